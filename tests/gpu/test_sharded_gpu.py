"""ZeRO, tensor and sequence parallelism on GPUs: as many bytes held as the tracker says; gradients: test_five_d_gpu.py.

More ranks than GPUs share one through gloo; each process has its own allocator, so its peak is its own.
"""

import pytest
import torch
import torch.distributed as dist
from harness import my_device

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import launch
from course_lib.measure import MemoryTracker
from course_lib.parallel import engine as engines
from course_lib.parallel import sequence, tensor, zero

pytestmark = pytest.mark.gpu

ENGINES = {
    "ZeRO-1": (zero, {"stage": 1}),
    "ZeRO-2": (zero, {"stage": 2}),
    "ZeRO-3": (zero, {"stage": 3}),
    "TP": (tensor, {}),
    "TP + SP": (sequence, {"regather": True}),
}


def tokens_of(config, rows, seq_len, device):
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(config.vocab_size, (rows, seq_len + 1), generator=generator).to(device)
    return tokens_BS[:, :-1], tokens_BS[:, 1:]


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
