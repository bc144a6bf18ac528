"""Attention whose keys and values come block by block from other ranks: kernels of one block, and how parts are merged.

A rank has queries of its s tokens and meets the keys and values of every rank, one block after the other. Of each block
it computes a tile (sequence_sharding.py) and gets that part's output and its rows' log-sum-exp:

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Merged so, any number of parts give the softmax over all keys. Backward needs no merging: with the row's final output
and log-sum-exp each tile gives its share of dq, dk and dv, and shares are added.

How blocks come and where their gradients go is an Exchange: `ring.Ring` or `ring.Gathered`. A block is one tensor,
kv_BKsU: of each token a key and behind it its value, U = H + W numbers. W differs from H in latent attention alone.

Dropout needs the same mask forward and backward. Each rank draws a seed for its queries once an attention, and a tile's
mask from that seed and the rank of the keys: nothing is kept but the seed. Kernels here have no dropout, so these tiles
are written out. As in every training on several ranks, which weights are dropped depends on the layout, how many does
not.

Source   Liu et al. 2023 (arXiv:2310.01889); Dao 2023 (arXiv:2307.08691), algorithm 2
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.comm.conjugate import Group, check_group
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, Tile, tile
from course_lib.model.attention import filled_up
from course_lib.parallel.engine import Trace, compute_span
from course_lib.validate import one_of

Block = tuple[int, Tensor]  # whose keys and values they are, and kv_BKsU


def keys_and_values(kv_BKsU: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Split a block into its keys, of key_dim numbers each, and its values."""
    return kv_BKsU[..., :key_dim], kv_BKsU[..., key_dim:]


def scores_of(q_BNqH: Tensor, k_BNkH: Tensor, causal: bool) -> Tensor:
    """Scaled scores in float32 at least; a causal tile is square, and row i sees columns 0 .. i."""
    dtype = torch.promote_types(q_BNqH.dtype, torch.float32)
    scores_BNqk = (q_BNqH.to(dtype) @ k_BNkH.to(dtype).transpose(-2, -1)).div_(math.sqrt(q_BNqH.shape[-1]))
    if causal:
        future_qk = torch.ones(scores_BNqk.shape[-2:], dtype=torch.bool, device=scores_BNqk.device).triu(1)
        scores_BNqk.masked_fill_(future_qk, -math.inf)
    return scores_BNqk


