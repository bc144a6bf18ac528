"""Runs that were measured on a real cluster: what a plan's advice is judged by.

measured_runs.csv has 58 finished runs of nanotron that the authors of the Ultra-Scale Playbook measured and published:
Llamas of 8 and of 80 billion parameters on nodes of 8 H100 80 GB, NVLink in a node, EFA between nodes; sequences of
4,096 tokens, 256 of them a step; ZeRO 0 or 1, 1F1B, sequence parallelism where tp is more than 1, no recomputation.
All finished runs of 8B on 8 and on 64 GPUs and of 80B on 128 GPUs are there, and the fastest on other numbers of GPUs.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from course_lib.config import ModelConfig
from course_lib.hardware import GB, GIB, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan.job import Job
from course_lib.validate import Checked, Positive, Size, checked

PATH = Path(__file__).with_name("measured_runs.csv")
SEQ_LEN, SEQUENCES = 4096, 256
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
MODELS = {
    "8B": ModelConfig("8B", 32, 4096, 32, 32, 14_336, 131_072, SEQ_LEN),
    "80B": ModelConfig("80B", 80, 8192, 64, 64, 28_672, 131_072, SEQ_LEN),
}


@dataclass(frozen=True)
class MeasuredRun(Checked):
    """A run as it was measured: mfu is 0 to 1 as nanotron counts it, memory the peak that its allocator reserved."""

    model: Literal[tuple(MODELS)]
    layout: Layout
    tokens_per_s_per_gpu: Positive
    mfu: Positive
    memory_gb: Positive

    @property
    def num_gpus(self) -> int:
        return self.layout.world_size

    @property
    def step_s(self) -> float:
        return SEQUENCES * SEQ_LEN / self.tokens_per_s_per_gpu / self.num_gpus


@checked
def measured_job(model: Literal[tuple(MODELS)], num_gpus: Size) -> Job:
    """Return the job that was measured: that model on so many GPUs, 256 sequences of 4,096 tokens a step."""
    return Job(MODELS[model], CLUSTER, num_gpus, SEQ_LEN, SEQUENCES * SEQ_LEN, engine="nanotron")


@checked
def measured_runs(model: Literal[tuple(MODELS)], num_gpus: Size | None = None) -> list[MeasuredRun]:
    """Return a model's measured runs on so many GPUs, fastest first; without a number on any."""
    with PATH.open(newline="") as file:
        of_model = [_run_of(row) for row in csv.DictReader(file) if row["model"] == model]
    found = [run for run in of_model if num_gpus in (None, run.num_gpus)]
    if not found:
        known = ", ".join(map(str, sorted({run.num_gpus for run in of_model})))
        raise ValueError(f"num_gpus is {num_gpus}; runs of {model} were measured on {known} GPUs: choose one of these")
    return sorted(found, key=lambda run: -run.tokens_per_s_per_gpu)


def _run_of(row: dict[str, str]) -> MeasuredRun:
    sizes = {name: int(row[name]) for name in ("dp", "tp", "pp", "micro_batch", "micro_batches")}
    with_tp = sizes["tp"] > 1
    layout = Layout(**sizes, zero_stage=int(row["zero"]), sequence_parallel=with_tp, regather=with_tp)
    speed, share, memory = (float(row[name]) for name in ("tokens_per_s_per_gpu", "mfu_percent", "memory_gib"))
    return MeasuredRun(row["model"], layout, speed, share / 100, memory * GIB / GB)
