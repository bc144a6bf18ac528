"""Backward in two parts: I, the gradient of the input, which the stage before waits for, and W, those of the weights.

A linear layer y = x w has two products in backward, and nobody in this step waits for the second:

    dx = dy w^T      in I: everything below needs it
    dw = x^T dy      in W: x and dy wait in a queue until then

So each linear gets two nodes in autograd's graph: one is on the way of the gradient and, when it comes past, puts x and
dy aside; the other hangs on the weight alone, and W runs it. To whoever watches gradients (hooks, FP32 sums) W looks
like any backward pass.

Only linears wait, the head too. What else has weights is done in I, where its gradient comes past: a norm's weight is D
numbers and needs what dx needs; an embedding has no dx, so all its backward is in I.

Layers cut over tp (linear.py) wait likewise: what is summed over ranks is dx, so nothing of W travels. An input that
columns gather along the sequence is whole until W, also where they would otherwise gather it again.

Between I and W of a micro-batch there is kept: the input of every linear (an input that three share, once), and the
gradient of each output. The head's are the longest: B S V. With recomputation these are the inputs made again in I.

Source   Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.parallel.linear import ColumnLinear, RowLinear


class _Product:
    """One use of one linear: its input and its output's gradient, once backward has come past."""

    __slots__ = ("grad", "x")

    def __init__(self):
        self.x: Tensor | None = None
        self.grad: Tensor | None = None


class _InputHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, product):
        ctx.product = product
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.product.x, ctx.product.grad = x.detach(), grad  # x itself would hold the graph below, and what that keeps
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _WeightHalf(torch.autograd.Function):
    """Gives an empty tensor: a handle by which W starts the other product."""

    @staticmethod
    def forward(ctx, weight, bias, product):
        ctx.product = product
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        product = ctx.product
        if product.grad is None:  # backward never came past: the output was not used
            return None, None, None
        grad, x = product.grad.flatten(0, -2), product.x.flatten(0, -2)
        product.grad = product.x = None
        wants_weight, wants_bias, _ = ctx.needs_input_grad
        return grad.t() @ x if wants_weight else None, grad.sum(0) if wants_bias else None, None


class WeightGradientStore:
    """The weight gradients of one micro-batch on one stage that are still to be done."""

    def __init__(self):
        self.handles: list[Tensor] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `F.linear` gives. The weight's gradient will wait here."""
        if torch.is_autocast_enabled(x.device.type):  # as F.linear does it: backward multiplies what forward did
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        product = self.product(weight, bias)
        if x.requires_grad:  # autograd then needs no other way here, and calls no hook for a gradient that is not there
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return _InputHalf.apply(x, weight, bias, product)

    def product(self, weight: Tensor, bias: Tensor | None) -> _Product:
        product = _Product()
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            self.handles.append(_WeightHalf.apply(weight, bias, product))
        return product

    def run(self) -> None:
        """W: computes what waits, last layer first, and adds it to the weights' gradients."""
        handles, self.handles = self.handles, []
        torch.autograd.backward(handles, [handle.detach() for handle in handles])


class DelayedLinear(nn.Linear):
    """A whole linear layer, with the parameters of the one that it replaces."""

    def __init__(self, linear: nn.Linear, delayed: "DelayedWeightGradients"):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.delayed = linear.weight, linear.bias, delayed

    def forward(self, x: Tensor) -> Tensor:
        return self.delayed.linear(x, self.weight, self.bias)


class DelayedWeightGradients:
    """The linears of one module, cut or whole, which put their weight gradients into `queue` while there is one."""

    def __init__(self, module: nn.Module):
        self.module: nn.Module | None = module  # prepared when the first queue comes, once all layers are cut
        self.queue: WeightGradientStore | None = None

    def _prepare(self, module: nn.Module) -> None:
        for layer in module.modules():
            for name, child in list(layer.named_children()):
                if type(child) in (nn.Linear, DelayedLinear):  # an earlier engine of the same model had it
                    setattr(layer, name, DelayedLinear(child, self))
            if isinstance(layer, RowLinear):
                layer.product = self.linear
            elif isinstance(layer, ColumnLinear):
                layer.delayed = self

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `F.linear` gives; with a queue the weight's gradient will wait in it."""
        if self.queue is None or not weight.requires_grad or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        return self.queue.linear(x, weight, bias)

    def products(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[_Product] | None:
        """For products of one input (`linear.column_linears`); None: their gradients do not wait."""
        if self.queue is None or not torch.is_grad_enabled():
            return None
        return [self.queue.product(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    @contextmanager
    def into(self, queue: WeightGradientStore | None) -> Iterator[None]:
        """Inside, weight gradients go into the queue. Around I too: recomputation must do again what forward did."""
        if self.module is not None:
            self._prepare(self.module)
            self.module = None
        self.queue = queue
        try:
            yield
        finally:
            self.queue = None
