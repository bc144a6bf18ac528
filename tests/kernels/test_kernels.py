"""Kernels compute what torch computes, and ask memory for what the formulas say, to the byte."""

import pytest
import torch
from torch.nn import functional as F

from course_lib.kernels import attention, rows
from course_lib.kernels.language import HOST, jit, tl
from course_lib.kernels.product import product_by_tiles, sum_lines
from course_lib.kernels.timed import on_a_gpu
from course_lib.kernels.traffic import LINE_BYTES, SECTOR_BYTES, KernelTraffic, new
from course_lib.timing import kernel

HALF = torch.float16


def test_softmax_by_four_kernels_and_by_one():
    R, N = 24, 100  # no power of two, so that masks matter
    x, e, y = (new((R, N), seed=seed) for seed in (0, 1, 2))
    largest, total = new((R,)), new((R,))
    with KernelTraffic() as four:
        rows.softmax_by_four(x, largest, e, total, y)
    torch.testing.assert_close(y, x.softmax(-1))
    y.zero_()
    with KernelTraffic() as one:
        rows.softmax_by_one(x, y)
    torch.testing.assert_close(y, x.softmax(-1))
    assert (four.bytes, one.bytes) == kernel.softmax_bytes(R, N)


def test_swiglu_and_its_gradients():
    n, block = 3000, 512
    gate, up, dy = (new((n,), seed=seed).requires_grad_() for seed in (0, 1, 2))
    right = F.silu(gate) * up
    right.backward(dy.detach())
    y, dgate, dup = new((n,)), new((n,)), new((n,))
    grid = rows.grid_of(n, block)
    with KernelTraffic() as forward:
        rows.swiglu_forward[grid](gate.detach(), up.detach(), y, n, block)
    with KernelTraffic() as backward:
        rows.swiglu_backward[grid](dy.detach(), gate.detach(), up.detach(), dgate, dup, n, block)
    torch.testing.assert_close(y, right.detach())
    torch.testing.assert_close(dgate, gate.grad)
    torch.testing.assert_close(dup, up.grad)
    assert (forward.bytes, backward.bytes) == (3 * 4 * n, 5 * 4 * n)


@pytest.mark.parametrize(
    ("shape", "tile", "dtype"),
    [
        ((64, 96, 80), (16, 32, 16), HALF),
        ((50, 70, 90), (32, 32, 32), torch.float32),
        ((64, 64, 64), (64, 16, 64), HALF),
    ],
)
def test_a_tiled_product_loads_what_the_formula_says(shape, tile, dtype):
    (M, K, N), (BM, BN, _) = shape, tile
    a, b = new((M, K), dtype, seed=0), new((K, N), dtype, seed=1)
    with KernelTraffic() as counted:
        c = product_by_tiles(a, b, tile)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-3, atol=2e-2)
    assert (counted.loaded, counted.stored) == kernel.product_bytes(M, N, K, BM, BN, dtype.itemsize)
    if M % BM == N % BN == 0:
        assert counted.loaded == M * N * K * dtype.itemsize // BM + M * N * K * dtype.itemsize // BN


def test_groups_of_tiles_compute_the_same_and_miss_a_small_cache_less():
    a, b = new((256, 128), HALF, seed=0), new((128, 256), HALF, seed=1)
    missed, products = [], []
    for group in (1, 4):
        with KernelTraffic(cache_bytes=2**16) as counted:
            products.append(product_by_tiles(a, b, (32, 32, 32), group))
        missed.append(counted.missed)
    torch.testing.assert_close(*products)
    assert missed[1] < missed[0]
    with KernelTraffic(cache_bytes=2**20) as counted:  # all fits: each line comes once
        product_by_tiles(a, b, (32, 32, 32))
    assert counted.missed == (a.numel() + b.numel()) * 2


def test_a_column_touches_a_sector_for_each_number():
    n = 64
    x, y = new((n, n), seed=0), new((n,))
    told = {}
    for name, step in (("row", 1), ("column", n)):
        with KernelTraffic() as told[name]:
            sum_lines[(n,)](x, y, n, step, n)
        torch.testing.assert_close(y, x.sum(1 if step == 1 else 0))
    assert told["row"].loaded == told["column"].loaded == 4 * n * n
    assert told["row"].sectors * SECTOR_BYTES == 4 * n * n
    assert told["column"].sectors == n * n
    assert LINE_BYTES % SECTOR_BYTES == 0


