"""Who is busy when: compute and communication of each rank, and the communication that nothing hides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from matplotlib.patches import Patch

from course_lib.plots.palette import COMMUNICATION_COLOR, COMPUTE_COLOR, EXPOSED_COLOR, mix, text_on
from course_lib.plots.style import (
    CENTRED,
    TIME_UNITS,
    ground,
    panel_title,
    picture_axes,
    picture_panels,
    show_seconds,
    time_unit_for,
)
from course_lib.validate import Amount, Share, Size, checked

COMPUTE_LANE = "compute"


@dataclass(frozen=True)
class TimelineBar:
    """One span as drawn: its row, its times, its name, and whether it is computation."""

    row: int
    name: str
    start_s: float
    stop_s: float
    compute: bool


@dataclass(frozen=True)
class OverlapPicture:
    """The rows, the bars, and the intervals of `others` (such as copy) during which that rank computes nothing."""

    rows: list[str]
    bars: list[TimelineBar]
    exposed: list[tuple[int, float, float]]
    exposed_s: dict[int, float]
    others: str
    end_s: float


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


def merge(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments as intervals that do not overlap."""
    merged: list[list[float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return [(start, stop) for start, stop in merged]


def joined(exposed: Sequence[tuple[int, float, float]], gap_s: Amount) -> list[tuple[int, float, float]]:
    """Intervals of one row that lie closer than `gap_s`, as one: frames around many short ones would hide them."""
    together: list[tuple[int, float, float]] = []
    for row, start, stop in sorted(exposed):
        if together and together[-1][0] == row and start - together[-1][2] < gap_s:
            together[-1] = (row, together[-1][1], max(stop, together[-1][2]))
        else:
            together.append((row, start, stop))
    return together


def overlap_picture(spans: Sequence) -> OverlapPicture:
    """Turn `Span`s into rows, one for each rank and lane, and find each rank's exposed communication."""
    if not spans:
        raise ValueError("there are no spans to draw; give at least one Span(rank, lane, name, start_s, stop_s)")
    lanes = sorted(
        {(span.rank, span.lane) for span in spans}, key=lambda lane: (lane[0], lane[1] != COMPUTE_LANE, lane[1])
    )
    row_of = {lane: row for row, lane in enumerate(lanes)}
    exposed, exposed_s = [], {}
    for rank in sorted({rank for rank, _ in lanes}):
        busy = [(s.start_s, s.stop_s) for s in spans if s.rank == rank and s.lane == COMPUTE_LANE]
        others = [s for s in spans if s.rank == rank and s.lane != COMPUTE_LANE]
        for lane in sorted({s.lane for s in others}):
            whole = merge([(s.start_s, s.stop_s) for s in others if s.lane == lane])
            exposed += [(row_of[rank, lane], *part) for interval in whole for part in subtract(interval, busy)]
        waiting = [part for whole in merge([(s.start_s, s.stop_s) for s in others]) for part in subtract(whole, busy)]
        exposed_s[rank] = sum(stop - start for start, stop in waiting)
    return OverlapPicture(
        rows=[f"rank {rank} {lane}" if len(exposed_s) > 1 else lane for rank, lane in lanes],
        bars=[TimelineBar(row_of[s.rank, s.lane], s.name, s.start_s, s.stop_s, s.lane == COMPUTE_LANE) for s in spans],
        exposed=exposed,
        exposed_s=exposed_s,
        others=" and ".join(sorted({lane for _, lane in lanes} - {COMPUTE_LANE})) or "communication",
        end_s=max(span.stop_s for span in spans),
    )


def in_order(spans: Sequence) -> list:
    """Return the spans with the place of each start and stop among all of them in place of its seconds.

    For what ranks do on a shared CPU: the order is that of GPUs, and the seconds mean nothing.
    """
    moments = sorted({moment for span in spans for moment in (span.start_s, span.stop_s)})
    place = {moment: float(index) for index, moment in enumerate(moments)}
    return [replace(span, start_s=place[span.start_s], stop_s=place[span.stop_s]) for span in spans]


def draw_overlap(
    axes, picture: OverlapPicture, keys: Mapping[str, str] | None = None, only_order: bool = False
) -> None:
    """Draw the lanes; exposed communication is hatched and its sum is written.

    keys         what stands for which name
    only_order   the picture has places `in_order`, and no seconds are shown
    """
    unit = time_unit_for(picture.end_s)
    scale = TIME_UNITS[unit]
    for bar in picture.bars:
        share = (bar.stop_s - bar.start_s) / picture.end_s
        label = label_for(bar.name, min(1.0, 1.3 * share) if only_order else share) if keys is None else keys[bar.name]
        _draw_bar(axes, bar, scale, picture.end_s, label, fontsize=7 if only_order else 8.5)
    for row, start, stop in joined(picture.exposed, 0.01 * picture.end_s):
        frame = {"height": 0.72, "facecolor": "none", "edgecolor": EXPOSED_COLOR, "hatch": "////", "linewidth": 1.6}
        axes.barh(row, (stop - start) / scale, left=start / scale, **frame)
    axes.set_yticks(range(len(picture.rows)), picture.rows)
    axes.set(ylim=(len(picture.rows) - 0.4, -0.6), xlim=(0, picture.end_s / scale * 1.02), xlabel=f"time ({unit})")
    worst = max(picture.exposed_s.values())
    note = f"{show_seconds(picture.end_s)}; {picture.others} that nothing hides (hatched): {show_seconds(worst)}"
    if only_order:
        note = "hatched: no computation at the same time"
        axes.set(xticks=[], xlabel="order of events, not time")
    place = {"xycoords": "axes fraction", "xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate(note, (1, 1), ha="right", va="bottom", fontsize=8.5, **place)


def label_for(name: str, share: Share) -> str:
    """As much of a name as a bar of that share of the width has room for: all, its last word, or nothing."""
    fitting = [text for text in (name, name.rpartition(" ")[2]) if _has_room(text, share)]
    return fitting[0] if fitting else ""


def _has_room(text: str, share: float) -> bool:
    return len(text) <= int((share - 0.008) / 0.0105)


def keys_for(pictures: Sequence[OverlapPicture]) -> dict[str, str]:
    """What stands in the bars of each name: the name, if all its bars have room for it, or else a letter."""
    shares: dict[str, float] = {}
    longest_s = max(picture.end_s for picture in pictures)
    for bar in sorted((bar for picture in pictures for bar in picture.bars), key=lambda bar: bar.start_s):
        shares[bar.name] = min(shares.get(bar.name, 1.0), (bar.stop_s - bar.start_s) / longest_s)
    without_room = [name for name, share in shares.items() if not _has_room(name, share)]
    if len(without_room) > len(ascii_lowercase):
        raise ValueError(
            f"{len(without_room)} names have no room in their bars, and there are 26 letters; give keys=False"
        )
    return {name: name for name in shares} | dict(
        zip(without_room, ascii_lowercase, strict=False)
    )  # the alphabet is long enough


def _draw_bar(axes, bar: TimelineBar, scale: float, end_s: float, label: str, fontsize: float) -> None:
    color = COMPUTE_COLOR if bar.compute else COMMUNICATION_COLOR
    if bar.compute and bar.name.startswith("forward"):
        color = mix(color, "#FFFFFF", 0.55)
    if not bar.compute and bar.name.startswith("dk"):  # gradients on their way home, beside keys and values
        color = mix(color, "#000000", 0.45)
    width = bar.stop_s - bar.start_s
    gap = 1 if width / end_s > 0.015 else 0.1  # the gaps between many short spans would hide them
    look = {"height": 0.72, "facecolor": color, "edgecolor": "white", "linewidth": gap}
    axes.barh(bar.row, width / scale, left=bar.start_s / scale, **look)
    if label:
        look = {"fontsize": fontsize, "color": text_on(color), "bbox": ground(color), "zorder": 3} | CENTRED
        axes.text((bar.start_s + bar.stop_s) / 2 / scale, bar.row, label, **look)


@checked
def show_overlap(
    spans: Sequence | Mapping,
    title: str = "Computation and communication of one step",
    keys: bool = False,
    only_order: bool = False,
) -> None:
    """Show `Span`s as lanes, one for each rank and lane; give a mapping `{label: spans}` to compare several steps.

    With `keys`, a name for which its bars have no room becomes a letter, and a list below says what the letters mean.
    With `only_order`, each start and stop is one place further on, and there are no seconds.
    """
    steps = spans if isinstance(spans, dict) else {"": spans}
    pictures = {label: overlap_picture(in_order(s) if only_order else s) for label, s in steps.items()}
    heights = [0.65 + 0.34 * len(picture.rows) for picture in pictures.values()]
    shown = keys_for(list(pictures.values())) if keys else None
    listed = wrap_entries([f"{key}: {name}" for name, key in (shown or {}).items() if key != name])
    with picture_panels(
        len(pictures),
        1,
        sum(heights) + 0.75 + 0.16 * len(listed),
        title,
        squeeze=False,
        sharex=not only_order,
        height_ratios=heights,
    ) as (figure, panels):
        slowest = max(picture.end_s for picture in pictures.values())
        for axes, (label, picture) in zip(panels[:, 0], pictures.items(), strict=True):
            draw_overlap(axes, picture, shown, only_order)
            if not only_order:
                axes.set_xlim(0, slowest / TIME_UNITS[time_unit_for(slowest)] * 1.02)
            panel_title(axes, label)
            if axes is not panels[-1, 0]:
                axes.set_xlabel("")
            axes.tick_params(labelbottom=True)
        if listed:
            figure.supxlabel("\n".join(listed), x=0.01, ha="left", fontsize=8.5)


def wrap_entries(entries: Sequence[str], columns: Size = 124) -> list[str]:
    """The entries in lines of at most that many columns, none of them broken."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= columns:
            lines[-1] += "   " + entry
        else:
            lines.append(entry)
    return lines


# ---------------------------------------------------------------- the same step under several layouts


def draw_step_times(axes, seconds: Mapping[str, tuple[float, float]]) -> None:
    """A bar for each label, `{label: (computing, waiting for communication)}`, with its share of communication."""
    longest = max(sum(both) for both in seconds.values())
    unit = time_unit_for(longest)
    scale = TIME_UNITS[unit]
    for row, (compute_s, comm_s) in enumerate(seconds.values()):
        look = {"height": 0.66, "edgecolor": "white", "linewidth": 0.8}
        axes.barh(row, compute_s / scale, color=COMPUTE_COLOR, **look)
        axes.barh(row, comm_s / scale, left=compute_s / scale, color=COMMUNICATION_COLOR, hatch="////", **look)
        whole_s = compute_s + comm_s
        share = f" {show_seconds(whole_s)}, {100 * comm_s / whole_s:.0f} % communication"
        axes.text(whole_s / scale, row, share, va="center", fontsize=9)
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.tick_params(axis="y", length=0)
    axes.set(
        xlim=(0, longest / scale * 1.5), ylim=(len(seconds) - 0.4, -0.6), xlabel=f"modelled time of one step ({unit})"
    )
    handles = [
        Patch(facecolor=COMPUTE_COLOR, label="computing"),
        Patch(facecolor=COMMUNICATION_COLOR, hatch="////", edgecolor="white", label="waiting for communication"),
    ]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.2}  # on no bar, whichever is longest
    axes.legend(handles=handles, ncol=2, **below)


@checked
def show_step_times(seconds: Mapping[str, tuple[float, float]], title: str) -> None:
    """Show modelled steps side by side: `{label: (seconds computing, seconds waiting for communication)}`."""
    with picture_axes(1.3 + 0.34 * len(seconds)) as axes:
        draw_step_times(axes, seconds)
        axes.set_title(title)
