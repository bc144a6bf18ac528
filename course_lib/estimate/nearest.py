"""Where a run does not fit: how much is missing, and what is nearest to it and would, each worked out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course_lib.engines import EngineFacts
from course_lib.estimate.estimate import Estimate, estimate
from course_lib.hardware import GB, Cluster
from course_lib.layout import DEFAULTS
from course_lib.memory.states import LoRA, Offload
from course_lib.run import Run
from course_lib.timing.rates import RATES, Rates
from course_lib.validate import checked

_SHORTEST = 256  # tokens: shorter sequences are another question


@dataclass(frozen=True)
class Nearest:
    """What would fit: the change in words, and the estimate of the run with it."""

    change: str
    estimate: Estimate

    @property
    def words(self) -> str:
        one = self.estimate
        of = f"{one.memory_bytes / GB:.1f} of {one.usable_bytes / GB:.1f} GB"
        return f"{self.change}: {one.room}, {of}, {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"


@checked
def nearest(run: Run, cluster: Cluster, engine: str | EngineFacts = "course", rates: Rates = RATES) -> list[Nearest]:
    """Return for each way to need less the least change of it that fits; none for a run that fits itself."""
    if estimate(run, cluster, engine, rates).room == "fits":
        return []
    found = []
    for way in (_recomputing, _sharding, _optimizing, _offloading, _adapting, _shortening, _growing):
        for change, changes in way(run):
            try:
                one = estimate(_changed(run, **changes), cluster, engine, rates)
            except ValueError:  # what cannot be: nothing further this way
                break
            if one.room == "fits":
                found.append(Nearest(change, one))
                break
    return sorted(found, key=lambda one: -one.estimate.tokens_per_s_per_gpu)


Changes = Iterator[tuple[str, dict]]  # in words, and the fields of a run or its layout
_LEAN = {"recompute": "full", "operators": False}


def _changed(run: Run, **changes: object) -> Run:
    of_layout = {name: changes.pop(name) for name in (*changes,) if name in DEFAULTS}
    return replace(run, layout=replace(run.layout, **of_layout), **changes)


def _recomputing(run: Run) -> Changes:
    if run.layout.recompute != "full":
        yield "recompute each block", _LEAN


def _sharding(run: Run) -> Changes:
    for stage in range(run.layout.zero_stage + 1, 4):
        if run.layout.data_size > 1 and (run.layout.pp == 1 or stage == 1):
            yield f"ZeRO-{stage} and recompute each block", _LEAN | {"zero_stage": stage}


def _optimizing(run: Run) -> Changes:
    if run.optimizer == "adamw":
        yield "8-bit Adam", {"optimizer": "adamw-8bit"}
        yield "8-bit Adam and recompute each block", _LEAN | {"optimizer": "adamw-8bit"}


def _offloading(run: Run) -> Changes:
    on_host = {"offload": replace(run.offload, optimizer="host")}
    yield "optimizer on the host", on_host
    yield "optimizer on the host, recompute each block", _LEAN | on_host
    both = Offload(optimizer="host", parameters="host")
    yield "parameters too", _LEAN | {"zero_stage": 3, "offload": both}


def _adapting(run: Run) -> Changes:
    alone = {"zero_stage": 0, "recipe": "bf16-master"}
    yield "LoRA of rank 16", alone | {"lora": LoRA(16)}
    yield "LoRA of rank 16, recompute each block", _LEAN | alone | {"lora": LoRA(16)}
    yield "QLoRA of rank 16, recompute each block", _LEAN | alone | {"lora": LoRA(16, four_bits=True)}


def _shortening(run: Run) -> Changes:
    seq_len = run.seq_len
    while (seq_len := seq_len // 2) >= _SHORTEST:
        yield f"sequences of {seq_len:,} tokens", {"seq_len": seq_len}


def _growing(run: Run) -> Changes:
    """More GPUs share the states: ZeRO-3 over all, recomputation, one sequence each."""
    stage = 3 if run.layout.pp == 1 else 1
    for times in (2, 4, 8, 16, 32, 64):
        words = f"{times * run.layout.world_size} GPUs, ZeRO-{stage}, recompute each block"
        yield words, _LEAN | {"dp": times * run.layout.dp, "zero_stage": stage}
