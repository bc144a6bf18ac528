"""The collectives as the course uses them: the group always given, the input checked, the result returned.

One rule for all: a function returns a new tensor and leaves its input as it was. Three exceptions write where they are
told, and can be waited for later: `all_reduce_` changes its input, `reduce_scatter_into` and `all_gather_into` fill
their first argument, which may be a part of the input, or hold it.
Ranks are counted inside the group (0 .. size - 1), as in `tp_rank`: `src`, `dst` and pieces mean these.
All ranks of a group call the same function in the same order with the same shapes and dtypes; no rank can check that
alone.
Bytes are what one rank sends if the messages travel around a ring (see measure/meter.py); G = size of the group.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.compat import all_gather_single, reduce_scatter_single

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no mean: sum, then divide
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


# ---------------------------------------------------------------------------------------------------- reductions
def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The sum (mean, max, min, product) over the group, on every rank.

    Bytes    sent per rank: 2 (G - 1) / G * x.nbytes
    Raises   ValueError if x is not contiguous, or op is unknown
    """
    _check_sendable(x, group, "all_reduce")
    result = x.clone()
    all_reduce_(result, group, op)
    return result


def all_reduce_(x: Tensor, group: dist.ProcessGroup, op: str = "sum", async_op: bool = False) -> dist.Work | None:
    """Put the sum over the group into x itself. With async_op, return a Work at once: x is right after work.wait().

    Bytes    sent per rank: 2 (G - 1) / G * x.nbytes
    Raises   ValueError if x is not contiguous, op is unknown, or a mean is asked for with async_op
    """
    _check_sendable(x, group, "all_reduce")
    if op == "mean" and async_op:
        raise ValueError('op "mean" cannot be asynchronous; use op="sum", wait, then divide by the size of the group')
    work = dist.all_reduce(x, _op(op, x), group=group, async_op=async_op)
    if op == "mean":
        x.div_(dist.get_world_size(group))
    return work


