"""One line each: is an attention over cut sequences right, what does it send, what does it keep; is a step right.

`attend` is a function as RingAttention.apply: attend(q_BNsH, k_BKsH, v_BKsH, where, group) returns the output of my
tokens. `cut` says which tokens are whose: contiguous or zigzag of ring_attention.py. `step` is a function as
context_parallel_step. All of them run on real ranks, on the same numbers and texts.
"""

import copy
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.minimal.ring_attention import contiguous, zigzag
from course_lib.model import build, fused_attention
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens
from course_lib.validate import Size, checked

CP_CONFIG = preset("toy")
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 8
READINGS = 8  # of bytes: gloo lets go of a sent buffer a moment after the message is done, so the least counts


@checked
def output_differences(attend: Callable, world_size: Size = 4, seq_len: Size = 64, cut: Callable = contiguous) -> list:
    """Return for each rank the largest difference of its output from attention over the full sequence, in float64."""
    return list(launch(_output_difference, world_size, attend, seq_len, cut))


@checked
def compare_with_full_attention(
    attend: Callable, world_size: Size = 4, seq_len: Size = 64, cut: Callable = contiguous
) -> dict[str, float]:
    """Return the largest difference of out, dq, dk and dv on any rank from attention over the full sequence."""
    ranks = list(launch(_differences, world_size, attend, seq_len, cut))
    return {name: max(rank[name] for rank in ranks) for name in ("out", "dq", "dk", "dv")}


@checked
def sent_blocks(attend: Callable, world_size: Size = 4, seq_len: Size = 64, cut: Callable = contiguous) -> tuple:
    """Return what a rank sends forward and backward; the unit is the bytes of its own keys and values."""
    return launch(_sent, world_size, attend, seq_len, cut)[0]


@checked
def kept_per_position(
    attend: Callable, world_size: Size = 4, shard_len: Size = 64, cut: Callable = contiguous
) -> float:
    """Return the bytes that one rank keeps for the backward pass of one attention, per position of this rank.

    A position is one token of each of the 2 sequences.
    """
    return launch(_kept, world_size, attend, shard_len * world_size, cut)[0] / shard_len


@checked
def compare_step_with_one_process(
    step: Callable, world_size: Size = 4, seq_len: Size = 64, cut: Callable = zigzag
) -> tuple[float, float]:
    """Return the relative error of the loss, and of the worst gradient, against one process, in float64."""
    return launch(_step_errors, world_size, step, seq_len, cut)[0]


def sharp_model(seed: int = 0) -> nn.Module:
    """Return a model whose attention looks at few tokens, as a trained model's does: queries and keys are large."""
    model = build(CP_CONFIG, seed=seed, dtype=torch.float64)
    for block in model.blocks:
        for layer in (block.attention.q, block.attention.k):
            layer.weight.data *= 8
    return model


def _qkv(seq_len: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(2, count, seq_len, HEAD_DIM, generator=generator).to(dtype) for count in heads]


def _mine(seq_len: int, cut: Callable, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Where all tokens are, and this rank's part of q, k and v."""
    where = cut(seq_len, dist.get_world_size())
    mine_s = where[dist.get_rank()]
    return where, [x[:, :, mine_s].clone().requires_grad_() for x in _qkv(seq_len, dtype)]


def _output_difference(attend: Callable, seq_len: int, cut: Callable) -> float:
    where, shards = _mine(seq_len, cut)
    out = attend(*shards, where, dist.group.WORLD)
    expected = fused_attention(*_qkv(seq_len))[:, :, where[dist.get_rank()]]
    return _largest(out - expected)


def _differences(attend: Callable, seq_len: int, cut: Callable) -> dict[str, float]:
    where, shards = _mine(seq_len, cut)
    mine_s, full = where[dist.get_rank()], [x.requires_grad_() for x in _qkv(seq_len)]
    weight = torch.randn(full[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, expected = attend(*shards, where, dist.group.WORLD), fused_attention(*full)
    (out * weight[:, :, mine_s]).sum().backward()
    (expected * weight).sum().backward()
    pairs = [(out, expected[:, :, mine_s])]
    pairs += [(mine.grad, whole.grad[:, :, mine_s]) for mine, whole in zip(shards, full, strict=True)]
    found = [_largest(got - want) for got, want in pairs]
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


def _sent(attend: Callable, seq_len: int, cut: Callable) -> tuple[float, float]:
    where, shards = _mine(seq_len, cut)
    with ByteMeter() as forward:
        out = attend(*shards, where, dist.group.WORLD)
    with ByteMeter() as backward:
        out.sum().backward()
    block_bytes = shards[1].nbytes + shards[2].nbytes
    return forward.sent_bytes / block_bytes, backward.sent_bytes / block_bytes


def _kept(attend: Callable, seq_len: int, cut: Callable) -> int:
    where, shards = _mine(seq_len, cut, torch.float32)
    readings = []
    for _ in range(READINGS):
        with MemoryTracker(nn.Linear(1, 1)) as tracker:
            out = attend(*shards, where, dist.group.WORLD)
            time.sleep(0.002)
            readings.append(tracker.current("activations"))
        del out
    return min(readings)


def _step_errors(step: Callable, seq_len: int, cut: Callable) -> tuple[float, float]:
    x_BS, y_BS = batch(tokens(100_000), 0, 2, seq_len)
    reference, group = sharp_model(), dist.group.WORLD
    model = copy.deepcopy(reference)
    loss = step(model, x_BS, y_BS, cut(seq_len, group.size()), group)
    expected = loss_of(reference, x_BS, y_BS)
    expected.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = torch.stack([(mine.grad - want.grad).norm() / want.grad.norm() for mine, want in pairs])
    return _largest(loss / expected - 1), _largest(worst)


def _largest(difference: Tensor) -> float:
    """The largest magnitude; what is no number counts as infinite, as Python's max would pass it over."""
    return difference.detach().abs().nan_to_num(nan=math.inf).max().item()
