"""Optimizer states that leave the GPU: its memory is free, the bytes cross PCIe, and the copies are timed."""

import time

import pytest
import torch
from torch import nn

from course_lib.parallel.offload_states import OffloadedAdamW
from course_lib.timing import crossing_s
from course_lib.training import MasterAdamW

pytestmark = pytest.mark.gpu

NUMEL = 64 * 2**20


def parameter_with_gradient(numel):
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(numel, generator=generator).to("cuda", torch.bfloat16))
    parameter.grad = torch.randn(numel, generator=generator).to("cuda", torch.bfloat16)
    return parameter


@pytest.mark.parametrize("place", ["host", "disk"])
def test_no_state_is_on_the_gpu_and_a_step_takes_no_gpu_memory(place, record):
    parameter = parameter_with_gradient(NUMEL)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with OffloadedAdamW([parameter], place) as optimizer:
        optimizer.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        step_s = time.perf_counter() - start
        crossings = dict(optimizer.link_bytes)
        pinned = all(buffer.is_pinned() for buffer in optimizer._staging.values())
    modelled = crossing_s(crossings, "pcie5")
    record(place=place, step_s=step_s, link_bytes=crossings, modelled_link_s=modelled)
    assert pinned
    assert torch.cuda.max_memory_allocated() - before < 2**20  # the states would be 12 * 64 MiB
    assert crossings["device to host"] == crossings["host to device"] == 2 * NUMEL
    assert step_s > modelled["device to host"] + modelled["host to device"]


def test_updates_are_those_of_master_adamw_on_the_gpu():
    expected, offloaded = parameter_with_gradient(100_003), parameter_with_gradient(100_003)
    reference, optimizer = MasterAdamW([expected]), OffloadedAdamW([offloaded], piece_numel=5000)
    for _ in range(3):
        reference.step()
        optimizer.step()
    torch.testing.assert_close(
        optimizer.state[offloaded]["master"], reference.state[expected]["master"].cpu(), rtol=1e-5, atol=1e-6
    )
    assert (expected != offloaded).float().mean() < 0.01  # a last bit, where the two processors round differently


def test_the_rate_of_pinned_copies_is_measured_beside_the_model(record):
    on_gpu = torch.empty(NUMEL, dtype=torch.bfloat16, device="cuda")
    rates = {}
    for pinned in (False, True):
        on_host = torch.zeros(NUMEL, dtype=torch.bfloat16, device="cpu", pin_memory=pinned)
        for name, target, source in (("device to host", on_host, on_gpu), ("host to device", on_gpu, on_host)):
            seconds = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            rates[f"{name}, {'pinned' if pinned else 'pageable'}"] = on_host.nbytes / min(seconds)
    record(bytes_per_s=rates)
    assert rates["device to host, pinned"] > 0.8 * rates["device to host, pageable"]
    assert rates["host to device, pinned"] > 0.8 * rates["host to device, pageable"]
