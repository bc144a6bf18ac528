"""ZeRO, tensor and sequence parallelism on GPUs: equal to one process, and as many bytes held as the tracker says.

More ranks than GPUs share one through gloo; each process has its own allocator, so its peak is its own.
"""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.measure import MemoryTracker
from course_lib.parallel import engine as engines
from course_lib.parallel import sequence, tensor, zero
from course_lib.training import loss_of

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(PRESETS["toy"], tied=True, d_ff=190)
ENGINES = {
    "ZeRO-1": (zero, {"stage": 1}),
    "ZeRO-2": (zero, {"stage": 2}),
    "ZeRO-3": (zero, {"stage": 3}),
    "TP": (tensor, {}),
    "TP + SP": (sequence, {"regather": True}),
}


def my_device():
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def tokens_of(config, rows, seq_len, device):
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(config.vocab_size, (rows, seq_len + 1), generator=generator).to(device)
    return tokens_BS[:, :-1], tokens_BS[:, 1:]


def largest_difference(name):
    """Of the gradients, from those of one process on the same device, in float64."""
    module, options = ENGINES[name]
    device = my_device()
    x_BS, y_BS = tokens_of(CONFIG, 4, 32, device)
    reference = model.build(CONFIG, dtype=torch.float64, device=device)
    loss_of(reference, x_BS, y_BS).backward()
    engine = module.build(model.build(CONFIG, dtype=torch.float64, device=device), dist.group.WORLD, **options)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if module is zero else slice(None)
    engines.accumulate_gradients(engine, [(x_BS[mine], y_BS[mine])])
    ours = engines.full_gradients(engine)
    return max((ours[name] - param.grad).abs().max().item() for name, param in reference.named_parameters())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("name", ENGINES)
def test_gradients_equal_one_process(name, backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"NCCL between two ranks needs two GPUs; this machine has {torch.cuda.device_count()}")
    assert max(launch(largest_difference, 2, name, backend=backend)) < 1e-10


def peaks(name):
    """Of one step on this rank's GPU: what the tracker counted, and what the allocator says."""
    module, options = ENGINES[name]
    config, device = PRESETS["mini"], my_device()
    engine = module.build(model.build(config, device=device), dist.group.WORLD, **options)
    optimizer = engines.make_optimizer(engine)
    batches = [tokens_of(config, 4, 256, device)]
    engines.step(engine, batches, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with MemoryTracker(engine, optimizer) as tracker:
        engines.step(engine, batches, optimizer)
        torch.cuda.synchronize()
    return tracker.peak_bytes, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("name", ENGINES)
def test_the_peak_is_what_the_tracker_counts(name, record):
    of_ranks = launch(peaks, 2, name, backend="gloo")
    record(engine=name, tracked_bytes=[pair[0] for pair in of_ranks], allocated_bytes=[pair[1] for pair in of_ranks])
    for tracked, allocated in of_ranks:
        assert tracked == pytest.approx(allocated, rel=0.05)
