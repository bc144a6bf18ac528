"""Context parallelism without options: tokens cut over the ranks, attention as a ring of keys and values.

The engine in parallel/ring.py, tiles.py and context.py computes only what the mask leaves, merges in FP32, and knows
dropout, striped tokens and Ulysses. `where` is a list: where[r] has the positions of rank r's tokens in the sequence.

Source   Liu et al. 2023 (arXiv:2310.01889); Dao 2023 (arXiv:2307.08691)
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib import comm

MASKED = -1e30  # not -inf: a row without any allowed key must have a finite log-sum-exp


# --- which tokens are whose
def contiguous(seq_len, cp):
    """Return for each rank the positions of its tokens: one piece of the sequence."""
    return list(torch.arange(seq_len).chunk(cp))


def zigzag(seq_len, cp):
    """Return for each rank an early chunk and a late one, of 2 cp chunks."""
    chunks = torch.arange(seq_len).chunk(2 * cp)
    return [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]


def zigzag_in_documents(lengths, cp):
    """Return the positions of zigzag in each of the documents that fill a sequence."""
    pieces, start = [[] for _ in range(cp)], 0
    for length in lengths:
        for rank, mine_s in enumerate(zigzag(length, cp)):
            pieces[rank].append(mine_s + start)
        start += length
    return [torch.cat(of_rank) for of_rank in pieces]


# --- attention to one block of keys
def scores_of(q_BNsH, k_BKkH, allowed_sk):
    """Return the scores of my queries with a block of keys; query heads share keys."""
    copies = q_BNsH.shape[1] // k_BKkH.shape[1]
    k_BNkH = k_BKkH.repeat_interleave(copies, dim=1)
    scores_BNsk = q_BNsH @ k_BNkH.mT / math.sqrt(q_BNsH.shape[-1])
    return scores_BNsk.masked_fill(~allowed_sk, MASKED)


def attend(q_BNsH, k_BKkH, v_BKkH, allowed_sk):
    """Return the output of attention to this block alone, and its log-sum-exp."""
    scores_BNsk = scores_of(q_BNsH, k_BKkH, allowed_sk)
    lse_BNs1 = scores_BNsk.logsumexp(-1, keepdim=True)
    v_BNkH = v_BKkH.repeat_interleave(q_BNsH.shape[1] // v_BKkH.shape[1], dim=1)
    return (scores_BNsk - lse_BNs1).exp() @ v_BNkH, lse_BNs1


def merge(out, lse, part, part_lse):
    """Two outputs over different keys become one; each shrinks to its share."""
    both = torch.logaddexp(lse, part_lse)
    return (lse - both).exp() * out + (part_lse - both).exp() * part, both


def attend_backward(grad_BNsH, tensors, rows, allowed_sk):
    """Return this block's share of dq, and of dk and dv."""
    (q_BNsH, k_BKkH, v_BKkH), (delta_BNs1, lse_BNs1) = tensors, rows
    copies = q_BNsH.shape[1] // k_BKkH.shape[1]
    k_BNkH, v_BNkH = (x.repeat_interleave(copies, dim=1) for x in (k_BKkH, v_BKkH))
    p_BNsk = (scores_of(q_BNsH, k_BKkH, allowed_sk) - lse_BNs1).exp()  # final weights
    ds_BNsk = p_BNsk * (grad_BNsH @ v_BNkH.mT - delta_BNs1)
    ds_BNsk = ds_BNsk / math.sqrt(q_BNsH.shape[-1])
    dkv_BNkH = torch.stack([ds_BNsk.mT @ q_BNsH, p_BNsk.mT @ grad_BNsH])
    # N = K x copies: split this dimension in two, and sum the copies of each key head
    dkv_BKkH = dkv_BNkH.unflatten(2, (-1, copies)).sum(3)
    return ds_BNsk @ k_BNkH, dkv_BKkH


# --- the ring
def pass_on(outgoing, group):
    """Start to send to the right and to receive from the left; `arrived()` waits."""
    rank, size = group.rank(), group.size()
    incoming = torch.empty_like(outgoing)
    messages = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(messages)

    def arrived():
        for work in works:
            work.wait()
        return incoming

    return arrived


