"""launch on a machine with a GPU: NCCL where every rank has one, gloo with CUDA tensors where they share it."""

import os

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch

pytestmark = pytest.mark.gpu


def sum_on_gpu():
    device = torch.device("cuda", 0 if dist.get_backend() == "gloo" else int(os.environ["LOCAL_RANK"]))
    x = torch.full((1 << 20,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(x)
    backend = "nccl" if "nccl" in dist.get_backend() else "gloo"
    return x[:3], backend, torch.cuda.current_device()


def test_auto_takes_nccl_for_one_rank_and_returns_tensors_on_the_cpu():
    results = launch(sum_on_gpu, 1)
    total, backend, device = results[0]
    assert (results.backend, backend, device) == ("nccl", "nccl", 0)
    assert total.device.type == "cpu" and total.tolist() == [1.0] * 3
    assert 4 << 20 <= results.peak_bytes[0] < 64 << 20  # of the GPU, not of the process


def test_more_ranks_than_gpus_share_one_through_gloo():
    world_size = torch.cuda.device_count() + 1
    results = launch(sum_on_gpu, world_size)
    assert results.backend == "gloo" and "NCCL needs one for each rank" in results.why
    assert {tuple(total.tolist()) for total, _, _ in results} == {(world_size * (world_size + 1) / 2,) * 3}
    assert all(4 << 20 <= peak < 64 << 20 for peak in results.peak_bytes)


def new_tensors_and_cpu_tensors():
    new, on_cpu = torch.ones(4), torch.ones(4, device="cpu")
    dist.all_reduce(new)
    dist.all_reduce(on_cpu)
    return new.device.type, new, on_cpu


def test_a_cell_written_for_the_cpu_runs_on_nccl():
    device, new, on_cpu = launch(new_tensors_and_cpu_tensors, 1)[0]
    assert device == "cuda" and new.tolist() == on_cpu.tolist() == [1.0] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs for NCCL between two ranks")
def test_two_gpus_are_two_nccl_ranks():
    results = launch(sum_on_gpu, 2)
    assert results.backend == "nccl" and [device for _, _, device in results] == [0, 1]


def test_neither_the_notebook_nor_the_fork_server_touches_the_gpu():
    before = torch.cuda.is_initialized()  # by another test of this process, perhaps
    launch(sum_on_gpu, 1)
    assert torch.cuda.is_initialized() == before


def out_of_gpu_memory():
    return torch.empty(1 << 50, device="cuda")


def test_out_of_gpu_memory_is_the_ranks_own_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 failed:.*OutOfMemoryError"):
        launch(out_of_gpu_memory, 1)
