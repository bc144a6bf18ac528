"""Activation recomputation without options: keep the inputs of a function, run it a second time in backward.

`torch.utils.checkpoint` does the same with saved-tensor hooks (use_reentrant=False), and stops the second run early.

Source   Chen et al. 2016 (arXiv:1604.06174)
"""

from functools import partial

import torch
from torch import nn


def own_leaf(x):
    """Return x as the start of a graph of its own; RoPE's tables need no gradient."""
    return x.detach().requires_grad_(x.requires_grad)


def autocast_as_now(x):
    """Return a context with the autocast that is set now on the device of x."""
    kind = x.device.type
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


class Recomputed(torch.autograd.Function):
    """Run a function and keep its inputs only; run it again in backward."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.rng_state = function, torch.get_rng_state()
        ctx.autocast = autocast_as_now(inputs[0])
        ctx.save_for_backward(*inputs)
        return function(*inputs)  # autograd records nothing in here

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), ctx.autocast:
            torch.set_rng_state(ctx.rng_state)  # the same dropout as the first time
            inputs = [own_leaf(x) for x in ctx.saved_tensors]
            output = ctx.function(*inputs)
        torch.autograd.backward(output, grad)  # parameters get their gradients here
        return None, *(x.grad for x in inputs)


def recompute(function, *inputs):
    """Return function(*inputs); what it keeps inside is made again in backward."""
    if not any(x.requires_grad for x in inputs):  # autograd would skip backward
        return function(*inputs)
    return Recomputed.apply(function, *inputs)


class Segment(nn.Module):
    """Consecutive blocks as one module."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_BSD, *tables):
        for block in self.blocks:
            x_BSD = block(x_BSD, *tables)
        return x_BSD


def recompute_segments(model, blocks_per_segment=1):
    """Let a model keep one input for each segment of blocks, and recompute the rest."""
    blocks, k = list(model.blocks), blocks_per_segment
    starts = range(0, len(blocks), k)
    model.blocks = nn.ModuleList(Segment(blocks[start : start + k]) for start in starts)
    for segment in model.blocks:
        segment.forward = partial(recompute, segment.forward)


def recompute_cores(model):
    """Let a model recompute its attention cores only: selective recomputation."""
    for block in model.blocks:
        block.attention.core = partial(recompute, block.attention.core)