def reduce(x: Tensor, dst: int, group: dist.ProcessGroup, op: str = "sum") -> Tensor | None:
    """The sum over the group, on rank `dst` alone; the others get None.

    Bytes    sent per rank: x.nbytes, and 0 by dst
    """
    _check_sendable(x, group, "reduce")
    result = x.clone()
    dist.reduce(result, group_dst=_peer(dst, group), op=_op(op, x), group=group)
    if dist.get_rank(group) != dst:
        return None
    return result.div_(dist.get_world_size(group)) if op == "mean" else result


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """My piece of the sum: x is cut into G equal pieces along dimension 0, and rank r gets piece r, summed.

    Bytes    sent per rank: (G - 1) / G * x.nbytes
    Raises   ValueError if x is not contiguous, or its rows do not divide by G
    """
    size = dist.get_world_size(group)
    _check_sendable(x, group, "reduce_scatter")
    _check_rows(x, size, "reduce_scatter")
    piece = x.new_empty(x.shape[0] // size, *x.shape[1:])
    reduce_scatter_single(piece, x, _op(op, x), group=group)
    return piece.div_(size) if op == "mean" else piece


def reduce_scatter_into(piece: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Put my piece of the sum into `piece`, which may be that very part of x. With async_op, return a Work at once.

    Bytes    sent per rank: (G - 1) / G * x.nbytes
    Raises   ValueError if a tensor is not contiguous, or x is not G pieces
    """
    _check_pair(piece, x, group, "reduce_scatter_into")
    return reduce_scatter_single(piece, x, _OPS["sum"], group=group, async_op=async_op)


# ---------------------------------------------------------------------------------------------------- copies
def all_gather(x_shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everybody's shard, one after the other along dimension 0, on every rank.

    Bytes    sent per rank: (G - 1) * x_shard.nbytes
    Raises   ValueError if x_shard is not contiguous or has no dimension
    """
    size = dist.get_world_size(group)
    _check_sendable(x_shard, group, "all_gather")
    _check_rows(x_shard, 1, "all_gather")
    whole = x_shard.new_empty(x_shard.shape[0] * size, *x_shard.shape[1:])
    all_gather_single(whole, x_shard, group=group)
    return whole


def all_gather_into(
    whole: Tensor, x_shard: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Put everybody's shard into `whole`, of which x_shard may be my part. With async_op, return a Work at once.

    Bytes    sent per rank: (G - 1) * x_shard.nbytes
    Raises   ValueError if a tensor is not contiguous, or `whole` is not G shards
    """
    _check_pair(x_shard, whole, group, "all_gather_into")
    return all_gather_single(whole, x_shard, group=group, async_op=async_op)


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Rank `src`'s x, on every rank. The others give a tensor of the same shape; its values do not matter.

    Bytes    sent per rank: x.nbytes, and 0 by the last rank of the chain, the one before src
    """
    _check_sendable(x, group, "broadcast")
    result = x.clone()
    dist.broadcast(result, group_src=_peer(src, group), group=group)
    return result


def gather(x_shard: Tensor, dst: int, group: dist.ProcessGroup) -> Tensor | None:
    """Everybody's shard along dimension 0, on rank `dst` alone; the others get None.

    Bytes    sent per rank: x_shard.nbytes, and 0 by dst
    """
    _check_sendable(x_shard, group, "gather")
    _check_rows(x_shard, 1, "gather")
    shards = None
    if dist.get_rank(group) == _peer(dst, group):
        shards = [torch.empty_like(x_shard) for _ in range(dist.get_world_size(group))]
    dist.gather(x_shard, shards, group_dst=dst, group=group)
    return None if shards is None else torch.cat(shards)


def scatter(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """My piece of rank `src`'s x, cut along dimension 0. The others give a tensor of the same shape as src's x.

    Bytes    sent per rank: (G - 1) / G * x.nbytes by src, 0 by the others
    """
    size = dist.get_world_size(group)
    _check_sendable(x, group, "scatter")
    _check_rows(x, size, "scatter")
    piece = x.new_empty(x.shape[0] // size, *x.shape[1:])
    pieces = list(x.chunk(size)) if dist.get_rank(group) == _peer(src, group) else None
    dist.scatter(piece, pieces, group_src=src, group=group)
    return piece


def all_to_all(
    x: Tensor, group: dist.ProcessGroup, sent_rows: list[int] | None = None, received_rows: list[int] | None = None
) -> Tensor:
    """Piece j of rank i goes to rank j, which puts it at place i: a transpose between ranks, along dimension 0.

    Without the two lists all pieces are equal. With them, sent_rows[j] rows go to rank j, received_rows[i] come from i.
    Bytes    sent per rank: what goes to others, (G - 1) / G * x.nbytes if all pieces are equal
    Raises   ValueError if the rows do not divide by G, or the lists do not add up
    """
    size = dist.get_world_size(group)
    _check_sendable(x, group, "all_to_all")
    if (sent_rows is None) != (received_rows is None):
        raise ValueError("all_to_all got one of sent_rows and received_rows; give both, or neither for equal pieces")
    if sent_rows is None:
        _check_rows(x, size, "all_to_all")
        sent_rows = received_rows = [x.shape[0] // size] * size
    if len(sent_rows) != size or len(received_rows) != size or sum(sent_rows) != x.shape[0]:
        raise ValueError(
            f"sent_rows {sent_rows} and received_rows {received_rows} need {size} entries each (one a rank), "
            f"and sent_rows must add up to the {x.shape[0]} rows of x"
        )
    received = x.new_empty(sum(received_rows), *x.shape[1:])
    dist.all_to_all_single(received, x, received_rows, sent_rows, group=group)
    return received


# ---------------------------------------------------------------------------------------------------- one to one
def send(x: Tensor, dst: int, group: dist.ProcessGroup) -> None:
    """Send x to rank `dst`, which must call `recv`. May return before x has arrived, or wait for it: rely on neither.

    Bytes    sent: x.nbytes
    """
    _check_sendable(x, group, "send")
    dist.send(x, group_dst=_peer(dst, group, other=True), group=group)


def recv(like: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """What rank `src` sends, as a new tensor with the shape and dtype of `like`. Waits until it has come.

    Bytes    sent: 0
    """
    received = torch.empty_like(like, memory_format=torch.contiguous_format)
    _check_sendable(received, group, "recv")
    dist.recv(received, group_src=_peer(src, group, other=True), group=group)
    return received


def barrier(group: dist.ProcessGroup) -> None:
    """Wait until every rank of the group has come here."""
    dist.barrier(group=group)


# ---------------------------------------------------------------------------------------------------- around a ring
def pass_on(outgoing: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send `outgoing` to my right neighbour; return what my left neighbour sent me, shaped as `like`.

    Both are under way at once. If everybody first sent and then received, everybody could wait for ever.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    _check_sendable(outgoing, group, "pass_on")
    incoming = torch.empty_like(like)
    to_right = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size)
    from_left = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([to_right, from_left]):
        work.wait()
    return incoming


# ---------------------------------------------------------------------------------------------------- checks
def check_point_to_point(device: torch.device, group: dist.ProcessGroup, name: str) -> None:
    """Raises ValueError if the group's ranks cannot send each other tensors of that device one to one."""
    if device.type == "cuda" and "nccl" not in dist.get_backend(group):  # may be "cpu:gloo,cuda:nccl"
        raise ValueError(
            f"{name} sends from rank to rank, and gloo takes tensors on a GPU in collectives alone; keep the model on "
            "the CPU, or give every rank a GPU of its own (backend='nccl')"
        )


def _check_sendable(x: Tensor, group: dist.ProcessGroup, name: str) -> None:
    """Refuse what gloo would send wrongly without a word: a tensor that is not contiguous, or no group."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{name} got {group!r} as its group; it needs a process group of which this rank is a member, "
            "such as dist.group.WORLD or make_groups(mesh)['dp']"
        )
    if not x.is_contiguous():
        raise ValueError(
            f"{name} got a tensor of shape {tuple(x.shape)} with strides {x.stride()}, which is not contiguous; "
            "gloo would give wrong values without a word. Call .contiguous() first"
        )


def _check_rows(x: Tensor, size: int, name: str) -> None:
    if x.dim() == 0 or x.shape[0] % size != 0:
        raise ValueError(
            f"{name} cuts dimension 0 into {size} equal pieces, but got shape {tuple(x.shape)}; "
            f"pad dimension 0 to a multiple of {size}"
        )


def _check_pair(piece: Tensor, whole: Tensor, group: dist.ProcessGroup, name: str) -> None:
    _check_sendable(piece, group, name)
    _check_sendable(whole, group, name)
    size = dist.get_world_size(group)
    fits = piece.dim() > 0 and whole.shape == (piece.shape[0] * size, *piece.shape[1:])
    if not fits or piece.dtype != whole.dtype:
        raise ValueError(
            f"{name} got a piece of {tuple(piece.shape)} {piece.dtype} and a whole of {tuple(whole.shape)} "
            f"{whole.dtype}; the whole must be {size} such pieces along dimension 0, in the same dtype"
        )


def _op(op: str, x: Tensor) -> dist.ReduceOp:
    if op not in _OPS:
        raise ValueError(f"op {op!r} is not one of {', '.join(_OPS)}")
    if op == "mean" and not x.is_floating_point():
        raise ValueError(f'op "mean" needs floating point, but got {x.dtype}; use op="sum" and divide')
    return _OPS[op]


def _peer(rank: int, group: dist.ProcessGroup, other: bool = False) -> int:
    size = dist.get_world_size(group)
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in the group, which has ranks 0..{size - 1} (counted inside the group)")
    if other and rank == dist.get_rank(group):
        raise ValueError(f"rank {rank} would send to itself or receive from itself; copy the tensor instead")
    return rank
