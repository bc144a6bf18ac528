"""Bytes alive over time, by kind: the record that the tracker leaves and the pictures draw."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "temporary")


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each allocation and each release, by kind; a mark is (time_s, the phase that begins)."""

    times_s: list[float]
    bytes_by_kind: dict[str, list[int]]
    marks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def total_bytes(self) -> list[int]:
        """All kinds together, at each time."""
        return [sum(column) for column in zip(*(self.bytes_by_kind[kind] for kind in KINDS), strict=True)]

    @property
    def peak_bytes(self) -> int:
        """The largest total."""
        return max(self.total_bytes, default=0)

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """What the peak was made of (at its first moment)."""
        return self.at(self.total_bytes.index(self.peak_bytes)) if self.times_s else dict.fromkeys(KINDS, 0)

    def at(self, index: int) -> dict[str, int]:
        """Bytes by kind after one event."""
        return {kind: self.bytes_by_kind[kind][index] for kind in KINDS}

    def between(self, start_s: float, stop_s: float) -> Timeline:
        """The same timeline, cut to a span of time (its first entry says what was alive at the start)."""
        first = max(0, sum(t <= start_s for t in self.times_s) - 1)
        last = sum(t <= stop_s for t in self.times_s)
        return Timeline(
            self.times_s[first:last],
            {kind: column[first:last] for kind, column in self.bytes_by_kind.items()},
            [mark for mark in self.marks if start_s <= mark[0] <= stop_s],
        )