def standard_forward(
    q_BNqH: Tensor, k_BKkH: Tensor, v_BKkW: Tensor, causal: bool, keep_BNqk: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one tile written out.
    keep_BNqk   dropout: 0 where a weight is dropped, else 1 / (1 - p)
    Shapes      -> out_BNqW, lse_BNq (float32 at least)
    """
    copies = q_BNqH.shape[1] // k_BKkH.shape[1]
    scores_BNqk = scores_of(q_BNqH, k_BKkH.repeat_interleave(copies, 1), causal)
    lse_BNq = scores_BNqk.logsumexp(-1)
    weights_BNqk = (scores_BNqk - lse_BNq.unsqueeze(-1)).exp_()
    weights_BNqk = weights_BNqk if keep_BNqk is None else weights_BNqk * keep_BNqk
    return (weights_BNqk @ v_BKkW.repeat_interleave(copies, 1).to(weights_BNqk.dtype)).to(q_BNqH.dtype), lse_BNq


def standard_backward(
    grad_BNqW: Tensor,
    q_BNqH: Tensor,
    k_BKkH: Tensor,
    v_BKkW: Tensor,
    out_BNqW: Tensor,
    lse_BNq: Tensor,
    causal: bool,
    keep_BNqk: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one tile's shares of dq, dk, dv; out and lse are of the whole rows, merged over all keys."""
    copies, dtype = q_BNqH.shape[1] // k_BKkH.shape[1], torch.promote_types(q_BNqH.dtype, torch.float32)
    k_BNkH, v_BNkW = (x_BKk.repeat_interleave(copies, 1).to(dtype) for x_BKk in (k_BKkH, v_BKkW))
    grad_BNqW = grad_BNqW.to(dtype)
    weights_BNqk = scores_of(q_BNqH, k_BNkH, causal).sub_(lse_BNq.unsqueeze(-1)).exp_()
    along_out_BNq1 = (grad_BNqW * out_BNqW.to(dtype)).sum(-1, keepdim=True)
    dweights_BNqk, dropped_BNqk = grad_BNqW @ v_BNkW.transpose(-2, -1), weights_BNqk
    if keep_BNqk is not None:
        dweights_BNqk, dropped_BNqk = dweights_BNqk.mul_(keep_BNqk), weights_BNqk * keep_BNqk
    dscores_BNqk = dweights_BNqk.sub_(along_out_BNq1).mul_(weights_BNqk).div_(math.sqrt(q_BNqH.shape[-1]))
    dk_BNkH = dscores_BNqk.transpose(-2, -1) @ q_BNqH.to(dtype)
    dv_BNkW = dropped_BNqk.transpose(-2, -1) @ grad_BNqW
    dk_BKkH, dv_BKkW = (x_BNk.unflatten(1, (-1, copies)).sum(2) for x_BNk in (dk_BNkH, dv_BNkW))
    return tuple(x.to(q_BNqH.dtype) for x in (dscores_BNqk @ k_BNkH, dk_BKkH, dv_BKkW))


def _fused_forward(
    q_BNqH: Tensor, k_BKkH: Tensor, v_BKkW: Tensor, causal: bool, keep_BNqk: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one tile by PyTorch's flash kernel, which returns the log-sum-exp beside the output.

    On a GPU it exists for 16-bit numbers and heads of a multiple of 8; anything else is written out, and dropout is.
    Where values are of another length than keys, the shorter are filled up with zeros for the kernel.
    """
    if keep_BNqk is not None or not _has_kernel(q_BNqH, v_BKkW):
        return standard_forward(q_BNqH, k_BKkH, v_BKkW, causal, keep_BNqk)
    (key_dim, value_dim), options = (q_BNqH.shape[-1], v_BKkW.shape[-1]), {"scale": 1 / math.sqrt(q_BNqH.shape[-1])}
    tensors = [filled_up(x, max(key_dim, value_dim)) for x in (q_BNqH, k_BKkH, v_BKkW)]
    if not q_BNqH.is_cuda:
        out_BNqM, lse_BNq = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, **options)
    else:
        out_BNqM, lse_BNq = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, **options)[:2]
    if out_BNqM.shape[-1] == value_dim:
        return out_BNqM, lse_BNq
    return out_BNqM[..., :value_dim].clone(), lse_BNq  # a view would keep the zeros


def _fused_backward(
    grad_BNqW: Tensor,
    q_BNqH: Tensor,
    k_BKkH: Tensor,
    v_BKkW: Tensor,
    out_BNqW: Tensor,
    lse_BNq: Tensor,
    causal: bool,
    keep_BNqk: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the kernel's own backward, given the rows' final output and log-sum-exp."""
    if keep_BNqk is not None or not _has_kernel(q_BNqH, v_BKkW):
        return standard_backward(grad_BNqW, q_BNqH, k_BKkH, v_BKkW, out_BNqW, lse_BNq, causal, keep_BNqk)
    (key_dim, value_dim), options = (q_BNqH.shape[-1], v_BKkW.shape[-1]), {"scale": 1 / math.sqrt(q_BNqH.shape[-1])}
    width = max(key_dim, value_dim)
    tensors = [*(filled_up(x, width) for x in (grad_BNqW, q_BNqH, k_BKkH, v_BKkW, out_BNqW)), lse_BNq]
    if not q_BNqH.is_cuda:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, **options)
    else:
        no_lengths, no_dropout = None, torch.zeros(2, dtype=torch.uint64, device=q_BNqH.device)
        lengths = (no_lengths, no_lengths, q_BNqH.shape[2], k_BKkH.shape[2])
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(x.contiguous() for x in tensors), *lengths, 0.0, causal, no_dropout, no_dropout, **options
        )
    return grads[0][..., :key_dim], grads[1][..., :key_dim], grads[2][..., :value_dim]


def _has_kernel(q_BNqH: Tensor, v_BKkW: Tensor) -> bool:
    widths = (q_BNqH.shape[-1], v_BKkW.shape[-1])
    return not q_BNqH.is_cuda or (q_BNqH.element_size() == 2 and max(widths) % 8 == 0)


@dataclass(frozen=True)
class Kernel:
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


KERNELS = {"fused": Kernel(_fused_forward, _fused_backward), "standard": Kernel(standard_forward, standard_backward)}


