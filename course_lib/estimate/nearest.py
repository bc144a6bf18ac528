"""Where a run does not fit: how much is missing, and what is nearest to it and would, each worked out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course_lib.engines import Engine
from course_lib.estimate.estimate import Estimate, estimate
from course_lib.hardware import GB, Cluster
from course_lib.memory.states import LoRA
from course_lib.memory.zero import Offload
from course_lib.run import Run
from course_lib.timing.rates import RATES, Rates
from course_lib.validate import checked

SHORTEST = 256  # tokens: shorter sequences are another question
MOST_TIMES = 64  # the GPUs that there are


@dataclass(frozen=True)
class Nearest:
    """What would fit: the change in words, the run with it, and its estimate."""

    change: str
    run: Run
    estimate: Estimate

    @property
    def words(self) -> str:
        """The change, what it needs and how fast it is."""
        one = self.estimate
        of = f"{one.memory_bytes / GB:.1f} of {one.usable_bytes / GB:.1f} GB"
        return f"{self.change}: {one.verdict}, {of}, {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"


@checked
def nearest(run: Run, cluster: Cluster, engine: str | Engine = "course", rates: Rates = RATES) -> list[Nearest]:
    """Return for each way to need less the least change of it that fits; none for a run that fits itself.

    The ways: recomputation, ZeRO, 8-bit Adam, offload, LoRA, QLoRA, shorter sequences, more GPUs.
    """
    if estimate(run, cluster, engine, rates).verdict == "fits":
        return []
    found = []
    for way in (_recomputing, _sharding, _optimizing, _offloading, _adapting, _shortening, _growing):
        for change, other in _possible(way(run)):
            one = estimate(other, cluster, engine, rates)
            if one.verdict == "fits":
                found.append(Nearest(change, other, one))
                break
    return sorted(found, key=lambda one: -one.estimate.tokens_per_s_per_gpu)


def _possible(changes: Iterator[tuple[str, Run]]) -> Iterator[tuple[str, Run]]:
    """Changes up to the first that cannot be."""
    try:
        yield from changes
    except ValueError:
        return


def _recomputing(run: Run) -> Iterator[tuple[str, Run]]:
    if run.layout.recompute != "full":
        yield "recompute each block", _laid(replace(run, operators=False), recompute="full")


def _sharding(run: Run) -> Iterator[tuple[str, Run]]:
    for stage in range(run.layout.zero_stage + 1, 4):
        if run.layout.data_size > 1 and (run.layout.pp == 1 or stage == 1):
            yield f"ZeRO-{stage} and recompute each block", _laid(_lean(run), zero_stage=stage)


def _optimizing(run: Run) -> Iterator[tuple[str, Run]]:
    if run.optimizer == "adamw":
        yield "8-bit Adam", replace(run, optimizer="adamw-8bit")
        yield "8-bit Adam and recompute each block", replace(_lean(run), optimizer="adamw-8bit")


def _offloading(run: Run) -> Iterator[tuple[str, Run]]:
    yield "optimizer on the host", replace(run, offload=replace(run.offload, optimizer="host"))
    lean = _lean(run)
    yield "optimizer on the host, recompute each block", replace(lean, offload=replace(run.offload, optimizer="host"))
    sharded = _laid(lean, zero_stage=3)
    yield "parameters too", replace(sharded, offload=Offload(optimizer="host", parameters="host"))


def _adapting(run: Run) -> Iterator[tuple[str, Run]]:
    alone = _laid(run, zero_stage=0)
    yield "LoRA of rank 16", replace(alone, lora=LoRA(16), recipe="bf16-master")
    lean = _lean(alone)
    yield "LoRA of rank 16, recompute each block", replace(lean, lora=LoRA(16), recipe="bf16-master")
    four_bits = LoRA(16, four_bits=True)
    yield "QLoRA of rank 16, recompute each block", replace(lean, lora=four_bits, recipe="bf16-master")


def _shortening(run: Run) -> Iterator[tuple[str, Run]]:
    seq_len = run.seq_len // 2
    while seq_len >= SHORTEST:
        yield f"sequences of {seq_len:,} tokens", replace(run, seq_len=seq_len)
        seq_len //= 2


def _growing(run: Run) -> Iterator[tuple[str, Run]]:
    """More GPUs share the states: ZeRO-3 over all, recomputation, one sequence each."""
    lean, times = _lean(run), 2
    while times <= MOST_TIMES:
        layout = replace(lean.layout, dp=times * lean.layout.dp, zero_stage=3 if lean.layout.pp == 1 else 1)
        yield f"{layout.world_size} GPUs, ZeRO-{layout.zero_stage}, recompute each block", replace(lean, layout=layout)
        times *= 2


def _lean(run: Run) -> Run:
    return _laid(replace(run, operators=False), recompute="full")


def _laid(run: Run, **changes: object) -> Run:
    return replace(run, layout=replace(run.layout, **changes))
