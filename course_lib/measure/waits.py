"""How long a rank waits for other ranks: spans of a program that runs as it always does, without a profiler.

Whatever a program sends through torch.distributed ends in a Work, and whoever needs the result calls its `wait`: the
collectives themselves where they are not asynchronous, else the program. So one function sees all of it, on gloo:

    seconds that are counted      the calling thread stands in `Work.wait`: messages still travel, or another rank is
                                  late; communication that computation hides is not in them
    seconds that are not          copying into buckets and out of them; gloo's own threads, which need the same cores;
                                  functional collectives, as DTensor's, which wait elsewhere
    on a GPU                      `wait` returns at once, and the stream waits: there the moments are events of the
                                  stream (StreamSpans). A collective that is not asynchronous runs on this stream
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from course_lib.measure.storages import replaced
from course_lib.span import Span

OPS = ("all", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv")
COLLECTIVES = [  # methods of a process group, whose names differ between versions of torch
    name for name in dir(dist.ProcessGroup) if not name.startswith("__") and name.strip("_").startswith(OPS)
]


class Spans(list[Span]):
    """Spans whose moments are seconds of the host's clock."""

    def now(self) -> float:
        return time.perf_counter()

    def around(self, lane: str, name: str | Callable[..., str], act: Callable) -> Callable:
        """Return `act` with a span around each call. `name` may be a function of its arguments."""
        rank, thread = dist.get_rank(), threading.get_ident()

        def timed(*args, **kwargs):
            start = self.now()
            try:
                return act(*args, **kwargs)
            finally:  # a checkpoint may be written meanwhile, by a thread of its own; autograd has one for each GPU
                if threading.get_ident() == thread or torch._C._current_graph_task_id() != -1:
                    self.append(Span(rank, lane, name if isinstance(name, str) else name(*args), start, self.now()))

        return timed

    def in_seconds(self, start: float) -> list[Span]:
        return list(self)


class StreamSpans(Spans):
    """Spans whose moments are events on the current stream of a GPU. Nothing waits for them."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def in_seconds(self, start: torch.cuda.Event) -> list[Span]:
        """Return the spans in seconds since that event, once the stream has passed them all."""
        return [
            replace(span, start_s=start.elapsed_time(span.start_s) / 1e3, stop_s=start.elapsed_time(span.stop_s) / 1e3)
            for span in self
        ]


@contextmanager
def record_waits(on_gpu: bool = False) -> Iterator[Spans]:
    """Give a list that gets a span each time this thread, or on a GPU its stream, waits for other ranks."""
    spans = StreamSpans() if on_gpu else Spans()
    with ExitStack() as stack:
        for owner, name in [(dist.Work, "wait"), *((dist.ProcessGroup, name) for name in COLLECTIVES if on_gpu)]:
            stack.enter_context(replaced(owner, name, partial(spans.around, "communication", "wait")))
        yield spans


def own_seconds(span: Span, waits: Sequence[Span]) -> float:
    """Return the span's seconds without the waits that lie in it; `waits` are in the order of time."""
    first = bisect_left(waits, span.start_s, key=lambda wait: wait.start_s)
    last = bisect_left(waits, span.stop_s, key=lambda wait: wait.start_s)
    return span.seconds - sum(wait.seconds for wait in waits[first:last])