def ring_forward(q_BNsH, kv, where, group):
    """Return attention of my queries to the keys of all ranks, and its log-sum-exp."""
    rank, size = group.rank(), group.size()
    for step in range(size):
        if step < size - 1:
            arrived = pass_on(kv, group)  # travels while this rank computes
        allowed_sk = where[(rank - step) % size] <= where[rank][:, None]
        part, part_lse = attend(q_BNsH, *kv, allowed_sk)
        if step == 0:
            out, lse = part, part_lse
        else:
            out, lse = merge(out, lse, part, part_lse)
        if step < size - 1:
            kv = arrived()
    return out, lse


def ring_backward(grad_BNsH, saved, where, group):
    """Return dq of my queries, and dk and dv of my keys and values."""
    q_BNsH, kv, out_BNsH, lse_BNs1 = saved
    rank, size = group.rank(), group.size()
    rows = (grad_BNsH * out_BNsH).sum(-1, keepdim=True), lse_BNs1  # delta, lse
    dq_BNsH, dkv_arrived = torch.zeros_like(q_BNsH), None
    for step in range(size):
        if step < size - 1:
            kv_arrived = pass_on(kv, group)
        allowed_sk = where[(rank - step) % size] <= where[rank][:, None]
        dq_part, dkv = attend_backward(grad_BNsH, (q_BNsH, *kv), rows, allowed_sk)
        dq_BNsH += dq_part
        if step == 0:
            own_dkv = dkv  # my share for my own block stays here
        else:
            if step > 1:
                dkv += dkv_arrived()  # the shares of the ranks before me
            dkv_arrived = pass_on(dkv, group)
        if step < size - 1:
            kv = kv_arrived()
    if size > 1:
        own_dkv += dkv_arrived()  # home: the shares of all other ranks
    return dq_BNsH, own_dkv


class RingAttention(torch.autograd.Function):
    """Keep my q, k, v, my output and one number per row; nothing of other ranks."""

    @staticmethod
    def forward(ctx, q_BNsH, k_BKsH, v_BKsH, where, group):
        kv = torch.stack([k_BKsH, v_BKsH])
        with torch.autocast(kv.device.type, enabled=False):  # sums stay in FP32
            out_BNsH, lse_BNs1 = ring_forward(q_BNsH, kv, where, group)
        ctx.save_for_backward(q_BNsH, kv, out_BNsH, lse_BNs1)
        ctx.where, ctx.group = where, group
        return out_BNsH

    @staticmethod
    def backward(ctx, grad_BNsH):
        saved = ctx.saved_tensors
        with torch.autocast(grad_BNsH.device.type, enabled=False):  # as in forward
            dq, (dk, dv) = ring_backward(grad_BNsH, saved, ctx.where, ctx.group)
        return dq, dk, dv, None, None


# --- a step of a model
def use_ring(model, where, group):
    """Let every attention core of a model be the ring."""
    for block in model.blocks:
        block.attention.core = lambda *qkv: RingAttention.apply(*qkv, where, group)


def loss_of_my_tokens(model, x_BS, y_BS, where, group):
    """Return my tokens' part of the mean loss over all tokens."""
    mine_s = where[group.rank()]
    logits_BsV = model(x_BS[:, mine_s], mine_s)  # positions of the whole sequence
    y_Bs = y_BS[:, mine_s]  # labels were made before the cut
    losses = F.cross_entropy(logits_BsV.flatten(0, 1), y_Bs.flatten(), reduction="sum")
    return losses / y_BS.numel()


def context_parallel_step(model, x_BS, y_BS, where, group):
    """Leave the gradient of the full mean loss in every rank; return that loss."""
    use_ring(model, where, group)
    loss = loss_of_my_tokens(model, x_BS, y_BS, where, group)
    loss.backward()
    for param in model.parameters():
        param.grad = comm.all_reduce(param.grad, group)  # a sum, not a mean
    return comm.all_reduce(loss.detach(), group)
