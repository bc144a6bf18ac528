"""Autograd Functions across ranks: made from what they do forward and backward, and watched at work."""

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.checks.watch import Cost
from course_lib.measure import ByteMeter


def function(forward: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """Return a Function of x and of what else it is given: forward(x, *rest) and backward(gradient, *rest)."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *rest):
            ctx.rest = rest
            return forward(x, *rest)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad.contiguous(), *ctx.rest), *[None] * len(ctx.rest)

    return Made


def crossed(apply: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict:
    """Watch x on its way through, and the gradient of the result on its way back."""
    x.requires_grad_()
    with ByteMeter() as forward:
        out = apply(x)
    with ByteMeter() as backward:
        if isinstance(out, Tensor) and out.shape == grad.shape and out.requires_grad:
            out.backward(grad)
    return {
        "forward": out.detach().clone() if isinstance(out, Tensor) else out,
        "the gradient": x.grad,
        "bytes sent forward": Cost(forward.sent_bytes),
        "bytes sent backward": Cost(backward.sent_bytes),
    }
