"""Which bytes: what a rank sends in one step, before it is run.

collectives.py   the bytes of one collective, and of a list of calls
step.py          which collectives a step of each technique calls
routing.py       rows and bytes of a mixture of experts, from whom the tokens chose
odds.py          the same, expected, of tokens that choose uniformly
"""

from course_lib.traffic.collectives import (
    Call,
    all_gather_bytes,
    all_to_all_bytes,
    broadcast_bytes,
    by_collective,
    call_counts,
    gather_bytes,
    reduce_bytes,
    reduce_scatter_bytes,
    ring_all_reduce_bytes,
    scatter_bytes,
    sent_bytes,
)

__all__ = [
    "Call",
    "all_gather_bytes",
    "all_to_all_bytes",
    "broadcast_bytes",
    "by_collective",
    "call_counts",
    "gather_bytes",
    "reduce_bytes",
    "reduce_scatter_bytes",
    "ring_all_reduce_bytes",
    "scatter_bytes",
    "sent_bytes",
]
