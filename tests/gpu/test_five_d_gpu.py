"""Whole layouts on GPUs: loss and gradients equal to one process.

Ranks that share a GPU talk through gloo, which takes tensors on a GPU in collectives alone: layouts with a pipeline
need NCCL and a GPU for each rank. What ranks allocate is beside what was simulated in test_fake_cluster_gpu.py.
"""

import pytest
import torch
from harness import my_device

from course_lib import model
from course_lib.config import PRESETS, preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.training import loss_of

pytestmark = pytest.mark.gpu

SEQ_LEN = 64
CONFIGS = {"dense": PRESETS["toy"], "experts": preset("toy-moe")}
COLLECTIVES = [  # without a pipeline: under gloo on a shared GPU, and under NCCL where each rank has one
    ("dense", "dp=2,zero_stage=3,micro_batches=2"), ("dense", "tp=2,sequence_parallel=true"), ("dense", "cp=2"),
    ("dense", "dp=2,tp=2,sequence_parallel=true,zero_stage=1,micro_batches=2"), ("dense", "cp=2,tp=2,zero_stage=2"),
    ("dense", "dp=2,cp=2,cp_method=ulysses,zero_stage=3"), ("experts", "dp=2,tp=2,ep=2"),
    ("experts", "dp=2,cp=2,ep=4,zero_stage=1"),
]  # fmt: skip
PIPELINES = [
    ("dense", "pp=2,micro_batches=4"), ("dense", "pp=2,schedule=zbv,micro_batches=4"),
    ("dense", "pp=2,dp=2,zero_stage=1,micro_batches=2"), ("dense", "pp=2,tp=2,sequence_parallel=true,micro_batches=2"),
    ("experts", "pp=2,dp=2,ep=2,zero_stage=3,micro_batches=2"),
    ("experts", "pp=2,dp=2,cp=2,ep=2,zero_stage=1,micro_batches=2"),
    ("dense", "pp=2,dp=2,tp=2,sequence_parallel=true,zero_stage=1,micro_batches=2"),
]  # fmt: skip


def need_a_gpu_each(layout: Layout) -> None:
    if torch.cuda.device_count() < layout.world_size:
        pytest.skip(f"NCCL needs a GPU for each of {layout.world_size} ranks; here are {torch.cuda.device_count()}")


def batches_of(layout, dp_rank, config, device):
    """What one dp rank brings: other text than the others', the same on all that differ in cp, tp and pp alone."""
    generator = torch.Generator().manual_seed(dp_rank)
    shape = layout.micro_batches, 2, layout.micro_batch, SEQ_LEN
    return [(x, y) for x, y in torch.randint(config.vocab_size, shape, generator=generator).to(device)]


def largest_difference(name, text):
    """Of loss and gradients, from those of one process on the same device, as a share of the largest gradient."""
    config, layout, device = CONFIGS[name], Layout.parse(text), my_device()
    reference, loss = model.build(config, dtype=torch.float64, device=device), 0.0
    of_ranks = [batches_of(layout, dp_rank, config, device) for dp_rank in range(layout.dp)]
    for of_step in zip(*of_ranks, strict=True):
        x_BS, y_BS = (torch.cat(parts) for parts in zip(*of_step, strict=True))
        share = loss_of(reference, x_BS, y_BS) / layout.micro_batches
        share.backward()
        loss += share.item()
    engine = five_d.build(config, layout, dtype=torch.float64, device=device)
    got = engines.accumulate_gradients(engine, of_ranks[engine.groups.coordinates["dp"]]).item()
    grads = {key: param.grad for key, param in reference.named_parameters() if param.grad is not None}
    ours = engines.full_gradients(engine)
    largest = max(grad.abs().max() for grad in grads.values())
    return max(
        abs(got - loss), *((ours[key].to(device) - x).abs().max().item() / largest.item() for key, x in grads.items())
    )


@pytest.mark.parametrize("name, text", COLLECTIVES)
def test_ranks_that_share_a_gpu_equal_one_process(name, text, record):
    apart = list(launch(largest_difference, Layout.parse(text).world_size, name, text, backend="gloo"))
    record(config=name, layout=text, backend="gloo", off_by=max(apart))
    assert max(apart) < 1e-10


@pytest.mark.parametrize("name, text", COLLECTIVES + PIPELINES)
def test_ranks_with_a_gpu_each_equal_one_process(name, text, record):
    need_a_gpu_each(Layout.parse(text))
    apart = list(launch(largest_difference, Layout.parse(text).world_size, name, text, backend="nccl"))
    record(config=name, layout=text, backend="nccl", off_by=max(apart))
    assert max(apart) < 1e-10
