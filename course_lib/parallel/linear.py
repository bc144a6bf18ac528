"""Column and row linear: a matrix cut over the ranks of one group, by its outputs or by its inputs.

    column   some of the outputs. Needs the whole input, gives its part of the result       q k v, gate up, head
    row      some of the inputs. Takes what a column gave, gives its part of a sum          o, down

The names are those of y = x w. `nn.Linear` stores the transpose: a column's weight w_fD is cut along dimension 0, a
row's w_Df along dimension 1. Between a column and a row nothing is sent, whatever works on each head or feature by
itself. Both ends of that stretch are in one object, the *residual* (here `ReplicatedResidual`; sequence parallelism
brings another, which keeps the activations between blocks in shards, and nothing else changes):

    into columns     forward nothing, backward all-reduce      the pair copy_in
    out of a row     forward all-reduce, backward nothing      the pair sum_out

Both let weight gradients wait (weight_gradients.py): a row's `product` is replaced, columns ask their `delayed` for a
queue.

Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.comm.conjugate import Group, InFlight, copy_in, my_piece, start_all_reduce, sum_out
from course_lib.layout.partition import piece_sizes
from course_lib.parallel.data import record_when_done
from course_lib.parallel.engine import Trace, compute_span


@dataclass(frozen=True)
class ReplicatedResidual:
    """The activations between blocks, whole on every rank.
    enter, leave             what goes in, and what comes out of a row, for autograd
    start_enter, start_sum   what goes into columns, and the sum of its gradient: without autograd, without waiting.
                             seq_len: S, where x enters again in backward
    overlap                  while the gradient of an input is summed, weight gradients are computed
    """

    group: Group
    overlap: bool = True
    trace: Trace | None = None
    regather = False  # True: what columns keep for backward is x as it came in, and it enters again

    def enter(self, x_BSD: Tensor) -> Tensor:
        return copy_in(x_BSD, self.group)

    def leave(self, x_BSD_partial: Tensor) -> Tensor:
        with communication_span(self.trace, "sum of outputs"):
            return sum_out(x_BSD_partial, self.group)

    def start_enter(self, x_BSD: Tensor, seq_len: int | None = None) -> InFlight:
        return InFlight(None, lambda: x_BSD)

    def start_sum(self, x_BSD_partial: Tensor) -> InFlight:
        return traced(lambda: start_all_reduce(x_BSD_partial, self.group), "sum of input gradients", self.trace)


def traced(start: Callable[[], InFlight], name: str, trace: Trace | None) -> InFlight:
    """Starts a communication, and records a Span that ends when it does, whoever waits for it and when."""
    start_s = time.perf_counter()
    in_flight = start()
    if trace is not None:
        record_when_done(in_flight.work.get_future(), trace, name, start_s)
    return in_flight


communication_span = partial(compute_span, lane="communication")  # around one that is waited for at once


@dataclass(frozen=True)
class Cut:
    """Which part of a tensor each rank has: an equal piece along `dim`, or with copies > 1 that many ranks the same.

    Each of these uses the same numbers for its own heads: a different term of their gradient. The last may be shorter.
    """

    dim: int
    size: int  # of the whole, along dim
    tp_size: int
    copies: int = 1

    def start_and_length(self, tp_rank: int) -> tuple[int, int]:
        """Where that rank's part begins along `dim`, and how long it is."""
        sizes, piece = piece_sizes(self.size, self.tp_size // self.copies), tp_rank // self.copies
        return sum(sizes[:piece]), sizes[piece]

    def part(self, whole: Tensor, tp_rank: int) -> Tensor:
        return my_piece(whole, tp_rank // self.copies, self.tp_size // self.copies, self.dim)


def cut_parameter(whole: nn.Parameter, cut: Cut, group: Group) -> nn.Parameter:
    """This rank's part as a parameter of its own, so that the whole can be freed."""
    part = cut.part(whole.detach(), group.rank()).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)


class ColumnLinear(nn.Module):
    """Some of the outputs of a linear layer. `copies`: how many neighbouring ranks have the same ones.
    Shapes   weight w_fD, bias b_f; x_BSD -> y_BSf
    """

    def __init__(self, linear: nn.Linear, residual: ReplicatedResidual, copies: int = 1):
        super().__init__()
        self.residual = residual
        cut = Cut(0, linear.out_features, residual.group.size(), copies)
        self.weight = cut_parameter(linear.weight, cut, residual.group)
        self.bias = None if linear.bias is None else cut_parameter(linear.bias, cut, residual.group)
        self.cuts = {"weight": cut, "bias": cut}
        self.delayed = None  # whose queue, while there is one, takes the weights' gradients

    def forward(self, x_BSD: Tensor) -> Tensor:
        return column_linears(x_BSD, [self], self.residual)[0]


class RowLinear(nn.Module):
    """Some of the inputs of a linear layer. The bias is whole, and added once: after the sum.
    Shapes   weight w_Df, bias b_D; x_BSf -> y_BSD
    """

    def __init__(self, linear: nn.Linear, residual: ReplicatedResidual):
        super().__init__()
        self.residual = residual
        cut = Cut(1, linear.in_features, residual.group.size())
        self.weight = cut_parameter(linear.weight, cut, residual.group)
        self.bias = linear.bias
        self.cuts = {"weight": cut}
        self.product = F.linear

    def forward(self, x_BSf: Tensor) -> Tensor:
        y_BSD = self.residual.leave(self.product(x_BSf, self.weight))
        return y_BSD if self.bias is None else y_BSD + self.bias


def column_linears(x: Tensor, layers: Sequence[ColumnLinear], residual: ReplicatedResidual) -> tuple[Tensor, ...]:
    """The products of one input: it is kept once, and its gradient is summed once, however many they are.

    To autograd it is `x = copy_in(x, group)`, then `F.linear(x, w_fD, b_f)` for each layer. Backward is written out for
    the sake of its order: the sum of the input's gradient travels while the weights' gradients are computed.

    Under autocast all is cast before, as `F.linear` would: backward then multiplies what forward multiplied.
    Bytes    sent per rank: 0 forward, 2 (tp - 1) / tp * x.nbytes backward
    """
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(dtype), [w_fD.to(dtype) for w_fD in weights]
        biases = [None if b_f is None else b_f.to(dtype) for b_f in biases]
    delayed = layers[0].delayed
    products = delayed and delayed.products(weights, biases)
    if products and x.requires_grad:
        weights, biases = ([None if one is None else one.detach() for one in each] for each in (weights, biases))
    return _ColumnLinears.apply(x, residual, products, *weights, *biases)


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, products, *weights_and_biases):
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        x_BSD = residual.start_enter(x).wait()
        ctx.residual, ctx.seq_len, ctx.products = residual, x_BSD.shape[-2], products
        ctx.save_for_backward(x if residual.regather else x_BSD, *weights)
        return tuple(F.linear(x_BSD, w_fD, b_f) for w_fD, b_f in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grads_BSf):
        residual, (x, *weights) = ctx.residual, ctx.saved_tensors
        entering = residual.start_enter(x, ctx.seq_len) if residual.regather else InFlight(None, lambda: x)
        grad_BSD_partial = grads_BSf[0] @ weights[0]
        for grad_BSf, w_fD in zip(grads_BSf[1:], weights[1:], strict=True):
            grad_BSD_partial += grad_BSf @ w_fD
        summing = residual.start_sum(grad_BSD_partial)
        if not residual.overlap:
            grad_x = summing.wait()
            summing = InFlight(None, lambda: grad_x)
        x_BSD = entering.wait()
        if ctx.products:
            for product, grad_BSf in zip(ctx.products, grads_BSf, strict=True):
                product.x, product.grad = x_BSD.detach(), grad_BSf
            return summing.wait(), *[None] * (2 + 2 * len(weights))
        wanted = ctx.needs_input_grad[3:]  # of weights, then of biases: none of what is frozen or absent
        with compute_span(residual.trace, "weight gradients"):
            grad_weights = [
                rows(grad).t() @ rows(x_BSD) if want else None
                for grad, want in zip(grads_BSf, wanted[: len(weights)], strict=True)
            ]
            grad_biases = [
                rows(grad).sum(0) if want else None
                for grad, want in zip(grads_BSf, wanted[len(weights) :], strict=True)
            ]
        return summing.wait(), None, None, *grad_weights, *grad_biases


def rows(x_BSD: Tensor) -> Tensor:
    return x_BSD.flatten(0, -2)
