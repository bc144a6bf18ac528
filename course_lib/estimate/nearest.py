"""Where a run does not fit: how much is missing, and what is nearest to it and would, each worked out."""

from collections.abc import Iterator
from dataclasses import replace

from course_lib.engines import EngineFacts
from course_lib.estimate.estimate import Estimate, estimate
from course_lib.hardware import Cluster
from course_lib.layout import DEFAULTS
from course_lib.run import Offload, Run
from course_lib.tensors import LoRA
from course_lib.validate import checked

_SHORTEST = 256  # tokens: shorter sequences are another question


@checked
def nearest(run: Run, cluster: Cluster, engine: str | EngineFacts = "course") -> dict[str, Estimate]:
    """Return for each way to need less the least change that fits, with its estimate; none for a run that fits."""
    if estimate(run, cluster, engine).room == "fits":
        return {}
    found: dict[str, Estimate] = {}
    for way in _ways(run):
        for change, changes in way.items():
            of_layout = {name: value for name, value in changes.items() if name in DEFAULTS}
            of_run = {name: value for name, value in changes.items() if name not in DEFAULTS}
            try:
                one = estimate(replace(run, layout=replace(run.layout, **of_layout), **of_run), cluster, engine)
            except ValueError:  # what cannot be: nothing further this way
                break
            if one.room == "fits":
                found[change] = one
                break
    return dict(sorted(found.items(), key=lambda item: -item[1].tokens_per_s_per_gpu))


def _ways(run: Run) -> Iterator[dict[str, dict]]:
    """For each way to need less its changes, the least first: in words, and the fields of a run or its layout."""
    layout, lean = run.layout, {"recompute": "full", "operators": False}
    if layout.recompute != "full":
        yield {"recompute each block": lean}
    stages = [stage for stage in range(layout.zero_stage + 1, 4) if layout.pp == 1 or stage == 1]
    if layout.data_size > 1:
        yield {f"ZeRO-{stage} and recompute each block": lean | {"zero_stage": stage} for stage in stages}
    if run.optimizer == "adamw":
        adam = {"optimizer": "adamw-8bit"}
        yield {"8-bit Adam": adam, "8-bit Adam and recompute each block": lean | adam}
    on_host = {"offload": replace(run.offload, optimizer="host")}
    both = {"zero_stage": 3, "offload": Offload(optimizer="host", parameters="host")}
    yield {
        "optimizer on the host": on_host,
        "optimizer on the host, recompute each block": lean | on_host,
        "parameters too": lean | both,
    }
    adapters = {"zero_stage": 0, "recipe": "bf16-master", "lora": LoRA(16)}
    yield {
        "LoRA of rank 16": adapters,
        "LoRA of rank 16, recompute each block": lean | adapters,
        "QLoRA of rank 16, recompute each block": lean | adapters | {"lora": LoRA(16, four_bits=True)},
    }
    halves = [run.seq_len >> times for times in range(1, 64) if run.seq_len >> times >= _SHORTEST]
    yield {f"sequences of {seq_len:,} tokens": {"seq_len": seq_len} for seq_len in halves}
    stage = 3 if layout.pp == 1 else 1  # more GPUs share the states: ZeRO over all, recomputation, one sequence each
    yield {
        f"{times * layout.world_size} GPUs, ZeRO-{stage}, recompute each block": lean
        | {"dp": times * layout.dp, "zero_stage": stage}
        for times in (2, 4, 8, 16, 32, 64)
    }
