"""FlashAttention written out in PyTorch: attention block by block, and no score matrix ever exists as a whole.

A softmax needs the largest score of its row and the sum of all exponentials. Both can be kept as running values: when a
block of keys brings a larger score, what was added up so far is shrunk to the new maximum. Backward makes every block's
scores again from q, k and the row's log-sum-exp. The real kernels do the same in the GPU's fast on-chip memory.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def block_scores(q_BNSH: Tensor, k_BNSH: Tensor, queries: slice, keys: slice, causal: bool) -> Tensor:
    """Scores of one block of queries against one block of keys; a causal mask hides keys after the query."""
    scores_BNqk = q_BNSH[..., queries, :] @ k_BNSH[..., keys, :].transpose(-2, -1) / math.sqrt(q_BNSH.shape[-1])
    if causal:
        query_q1 = torch.arange(queries.start, queries.stop, device=q_BNSH.device)[:, None]
        key_k = torch.arange(keys.start, keys.stop, device=q_BNSH.device)
        scores_BNqk = scores_BNqk.masked_fill(key_k > query_q1, -math.inf)
    return scores_BNqk


def blocks_of(seq_len: int, block_size: int) -> Iterator[slice]:
    """Cuts a sequence into slices of block_size; the last may be shorter."""
    return (slice(start, min(start + block_size, seq_len)) for start in range(0, seq_len, block_size))


def blockwise_forward(
    q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, causal: bool, block_size: int
) -> tuple[Tensor, Tensor]:
    """Attention with a running maximum and a running sum for each row.

    Shapes   -> out_BNSH, log_sum_exp_BNS1
    Source   Dao et al. 2022 (arXiv:2205.14135), algorithm 1; Milakov and Gimelshein 2018 (arXiv:1805.02867)
    """
    out_BNSH = torch.empty_like(q_BNSH)
    log_sum_exp_BNS1 = q_BNSH.new_empty(*q_BNSH.shape[:-1], 1)
    for queries in blocks_of(q_BNSH.shape[-2], block_size):
        sum_BNqH = torch.zeros_like(q_BNSH[..., queries, :])
        total_BNq1 = torch.zeros_like(sum_BNqH[..., :1])
        largest_BNq1 = torch.full_like(total_BNq1, -math.inf)
        for keys in blocks_of(queries.stop if causal else k_BNSH.shape[-2], block_size):
            scores_BNqk = block_scores(q_BNSH, k_BNSH, queries, keys, causal)
            new_largest_BNq1 = torch.maximum(largest_BNq1, scores_BNqk.amax(-1, keepdim=True))
            shrink_BNq1 = (largest_BNq1 - new_largest_BNq1).exp()  # 0 at the first block: exp(-inf)
            weights_BNqk = (scores_BNqk - new_largest_BNq1).exp()
            total_BNq1 = total_BNq1 * shrink_BNq1 + weights_BNqk.sum(-1, keepdim=True)
            sum_BNqH = sum_BNqH * shrink_BNq1 + weights_BNqk @ v_BNSH[..., keys, :]
            largest_BNq1 = new_largest_BNq1
        out_BNSH[..., queries, :] = sum_BNqH / total_BNq1
        log_sum_exp_BNS1[..., queries, :] = largest_BNq1 + total_BNq1.log()
    return out_BNSH, log_sum_exp_BNS1


class BlockwiseAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and one number a row; backward makes each block of scores once more.

    Source   Dao et al. 2022 (arXiv:2205.14135), algorithm 4; Dao 2023 (arXiv:2307.08691), algorithm 2
    """

    @staticmethod
    def forward(ctx, q_BNSH, k_BNSH, v_BNSH, causal, block_size):
        out_BNSH, log_sum_exp_BNS1 = blockwise_forward(q_BNSH, k_BNSH, v_BNSH, causal, block_size)
        ctx.save_for_backward(q_BNSH, k_BNSH, v_BNSH, out_BNSH, log_sum_exp_BNS1)
        ctx.causal, ctx.block_size = causal, block_size
        return out_BNSH

    @staticmethod
    def backward(ctx, grad_BNSH):
        q_BNSH, k_BNSH, v_BNSH, out_BNSH, log_sum_exp_BNS1 = ctx.saved_tensors
        scale = 1.0 / math.sqrt(q_BNSH.shape[-1])
        dq_BNSH, dk_BNSH, dv_BNSH = (torch.zeros_like(x) for x in (q_BNSH, k_BNSH, v_BNSH))
        along_out_BNS1 = (grad_BNSH * out_BNSH).sum(-1, keepdim=True)
        for queries in blocks_of(q_BNSH.shape[-2], ctx.block_size):
            q_BNqH, grad_BNqH = q_BNSH[..., queries, :], grad_BNSH[..., queries, :]
            for keys in blocks_of(queries.stop if ctx.causal else k_BNSH.shape[-2], ctx.block_size):
                scores_BNqk = block_scores(q_BNSH, k_BNSH, queries, keys, ctx.causal)
                weights_BNqk = (scores_BNqk - log_sum_exp_BNS1[..., queries, :]).exp()
                dweights_BNqk = grad_BNqH @ v_BNSH[..., keys, :].transpose(-2, -1)
                dscores_BNqk = weights_BNqk * (dweights_BNqk - along_out_BNS1[..., queries, :]) * scale
                dv_BNSH[..., keys, :] += weights_BNqk.transpose(-2, -1) @ grad_BNqH
                dk_BNSH[..., keys, :] += dscores_BNqk.transpose(-2, -1) @ q_BNqH
                dq_BNSH[..., queries, :] += dscores_BNqk @ k_BNSH[..., keys, :]
        return dq_BNSH, dk_BNSH, dv_BNSH, None, None


def blockwise_attention(
    q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, causal: bool = True, block_size: int = 64
) -> Tensor:
    """Attention in memory linear in the sequence, forward and backward; the readable twin of a FlashAttention kernel.

    Bytes    kept for backward: q, k, v, the output, and one number a row
    Raises   ValueError if k and v have fewer heads than q, or block_size is below 1
    """
    if k_BNSH.shape[1] != q_BNSH.shape[1] or v_BNSH.shape[1] != q_BNSH.shape[1]:
        raise ValueError(
            f"q has {q_BNSH.shape[1]} heads, k {k_BNSH.shape[1]} and v {v_BNSH.shape[1]}; they must be as many: "
            "repeat k and v first, with repeat_interleave(q_heads // k_heads, dim=1)"
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    return BlockwiseAttention.apply(q_BNSH, k_BNSH, v_BNSH, causal, block_size)
