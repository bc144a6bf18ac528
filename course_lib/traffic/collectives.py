"""The bytes of one collective: what a rank sends if every collective travels around a ring, to the byte.

A payload is the full tensor: the gathered result of an all-gather, the input of a reduce-scatter. What one rank sends
to another is a "send"; the matching receive sends nothing and is not listed. Where the elements do not divide into
world_size equal pieces, ranks differ by an element or two: then `rank` and `itemsize` matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from course_lib.validate import Bytes, Checked, Count, Index, Size, checked

_LEFT_OUT = {"all_reduce": (0, 1), "reduce_scatter": (0,), "all_gather": (1,), "all_to_all": (0,)}


@checked
def collective_bytes(
    collective: Literal[tuple(_LEFT_OUT)], payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4
) -> int:
    """Count what a rank sends: each phase passes the payload on but for one piece, (G - 1) / G of it.

    A reduce-scatter leaves out the piece that the rank keeps, an all-gather its right neighbour's; an all-reduce is
    both. Pieces are cut as `tensor_split` cuts: the first ones have one element more.
    """
    if payload_bytes % itemsize != 0:
        raise ValueError(
            f"payload_bytes ({payload_bytes}) must be a multiple of itemsize ({itemsize}); "
            "give the itemsize of the dtype, such as 2 for bf16"
        )
    length, longer = divmod(payload_bytes // itemsize, world_size)
    pieces = (length + ((rank + step) % world_size < longer) for step in _LEFT_OUT[collective])
    return sum(payload_bytes - piece * itemsize for piece in pieces)


def ring_all_reduce_bytes(payload_bytes: Bytes, world_size: Size, rank: Index = 0, itemsize: Size = 4) -> int:
    """Count what a rank sends in a ring all-reduce, 2 (G - 1) / G of the payload: each phase leaves out one piece."""
    return collective_bytes("all_reduce", payload_bytes, world_size, rank, itemsize)


@dataclass(frozen=True)
class Call(Checked):
    """`count` equal calls of one collective in one step; `place` says where in the step."""

    place: str
    collective: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]
    payload_bytes: Bytes
    group_size: Size
    itemsize: Size
    count: Count = 1
    src: Index = 0  # the rank of the group that broadcasts
    to_one: bool = False  # whether all of an all-to-all goes to one other rank, as one step of a ring does


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


def _sent_by(call: Call, rank: int) -> int:
    rank %= call.group_size
    if call.collective == "broadcast":  # along the chain src, src + 1, ...: the last sends nothing
        return 0 if (rank + 1) % call.group_size == call.src else call.payload_bytes
    if call.to_one or call.collective == "send":
        return call.payload_bytes
    return collective_bytes(call.collective, call.payload_bytes, call.group_size, rank, call.itemsize)
