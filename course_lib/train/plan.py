"""What a training run is asked to do, as plain records: none of it depends on how the run lies on its ranks.

Data, learning rate and random numbers of a step are functions of the step and of the plan alone. So a run that was
killed needs no memory of them: the number of its next step says it all.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from course_lib.config import ModelConfig, TrainSettings
from course_lib.layout import Layout
from course_lib.validate import Checked, Count, Index, Size

if TYPE_CHECKING:  # `course --help` reads this module, and needs no torch
    import torch

PRECISIONS = ("fp32", "bf16-master", "bf16-master-fp32-grads", "fp64")  # as in training/precision.py; fp64 to compare
PARTS = ("model", "layout", "text", "versions")  # of settings, each with names of its own
_SHOWN_CHARS = 16  # of a text or a checksum in an error
_DECAYS = ("none", "cosine")
_FINAL_SHARE = 0.1  # of the learning rate, where a cosine ends: Brown et al. 2020 (arXiv:2005.14165), appendix B


@dataclass(frozen=True)
class TrainPlan(TrainSettings):
    """Steps, data and optimizer of a run. `warmup` steps lead up to `learning_rate`, then `decay` leads down from it.

    Raises   ValueError where a number makes no sense
    """

    warmup: Index = 0
    compare_every: Count = 0  # steps after which ranks compare what they hold alike; 0: never
    decay: Literal[_DECAYS] = "none"
    precision: Literal[PRECISIONS] = "fp32"
    loss_chunks: Size = 1  # head and loss go over the tokens in so many parts: less memory

    def __post_init__(self):
        super().__post_init__()
        if self.warmup > self.steps:
            raise ValueError(f"warmup ({self.warmup}) must not exceed steps ({self.steps})")

    @property
    def dtypes(self) -> tuple["torch.dtype", "torch.dtype | None"]:
        """Of parameters, and of gradients where it is another."""
        import torch

        from course_lib.training.precision import engine_dtypes

        return (torch.float64, None) if self.precision == "fp64" else engine_dtypes(self.precision)


@dataclass(frozen=True)
class Checkpoints(Checked):
    """Where a run leaves its state, after how many steps each time (and after the last), and how many remain.
    in_background  the files are written while training goes on
    Raises   ValueError where a choice makes no sense
    """

    folder: str
    every: Size = 5
    keep: Size = 2
    in_background: bool = False

    def most_at_once(self, steps: Size) -> int:
        """Return how many a run of so many steps has at a time: the oldest goes when a new one is complete."""
        return min(self.keep + 1, math.ceil(steps / self.every))


@dataclass(frozen=True)
class Logs(Checked):
    """Where a run tells of its steps: of each rank a file of JSON lines, FOLDER/log/rank0.jsonl.
    trace   the step of which each rank writes a profile, FOLDER/trace/rank0.json.gz; None: of none
    """

    folder: str
    trace: Size | None = None


def learning_rate_of(plan: TrainPlan, step: Index) -> float:
    """The learning rate of that step, counted from 0: up in a straight line, then constant or half a cosine."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    if plan.decay == "none":
        return plan.learning_rate
    done = (step - plan.warmup) / max(1, plan.steps - 1 - plan.warmup)
    return plan.learning_rate * (_FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def seed_step(plan: TrainPlan, step: Index, coordinates: Mapping[str, int]) -> None:
    """Seeds this rank's random numbers, dropout's, for one step: another seed for each step and each place but tp.

    The ranks of tp share a seed: where the residual stream is whole they must drop the same; the engine separates the
    rest.
    """
    import torch

    place = " ".join(f"{axis}={index}" for axis, index in sorted(coordinates.items()) if axis != "tp")
    digest = hashlib.blake2b(f"{plan.seed} {step} {place}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))  # a CPU generator looks at 32 bits


def settings_of(config: ModelConfig, layout: Layout, plan: TrainPlan) -> dict[str, object]:
    """All that decides a run's numbers, as JSON can hold it: the text that this machine has, and versions, too.

    The layout is not part of it. It decides them up to rounding, but for what is counted over one micro-batch of the
    ranks: auxiliary losses, capacity, and the places that dropout draws.
    """
    import torch

    from course_lib.train.start import text_of

    text = text_of(config)
    identity = {
        "text": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
        "versions": {"course_lib": _version("course-lib"), "torch": torch.__version__.partition("+")[0]},
    }
    return {"model": asdict(config), "batch_size": layout.sequences_per_step, **asdict(plan), **identity}


def check_settings(saved: Mapping[str, object], now: Mapping[str, object], where: str) -> None:
    """Raises ValueError if a run that goes on would differ from the one that was saved: what, and what to do.

    What ranks compare may change, and the number of steps, unless the learning rate's decay depends on it.
    """
    if "model" not in saved:
        raise ValueError(f"{where} does not say how it was trained, so it is not the trainer's; give another folder")
    free = {"model.name", "compare_every"} | ({"steps"} if now["decay"] == "none" else set())
    if different := _differences(saved, now, free):
        raise ValueError(
            f"{where} was made with {_told(different, 'now')}; give the same, or another folder for the checkpoints"
            + _hint(different)
        )


def check_ranks(of_ranks: Sequence[Mapping[str, object]]) -> None:
    """Raises ValueError unless all ranks are about to run the same: which rank differs from rank 0, and in what."""
    for rank, settings in enumerate(of_ranks):
        if different := _differences(of_ranks[0], settings, set()):
            raise ValueError(
                f"rank 0 has {_told(different, f'rank {rank}')}; all ranks must be started with the same options, on "
                "machines with the same packages" + _hint(different)
            )


def _differences(before: Mapping, after: Mapping, free: set[str]) -> dict[str, tuple]:
    """What two settings say differently: name -> (before, after)."""
    before, after = _flat(before), _flat(after)
    names = [name for name in after if name not in free and before.get(name) != after[name]]
    return {name: (before.get(name), after[name]) for name in names}


def _told(different: dict[str, tuple], other: str) -> str:
    return ", ".join(f"{name} {_short(old)} ({other} {_short(new)})" for name, (old, new) in different.items())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...'"


def _hint(different: dict[str, tuple]) -> str:
    if "text.sha256" not in different:
        return ""
    return ". The text is the standard library of this Python, of which each release has another: use the same Python"


def _version(package: str) -> str | None:
    """None where the package lies on PYTHONPATH and is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _flat(settings: Mapping[str, object]) -> dict[str, object]:
    parts = {part: settings[part] for part in PARTS if isinstance(settings.get(part), Mapping)}
    nested = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    return nested | {name: value for name, value in settings.items() if name not in parts}
