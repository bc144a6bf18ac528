"""estimate(run, cluster, engine): how much, how fast, does it fit, how sure that is, and why. The only answer there is.

Bytes by kind are those of memory/, seconds by part those of the clock (timing/step.py), under the facts of an engine
(engines.py). Here stands how far such estimates were off, and whether that leaves room.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from course_lib.engines import ENGINES, EngineFacts, engine_of
from course_lib.estimate.memory import NO_TENSORS, held_bytes
from course_lib.flops import attention_flops_per_token, flops_per_token, layer_matmul_parameters, step_flops
from course_lib.hardware import GB, MOST_NODES, Cluster, peak_flops
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.timing.rates import RATES, Rates, hfu, mfu
from course_lib.timing.step import step_time
from course_lib.validate import Bytes, Checked, Positive, check_fields, checked


@dataclass(frozen=True)
class Spread:
    """Between which factors on the estimate nine in ten measured values of such runs lay; 1 is one of them.

    Where all runs lay on one side of their estimates, the interval still begins or ends at the estimate: a few runs of
    one model do not say that other runs are off in the same way.
    """

    memory: tuple[Positive, Positive]
    speed: tuple[Positive, Positive]
    note: str = ""  # what else those runs showed, told with the answer

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("memory", "speed"):
            low, high = getattr(self, name)
            if not low <= 1 <= high:
                raise ValueError(f"{name} is ({low}, {high}); the estimate must be inside: give factors around 1")


_WAITED = "of measured runs on 64 nodes of this network many waited several times as long as they computed"
_STALLED = "of measured pipelines on 16 to 64 nodes of this network many ran 5 to 10 times slower"

# From benchmarks/errors.py --fit-rates: measured runs of nanotron on EFA, and published runs of other engines. A run on
# 80 GB is a bound: it needed no more. On 64 nodes all pipelines waited, as the clock says; on fewer only some did.
SPREAD: dict[tuple[str, str], Spread] = {
    ("measured network", "one stage"): Spread((0.88, 1.16), (0.70, 1.45)),
    ("measured network", "one stage, 64 nodes"): Spread((0.66, 1.10), (0.70, 4.05), _WAITED),
    ("measured network", "pipeline"): Spread((0.90, 1.13), (0.35, 1.23)),
    ("measured network", "pipeline, 16 to 63 nodes"): Spread((0.84, 1.31), (0.15, 1.95), _STALLED),
    ("measured network", "pipeline, 64 nodes"): Spread((0.90, 1.15), (0.81, 1.12), _STALLED),
    ("other", "one stage"): Spread((0.95, 1.06), (0.88, 1.15)),
    ("other", "pipeline"): Spread((0.80, 1.26), (0.88, 1.20)),
}
_MANY_NODES = 16  # from here on pipelines of the measured runs stalled, more of them the more nodes


@dataclass(frozen=True)
class Estimate(Checked):
    """Bytes of the fullest rank of a run by kind, and seconds of a step by what they are spent on."""

    run: Run
    bytes_by_kind: dict[str, float]
    seconds_by_part: dict[str, float]
    tokens_per_s_per_gpu: float
    mfu: float  # 0 to 1, as the engine counts it
    causal_mfu: float  # without the pairs that a causal mask forbids, whose FLOPs no kernel does
    hfu: float  # as mfu, with what recomputation repeats
    usable_bytes: float
    spread: Spread  # between which factors on this nine in ten measured values of such runs lay
    note: str = ""  # what the question leaves open, told with the answer
    gb: Bytes = 10**9  # as the engine's log counts: nanotron's are GiB
    log_reserved: bool = False  # whether its log leaves out what is no tensor

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def memory_bytes(self) -> float:
        """All that is on the card, what is no tensor included."""
        return sum(self.bytes_by_kind.values())

    @property
    def logged_bytes(self) -> float:
        """What the engine's log would tell."""
        return self.memory_bytes - self.log_reserved * self.bytes_by_kind.get(NO_TENSORS, 0.0)

    @property
    def step_s(self) -> float:
        return sum(self.seconds_by_part.values())

    @property
    def room(self) -> str:
        """ "fits", "tight" or "does not fit": by the ends of the error bar."""
        low, high = self.memory_range
        if high <= self.usable_bytes:
            return "fits"
        return "tight" if low <= self.usable_bytes else "does not fit"

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the memory, tightly or not: only such layouts are advised."""
        return self.memory_bytes <= self.usable_bytes

    @property
    def may_run(self) -> bool:
        """Whether the lower end of the error bar is within the memory: a run that ran is of these."""
        return self.room != "does not fit"

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.tokens_per_s_per_gpu * self.layout.world_size

    @property
    def memory_in_words(self) -> str:
        """How much of what there is, and what takes most of it."""
        size, kind = max((size, kind) for kind, size in self.bytes_by_kind.items())
        return f"{self.memory_bytes / GB:.1f} of {self.usable_bytes / GB:.1f} GB, most for {kind} ({size / GB:.1f} GB)"

    @property
    def why(self) -> str:
        """What takes most of the memory, and most of the time, in one sentence each."""
        memory, kind = max((size, kind) for kind, size in self.bytes_by_kind.items())
        seconds, part = max((seconds, part) for part, seconds in self.seconds_by_part.items())
        room, share = self.room, seconds / self.step_s
        if room != "fits":
            room += f": needs {self.memory_bytes / GB:.1f} of {self.usable_bytes / GB:.1f} GB"
        why = f"{room}; most memory: {kind} {memory / GB:.1f} GB; most time: {part} {share:.0%}"
        return f"{why}; {self.note}" if self.note else why

    @property
    def memory_range(self) -> tuple[float, float]:
        """Bytes between which nine in ten such runs lay, what is no tensor included."""
        fixed = self.bytes_by_kind.get(NO_TENSORS, 0.0)
        return tuple(fixed + factor * (self.memory_bytes - fixed) for factor in self.spread.memory)

    @property
    def speed_range(self) -> tuple[float, float]:
        """Tokens/s of a GPU between which nine in ten such runs lay."""
        return tuple(factor * self.tokens_per_s_per_gpu for factor in self.spread.speed)

    @property
    def step_range(self) -> tuple[float, float]:
        """Seconds of a step between which nine in ten such runs lay."""
        return tuple(self.step_s / factor for factor in reversed(self.spread.speed))


@checked
@lru_cache(maxsize=4096)
def estimate(run: Run, cluster: Cluster, engine: str | EngineFacts = "course", rates: Rates = RATES) -> Estimate:
    """Estimate what a run of an engine shows on a cluster: modelled, with constants fitted to measured runs.

    Raises   ValueError for an engine that has not what the layout asks for, and for FP8 on a GPU without units for it
    """
    engine = engine_of(engine)
    _check_engine(run, engine)
    if run.fp8:
        peak_flops(cluster.gpu, "fp8")
    layout, time, spread = run.layout, step_time(run, cluster, engine, rates), _spread_of(run, cluster, engine)
    gpus, num_tokens = (time.total_s, layout.world_size, time.peak_flops_per_s), time.num_tokens
    counted = num_tokens * counted_flops_per_token(run) if engine.counts_tied_twice else time.model_flops
    once = num_tokens * flops_per_token(run.config, run.seq_len)
    executed = step_flops(run.config, num_tokens, run.seq_len, layout.recompute, operators=run.operators)
    return Estimate(
        run,
        held_bytes(run, cluster, engine, time, rates),
        time.parts,
        time.tokens_per_s_per_gpu,
        mfu=mfu(counted, *gpus),
        causal_mfu=time.causal_mfu,
        hfu=hfu(counted + (executed - once), *gpus),
        usable_bytes=float(cluster.gpu.usable_bytes),
        spread=spread,
        note=spread.note,
        gb=engine.log_unit,
        log_reserved=engine.log_reserved,
    )


def _check_engine(run: Run, engine: EngineFacts) -> None:
    """Raises ValueError for more ZeRO, or for more stages without a layer, than the engine has."""
    layout, layers, in_pipeline = run.layout, run.layout.layers_of_stage or (), " in a pipeline" * (run.layout.pp > 1)
    if (empty := layers.count(0)) > engine.other_blocks:
        able = ", ".join(f"{one.other_blocks} in {name}" for name, one in ENGINES.items() if one.other_blocks)
        raise ValueError(
            f"layers_of_stage has {empty} stages without a layer, of which {engine.name} can have "
            f"{engine.other_blocks}; choose 1 or more for each, or another engine ({able})"
        )
    stages = engine.file.pipeline_zero if in_pipeline else engine.file.zero_stages
    is_less = engine.pipeline_grads_whole and in_pipeline  # it does as much as it has
    if layout.data_size > 1 and layout.zero_stage > max(stages) and not is_less:
        able = ", ".join(map(str, stages))
        raise ValueError(
            f"{engine.name} has no ZeRO-{layout.zero_stage}{in_pipeline}; choose from {able}, or another engine"
        )


def _spread_of(run: Run, cluster: Cluster, engine: EngineFacts) -> Spread:
    """Between which factors runs like this one lay: speed by network, pipeline and nodes, memory by engine too. The
    memory of runs on the measured network is that of the engine that ran there, whose tensors wait in a queue."""
    kind = "one stage" if run.layout.pp == 1 else "pipeline"
    other = SPREAD["other", kind]
    if not cluster.between.by_nodes:
        return other
    nodes = run.layout.world_size / cluster.gpus_per_node
    if nodes >= MOST_NODES:
        kind += ", 64 nodes"
    elif nodes >= _MANY_NODES and kind == "pipeline":
        kind += ", 16 to 63 nodes"
    there = SPREAD["measured network", kind]
    return there if engine.queued_tensors else replace(there, memory=other.memory)


def counted_flops_per_token(run: Run) -> int:
    """FLOPs a token as nanotron's MFU counts them: 6 N of all parameters, embedding too, and 12 L h s."""
    config = run.config
    copies = 1 if config.tied and run.layout.pp == 1 else 2
    weights = config.num_layers * layer_matmul_parameters(config) + copies * config.vocab_size * config.d_model
    return 6 * weights + 3 * attention_flops_per_token(config, run.seq_len)
