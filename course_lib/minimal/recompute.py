"""Activation recomputation without options: keep the inputs of a function, run it a second time in backward.

`torch.utils.checkpoint` does the same with saved-tensor hooks (use_reentrant=False), and stops the second run early.

Source   Chen et al. 2016 (arXiv:1604.06174)
"""

from functools import partial

import torch
import torch.nn.functional as F
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


class CheapThenLinear(torch.autograd.Function):
    """f(a, b) W^T for several W and a cheap f: keep a and b, and run f again in backward. No product runs again."""

    @staticmethod
    def forward(ctx, cheap, a, b, *weights):
        ctx.cheap, ctx.autocast = cheap, autocast_as_now(a)
        ctx.save_for_backward(a, b, *weights)
        x = cheap(a, b)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        a, b, *weights = ctx.saved_tensors
        a, b = own_leaf(a), own_leaf(b)
        with ctx.autocast:
            with torch.enable_grad():
                x = ctx.cheap(a, b)
            pairs = zip(grads, weights, strict=True)
            x.backward(sum(grad @ weight for grad, weight in pairs).to(x.dtype))
            rows = x.detach().flatten(0, -2)
            return None, a.grad, b.grad, *(grad.flatten(0, -2).t() @ rows for grad in grads)


def recompute_norms(model):
    """Let a model's projections keep a norm's input, not its output."""
    for block in model.blocks:
        pairs = (block.attention_norm, block.attention), (block.mlp_norm, block.mlp)
        for norm, layer in pairs:
            normed = partial(F.rms_norm, eps=norm.eps)
            layer.project = partial(project_normed, normed, norm.weight)
            norm.forward = lambda x_BSD: x_BSD  # the norm runs inside project


def project_normed(norm, weight_D, x_BSD, layers):
    """Return the products of norm(x) with each layer."""
    weights = [layer.weight for layer in layers]
    return CheapThenLinear.apply(lambda x, w: norm(x, w.shape, w), x_BSD, weight_D, *weights)


def recompute_products(model):
    """Let `down` keep what silu(gate) * up is made of, not the product."""
    for block in model.blocks:
        block.mlp.forward = partial(swiglu, block.mlp)


def swiglu(mlp, x_BSD):
    """Return down(silu(gate) * up)."""
    gate_BSF, up_BSF = mlp.project(x_BSD, (mlp.gate, mlp.up))
    inputs = gate_BSF, up_BSF, mlp.down.weight
    return CheapThenLinear.apply(lambda gate, up: F.silu(gate) * up, *inputs)[0]
