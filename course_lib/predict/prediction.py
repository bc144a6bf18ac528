"""One run predicted: memory and seconds by kind, tokens/s, MFU, whether it fits, how sure that is, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from course_lib.flops import flops_per_token, step_flops
from course_lib.hardware import GB, GIB, Cluster, peak_flops
from course_lib.predict import frameworks, nanotron
from course_lib.predict.frameworks import How
from course_lib.predict.rates import RATES, Rates
from course_lib.run import Run
from course_lib.timing.rates import hfu, mfu
from course_lib.validate import Amount, Bytes, Positive, check_fields, checked

FRAMEWORKS = ("nanotron", *frameworks.FRAMEWORKS)


@dataclass(frozen=True)
class Spread:
    """Between which factors on the prediction nine in ten measured values of such runs lay; 1 is one of them.

    Where all runs lay on one side of their predictions, the interval still begins or ends at the prediction: a few runs
    of one model do not say that others are off in the same way.

    Raises   ValueError for factors that are all above 1, or all below
    """

    memory: tuple[Positive, Positive]
    speed: tuple[Positive, Positive]

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("memory", "speed"):
            low, high = getattr(self, name)
            if not low <= 1 <= high:
                raise ValueError(f"{name} is ({low}, {high}); the prediction must be inside: give factors around 1")


# From residuals of runs whose model was not in the fit (benchmarks/fit_rates.py), and of published runs that set no
# rate (benchmarks/published_errors.py). Speeds lie far below where pipelines stalled whose columns do not say so.
SLOW_MFU = 0.1
SPREAD: dict[tuple[str, str], Spread] = {
    ("nanotron", "one stage"): Spread((0.68, 1.09), (0.67, 1.20)),
    ("nanotron", "pipeline"): Spread((0.88, 1.12), (0.32, 1.13)),
    ("nanotron", "slow"): Spread((0.91, 1.16), (0.85, 1.33)),
    ("others", "one stage"): Spread((0.96, 1.08), (0.80, 1.24)),
    ("others", "pipeline"): Spread((1.00, 1.23), (0.95, 1.27)),  # memory: six runs of one model, all above
}


@dataclass(frozen=True)
class Prediction:
    """Bytes of the fullest rank by kind, and seconds of a step by what they are spent on.

    note         what the question leaves open, told with the answer
    gb           bytes of a GB as the framework's log counts: nanotron's are GiB
    mfu          0 to 1, as the framework counts it
    causal_mfu   the same without the pairs that a causal mask forbids, whose FLOPs no kernel does
    hfu          as mfu, with what recomputation repeats
    spread       between which factors on this nine in ten measured values of such runs lay
    """

    bytes_by_kind: dict[str, float]
    seconds_by_part: dict[str, float]
    tokens_per_s_per_gpu: float
    mfu: float
    causal_mfu: float
    hfu: float
    usable_bytes: float
    spread: Spread
    note: str = ""
    gb: Bytes = GB

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
        memory, seconds = self.bytes_by_kind[kind] / self.gb, self.seconds_by_part[part]
        verdict = "fits"
        if not self.fits:
            verdict = f"needs {self.memory_bytes / self.gb:.1f} of {self.usable_bytes / self.gb:.1f} {self.unit}"
        why = f"{verdict}; most memory: {kind} {memory:.1f} {self.unit}; most time: {part} {seconds / self.step_s:.0%}"
        return f"{why}; {self.note}" if self.note else why

    @property
    def unit(self) -> str:
        return "GiB" if self.gb == GIB else "GB"

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes between which nine in ten such runs lay."""
        return tuple(factor * self.memory_bytes for factor in self.spread.memory)

    @property
    def speed_range(self) -> tuple[float, float]:
        """Tokens/s of a GPU between which nine in ten such runs lay."""
        return tuple(factor * self.tokens_per_s_per_gpu for factor in self.spread.speed)

    def table(self) -> str:
        """Where the time goes and what the memory is, in lines to print; all of it is modelled."""
        slow, fast = self.speed_range
        few, most = (size / self.gb for size in self.memory_range)
        lines = [
            f"step {self.step_s:.3g} s, {self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU; nine in ten such runs: "
            f"{slow:,.0f} to {fast:,.0f}",
            "where the time goes (modelled):",
            *_bars(self.seconds_by_part, "s"),
            f"peak {self.memory_bytes / self.gb:.1f} {self.unit}; nine in ten such runs: {few:.1f} to {most:.1f}",
            "what the memory is (modelled):",
            *_bars({kind: size / self.gb for kind, size in self.bytes_by_kind.items()}, self.unit),
        ]
        shares = (self.mfu, self.causal_mfu, self.hfu)
        names = ("MFU", "MFU of causal pairs", "HFU with recomputation")
        lines.append(", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True)))
        return "\n".join(lines)


def _bars(amounts: dict[str, float], unit: str) -> list[str]:
    total = sum(amounts.values())
    ranked = sorted(((size, name) for name, size in amounts.items() if size > 0.005 * total), reverse=True)
    return [
        f"  {name:16s}{size:9.2f} {unit} {size / total:5.0%}  {'#' * round(40 * size / total)}" for size, name in ranked
    ]


@checked
def predict(
    run: Run,
    cluster: Cluster,
    framework: Literal[FRAMEWORKS] = "nanotron",
    rates: Rates = RATES,
    how: How = How(),
) -> Prediction:
    """Predict what a framework's run shows on a cluster: modelled, with constants fitted to measured runs.

    Raises   ValueError for a framework that is not known, and for what nanotron's fitted runs do not have
    """
    layout = run.layout
    memory = predicted_bytes(run, cluster, framework, rates, how)
    if framework == "nanotron":
        seconds = nanotron.seconds_of(run, cluster, rates, _nodes_of(run, cluster))
    else:
        seconds = frameworks.seconds_of(run, cluster, frameworks.FRAMEWORKS[framework], rates, how)
    step_s, num_tokens = sum(seconds.values()), layout.sequences_per_step * run.seq_len
    gpus = (step_s, layout.world_size, peak_flops(cluster.gpu))
    full = flops_per_token(run.config, run.seq_len)
    counted = nanotron.counted_flops_per_token(run) if framework == "nanotron" else full
    repeated = step_flops(run.config, num_tokens, run.seq_len, layout.recompute) - num_tokens * full
    if how.operators:
        repeated += frameworks.repeated_flops(run)
    counted_mfu = mfu(num_tokens * counted, *gpus)
    return Prediction(
        memory,
        seconds,
        num_tokens / step_s / layout.world_size,
        mfu=counted_mfu,
        causal_mfu=mfu(num_tokens * flops_per_token(run.config, run.seq_len, causal=True), *gpus),
        hfu=hfu(num_tokens * counted + repeated, *gpus),
        usable_bytes=float(cluster.gpu.usable_bytes),
        spread=spread_of(run, framework, counted_mfu),
        gb=GIB if framework == "nanotron" else GB,
    )


@checked
def predicted_bytes(
    run: Run,
    cluster: Cluster,
    framework: Literal[FRAMEWORKS] = "nanotron",
    rates: Rates = RATES,
    how: How = How(),
) -> dict[str, float]:
    """Predict the bytes of the fullest rank by kind, as `predict` has them, without its seconds.

    Raises   ValueError as `predict`
    """
    if framework == "nanotron":
        _check_nanotron(run, how)
        return nanotron.memory_of(run, cluster, rates, _nodes_of(run, cluster))
    return frameworks.memory_of(run, frameworks.FRAMEWORKS[framework], how)


def _nodes_of(run: Run, cluster: Cluster) -> int:
    return max(1, run.layout.world_size // cluster.gpus_per_node)


@checked
def spread_of(run: Run, framework: Literal[FRAMEWORKS], predicted_mfu: Amount) -> Spread:
    """Between which factors runs like this one lay: by framework, by its pipeline, and by whether it mostly waits."""
    kind = "one stage" if run.layout.pp == 1 else "pipeline"
    if framework != "nanotron":
        return SPREAD["others", kind]
    return SPREAD["nanotron", "slow" if predicted_mfu < SLOW_MFU else kind]


def _check_nanotron(run: Run, how: How) -> None:
    """Its fitted runs are dense, in BF16, and recompute nothing."""
    for axis in ("cp", "ep"):
        if getattr(run.layout, axis) > 1:
            raise ValueError(
                f"{axis} is {getattr(run.layout, axis)}, and nanotron's fitted runs have none; choose {axis} 1, or "
                f"another framework: {', '.join(frameworks.FRAMEWORKS)}"
            )
    if run.layout.recompute != "none" or how != How():
        raise ValueError(
            "nanotron's fitted runs compute in bf16 and recompute nothing; choose bf16 and recompute none, or another "
            f"framework: {', '.join(frameworks.FRAMEWORKS)}"
        )
    if run.layout.zero_stage > 1:
        raise ValueError(
            f"zero_stage is {run.layout.zero_stage}, and nanotron's fitted runs have 0 or 1; choose one of these, or "
            f"another framework: {', '.join(frameworks.FRAMEWORKS)}"
        )
    if run.layout.schedule != "1f1b":
        raise ValueError(f"schedule is {run.layout.schedule!r}; nanotron's fitted runs have 1f1b: choose it")
