"""Sequence parallelism on top of tensor parallelism: what that leaves whole on every rank is cut along the sequence.

Between a row and the next column stand dropout, residual sum and norm. Tensor parallelism does them on every rank with
the same B S D numbers. But they treat each token by itself, so here a rank does them for its own tokens, x_BsD:

    region                    tensor parallel (ReplicatedResidual)    with sequence parallel (ShardedResidual)
    enter, into columns       x_BSD as it is                   x_BsD, all-gather to x_BSD
    between column and row    heads or features cut, all S     the same
    leave, out of a row       all-reduce, y_BSD                reduce-scatter, y_BsD
    norm, dropout, residual   x_BSD, the same on every rank    x_BsD, my tokens
    backward                  leave nothing, enter all-reduce  leave all-gather, enter reduce-scatter

An all-reduce is a reduce-scatter and then an all-gather: the same bytes on the wire, in twice the calls.

Two things change with it. A weight used for my tokens alone (norms, biases behind a row, learned positions) gets the
gradient of my tokens alone: `finish` sums those over the group, once a step. Forget it and nothing fails:
ranks that should hold one norm hold several. And dropout of the residual stream must draw other numbers on every rank.

What columns keep for their weights' gradients is a choice:

    regather=False    their whole input, x_BSD: no byte more on the wire than tensor parallelism
    regather=True     my tokens of it, x_BsD: one more all-gather for each in backward. Korthikanti's 34 s b h / t

Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.comm.conjugate import (
    Group,
    InFlight,
    gather_in,
    my_piece,
    scatter_sum,
    start_gather,
    start_reduce_scatter,
)
from course_lib.parallel import tensor
from course_lib.parallel.engine import Trace
from course_lib.parallel.linear import communication_span, traced
from course_lib.parallel.tensor import TensorParallel
from course_lib.span import Span

SEQUENCE = 1  # the dimension of x_BSD that is cut


@dataclass
class ShardedResidual:
    """The activations between blocks, each rank with its own tokens: ceil(S / tp) of them, the last with fewer.

    A shard does not tell how long the whole is: the last to leave does, the embedding first of all; columns remember it
    for their backward. With recomputation, which runs a block forward again, nothing of another length may come between
    forward and backward.
    regather   what columns keep for backward is x_BsD as it came in, and it is gathered again
    Shapes     leave: x_BSD_partial -> x_BsD; enter: x_BsD -> x_BSD
    """

    group: Group
    overlap: bool = True
    trace: Trace | None = None
    regather: bool = False
    seq_len: int = 0  # S of what left last

    def enter(self, x_BsD: Tensor) -> Tensor:
        return gather_in(x_BsD, self.group, SEQUENCE, self.seq_len)

    def leave(self, x_BSD_partial: Tensor) -> Tensor:
        self.seq_len = x_BSD_partial.shape[SEQUENCE]
        with communication_span(self.trace, "reduce-scatter of outputs"):
            return scatter_sum(x_BSD_partial, self.group, SEQUENCE)

    def start_enter(self, x_BsD: Tensor, seq_len: int | None = None) -> InFlight:
        start = partial(start_gather, x_BsD, self.group, SEQUENCE, seq_len or self.seq_len)
        return traced(start, "gather of tokens", self.trace)

    def start_sum(self, x_BSD_partial: Tensor) -> InFlight:
        start = partial(start_reduce_scatter, x_BSD_partial, self.group, SEQUENCE)
        return traced_until_awaited(start, "reduce-scatter of input gradients", self.trace)


def traced_until_awaited(start: Callable[[], InFlight], name: str, trace: Trace | None) -> InFlight:
    """Starts a communication whose Span ends where it is waited for: gloo says of no reduce-scatter when it ended."""
    start_s = time.perf_counter()
    in_flight = start()
    if trace is None:
        return in_flight

    def finish() -> Tensor:
        trace.append(Span(dist.get_rank(), "communication", name, start_s, time.perf_counter()))
        return in_flight.finish()

    return InFlight(in_flight.work, finish)


class MyPositions(nn.Module):
    """Learned positions of my tokens. The table is whole on every rank. Shapes positions_S -> x_sD"""

    def __init__(self, positions: nn.Embedding, group: Group):
        super().__init__()
        self.weight, self.group = positions.weight, group

    def forward(self, positions_S: Tensor) -> Tensor:
        positions_s = my_piece(positions_S, self.group.rank(), self.group.size(), dim=0)
        return F.embedding(positions_s, self.weight)


class TensorSequenceParallel(TensorParallel):
    """Tensor parallelism whose hidden states are cut along the sequence between the cut layers."""

    def finish(self) -> None:
        """Sums what ranks have a part of: shared key/value heads, and the gradients of my tokens alone.
        Bytes    besides those of enter and leave: one all-reduce of the parameters that are not cut
        """
        super().finish()
        tensor.sum_gradients(of_my_tokens(self), self.residual.group)


def build(
    model: nn.Module, group: Group, regather: bool = False, overlap: bool = True, trace: Trace | None = None
) -> TensorSequenceParallel:
    """Cuts the model's matrices and its residual stream in place; returns the engine. Ranks bring the same weights.

    Every rank is given all tokens_BS, and gives logits_BSv, its part of the vocabulary.
    Bytes    with dropout, a seed that the group then shares; otherwise none
    Raises   ValueError if model or group cannot be cut so, before anything is sent or changed
    """
    tensor.check_shardable(model, group)
    residual = ShardedResidual(group, overlap, trace, regather)
    tensor.shard_model(model, residual)
    if model.config.family == "gpt":
        model.positions = MyPositions(model.positions, group)
    if model.config.dropout > 0:
        tensor.share_seed(group)
        for owner in (model, *model.blocks):
            owner.dropout = tensor.RankDropout(model.config.dropout, group)
    return TensorSequenceParallel(model, residual)


def of_my_tokens(engine: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradient is of my tokens alone: all that are not cut."""
    cuts = tensor.cuts_of(engine)
    return [param for name, param in engine.named_parameters() if name not in cuts and param.requires_grad]
