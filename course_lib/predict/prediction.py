"""One run predicted: memory and seconds by kind, tokens/s, MFU, whether it fits, and why."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.hardware import GB, Cluster, peak_flops
from course_lib.predict import nanotron
from course_lib.predict.rates import RATES, Rates
from course_lib.run import Run
from course_lib.timing.rates import mfu
from course_lib.validate import check_fields, checked

FRAMEWORKS = ("nanotron",)


@dataclass(frozen=True)
class Prediction:
    """Bytes of the fullest rank by kind, and seconds of a step by what they are spent on."""

    bytes_by_kind: dict[str, float]
    seconds_by_part: dict[str, float]
    tokens_per_s_per_gpu: float
    mfu: float  # 0 to 1, as the framework counts it
    usable_bytes: float

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def memory_bytes(self) -> float:
        return sum(self.bytes_by_kind.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds_by_part.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.usable_bytes

    @property
    def why(self) -> str:
        """What takes most of the memory, and most of the time, in one sentence each."""
        kind = max(self.bytes_by_kind, key=self.bytes_by_kind.get)
        part = max(self.seconds_by_part, key=self.seconds_by_part.get)
        memory, seconds = self.bytes_by_kind[kind] / GB, self.seconds_by_part[part]
        verdict = "fits" if self.fits else f"needs {self.memory_bytes / GB:.1f} of {self.usable_bytes / GB:.1f} GB"
        return f"{verdict}; most memory: {kind} {memory:.1f} GB; most time: {part} {seconds / self.step_s:.0%}"


@checked
def predict(run: Run, cluster: Cluster, framework: str = "nanotron", rates: Rates = RATES) -> Prediction:
    """Predict what a framework's run shows on a cluster: modelled, with constants fitted to measured runs.

    Raises   ValueError for a framework that is not known, or a model with experts or of several context ranks
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework is {framework!r}; known: {', '.join(FRAMEWORKS)}")
    layout = run.layout
    for axis in ("cp", "ep"):
        if getattr(layout, axis) > 1:
            raise ValueError(f"{axis} is {getattr(layout, axis)}, and the fitted runs have none; choose {axis} 1")
    nodes = max(1, layout.world_size // cluster.gpus_per_node)
    seconds = nanotron.seconds_of(run, cluster, rates, nodes)
    step_s, num_tokens = sum(seconds.values()), layout.sequences_per_step * run.seq_len
    flops = num_tokens * nanotron.counted_flops_per_token(run)
    return Prediction(
        nanotron.memory_of(run, rates, nodes),
        seconds,
        num_tokens / step_s / layout.world_size,
        mfu(flops, step_s, layout.world_size, peak_flops(cluster.gpu)),
        float(cluster.gpu.usable_bytes),
    )
