"""Who is busy when: compute and communication of each rank, and the communication that nothing hides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from course_lib.palette import COMMUNICATION_COLOR, COMPUTE_COLOR, EXPOSED_COLOR, mix, text_on
from course_lib.panels.svg import bars
from course_lib.plots.concepts import show_charts
from course_lib.plots.style import ground, panel_title, picture_panels, plain_rows, write
from course_lib.units import TIME_UNITS, show_seconds, time_unit_for
from course_lib.validate import checked

_COMPUTE_LANE = "compute"


def subtract(interval: tuple[float, float], busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of `interval` that no interval of `busy` covers."""
    start, stop = interval
    left = []
    for low, high in sorted(busy):
        if low > start:
            left.append((start, min(low, stop)))
        start = max(start, high)
        if start >= stop:
            break
    if start < stop:
        left.append((start, stop))
    return [(a, b) for a, b in left if b > a]


def merge(intervals: Sequence[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """The same moments as intervals that do not overlap; those that lie closer than `gap` are one."""
    merged: list[list[float]] = []
    for start, stop in sorted(intervals):
        if merged and (start <= merged[-1][1] or start - merged[-1][1] < gap):
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return [(start, stop) for start, stop in merged]


@dataclass(frozen=True)
class OverlapPicture:
    """The lanes (rank, name), their spans, and when each lane but compute is busy while its rank computes nothing."""

    lanes: list[tuple[int, str]]
    spans: Sequence
    exposed: dict[tuple[int, str], list[tuple[float, float]]]

    @property
    def rows(self) -> list[str]:
        """The lanes' names, with their ranks where there are several."""
        several = len({rank for rank, _ in self.lanes}) > 1
        return [f"rank {rank} {lane}" if several else lane for rank, lane in self.lanes]

    @property
    def others(self) -> str:
        """What is exposed, such as copy or communication."""
        return " and ".join(sorted({lane for _, lane in self.lanes} - {_COMPUTE_LANE})) or "communication"

    @property
    def end_s(self) -> float:
        return max(span.stop_s for span in self.spans)

    def exposed_s(self, rank: int) -> float:
        """The seconds in which a rank waits: what several lanes wait for at once counts once."""
        intervals = [part for (of, _), parts in self.exposed.items() if of == rank for part in parts]
        return sum(stop - start for start, stop in merge(intervals))


def overlap_picture(spans: Sequence) -> OverlapPicture:
    """Turn `Span`s into lanes, and find each rank's exposed communication."""
    if not spans:
        raise ValueError("there are no spans to draw; give at least one Span(rank, lane, name, start_s, stop_s)")
    lanes = sorted({(s.rank, s.lane) for s in spans}, key=lambda lane: (lane[0], lane[1] != _COMPUTE_LANE, lane[1]))
    busy = {lane: merge([(s.start_s, s.stop_s) for s in spans if (s.rank, s.lane) == lane]) for lane in lanes}
    exposed = {
        lane: [part for whole in busy[lane] for part in subtract(whole, busy.get((lane[0], _COMPUTE_LANE), ()))]
        for lane in lanes
        if lane[1] != _COMPUTE_LANE
    }
    return OverlapPicture(lanes, spans, exposed)


def in_order(spans: Sequence) -> list:
    """Return spans with places in the order for seconds: of ranks on a shared CPU the order is that of GPUs."""
    moments = sorted({moment for span in spans for moment in (span.start_s, span.stop_s)})
    place = {moment: float(index) for index, moment in enumerate(moments)}
    return [replace(span, start_s=place[span.start_s], stop_s=place[span.stop_s]) for span in spans]


def draw_overlap(axes, picture: OverlapPicture, names: Mapping[str, str] | None, only_order: bool) -> None:
    """Draw lanes, hatched what nothing hides; `names`: what stands for which, `only_order`: places, no seconds."""
    end_s = picture.end_s
    unit = time_unit_for(end_s)
    scale = TIME_UNITS[unit]
    for span in picture.spans:
        share = span.seconds / end_s
        room = min(1.0, 1.3 * share) if only_order else share
        label = label_for(span.name, room) if names is None else names[span.name]
        row, color = picture.lanes.index((span.rank, span.lane)), _color_of(span)
        look = {"edgecolor": "white", "linewidth": 1 if share > 0.015 else 0.1}  # wide gaps would hide short spans
        axes.barh(row, span.seconds / scale, left=span.start_s / scale, height=0.72, color=color, **look)
        if label:
            look = {"fontsize": 7 if only_order else 8.5, "color": text_on(color), "bbox": ground(color), "zorder": 3}
            write(axes, (span.start_s + span.stop_s) / 2 / scale, row, label, **look)
    for lane, intervals in picture.exposed.items():
        for start, stop in merge(intervals, 0.01 * end_s):  # frames around many short ones would hide them
            frame = {"facecolor": "none", "edgecolor": EXPOSED_COLOR, "hatch": "////", "linewidth": 1.6}
            axes.barh(picture.lanes.index(lane), (stop - start) / scale, left=start / scale, height=0.72, **frame)
    plain_rows(axes, picture.rows)
    axes.tick_params(axis="y", length=3.5)
    axes.set(xlim=(0, end_s / scale * 1.02), xlabel=f"time ({unit})")
    worst = max(picture.exposed_s(rank) for rank, _ in picture.lanes)
    note = f"{show_seconds(end_s)}; {picture.others} that nothing hides (hatched): {show_seconds(worst)}"
    if only_order:
        note = "hatched: no computation at the same time"
        axes.set(xticks=[], xlabel="order of events, not time")
    place = {"xycoords": "axes fraction", "xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(note, (1, 1), ha="right", va="bottom", fontsize=8.5, **place)


def _color_of(span) -> str:
    if span.lane == _COMPUTE_LANE:
        return mix(COMPUTE_COLOR, "#FFFFFF", 0.55) if span.name.startswith("forward") else COMPUTE_COLOR
    # gradients on their way home, beside keys and values, are darker
    return mix(COMMUNICATION_COLOR, "#000000", 0.45) if span.name.startswith("dk") else COMMUNICATION_COLOR


def label_for(name: str, share: float) -> str:
    """As much of a name as a bar of that share of the width has room for: all, its last word, or nothing."""
    fitting = [text for text in (name, name.rpartition(" ")[2]) if _has_room(text, share)]
    return fitting[0] if fitting else ""


def _has_room(text: str, share: float) -> bool:
    return len(text) <= int((share - 0.008) / 0.0105)


def keys_for(pictures: Sequence[OverlapPicture]) -> dict[str, str]:
    """What stands in the bars of a name: it, if all have room, or a letter; raises ValueError beyond 26 letters."""
    shares: dict[str, float] = {}
    longest_s = max(picture.end_s for picture in pictures)
    for span in sorted((span for picture in pictures for span in picture.spans), key=lambda span: span.start_s):
        shares[span.name] = min(shares.get(span.name, 1.0), span.seconds / longest_s)
    without_room = [name for name, share in shares.items() if not _has_room(name, share)]
    if (count := len(without_room)) > len(ascii_lowercase):
        raise ValueError(f"{count} names have no room in their bars, and there are 26 letters; give keys=False")
    letters = dict(zip(without_room, ascii_lowercase, strict=False))  # the alphabet is long enough
    return {name: name for name in shares} | letters


@checked
def show_overlap(spans: Sequence | Mapping, title: str, keys: bool = False, only_order: bool = False) -> None:
    """Show `Span`s as lanes, one for each rank and lane; give a mapping `{label: spans}` to compare several steps.

    With `keys`, a name for which its bars have no room becomes a letter, and a list below says what the letters mean.
    With `only_order`, each start and stop is one place further on, and there are no seconds.
    """
    steps = spans if isinstance(spans, dict) else {"": spans}
    pictures = {label: overlap_picture(in_order(s) if only_order else s) for label, s in steps.items()}
    if not pictures:
        raise ValueError("there are no steps to draw; give the spans of at least one")
    heights = [0.65 + 0.34 * len(picture.lanes) for picture in pictures.values()]
    names = keys_for(list(pictures.values())) if keys else None
    listed = wrap_entries([f"{letter}: {name}" for name, letter in (names or {}).items() if letter != name])
    height, slowest = sum(heights) + 0.75 + 0.16 * len(listed), max(picture.end_s for picture in pictures.values())
    look = {"squeeze": False, "sharex": not only_order, "height_ratios": heights}
    with picture_panels(len(pictures), 1, height, title, **look) as (figure, panels):
        for axes, (label, picture) in zip(panels[:, 0], pictures.items(), strict=True):
            draw_overlap(axes, picture, names, only_order)
            if not only_order:
                axes.set_xlim(0, slowest / TIME_UNITS[time_unit_for(slowest)] * 1.02)
            panel_title(axes, label)
            if axes is not panels[-1, 0]:
                axes.set_xlabel("")
            axes.tick_params(labelbottom=True)
        if listed:
            figure.supxlabel("\n".join(listed), x=0.01, ha="left", fontsize=8.5)


def wrap_entries(entries: Sequence[str], columns: int = 124) -> list[str]:
    """The entries in lines of at most that many columns, none of them broken."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= columns:
            lines[-1] += "   " + entry
        else:
            lines.append(entry)
    return lines


@checked
def show_step_times(seconds: Mapping[str, tuple[float, float]], title: str) -> None:
    """Show modelled steps side by side: `{label: (seconds computing, seconds waiting for communication)}`."""
    rows = {label: dict(zip(("computing", "waiting"), both, strict=True)) for label, both in seconds.items()}
    notes = {label: f", {both[1] / sum(both):.0%} waiting" for label, both in seconds.items()}
    show_charts(title, bars(title, rows, "seconds", notes=notes))
