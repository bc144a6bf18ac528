"""One layout worked out: bytes of the fullest rank by kind, seconds of a step by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.estimate import Estimate, estimate
from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.plan.job import Job
from course_lib.run import Run
from course_lib.validate import check_fields, checked


@dataclass(frozen=True)
class Option:
    """A run, and the estimate of it: what its fullest rank holds, and what its step takes; all modelled."""

    run: Run
    estimate: Estimate

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def bytes_by_kind(self) -> dict[str, float]:
        """Of the fullest rank, what is no tensor included."""
        return self.estimate.bytes_by_kind

    @property
    def seconds_by_part(self) -> dict[str, float]:
        return self.estimate.seconds_by_part

    @property
    def memory_bytes(self) -> float:
        return self.estimate.memory_bytes

    @property
    def usable_bytes(self) -> float:
        return self.estimate.usable_bytes

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit": by the ends of the error bar."""
        return self.estimate.verdict

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the memory, tightly or not: only such layouts are advised."""
        return self.memory_bytes <= self.usable_bytes

    @property
    def mfu(self) -> float:
        return self.estimate.mfu

    @property
    def step_s(self) -> float:
        return self.estimate.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.layout.sequences_per_step * self.run.seq_len / self.step_s

    @property
    def memory_in_words(self) -> str:
        """How much of what there is, and what takes most of it."""
        kind, size = max(self.bytes_by_kind.items(), key=lambda one: one[1])
        return f"{self.memory_bytes / GB:.1f} of {self.usable_bytes / GB:.1f} GB, most for {kind} ({size / GB:.1f} GB)"


@checked
def work_out(job: Job, layout: Layout) -> Option:
    """Work out one layout of a job: the fullest rank of its pipeline, and a step.

    Raises   ValueError if the layout has other GPUs or another global batch than the job, if the job's model cannot lie
             so, or its engine has no such runs
    """
    if layout.world_size != job.num_gpus:
        raise ValueError(
            f"pp x dp x cp x tp is {layout.world_size}; it must be {job.num_gpus}, the job's GPUs (ep and SP need no "
            "ranks)"
        )
    if layout.sequences_per_step != job.sequences:
        raise ValueError(
            f"dp x micro_batch x micro_batches is {layout.sequences_per_step}; it must be {job.sequences}, the "
            "sequences of the job's global batch"
        )
    run = job.run(layout)
    return Option(run, estimate(run, job.cluster, job.engine))
