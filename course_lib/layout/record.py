"""A layout: how a training run lies on its ranks, as one frozen record that is checked when it is made.

Layout.parse("dp=4,tp=2,zero_stage=1"); str(layout)       # the form of a command line, there and back
layout.check_model(preset("toy"), seq_len=64)             # whether this model can lie so

ranks       pp x dp x cp x tp, in `order`; ep is carved out of data = dp x cp, folded out of data x tp
data        what is not an expert has its gradients summed over data; ZeRO shards over the same ranks
expert_dp   data / ep ranks have the same experts: their gradients are summed over these
folded      whole experts, spread over data x tp = world / pp; expert_dp is then world / (ep x pp). Megatron-Core
            calls it parallel folding: expert-tensor-parallel size 1
a step      dp x micro_batch x micro_batches sequences; cp cuts each sequence, pp and tp see all of it
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from course_lib.config import ModelConfig
from course_lib.layout.check import BETWEEN_ITEMS, SPLIT_BACKWARD, as_text, check_layout
from course_lib.layout.mesh import AXES, Mesh
from course_lib.schedules import placement, stages_per_rank
from course_lib.validate import Size, checked


@dataclass(frozen=True)
class Layout:
    """Sizes and choices of a run; whatever is left out is the choice of one process.

    Raises   ValueError that names the offending numbers and the nearest possible ones
    """

    dp: int = 1  # ranks along each axis
    cp: int = 1
    tp: int = 1
    pp: int = 1
    # neighbours of data = dp x cp over which a layer's experts are spread; folded: of data and tp, the innermost first
    ep: int = 1
    # over how many ranks of tp the matrices of an expert are cut: tp, or 1 for whole experts (folded)
    expert_tp: int | None = None  # None: tp where ep is at most dp x cp, else 1
    zero_stage: int = 0  # | 1 (optimizer) | 2 (gradients too) | 3 (parameters too), sharded over data
    # HSDP: ZeRO shards over data / dp_replicate neighbours; so many replicas sum shards' gradients
    dp_replicate: int = 1
    sequence_parallel: bool = False  # norms and residual stream cut over tp along the sequence
    # with that: matrices keep this rank's tokens alone for backward, and gather the others again
    regather: bool = False
    schedule: str = "1f1b"  # of the pipeline, a name of `schedules.SCHEDULES`
    v: int = 1  # stages a rank of "interleaved"
    micro_batch: int = 1  # sequences that go through the model at once, on each dp rank
    micro_batches: int = 1  # of a step, on each dp rank: also those of the pipeline
    recompute: str = "none"  # | "selective" (the attention core again in backward) | "full" (each block)
    cp_method: str = "ring"  # | "all_gather" | "ulysses"
    cp_sharding: str = "zigzag"  # | "contiguous" | "striped"
    layers_of_stage: tuple[int, ...] | None = None  # in the model's order; None: evenly. 0 where an engine can
    expert_method: str = "plain"  # a row for each choice | "once_per_rank"
    order: tuple[str, ...] = AXES  # the axes on the hardware, outermost first

    def __post_init__(self):
        for name in ("layers_of_stage", "order"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_layout(self)

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, order=self.order)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Ranks over which gradients are summed, of all that is not an expert."""
        return self.dp * self.cp

    @property
    def folded(self) -> bool:
        """Whether experts are whole and spread over the ranks of tp too: each routes its own tokens of a sequence."""
        return self.tp > 1 and (self.ep > self.data_size if self.expert_tp is None else self.expert_tp == 1)

    @property
    def fold(self) -> int:
        """Ranks of tp over which experts are spread."""
        return self.tp if self.folded else 1

    @property
    def expert_dp(self) -> int:
        """Ranks that have the same experts."""
        return self.data_size * self.fold // self.ep

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards all that is not an expert."""
        return self.data_size // self.dp_replicate

    @property
    def expert_shard_size(self) -> int:
        """Ranks over which ZeRO shards experts."""
        return self.expert_dp // self.dp_replicate

    @property
    def shard_axes(self) -> tuple[str, str]:
        """The axes over which gradients are summed first, and ZeRO shards: of all but experts, and of experts."""
        return ("shard", "expert_shard") if self.dp_replicate > 1 else ("data", "expert_dp")

    def members(self, rank: int) -> dict[str, list[int]]:
        return self.mesh.members(rank, self.ep, self.dp_replicate, self.folded)

    @property
    def stages_per_rank(self) -> int:
        return stages_per_rank(self.schedule, self.v)

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        return placement(self.schedule, self.pp, self.v)

    def stages_of_rank(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of one rank of the pipeline, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == pp_rank)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule does a backward in two parts, I and W."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def sequences_per_step(self) -> int:
        return self.dp * self.micro_batch * self.micro_batches

    @checked
    def check_model(self, config: ModelConfig, seq_len: Size | None = None) -> None:
        """Raises ValueError unless this model, and sequences of this length, can lie so: what, why, what is nearest."""
        check_layout(self, config, seq_len)

    def __str__(self) -> str:
        """What differs from one process, as `parse` reads it: dp=4,tp=2,zero_stage=1."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        different = [f"{field.name}={as_text(value)}" for field, value in values if value != field.default]
        return ",".join(different) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """From "dp=2,tp=2,schedule=interleaved,v=2,sequence_parallel=true,layers_of_stage=3-5,order=pp-cp-dp-tp"."""
        values: dict[str, object] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not name or not value:
                raise ValueError(f"{part.strip()!r} in layout {text!r} is not name=value; write dp=2,tp=2,zero_stage=1")
            if _known(name) in values:
                raise ValueError(f"{name} stands twice in layout {text!r}; give it once")
            values[name] = _from_text(name, value)
        return cls(**values)

    def to_dict(self) -> dict[str, object]:
        """All choices as JSON can hold them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """From what `to_dict` gave; what is left out is the choice of one process."""
        return cls(**{_known(name): value for name, value in values.items()})


DEFAULTS = {field.name: field.default for field in fields(Layout)}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _known(name: str) -> str:
    if name in DEFAULTS:
        return name
    near = difflib.get_close_matches(str(name), DEFAULTS, n=1)
    advice = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"a layout has no {name!r}; {advice}choose from {', '.join(DEFAULTS)}")


def _from_text(name: str, text: str) -> object:
    """The value of that name; what is not of its type stays text, which the layout's checks refuse."""
    if isinstance(DEFAULTS[name], bool):
        return _TRUTH.get(text.lower(), text)
    if DEFAULTS[name] is None and text.lower() == "none":
        return None
    if name in ("layers_of_stage", "order"):
        return tuple(map(_whole_or_text, text.split(BETWEEN_ITEMS)))
    return _whole_or_text(text)


def _whole_or_text(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text
