"""Conjugate pairs: what one of a pair does forward, the other does backward, so that autograd crosses between ranks.

    function                         forward          backward
    copy_in(x, group)                identity         all-reduce         whole -> whole        (Megatron's f)
    sum_out(x_partial, group)        all-reduce       identity           parts of a sum -> whole            (its g)
    gather_in(x_shard, group, dim)   all-gather       reduce-scatter     shard -> whole
    scatter_sum(x_partial, group, dim)  reduce-scatter  all-gather       parts of a sum -> shard
    split(x, group, dim)             my slice         all-gather         whole -> shard
    join(x_shard, group, dim)        all-gather       my slice           shard -> whole

Which one to use follows from what the gradient is. After `copy_in` and `gather_in` ranks compute different parts of the
result, so each has only a part of the gradient: it must be summed. After `sum_out` and `join` all ranks compute the
same, so each already has the whole gradient: summing it would count it G times.

A dimension that does not divide is cut as `torch.chunk` cuts it: ceil(size / G) for each rank, the last ones get less.
On the wire all pieces are as long as the first: padding counts in the bytes.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm import collectives as comm
from course_lib.compat import all_gather_single, reduce_scatter_single
from course_lib.layout.partition import piece_sizes

Group = dist.ProcessGroup


# ------------------------------------------------------------------------------------ the residual stays whole
class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad_partial):
        return comm.all_reduce(grad_partial.contiguous(), ctx.group), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial, group):
        return comm.all_reduce(x_partial.contiguous(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_in(x: Tensor, group: Group) -> Tensor:
    """x itself, into a part where each rank computes something else with it; backward sums the ranks' gradients.

    Bytes    sent per rank: 0 forward, 2 (G - 1) / G * x.nbytes backward
    Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3, f
    """
    return _CopyIn.apply(x, check_group(group, "copy_in"))


def sum_out(x_partial: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' parts, out to where all ranks compute the same; backward is the identity.

    Bytes    sent per rank: 2 (G - 1) / G * x_partial.nbytes forward, 0 backward
    Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3, g
    """
    return _SumOut.apply(x_partial, check_group(group, "sum_out"))


# ------------------------------------------------------------------------------------ the residual is sharded
class _GatherIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_shard, group, dim, size):
        ctx.group, ctx.dim = group, dim
        return start_gather(x_shard, group, dim, size).wait()

    @staticmethod
    def backward(ctx, grad_partial):
        return start_reduce_scatter(grad_partial, ctx.group, ctx.dim).wait(), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial, group, dim):
        ctx.group, ctx.dim, ctx.size = group, dim, x_partial.shape[dim]
        return start_reduce_scatter(x_partial, group, dim).wait()

    @staticmethod
    def backward(ctx, grad_shard):
        return start_gather(grad_shard, ctx.group, ctx.dim, ctx.size).wait(), None, None


def gather_in(x_shard: Tensor, group: Group, dim: int, size: int | None = None) -> Tensor:
    """The whole, into a part where each rank computes something else with it; backward sums and keeps my shard.

    size: length of the whole along `dim`; without it all shards are taken to be as long as mine.
    Bytes    sent per rank: (G - 1) / G of the (padded) whole, forward and again backward
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2, g
    """
    return _GatherIn.apply(x_shard, check_group(group, "gather_in"), dim, size)


def scatter_sum(x_partial: Tensor, group: Group, dim: int) -> Tensor:
    """My shard of the sum of the ranks' parts; backward gathers the gradient's shards.

    Bytes    sent per rank: (G - 1) / G of the (padded) whole, forward and again backward
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2, g with a bar
    """
    return _ScatterSum.apply(x_partial, check_group(group, "scatter_sum"), dim)