@pytest.mark.parametrize("S", [64, 256])
def test_flash_stores_no_score_and_is_attention(S):
    heads, H, tile = 2, 32, 64
    q, k, v, o, o3 = (new((heads, S, H), HALF, seed=seed) for seed in range(5))
    x, lse = new((heads, S, S), HALF), new((heads, S))
    with KernelTraffic() as one:
        attention.attend_by_one(q, k, v, o, lse, tile)
    with KernelTraffic() as three:
        attention.attend_by_three(q, k, v, x, o3, tile)
    wide = [one.float() for one in (q, k, v)]
    right = F.scaled_dot_product_attention(*wide, is_causal=True)
    score = (wide[0] @ wide[1].mT * H**-0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    assert (o.float() - right).abs().max() < 2e-3
    assert (o3.float() - right).abs().max() < 2e-3
    torch.testing.assert_close(lse, score.logsumexp(-1), atol=2e-3, rtol=1e-3)
    assert one.bytes == kernel.flash_bytes(heads, S, H, tile)
    assert three.bytes == kernel.three_kernel_bytes(heads, S, H, tile)


@pytest.mark.skipif(HOST != "torch", reason="Triton's interpreter reads past the end without an error")
def test_a_place_outside_the_tensor_is_an_error_here():
    x, y = new((100,), seed=0), new((128,))
    with pytest.raises(IndexError, match="28 places are outside the tensor of 100 elements"):
        sum_lines[(1,)](x, y, 128, 1, 128)


@pytest.mark.skipif(HOST != "torch", reason="checked by tiles.py alone")
def test_a_launch_names_what_it_takes():
    with pytest.raises(TypeError, match=r"sum_lines takes x_ptr, y_ptr, n, step, BLOCK; got 2"):
        sum_lines[(1,)](new((4,)), new((4,)))
    with pytest.raises(TypeError, match=r"sum_lines is a kernel; give the places of its grid: kernel\[grid\]"):
        sum_lines(new((4,)), new((4,)))
    with pytest.raises(ValueError, match="contiguous"):
        sum_lines[(1,)](new((4, 4), seed=0).mT, new((4,)), 4, 1, 4)


def test_counts_may_be_nested_and_begin_at_nothing():
    x, y = new((8, 8), seed=0), new((8, 8))
    with KernelTraffic() as outer:
        rows.softmax_by_one(x, y)
        with KernelTraffic() as inner:
            rows.softmax_by_one(x, y)
    assert outer.bytes == 2 * inner.bytes
    rows.softmax_by_one(x, y)
    assert outer.bytes == 2 * inner.bytes


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float64])
def test_new_begins_where_a_gpu_s_would(dtype):
    made = new((3, 5), dtype, seed=1)
    assert made.data_ptr() % 512 == 0
    assert torch.equal(made, new((3, 5), dtype, seed=1))
    assert not new((3, 5), dtype).any()


@jit
def add(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = a + b."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(a_ptr + i) + tl.load(b_ptr + i))


@pytest.mark.skipif(HOST != "interpreter", reason="of Triton's interpreter: make test-kernels")
def test_the_interpreter_adds_wrongly_in_bf16_and_refuses_a_sigmoid_as_the_notebook_in_depth_says():
    a, b, y = (new((16, 16), torch.bfloat16, seed=seed) for seed in range(3))
    add[(1,)](a, b, y, 256)
    assert not torch.allclose(y, a + b, rtol=1, atol=1)
    with pytest.raises(Exception, match="Expected dtype .* but got bf16"):
        rows.swiglu_forward[(1,)](a, b, y, 256, 256)


@pytest.mark.skipif(HOST == "interpreter", reason="of our own host")
def test_our_host_is_right_in_bf16():
    a, b, y = (new((16, 16), torch.bfloat16, seed=seed) for seed in range(3))
    add[(1,)](a, b, y, 256)
    assert torch.equal(y, a + b)
    rows.swiglu_forward[(1,)](a, b, y, 256, 256)
    torch.testing.assert_close(y, F.silu(a) * b, rtol=2e-2, atol=1e-2)


def test_without_a_gpu_one_sentence_says_what_would_be_timed():
    assert on_a_gpu().startswith("Here no GPU with Triton") or "TFLOP/s" in on_a_gpu()
