"""How long a rank waits for other ranks: spans of a program that runs as it always does, without a profiler.

Whatever a program sends through torch.distributed ends in a Work, and whoever needs the result calls its `wait`: the
collectives themselves where they are not asynchronous, else the program. So one function sees all of it, on gloo:

    seconds that are counted      the calling thread stands in `Work.wait`: messages still travel, or another rank is
                                  late; communication that computation hides is not in them
    seconds that are not          copying into buckets and out of them; gloo's own threads, which need the same cores;
                                  functional collectives, as DTensor's, which wait elsewhere
    on a GPU                      nothing: there `wait` returns at once, and the stream waits. Look at a trace instead
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from course_lib.span import Span


@contextmanager
def record_waits() -> Iterator[list[Span]]:
    """Give a list that gets a span each time this thread waits for other ranks."""
    original, thread, rank = dist.Work.wait, threading.get_ident(), dist.get_rank()
    spans: list[Span] = []

    def wait(work: dist.Work, *args, **kwargs):
        start_s = time.perf_counter()
        try:
            return original(work, *args, **kwargs)
        finally:
            if threading.get_ident() == thread:  # a checkpoint may be written meanwhile, by a thread of its own
                spans.append(Span(rank, "communication", "wait", start_s, time.perf_counter()))

    dist.Work.wait = wait
    try:
        yield spans
    finally:
        dist.Work.wait = original


def own_seconds(span: Span, waits: Sequence[Span]) -> float:
    """Return the span's seconds without the waits that lie in it; `waits` are in the order of time."""
    first, last = (
        bisect_left(waits, moment_s, key=lambda wait: wait.start_s) for moment_s in (span.start_s, span.stop_s)
    )
    return span.seconds - sum(wait.seconds for wait in waits[first:last])
