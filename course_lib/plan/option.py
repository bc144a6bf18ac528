"""One layout worked out: bytes of the fullest rank by kind, seconds of a step by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.memory.budget import Budget, fullest_budget
from course_lib.plan.job import Job
from course_lib.predict import predict
from course_lib.run import Run
from course_lib.timing import step_time
from course_lib.validate import Amount, check_fields, checked


@dataclass(frozen=True)
class Option:
    """A run, what its fullest rank holds, and what its step takes; all modelled."""

    run: Run
    bytes_by_kind: dict[str, float]
    seconds_by_part: dict[str, float]
    mfu: float
    usable_bytes: float

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank, what is no tensor included."""
        return sum(self.bytes_by_kind.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.usable_bytes

    @property
    def step_s(self) -> float:
        return sum(self.seconds_by_part.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.layout.sequences_per_step * self.run.seq_len / self.step_s

    @property
    def memory_in_words(self) -> str:
        return memory_in_words(self.bytes_by_kind, self.usable_bytes)


@checked
def memory_in_words(bytes_by_kind: dict[str, Amount], usable_bytes: Amount) -> str:
    """How much of what there is, and what takes most of it."""
    kind = max(bytes_by_kind, key=bytes_by_kind.get)
    return (
        f"{sum(bytes_by_kind.values()) / GB:.1f} of {usable_bytes / GB:.1f} GB, most for {kind} "
        f"({bytes_by_kind[kind] / GB:.1f} GB)"
    )


@checked
def work_out(job: Job, layout: Layout) -> Option:
    """Work out one layout of a job, every rank of its pipeline.

    Raises   ValueError if the layout has other GPUs or another global batch than the job, if the job's model cannot lie
             so, or its framework has no such runs
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
    if job.framework is not None:
        found = predict(run, job.cluster, job.framework)
        return Option(run, found.bytes_by_kind, found.seconds_by_part, found.mfu, found.usable_bytes)
    return option_of(job, run, fullest_budget(run))


def option_of(job: Job, run: Run, fullest: Budget) -> Option:
    """The option of a run whose fullest rank is known."""
    time = step_time(run, job.cluster)
    return Option(run, held_bytes(fullest), time.parts, time.mfu, float(job.cluster.gpu.usable_bytes))


@checked
def held_bytes(budget: Budget) -> dict[str, float]:
    """What the largest moment is made of, by kind, and what is no tensor."""
    return {kind: float(size) for kind, size in (budget.at_peak | budget.overheads).items() if size}
