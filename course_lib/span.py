"""Something that a lane of a rank was busy with, for how long: what clocks, traces and timelines share."""

from dataclasses import dataclass


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
