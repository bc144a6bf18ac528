"""A matrix product by tiles, and sums that read rows or columns."""

import torch
from torch import Tensor

from course_lib.kernels.language import cdiv, jit, tl
from course_lib.kernels.traffic import new


@jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A program makes one BM x BN tile of C = A B. GROUP rows of tiles are made together; 1: row by row."""
    tiles_n = tl.cdiv(N, BN)
    group, within = tl.program_id(0) // (GROUP * tiles_n), tl.program_id(0) % (GROUP * tiles_n)
    rows = min(tl.cdiv(M, BM) - group * GROUP, GROUP)
    m = ((group * GROUP + within % rows) * BM + tl.arange(0, BM))[:, None]
    n = (within // rows * BN + tl.arange(0, BN))[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + m * N + n, acc.to(c_ptr.dtype.element_ty), mask=(m < M) & (n < N))


@jit
def sum_lines(x_ptr, y_ptr, n, step, BLOCK: tl.constexpr):
    """Each program sums BLOCK numbers that lie `step` apart: 1, a row of n; n, a column."""
    i = tl.arange(0, BLOCK)
    start = tl.program_id(0) * (n if step == 1 else 1)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + start + i * step), 0))


def product_by_tiles(a_MK: Tensor, b_KN: Tensor, tile: tuple[int, int, int], group: int = 1) -> Tensor:
    """Return A B, made by a grid of programs of one tile (BM, BN, BK) each."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    c_MN = new((M, N), torch.promote_types(a_MK.dtype, b_KN.dtype))
    BM, BN, BK = tile
    matmul[(cdiv(M, BM) * cdiv(N, BN),)](a_MK, b_KN, c_MN, M, N, K, group, BM, BN, BK)
    return c_MN
