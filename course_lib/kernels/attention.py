"""Causal attention by one kernel that stores no score (FlashAttention's forward), and by three that do.

Tensors [heads, tokens, H], contiguous; tokens a multiple of the tile.
"""

from torch import Tensor

from course_lib.kernels.language import jit, tl


@jit
def flash(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, S, scale, H: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """A program: BQ queries of one head, over the keys up to the last of them, BK at a time."""
    first, head = tl.program_id(0) * BQ, tl.program_id(1) * S * H
    row, col, h = first + tl.arange(0, BQ), tl.arange(0, BK), tl.arange(0, H)
    q = tl.load(q_ptr + head + row[:, None] * H + h[None, :])
    top, total = tl.full((BQ,), -float("inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    o = tl.zeros((BQ, H), tl.float32)
    for start in range(0, first + BQ, BK):
        at = head + (start + col)[:, None] * H + h[None, :]
        x = tl.dot(q, tl.trans(tl.load(k_ptr + at)), input_precision="ieee") * scale
        x = tl.where(row[:, None] >= (start + col)[None, :], x, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 1))
        shrink, p = tl.exp(top - new_top), tl.exp(x - new_top[:, None])
        total, top = total * shrink + tl.sum(p, 1), new_top
        o = o * shrink[:, None] + tl.dot(p.to(q.dtype), tl.load(v_ptr + at), input_precision="ieee")
    tl.store(o_ptr + head + row[:, None] * H + h[None, :], (o / total[:, None]).to(q.dtype))
    tl.store(lse_ptr + tl.program_id(1) * S + row, top + tl.log(total))


@jit
def scores(q_ptr, k_ptr, x_ptr, S, scale, H: tl.constexpr, B: tl.constexpr):
    """x = q k^T, scaled and masked: a B x B tile."""
    i, j, h = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, H)
    head = tl.program_id(2) * S
    q = tl.load(q_ptr + (head + i)[:, None] * H + h[None, :])
    k = tl.load(k_ptr + (head + j)[:, None] * H + h[None, :])
    x = tl.where(i[:, None] >= j[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    tl.store(x_ptr + (head + i)[:, None] * S + j[None, :], x.to(q.dtype))


@jit
def softmax_row(x_ptr, S: tl.constexpr):
    """The softmax of one row of scores, in place."""
    at = x_ptr + tl.program_id(0) * S + tl.arange(0, S)
    x = tl.load(at).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(at, (e / tl.sum(e, 0)).to(x_ptr.dtype.element_ty))


@jit
def mix(p_ptr, v_ptr, o_ptr, S, H: tl.constexpr, B: tl.constexpr):
    """o = p v: B rows of one head."""
    i, j, h = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, B), tl.arange(0, H)
    head = tl.program_id(1) * S
    o = tl.zeros((B, H), tl.float32)
    for start in range(0, S, B):
        p = tl.load(p_ptr + (head + i)[:, None] * S + (start + j)[None, :])
        o = tl.dot(p, tl.load(v_ptr + (head + start + j)[:, None] * H + h[None, :]), o, input_precision="ieee")
    tl.store(o_ptr + (head + i)[:, None] * H + h[None, :], o.to(p_ptr.dtype.element_ty))


def attend_by_one(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tile: int = 64) -> None:
    """Fill o [heads, S, H] and lse [heads, S] (FP32), by FlashAttention."""
    heads, S, H = q.shape
    flash[(S // tile, heads)](q, k, v, o, lse, S, H**-0.5, H, tile, tile)


def attend_by_three(q: Tensor, k: Tensor, v: Tensor, x: Tensor, o: Tensor, tile: int = 64) -> None:
    """Fill o, with the scores x [heads, S, S] written, read, written and read."""
    heads, S, H = q.shape
    scores[(S // tile, S // tile, heads)](q, k, x, S, H**-0.5, H, tile)
    softmax_row[(heads * S,)](x, S)
    mix[(S // tile, heads)](x, v, o, S, H, tile)
