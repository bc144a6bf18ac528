"""Loss spikes: found by a rule, undone by going back to a good state; the batch of that step is left out of the order.

A step is a spike if its loss or its gradient norm is no finite number, or above `spike_factor` times the median of the
last `spike_window` good steps. All ranks agree, load the state of an earlier step, and go on with the same steps over
the order of batches without that one. So a run that was rolled back is bit for bit a run whose data never had it.

The good state is the last complete checkpoint.

Source   Chowdhery et al. 2022 (arXiv:2204.02311), section 5.1: a checkpoint some 100 steps before the spike, and 200 to
         500 batches left out. Here it is one batch, found by its step
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from course_lib import checkpoint, comm
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.train.plan import Checkpoints, TrainPlan
from course_lib.train.stop import agreed
from course_lib.validate import Index

Optimizer = torch.optim.Optimizer


class LossSpike(RuntimeError):
    """More spikes than the plan rolls back; every rank raises the same."""


def batch_of_step(step: Index, skipped: Sequence[Index]) -> int:
    """Return the number of the batch that a step trains on: the step-th of those that are not skipped."""
    number = step
    for batch in sorted(skipped):
        number += batch <= number
    return number


def spike_in(value: float, earlier: Sequence[float], plan: TrainPlan, what: str) -> str:
    """Return why a step's loss or norm makes it a spike, in words; empty if it does not.

    earlier   of the last good steps; fewer than `spike_window` judge nothing but whether the value is finite
    """
    if not math.isfinite(value):
        return f"{what} is {value}"
    last = list(earlier)[-plan.spike_window :]
    if len(last) < plan.spike_window or value <= plan.spike_factor * median(last):
        return ""
    return f"{what} is {value:.4g}, {value / median(last):.1f} times the median of {plan.spike_window} steps"


class SpikeGuard:
    """What a run needs for the rule: the batches that it skips, and losses and norms of its good steps.

    Without a rule (spike_factor 0) it finds nothing, and still leaves out what an earlier run has skipped.
    """

    def __init__(
        self,
        engine: five_d.FiveD,
        optimizer: Optimizer,
        plan: TrainPlan,
        checkpoints: Checkpoints | None,
        about: Mapping | None = None,
    ):
        self.engine, self.optimizer, self.plan, self.checkpoints = engine, optimizer, plan, checkpoints
        self.skipped: list[int] = list((about or {}).get("skipped_batches", []))
        self.good: list[list[float]] = [list(pair) for pair in (about or {}).get("last_good", [])]  # [loss, norm]
        self.rollbacks = 0

    def about(self) -> dict:
        """What a checkpoint keeps of it, so that a run that goes on from there finds and skips the same."""
        return {"skipped_batches": self.skipped, "last_good": self.good[-self.plan.spike_window :]}

    def batch(self, step: int) -> int:
        """The number of the batch of that step."""
        return batch_of_step(step, self.skipped)

    def needs_first_checkpoint(self, steps_done: int) -> bool:
        """Whether a run of so many steps done has no state to go back to unless it is saved now."""
        return bool(self.plan.spike_factor) and steps_done == 0

    def find(self, numbers: engines.StepNumbers) -> str:
        """Return why this step is a spike, in words, or nothing; all ranks say the same of whether it is.

        Bytes    an all-reduce of 4 bytes a step
        """
        if not self.plan.spike_factor:
            return ""
        loss, norm = numbers.loss.item(), numbers.norm.item()
        losses, norms = [pair[0] for pair in self.good], [pair[1] for pair in self.good]
        why = spike_in(loss, losses, self.plan, "the loss") or spike_in(norm, norms, self.plan, "the gradient norm")
        if agreed(bool(why), next(self.engine.parameters()).device):
            return why or "another rank saw a spike"
        self.good = [*self.good[1 - self.plan.spike_window :], [loss, norm]]
        return ""

    def roll_back(self, step: int, why: str, numbers: engines.StepNumbers) -> int:
        """Load the last good state, skip the batch of this step; return how many steps are done there.

        Raises   LossSpike on every rank if it was rolled back as often as the plan allows
        """
        batch = self.batch(step)
        if self.rollbacks == self.plan.spike_rollbacks:
            raise LossSpike(
                f"step {step} is a spike: {why}{not_finite_on(numbers)}; the run was rolled back {self.rollbacks} "
                "times already, so look at the data and the devices, or lower the learning rate"
            )
        self.rollbacks += 1
        restored = checkpoint.load(self.engine, self.optimizer, self.checkpoints.folder)
        self.good = list(restored.about.get("last_good", []))
        self.skipped.append(batch)
        return restored.step


def not_finite_on(numbers: engines.StepNumbers) -> str:
    """Return in words which ranks' own part of the loss is no finite number; all ranks must call it.

    Ranks of one tp or cp group compute one loss together, and all of them are named. With a pipeline it is the last
    stage's ranks that see the loss. A gradient that only the backward pass made infinite names nobody.
    """
    of_ranks = comm.all_gather_json(bool(torch.isfinite(numbers.share)), dist.group.WORLD)
    ranks = [str(rank) for rank, is_finite in enumerate(of_ranks) if not is_finite]
    if not ranks:
        return ""
    return f" (not finite on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
