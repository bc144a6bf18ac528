"""The bytes of one collective: what a rank sends if every collective travels around a ring, to the byte.

A payload is the full tensor: the gathered result of an all-gather, the input of a reduce-scatter. What one rank sends
to another is a "send"; the matching receive sends nothing and is not listed. Where the elements do not divide into
world_size equal pieces, ranks differ by an element or two: then `rank` and `itemsize` matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from course_lib.validate import Bytes, Checked, Count, Index, Size, checked


@checked
def ring_all_reduce_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4) -> int:
    """Count what a rank sends in a ring all-reduce, 2 (G - 1) / G of the payload: each phase leaves out one piece."""
    scattered = reduce_scatter_bytes(payload_bytes, world_size, rank, itemsize)
    return scattered + all_gather_bytes(payload_bytes, world_size, rank, itemsize)


def reduce_scatter_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4) -> int:
    """Count what a rank sends in a reduce-scatter: (G - 1) / G of its input, all but the piece that it keeps."""
    return payload_bytes - _piece_bytes(payload_bytes, world_size, rank, itemsize)


def all_gather_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4) -> int:
    """Count what a rank sends in an all-gather: (G - 1) / G of the result, all but its right neighbour's piece."""
    return payload_bytes - _piece_bytes(payload_bytes, world_size, rank + 1, itemsize)


def all_to_all_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4) -> int:
    """Count what a rank sends in an all-to-all of equal pieces: (G - 1) / G of its input."""
    return payload_bytes - _piece_bytes(payload_bytes, world_size, rank, itemsize)


def broadcast_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, src: Index = 0) -> int:
    """Count what a rank sends in a broadcast along the chain src, src + 1, ...: the payload; the last sends nothing."""
    return 0 if (rank + 1) % world_size == src else payload_bytes


def _piece_bytes(payload_bytes: int, world_size: int, index: int, itemsize: int) -> int:
    """Piece `index` of world_size, cut as `tensor_split` cuts: the first ones have one element more."""
    if payload_bytes % itemsize != 0:
        raise ValueError(
            f"payload_bytes ({payload_bytes}) must be a multiple of itemsize ({itemsize}); "
            "give the itemsize of the dtype, such as 2 for bf16"
        )
    quotient, remainder = divmod(payload_bytes // itemsize, world_size)
    return (quotient + (index % world_size < remainder)) * itemsize


@dataclass(frozen=True)
class Call(Checked):
    """`count` equal calls of one collective in one step; `place` says where in the step.

    src      the rank of the group that broadcasts
    to_one   whether all of an all-to-all goes to one other rank, as one step of a ring does
    """

    place: str
    collective: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]
    payload_bytes: Bytes
    group_size: Size
    itemsize: Size
    count: Count = 1
    src: Index = 0
    to_one: bool = False


@checked
def sent_bytes(calls: Iterable[Call], rank: Index = 0) -> int:
    """Add up the bytes that a rank sends; `rank` is its place in the calls' group."""
    return sum(by_collective(calls, rank).values())


@checked
def by_collective(calls: Iterable[Call], rank: Index = 0) -> dict[str, int]:
    """Add up the bytes that a rank sends, by collective, as `ByteMeter.by_collective` has them."""
    return _added((call.collective, call.count * _sent_by(call, rank)) for call in calls)


@checked
def call_counts(calls: Iterable[Call]) -> dict[str, int]:
    """Count the calls of each collective, as `ByteMeter.calls` has them."""
    return _added((call.collective, call.count) for call in calls)


def _added(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, amount in amounts:
        totals[name] = totals.get(name, 0) + amount
    return totals


_SENT = {
    "all_reduce": ring_all_reduce_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "all_gather": all_gather_bytes,
    "all_to_all": all_to_all_bytes,
}


def _sent_by(call: Call, rank: int) -> int:
    rank %= call.group_size
    if call.collective == "broadcast":
        return broadcast_bytes(call.payload_bytes, call.group_size, rank, call.src)
    if call.to_one or call.collective == "send":
        return call.payload_bytes
    return _SENT[call.collective](call.payload_bytes, call.group_size, rank, call.itemsize)
