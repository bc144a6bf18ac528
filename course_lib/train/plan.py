"""What a training run is asked to do, as plain records: none of it depends on how the run lies on its ranks.

Data, learning rate and random numbers of a step are functions of the step and of the plan alone. So a run that was
killed needs no memory of them: the number of its next step says it all.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from course_lib.config import ModelConfig, TrainSettings
from course_lib.layout import Layout
from course_lib.validate import Index, Size, check_fields, checked

if TYPE_CHECKING:  # `course --help` reads this module, and needs no torch
    import torch

# Dtype of parameters, and of gradients where it is another. Names as in training/precision.py; fp64 is for comparing.
PRECISIONS = {
    "fp32": ("float32", None),
    "bf16-master": ("bfloat16", None),
    "bf16-master-fp32-grads": ("bfloat16", "float32"),
    "fp64": ("float64", None),
}
DECAYS = ("none", "cosine")
FINAL_SHARE = 0.1  # of the learning rate, where a cosine ends: Brown et al. 2020 (arXiv:2005.14165), appendix B


@dataclass(frozen=True)
class TrainPlan(TrainSettings):
    """Steps, data and optimizer of a run. `warmup` steps lead up to `learning_rate`, then `decay` leads down from it.

    Raises   ValueError where a number makes no sense
    """

    warmup: Index = 0
    decay: Literal[DECAYS] = "none"
    precision: Literal[tuple(PRECISIONS)] = "fp32"

    def __post_init__(self):
        super().__post_init__()
        if self.warmup > self.steps:
            raise ValueError(f"warmup ({self.warmup}) must not exceed steps ({self.steps})")

    @property
    def dtypes(self) -> tuple["torch.dtype", "torch.dtype | None"]:
        """Of parameters, and of gradients where it is another."""
        import torch

        param, grad = PRECISIONS[self.precision]
        return getattr(torch, param), grad and getattr(torch, grad)


@dataclass(frozen=True)
class Checkpoints:
    """Where a run leaves its state, after how many steps each time (and after the last), and how many remain.

    resume         "auto": go on from the last complete one, start anew if there is none; "never": there must be none
    in_background  the files are written while training goes on

    Raises   ValueError where a choice makes no sense
    """

    folder: str
    every: Size = 5
    keep: Size = 2
    resume: Literal["auto", "never"] = "auto"
    in_background: bool = False

    def __post_init__(self):
        check_fields(self)


@checked
def learning_rate_of(plan: TrainPlan, step: Index) -> float:
    """The learning rate of that step, counted from 0: up in a straight line, then constant or half a cosine."""
    if step < plan.warmup:
        return plan.learning_rate * (step + 1) / plan.warmup
    if plan.decay == "none":
        return plan.learning_rate
    done = (step - plan.warmup) / max(1, plan.steps - 1 - plan.warmup)
    return plan.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


@checked
def seed_step(plan: TrainPlan, step: Index, coordinates: Mapping[str, int]) -> None:
    """Seeds this rank's random numbers, dropout's, for one step: another seed for each step and each place but tp.

    The ranks of tp share a seed: where the residual stream is whole they must drop the same; the engine separates the
    rest.
    """
    import torch

    place = " ".join(f"{axis}={index}" for axis, index in sorted(coordinates.items()) if axis != "tp")
    digest = hashlib.blake2b(f"{plan.seed} {step} {place}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(digest, "big"))  # a CPU generator looks at 32 bits


# --- what a checkpoint must agree with


@checked
def settings_of(config: ModelConfig, layout: Layout, plan: TrainPlan) -> dict[str, object]:
    """All that decides a run's numbers, as JSON can hold it.

    The layout is not part of it. It decides them up to rounding, but for what is counted over one micro-batch of the
    ranks: auxiliary losses, capacity, and the places that dropout draws.
    """
    return {"model": asdict(config), "batch_size": layout.sequences_per_step, **asdict(plan)}


@checked
def check_settings(saved: Mapping[str, object], now: Mapping[str, object], where: str) -> None:
    """Raises ValueError if a run that goes on would differ from the one that was saved: what, and what to do.

    The number of steps may change, unless the learning rate's decay depends on it.
    """
    if "model" not in saved:
        raise ValueError(f"{where} does not say how it was trained, so it is not the trainer's; give another folder")
    before, here = _flat(saved), _flat(now)
    free = {"steps", "model.name"} if now["decay"] == "none" else {"model.name"}
    different = [name for name in here if name not in free and before.get(name) != here[name]]
    if different:
        values = ", ".join(f"{name} {before.get(name)!r} (now {here[name]!r})" for name in different)
        raise ValueError(f"{where} was made with {values}; give the same, or another folder for the checkpoints")


def _flat(settings: Mapping[str, object]) -> dict[str, object]:
    return {f"model.{name}": value for name, value in settings["model"].items()} | {
        name: value for name, value in settings.items() if name != "model"
    }