def merge(out_BNqH: Tensor, lse_BNq1: Tensor, part_BNqH: Tensor, part_lse_BNq1: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax, over different keys, as one: each shrunk by its share of the sum of exponentials."""
    both_BNq1 = torch.logaddexp(lse_BNq1, part_lse_BNq1)
    kept, added = (lse_BNq1 - both_BNq1).exp(), (part_lse_BNq1 - both_BNq1).exp()
    return out_BNqH * kept.to(out_BNqH.dtype) + part_BNqH * added.to(out_BNqH.dtype), both_BNq1


@dataclass(frozen=True)
class Tiling:
    """What stays the same over all tiles of one attention.
    merge_dtype     of the sums, None for float32
    dropout, seed   probability that a weight is dropped, and of what this rank draws its masks
    """

    sequence_sharding: str = "zigzag"
    causal: bool = True
    kernel: str = "fused"
    merge_dtype: torch.dtype | None = None
    trace: Trace | None = None
    dropout: float = 0.0
    seed: int = 0

    def tile(self, q_BNsH: Tensor, query_rank: int, key_rank: int) -> Tile | None:
        return tile(self.sequence_sharding, q_BNsH.shape[2], query_rank, key_rank, self.causal)

    def sum_dtype(self, x: Tensor) -> torch.dtype:
        """float32 unless chosen otherwise; float64 for inputs in float64."""
        return self.merge_dtype or torch.promote_types(x.dtype, torch.float32)

    def keep(self, q_BNqH: Tensor, k_BKkH: Tensor, key_rank: int) -> Tensor | None:
        """Draw a tile's dropout, the same whenever it is asked for: 0 for what is dropped; None without dropout."""
        if self.dropout == 0.0:
            return None
        shape, device = (*q_BNqH.shape[:3], k_BKkH.shape[2]), q_BNqH.device
        generator = torch.Generator(device).manual_seed(self.seed + key_rank)
        kept_BNqk = torch.rand(shape, generator=generator, device=device) >= self.dropout
        return kept_BNqk.to(torch.promote_types(q_BNqH.dtype, torch.float32)).div_(1 - self.dropout)


def forward_over(q_BNsH: Tensor, blocks: Iterable[Block], rank: int, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Attention of my queries over all blocks; my own must come first, because in it every query sees a key.
    Shapes   -> out_BNsH (in the dtype of the sums), lse_BNs (float32 at least)
    """
    forward, dtype, out_BNsH, lse_BNs1 = KERNELS[tiling.kernel].forward, tiling.sum_dtype(q_BNsH), None, None
    for key_rank, kv_BKsU in blocks:
        if (part := tiling.tile(q_BNsH, rank, key_rank)) is None:
            continue
        with compute_span(tiling.trace, f"forward, keys of {key_rank}"):
            q_BNqH, kv_BKkU = q_BNsH[:, :, part.queries], kv_BKsU[:, :, part.keys]
            k_BKkH, v_BKkW = keys_and_values(kv_BKkU, q_BNsH.shape[-1])
            keep_BNqk = tiling.keep(q_BNqH, k_BKkH, key_rank)
            part_BNqH, part_lse_BNq = forward(q_BNqH, k_BKkH, v_BKkW, part.causal, keep_BNqk)
            part_BNqH, part_lse_BNq1 = part_BNqH.to(dtype), part_lse_BNq.unsqueeze(-1)
            if out_BNsH is None:
                out_BNsH, lse_BNs1 = part_BNqH, part_lse_BNq1
                continue
            mine = (..., part.queries, slice(None))
            out_BNsH[mine], lse_BNs1[mine] = merge(out_BNsH[mine], lse_BNs1[mine], part_BNqH, part_lse_BNq1)
    return out_BNsH, lse_BNs1.squeeze(-1)


class DKVSum(Protocol):
    """Where gradients of keys and values go: `add` my share of each block's, as they came; then my own's `total`."""

    def add(self, key_rank: int, dkv_BKsU: Tensor) -> None: ...
    def total(self) -> Tensor: ...


def backward_over(
    saved: tuple[Tensor, Tensor, Tensor],
    grad_BNsH: Tensor,
    blocks: Iterable[Block],
    rank: int,
    tiling: Tiling,
    dkv_sum: DKVSum,
) -> tuple[Tensor, Tensor]:
    """dq of my queries, and by way of `dkv_sum` dk and dv of my keys and values. saved: q_BNsH, out_BNsH, lse_BNs.
    Shapes   -> dq_BNsH, dkv_BKsU (both in the dtype of the sums)
    """
    q_BNsH, out_BNsH, lse_BNs = saved
    dtype = tiling.sum_dtype(q_BNsH)
    dq_BNsH = None
    for key_rank, kv_BKsU in blocks:
        if (part := tiling.tile(q_BNsH, rank, key_rank)) is None:
            dkv_sum.add(key_rank, torch.zeros_like(kv_BKsU, dtype=dtype))
            continue
        with compute_span(tiling.trace, f"backward, keys of {key_rank}"):
            rows = (slice(None), slice(None), part.queries)
            k_BKkH, v_BKkW = keys_and_values(kv_BKsU[:, :, part.keys], q_BNsH.shape[-1])
            saved = (q_BNsH[rows], k_BKkH, v_BKkW, out_BNsH[rows], lse_BNs[rows])
            keep_BNqk = tiling.keep(q_BNsH[rows], k_BKkH, key_rank)
            dq_BNqH, *dkv = KERNELS[tiling.kernel].backward(grad_BNsH[rows], *saved, part.causal, keep_BNqk)
            if dq_BNsH is None:  # of my own keys: all of my rows
                dq_BNsH = dq_BNqH.to(dtype)
            else:
                dq_BNsH[rows] += dq_BNqH
            around = (part.keys.start, kv_BKsU.shape[2] - part.keys.stop)  # keys that I do not see: zeros
            dkv_BKsU = torch.cat(dkv, -1).to(dtype)
            dkv_BKsU = F.pad(dkv_BKsU, (0, 0, *around)) if any(around) else dkv_BKsU
        dkv_sum.add(key_rank, dkv_BKsU)
    return dq_BNsH, dkv_sum.total()


class Exchange(Protocol):
    """How the ranks of a group come by each other's keys and values."""

    group: Group

    def blocks(self, kv_BKsU: Tensor) -> Iterator[Block]:
        """Every rank's keys and values: first mine, then those of the ranks before me, around the group."""

    def dkv_sum(self, kv_BKsU: Tensor) -> DKVSum: ...


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BNsH, k_BKsH, v_BKsH, exchange, tiling):
        kv_BKsU = torch.cat([k_BKsH, v_BKsH], -1)
        out_BNsH, lse_BNs = forward_over(q_BNsH, exchange.blocks(kv_BKsU), exchange.group.rank(), tiling)
        out_BNsH = out_BNsH.to(q_BNsH.dtype)
        ctx.save_for_backward(q_BNsH, kv_BKsU, out_BNsH, lse_BNs)
        ctx.exchange, ctx.tiling = exchange, tiling
        return out_BNsH

    @staticmethod
    def backward(ctx, grad_BNsH):
        q_BNsH, kv_BKsU, out_BNsH, lse_BNs = ctx.saved_tensors
        blocks, dkv_sum, rank = ctx.exchange.blocks(kv_BKsU), ctx.exchange.dkv_sum(kv_BKsU), ctx.exchange.group.rank()
        saved = (q_BNsH, out_BNsH, lse_BNs)
        dq_BNsH, dkv_BKsU = backward_over(saved, grad_BNsH, blocks, rank, ctx.tiling, dkv_sum)
        grads = (dq_BNsH, *keys_and_values(dkv_BKsU, q_BNsH.shape[-1]))
        return *(x.to(q_BNsH.dtype) for x in grads), None, None


def block_attention(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, exchange: Exchange, tiling: Tiling) -> Tensor:
    """Attention of my queries over the keys and values of all ranks of the exchange.

    Under autocast all is cast before, as `F.scaled_dot_product_attention` does: backward multiplies what forward did.
    Shapes   -> out_BNsH
    Bytes    kept for backward: q, k, v, the output and one number a row, all of my own tokens
    Raises   ValueError as check_inputs
    """
    check_group(exchange.group, type(exchange).__name__)
    check_inputs(q_BNsH, k_BKsH, v_BKsH, tiling)
    kind = q_BNsH.device.type
    if torch.is_autocast_enabled(kind):
        q_BNsH, k_BKsH, v_BKsH = (x.to(torch.get_autocast_dtype(kind)) for x in (q_BNsH, k_BKsH, v_BKsH))
    with torch.autocast(kind, enabled=False):
        return _BlockAttention.apply(q_BNsH, k_BKsH, v_BKsH, exchange, tiling)


def check_inputs(q_BNsH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, tiling: Tiling) -> None:
    """Raises ValueError for words that are not known, and shapes that do not belong together."""
    one_of("sequence_sharding", tiling.sequence_sharding, SEQUENCE_SHARDINGS)
    one_of("kernel", tiling.kernel, tuple(KERNELS))
    shapes = [tuple(x.shape) for x in (q_BNsH, k_BKsH, v_BKsH)]
    (B, N, s, H), (_, K, _, _) = (shape if len(shape) == 4 else (0, 0, 0, 0) for shape in shapes[:2])
    if K == 0 or N % K or shapes[1] != (B, K, s, H) or shapes[2][:-1] != (B, K, s):
        raise ValueError(
            f"q, k, v have shapes {shapes}; they must be (B, N, s, H), (B, K, s, H) and (B, K, s, W), K dividing N"
        )
    if tiling.sequence_sharding == "zigzag" and s % 2:
        raise ValueError(f"each rank has {s} tokens; zigzag needs two chunks of equal length: an even number")
