"""Something that a lane of a rank was busy with, for how long: what clocks, traces and timelines share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.validate import checked

COMPUTE = "compute"  # the lane of computation; other lanes communicate


@dataclass(frozen=True)
class Span:
    """Something that one lane of one rank was busy with, from start_s to stop_s: what timelines are drawn from."""

    rank: int
    lane: str
    name: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


def busy(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans runs."""
    total_s, until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_s):
        total_s += max(0.0, span.stop_s - max(span.start_s, until_s))
        until_s = max(until_s, span.stop_s)
    return total_s


class Lanes:
    """Spans of rank 0: each starts when its lane is free, and not before the seconds that it has to wait for."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._free_s: dict[str, float] = {}

    def add(self, lane: str, name: str, seconds: float, *after_s: float) -> Span:
        start_s = max(self._free_s.get(lane, 0.0), *after_s, 0.0)
        self.spans.append(Span(0, lane, name, start_s, start_s + seconds))
        self._free_s[lane] = start_s + seconds
        return self.spans[-1]

    def free_s(self, lane: str | None = None) -> float:
        """When a lane has done all, or all of them have."""
        return self._free_s.get(lane, 0.0) if lane else max(self._free_s.values(), default=0.0)

    def then(self, lane: str, name: str, seconds: float) -> Span:
        """The next span, after all others."""
        return self.add(lane, name, seconds, self.free_s())


@checked
def exposed_s(spans: Sequence[Span]) -> float:
    """Seconds of communication that no computation hides: from the end of the compute lane to the end of all."""
    compute_stop_s = max(span.stop_s for span in spans if span.lane == COMPUTE)
    return max(span.stop_s for span in spans) - compute_stop_s


@checked
def waiting_s(spans: Sequence[Span]) -> float:
    """Seconds in which the compute lane is idle, from the first span's start to the last one's end."""
    whole_s = max(span.stop_s for span in spans) - min(span.start_s for span in spans)
    return whole_s - sum(span.seconds for span in spans if span.lane == COMPUTE)
