"""On GPUs `course watch` names the slow rank, by the events of its own stream.

Ranks that share a GPU talk through gloo. There the program of one rank is slow, where each has a GPU its kernels are.
"""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.train import Logs, TrainPlan, trainer, watch

pytestmark = pytest.mark.gpu

SLOW_S, CYCLES = 0.02, 40_000_000  # after each module: of the program, of a kernel that spins
PLAN = TrainPlan(steps=6, seq_len=64)


def train_with_a_slow_rank(folder: str, layout: Layout, spins: bool) -> None:
    if dist.get_rank() == 1:
        wait = (lambda *_: torch.cuda._sleep(CYCLES)) if spins else (lambda *_: time.sleep(SLOW_S))
        torch.nn.modules.module.register_module_forward_hook(wait)
    trainer.train(preset("toy"), layout, PLAN, None, Logs(folder), trainer.ignore)


@pytest.mark.parametrize("layout", ["dp=2", "tp=2,sequence_parallel=true", "dp=2,zero_stage=3", "pp=2,micro_batches=4"])
def test_the_slow_rank_is_named(layout, tmp_path, record):
    layout, each = Layout.parse(layout), torch.cuda.device_count() >= 2
    if layout.pp > 1 and not each:
        pytest.skip(f"NCCL needs a GPU for each of 2 ranks; here are {torch.cuda.device_count()}")
    backend = "nccl" if each else "shared-gpu"
    launch(train_with_a_slow_rank, 2, str(tmp_path), layout, each, backend=backend)
    run = watch.look(tmp_path)
    record(layout=str(layout), backend=backend, own_s=[one.own_s for one in run.ranks], finding=run.finding)
    assert run.finding.startswith("rank 1 is slow: ")
