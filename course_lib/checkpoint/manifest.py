"""What stands in a manifest, field by field: a file may have the right checksum and still say what no save says."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from course_lib.comm.records import DTYPES
from course_lib.config import MlaConfig, ModelConfig, MoeConfig, RopeScaling
from course_lib.layout import Layout
from course_lib.validate import Index, check_fields

OPTIONS = ("lr", "betas", "eps", "weight_decay")


def config_from_dict(values: dict) -> ModelConfig:
    """Return the config that `dataclasses.asdict` was given, after JSON; a wrong field raises as `ModelConfig` does."""
    parts = {"rope_scaling": RopeScaling, "moe": MoeConfig, "mla": MlaConfig}
    return ModelConfig(**{key: parts[key](**x) if key in parts and x is not None else x for key, x in values.items()})


def _of(build):
    """An annotation of what `build` takes: a record checks its fields itself."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, dict) or build(value) is None:
            raise ValueError(f"{name} is no object")

    return Annotated[dict, check]


@dataclass(frozen=True)
class _Checked:
    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class _Options(_Checked):
    """Of a group of parameters; names as in OPTIONS."""

    lr: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class _Optimizer(_Checked):
    """The options of each group, and how many steps each parameter has taken."""

    options: list
    steps: Mapping[str, Index]
