"""FlashAttention without options: causal attention over blocks, in memory linear in the sequence.

The kernels in PyTorch do the same in on-chip memory, and also share key/value heads.

Source   Dao et al. 2022 (arXiv:2205.14135); Milakov and Gimelshein 2018 (arXiv:1805.02867)
"""

import math

import torch

from course_lib.minimal.recompute import autocast_as_now


def blocks_of(length, block_size):
    """Cut a sequence into slices of block_size; the last one may be shorter."""
    starts = range(0, length, block_size)
    return [slice(start, min(start + block_size, length)) for start in starts]


def block_scores(q_BNSH, k_BNSH, queries, keys):
    """Return the scores of two blocks; a key after its query gets -inf."""
    scores_BNqk = q_BNSH[..., queries, :] @ k_BNSH[..., keys, :].mT
    scores_BNqk = scores_BNqk / math.sqrt(q_BNSH.shape[-1])
    query_q1 = torch.arange(queries.start, queries.stop)[:, None]
    key_k = torch.arange(keys.start, keys.stop)
    return scores_BNqk.masked_fill(key_k > query_q1, -math.inf)


def flash_forward(q_BNSH, k_BNSH, v_BNSH, block_size):
    """Return causal attention and the log-sum-exp of each row of scores."""
    out_BNSH = torch.empty_like(q_BNSH)
    lse_BNS1 = torch.empty_like(q_BNSH[..., :1])
    for queries in blocks_of(q_BNSH.shape[-2], block_size):
        o_BNqH = torch.zeros_like(q_BNSH[..., queries, :])
        l_BNq1 = torch.zeros_like(o_BNqH[..., :1])
        m_BNq1 = torch.full_like(l_BNq1, -math.inf)
        for keys in blocks_of(queries.stop, block_size):  # keys up to the last query
            scores_BNqk = block_scores(q_BNSH, k_BNSH, queries, keys)
            new_m_BNq1 = torch.maximum(m_BNq1, scores_BNqk.amax(-1, keepdim=True))
            shrink_BNq1 = (m_BNq1 - new_m_BNq1).exp()  # 0 at the first block
            p_BNqk = (scores_BNqk - new_m_BNq1).exp()
            l_BNq1 = l_BNq1 * shrink_BNq1 + p_BNqk.sum(-1, keepdim=True)
            o_BNqH = o_BNqH * shrink_BNq1 + p_BNqk @ v_BNSH[..., keys, :]
            m_BNq1 = new_m_BNq1
        out_BNSH[..., queries, :] = o_BNqH / l_BNq1
        lse_BNS1[..., queries, :] = m_BNq1 + l_BNq1.log()
    return out_BNSH, lse_BNS1


def flash_backward(grad_BNSH, tensors, block_size):
    """Return the gradients of q, k and v; each block of weights is made again."""
    q_BNSH, k_BNSH, v_BNSH, out_BNSH, lse_BNS1 = tensors
    dq_BNSH, dk_BNSH, dv_BNSH = (torch.zeros_like(x) for x in (q_BNSH, k_BNSH, v_BNSH))
    along_BNS1 = (grad_BNSH * out_BNSH).sum(-1, keepdim=True)
    for queries in blocks_of(q_BNSH.shape[-2], block_size):
        q_BNqH, grad_BNqH = q_BNSH[..., queries, :], grad_BNSH[..., queries, :]
        for keys in blocks_of(queries.stop, block_size):
            k_BNkH, v_BNkH = k_BNSH[..., keys, :], v_BNSH[..., keys, :]
            scores_BNqk = block_scores(q_BNSH, k_BNSH, queries, keys)
            p_BNqk = (scores_BNqk - lse_BNS1[..., queries, :]).exp()
            dp_BNqk = grad_BNqH @ v_BNkH.mT - along_BNS1[..., queries, :]
            ds_BNqk = p_BNqk * dp_BNqk / math.sqrt(q_BNSH.shape[-1])
            dv_BNSH[..., keys, :] += p_BNqk.mT @ grad_BNqH
            dk_BNSH[..., keys, :] += ds_BNqk.mT @ q_BNqH
            dq_BNSH[..., queries, :] += ds_BNqk @ k_BNkH
    return dq_BNSH, dk_BNSH, dv_BNSH


class FlashAttention(torch.autograd.Function):
    """Keep q, k, v, the output and one number per row; no scores."""

    @staticmethod
    def forward(ctx, q_BNSH, k_BNSH, v_BNSH, block_size):
        out_BNSH, lse_BNS1 = flash_forward(q_BNSH, k_BNSH, v_BNSH, block_size)
        ctx.save_for_backward(q_BNSH, k_BNSH, v_BNSH, out_BNSH, lse_BNS1)
        ctx.block_size, ctx.autocast = block_size, autocast_as_now(q_BNSH)
        return out_BNSH

    @staticmethod
    def backward(ctx, grad_BNSH):
        with ctx.autocast:  # the scores of forward, in the same dtype
            grads = flash_backward(grad_BNSH, ctx.saved_tensors, ctx.block_size)
        return *grads, None


def use_flash(model, block_size=64):
    """Let every attention core of a model run in blocks."""
    for block in model.blocks:
        block.attention.core = lambda q, k, v: FlashAttention.apply(q, k, v, block_size)
