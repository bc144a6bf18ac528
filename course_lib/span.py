"""Something that a lane of a rank was busy with, for how long: what clocks, traces and timelines share."""

from collections.abc import Iterable
from dataclasses import dataclass

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
