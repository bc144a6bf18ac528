"""The course's kernels compiled by Triton: right, and timed beside the least time of the roofline.

COURSE_KERNELS=gpu pytest tests/gpu/test_kernels_gpu.py
"""

from statistics import median

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware import GPU, gpu_of_device
from course_lib.kernels import attention, rows
from course_lib.kernels.language import HOST, cdiv
from course_lib.kernels.product import matmul
from course_lib.timing import kernel as formulas

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(HOST != "gpu", reason="set COURSE_KERNELS=gpu before pytest starts")]

ROWS, COLUMNS = 32_768, 4096  # of a softmax: 0.5 GB, which no cache holds
M, TILES = 4096, ((32, 32, 32), (64, 64, 32), (128, 128, 32), (128, 256, 64))  # of a product
HEADS, TOKENS, H = 32, 2048, 64  # of attention
ROUNDS = 20


def seconds_of(work) -> float:
    """Median by CUDA events, after the compiler and a warm-up."""
    work()
    work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


def here() -> GPU:
    gpu = gpu_of_device(torch.cuda.get_device_name())
    if gpu is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in course_lib/hardware.py")
    return gpu


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def test_one_softmax_kernel_takes_the_time_of_its_bytes(record):
    x, e, y = (on_gpu(ROWS, COLUMNS) for _ in range(3))
    largest, total = on_gpu(ROWS), on_gpu(ROWS)
    works = {
        "four kernels": lambda: rows.softmax_by_four(x, largest, e, total, y),
        "one kernel": lambda: rows.softmax_by_one(x, y),
    }
    measured, predicted = {}, {}
    for (name, work), num_bytes in zip(works.items(), formulas.softmax_bytes(ROWS, COLUMNS), strict=True):
        y.zero_()
        measured[f"{name}, ms"] = 1e3 * seconds_of(work)
        predicted[f"{name}, ms"] = 1e3 * formulas.Roof(here(), 0, num_bytes).seconds
        assert (y - x.softmax(-1)).abs().max() < 1e-6
    record(measured=measured, predicted=predicted)
    assert measured["four kernels, ms"] > 2 * measured["one kernel, ms"]  # bytes say 3


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_tiled_product_is_right_and_timed(tile, record):
    BM, BN, BK = tile
    a, b = (on_gpu(M, M, dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    grid, right = (cdiv(M, BM) * cdiv(M, BN),), a.float() @ b.float()
    seconds = seconds_of(lambda: matmul[grid](a, b, c, M, M, M, 8, BM, BN, BK))
    assert (c.float() - right).abs().max() < 2e-3 * right.abs().max()
    library_s = seconds_of(lambda: torch.mm(a, b, out=c.clone()))
    flops = 2 * M**3
    roof = formulas.Roof(here(), flops, sum(formulas.product_bytes(M, M, M, BM, BN)))
    record(
        tile=tile,
        what="TFLOP/s (predicted: every load of a program from HBM)",
        measured=flops / seconds / 1e12,
        predicted=flops / roof.seconds / 1e12,
    )
    record(tile=tile, torch_tflops=flops / library_s / 1e12)


def test_attention_by_one_kernel_is_right_and_faster_than_by_three(record):
    q, k, v, o, o3 = (on_gpu(HEADS, TOKENS, H, dtype=torch.float16) for _ in range(5))
    scores, lse = on_gpu(HEADS, TOKENS, TOKENS, dtype=torch.float16), on_gpu(HEADS, TOKENS)
    one_s = seconds_of(lambda: attention.attend_by_one(q, k, v, o, lse))
    three_s = seconds_of(lambda: attention.attend_by_three(q, k, v, scores, o3))
    right = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert (o.float() - right).abs().max() < 5e-3
    assert (o3.float() - right).abs().max() < 5e-3
    sizes = HEADS, TOKENS, H, 64
    bytes_of = formulas.flash_bytes(*sizes), formulas.three_kernel_bytes(*sizes)
    record(what="three kernels / one (predicted: bytes)", measured=three_s / one_s, predicted=bytes_of[1] / bytes_of[0])
    assert three_s > one_s