# ------------------------------------------------------------------------------------ nothing is summed
class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim, ctx.size = group, dim, x.shape[dim]
        return my_piece(x, group.rank(), group.size(), dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad_shard):
        return start_gather(grad_shard, ctx.group, ctx.dim, ctx.size).wait(), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_shard, group, dim, size):
        ctx.group, ctx.dim = group, dim
        return start_gather(x_shard, group, dim, size).wait()

    @staticmethod
    def backward(ctx, grad):
        return my_piece(grad, ctx.group.rank(), ctx.group.size(), ctx.dim).contiguous(), None, None, None


def split(x: Tensor, group: Group, dim: int) -> Tensor:
    """My piece of what all ranks have; backward gathers the pieces' gradients.

    Bytes    sent per rank: 0 forward, (G - 1) / G of the (padded) whole backward
    """
    return _Split.apply(x, check_group(group, "split"), dim)


def join(x_shard: Tensor, group: Group, dim: int, size: int | None = None) -> Tensor:
    """The whole from everybody's shard, to where all ranks compute the same; backward keeps my piece of the gradient.

    size: length of the whole along `dim`; without it all shards are taken to be as long as mine.
    Bytes    sent per rank: (G - 1) / G of the (padded) whole forward, 0 backward
    """
    return _Join.apply(x_shard, check_group(group, "join"), dim, size)


# ------------------------------------------------------------------------------------ pieces, and how they travel
def my_piece(x: Tensor, part: int, parts: int, dim: int) -> Tensor:
    """That part of x along `dim`, as a view."""
    sizes = piece_sizes(x.shape[dim], parts)
    return x.narrow(dim, sum(sizes[:part]), sizes[part])


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A tensor on its way. What was sent must not be touched before wait(), which returns the result."""

    work: dist.Work | None  # None: there was nothing to send
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish()


def start_all_reduce(x_partial: Tensor, group: Group) -> InFlight:
    """Starts to put the sum over the group into x_partial itself."""
    return InFlight(comm.all_reduce_(x_partial, group, async_op=True), lambda: x_partial)


def start_gather(x_shard: Tensor, group: Group, dim: int, size: int | None = None) -> InFlight:
    """Starts an all-gather along any dimension.

    Raises   ValueError if my shard is not as long as `size` asks
    """
    dim, parts = dim % x_shard.dim(), group.size()
    size = x_shard.shape[dim] * parts if size is None else size
    sizes = piece_sizes(size, parts)
    if x_shard.shape[dim] != sizes[group.rank()]:
        raise ValueError(
            f"rank {group.rank()} brings {x_shard.shape[dim]} of {size} along dimension {dim}, but its piece is "
            f"{sizes[group.rank()]} of {sizes}; cut the whole with split()"
        )
    sent = _padded(x_shard, dim, sizes[0]).contiguous().unsqueeze(0)
    pieces = sent.new_empty(parts, *sent.shape[1:])
    work = all_gather_single(pieces, sent, group=group, async_op=True)
    return InFlight(work, lambda: pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, size).contiguous())


def start_reduce_scatter(x_partial: Tensor, group: Group, dim: int) -> InFlight:
    """Starts a reduce-scatter along any dimension."""
    dim, parts = dim % x_partial.dim(), group.size()
    sizes = piece_sizes(x_partial.shape[dim], parts)
    padded = _padded(x_partial, dim, sizes[0] * parts)
    sent = padded.unflatten(dim, (parts, sizes[0])).movedim(dim, 0).contiguous()
    piece = sent.new_empty(1, *sent.shape[1:])
    work = reduce_scatter_single(piece, sent, group=group, async_op=True)
    return InFlight(work, lambda: piece.squeeze(0).narrow(dim, 0, sizes[group.rank()]).contiguous())


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """x with zeros behind it along `dim`; x itself if it is long enough."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


def check_group(group: Group, name: str) -> Group:
    """The group itself.

    Raises   ValueError if it is no process group, before anything is sent
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{name} got {group!r} as its group; it needs a process group of which this rank is a member, "
            "such as dist.group.WORLD or make_groups(mesh)['tp']"
        )
    return group
