"""Context and pipeline parallelism on GPUs: gradients equal to one process, from scratch and as PyTorch ships them."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.native import context as native_context
from course_lib.native import pipeline as native_pipeline
from course_lib.parallel import pipeline
from course_lib.training import loss_of

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(PRESETS["toy"], num_layers=4)
ENGINES = {  # engine, options of build, dtype, share of the largest gradient by which it may be off
    "context_parallel, zigzag": (native_context, {}, torch.float32, 1e-4),
    "context_parallel, contiguous, gathered": (
        native_context, {"placement": "contiguous", "rotate_method": "allgather"}, torch.bfloat16, 5e-2
    ),
    "1F1B": (pipeline, {}, torch.float64, 1e-10),
    "ZBV": (pipeline, {"schedule": "zbv"}, torch.float64, 1e-10),
    "PyTorch's 1F1B": (native_pipeline, {}, torch.float64, 1e-10),
    "PyTorch's ZBV": (native_pipeline, {"schedule": "zbv"}, torch.float64, 1e-10),
}  # fmt: skip


def largest_difference(name):
    """Of the gradients, from those of one process on the same device, as a share of the largest of all."""
    module, options, dtype, _ = ENGINES[name]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(256, (2, 2, 32), generator=generator).to(device).unbind(0) for _ in range(2)]
    reference = model.build(CONFIG, dtype=dtype, device=device)
    for x_BS, y_BS in batches:
        (loss_of(reference, x_BS, y_BS) / 2).backward()
    engine = module.build(model.build(CONFIG, dtype=dtype, device=device), dist.group.WORLD, **options)
    module.accumulate_gradients(engine, batches)
    ours = module.full_gradients(engine)
    largest = max(param.grad.abs().max() for param in reference.parameters())
    return max(((ours[n] - param.grad).abs().max() / largest).item() for n, param in reference.named_parameters())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("name", ENGINES)
def test_gradients_equal_one_process(name, backend, record):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL between two ranks needs two GPUs; this machine has {torch.cuda.device_count()}")
    shares = list(launch(largest_difference, 2, name, backend=backend))
    record(engine=name, backend=backend, off_by=shares)
    assert max(shares) < ENGINES[name][3]
