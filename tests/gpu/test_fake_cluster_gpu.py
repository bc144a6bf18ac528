"""Layouts simulated without a GPU, against real ranks that share one: the allocator's peak of each process.

Ranks on one GPU talk through gloo, which sends its tensors in collectives alone: layouts with a pipeline need NCCL and
a GPU for each rank, and are left out here. The table of errors is printed, and recorded with device and versions.
"""

import os
from dataclasses import replace

import pytest
import torch

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.storages import replaced
from course_lib.model import moe
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.run import Run
from course_lib.simulate import simulate_rank
from course_lib.simulate.cluster import plan_assignments
from course_lib.training.precision import engine_dtypes

pytestmark = pytest.mark.gpu

SEQ_LEN, PRECISION = 512, "bf16-master"
DENSE = replace(preset("mini"), d_model=512, d_ff=1408, vocab_size=8192)
EXPERTS = replace(preset("mini-moe"), vocab_size=8192)
LAYOUTS = {
    "dp=2,zero_stage=1,micro_batches=2,micro_batch=2": DENSE,
    "dp=2,zero_stage=3,micro_batches=2,micro_batch=2": DENSE,
    "tp=2,micro_batch=2": DENSE,
    "tp=2,sequence_parallel=true,recompute=full,micro_batch=2": DENSE,
    "cp=2,micro_batch=2": DENSE,
    "dp=2,tp=2,zero_stage=2,micro_batch=2": DENSE,
    "cp=2,tp=2,cp_method=ulysses,zero_stage=3,micro_batch=2": DENSE,
    "dp=2,ep=2,zero_stage=1,micro_batch=2": EXPERTS,
}


def allocated(config, text: str) -> int:
    """The most bytes that this process's tensors took in the second step, as the allocator counts them."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU for this rank")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    layout, (dtype, grad_dtype) = Layout.parse(text), engine_dtypes(PRECISION)
    with replaced(moe, "choose", plan_assignments):
        engine = five_d.build(config, layout, dtype=dtype, device=device, grad_dtype=grad_dtype)
        optimizer = engines.make_optimizer(engine)
        tokens_BS = torch.zeros(layout.micro_batch, SEQ_LEN, dtype=torch.int64, device=device)
        micro_batches = [(tokens_BS, tokens_BS)] * layout.micro_batches
        engines.step(engine, micro_batches, optimizer, 1.0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engines.step(engine, micro_batches, optimizer, 1.0)
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_simulated_peak_is_what_the_allocator_counts(text, record):
    config, layout = LAYOUTS[text], Layout.parse(text)
    of_ranks = launch(allocated, layout.world_size, config, text, backend="gloo")
    run = Run(config, layout, SEQ_LEN, PRECISION)
    simulated = [simulate_rank(run, rank).peak_bytes for rank in range(len(of_ranks))]
    errors = [100 * (found - real) / real for found, real in zip(simulated, of_ranks, strict=True)]
    print(f"\n{text:<60} {min(simulated) / 2**20:9.1f} MiB simulated, error {min(errors):+.1f} to {max(errors):+.1f} %")
    record(layout=text, simulated_bytes=simulated, allocated_bytes=list(of_ranks), error_percent=errors)
    for found, real in zip(simulated, of_ranks, strict=True):
        assert found == pytest.approx(real, rel=0.05)
