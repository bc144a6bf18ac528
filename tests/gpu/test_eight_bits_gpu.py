"""Products of FP8 tensors on a GPU: how far off, and how much faster than in BF16, beside the peak rates."""

import pytest
import torch
from test_kernels_gpu import seconds_of

from course_lib.hardware import gpu_of_device, peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="FP8 products need compute capability 8.9 or more",
    ),
]

N = 8192
E4M3 = torch.float8_e4m3fn


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / scale in E4M3, and the scale: the largest element becomes the largest number of the format."""
    scale = x.abs().max().float() / torch.finfo(E4M3).max
    return (x / scale).to(E4M3), scale


def test_an_fp8_product_is_near_and_faster(record):
    a, b = (torch.randn(N, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (a8, a_scale), (b8, b_scale) = quantized(a), quantized(b.T.contiguous())  # the second operand by columns

    def product():
        return torch._scaled_mm(a8, b8.T, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)

    flops, right = 2 * N**3, a @ b
    off_by = ((product().float() - right.float()).norm() / right.float().norm()).item()
    seconds = {"bf16": seconds_of(lambda: a @ b), "fp8": seconds_of(product)}
    gpu = gpu_of_device(torch.cuda.get_device_name())
    measured = {f"{name}, TFLOP/s": flops / s / 1e12 for name, s in seconds.items()}
    predicted = {f"{name}, TFLOP/s": peak_flops(gpu, name) / 1e12 for name in seconds} if gpu else {}
    record(off_by=off_by, measured=measured, predicted=predicted)
    assert 0.01 < off_by < 0.06  # two operands of 3 bits of mantissa each; the same on a CPU: 0.037
    assert seconds["fp8"] < seconds["bf16"]
