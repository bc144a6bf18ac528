"""The same step on all ranks, side by side: what each computes, what it sends, and where it waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from course_lib.measure.trace import RankSeconds, RankTrace, seconds_of
from course_lib.plots.palette import AXIS_COLORS, COMPUTE_COLOR, NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import TIME_UNITS, picture_panels, show_seconds, time_unit_for
from course_lib.plots.timeline import merge, subtract
from course_lib.span import COMPUTE
from course_lib.validate import checked

COLORS = AXIS_COLORS | {"data": AXIS_COLORS["dp"], "world": OKABE_ITO["orange"]}
OTHER_COLOR = OKABE_ITO["green"]  # of axes without a colour of their own
ROOM = 1.3  # of the axis, for what is written behind a bar
LANE = 0.38  # the height of one of a rank's two lanes; exposed communication fills both


@dataclass(frozen=True)
class RankRow:
    """What is drawn of a rank: intervals in seconds in which it computes, sends by axis, and sends exposed by axis."""

    seconds: RankSeconds
    compute: list[tuple[float, float]]
    communication: dict[str, list[tuple[float, float]]]
    exposed: dict[str, list[tuple[float, float]]]


def rank_rows(traces: Sequence[RankTrace]) -> list[RankRow]:
    """Turn traces into what is drawn, a row for each rank."""
    if not traces:
        raise ValueError("there are no traces to draw; give at least one RankTrace")
    return [_row(trace) for trace in traces]


def _row(trace: RankTrace) -> RankRow:
    by_lane = {lane: merge([(s.start_s, s.stop_s) for s in trace.lane(lane)]) for lane in (COMPUTE, *trace.axes)}
    compute, exposed, covered = by_lane.pop(COMPUTE), {}, []
    for axis, intervals in by_lane.items():
        near = [*compute, *covered]
        exposed[axis] = [part for interval in intervals for part in subtract(interval, _touching(interval, near))]
        covered += intervals
    return RankRow(seconds_of(trace), compute, by_lane, exposed)


def _touching(interval: tuple[float, float], others: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    start, stop = interval
    return [(low, high) for low, high in others if low < stop and high > start]


def draw_lanes(axes, rows: Sequence[RankRow]) -> None:
    """Draw of each rank computation above communication; where it waits, the axis fills both lanes."""
    scale = TIME_UNITS[time_unit_for(max(row.seconds.step_s for row in rows))]
    for index, row in enumerate(rows):
        _bars(axes, row.compute, scale, (index - LANE, LANE), COMPUTE_COLOR)
        for axis, intervals in row.communication.items():
            _bars(axes, intervals, scale, (index, LANE), _color_of(axis))
            _bars(axes, row.exposed[axis], scale, (index - LANE, 2 * LANE), _color_of(axis))
    _finish_axes(axes, rows)


def _bars(axes, intervals: Sequence[tuple[float, float]], scale: float, place: tuple[float, float], color: str) -> None:
    bars = [(start / scale, (stop - start) / scale) for start, stop in intervals]
    axes.broken_barh(bars, place, facecolor=color, edgecolor=color, linewidth=0.3)


def draw_sums(axes, rows: Sequence[RankRow]) -> None:
    """Draw of each rank one bar: computing, exposed communication by axis, neither; together the step."""
    scale = TIME_UNITS[time_unit_for(max(row.seconds.step_s for row in rows))]
    for index, row in enumerate(rows):
        start_s, seconds = 0.0, row.seconds
        parts = [(COMPUTE_COLOR, seconds.compute_s)]
        parts += [(_color_of(axis), seconds.exposed_s[axis]) for axis in seconds.exposed_s]
        for color, part_s in [*parts, (NEUTRAL_COLOR, seconds.neither_s)]:
            axes.barh(index, part_s / scale, left=start_s / scale, height=2 * LANE, color=color, edgecolor="white")
            start_s += part_s
        share = sum(seconds.exposed_s.values()) / seconds.step_s
        text = f" {show_seconds(seconds.step_s)}, {share:.0%} exposed"
        axes.text(start_s / scale, index, text, va="center", fontsize=8.5)
    _finish_axes(axes, rows)


def _finish_axes(axes, rows: Sequence[RankRow]) -> None:
    longest_s = max(row.seconds.step_s for row in rows)
    unit = time_unit_for(longest_s)
    axes.set_yticks(range(len(rows)), [f"rank {row.seconds.rank}" for row in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.6), xlim=(0, ROOM * longest_s / TIME_UNITS[unit]), xlabel=f"time ({unit})")
    axes.tick_params(axis="y", length=0)


def _color_of(axis: str) -> str:
    """The colour of an axis; those of data are dp's."""
    return COLORS.get(axis, OTHER_COLOR)


@checked
def show_rank_traces(traces: Sequence[RankTrace], title: str = "One step on every rank") -> None:
    """Show traces side by side: the lanes of each rank over time, and below what their seconds add up to."""
    rows = rank_rows(traces)
    names = list(dict.fromkeys(axis for row in rows for axis in row.communication))
    handles = [Patch(facecolor=COMPUTE_COLOR, label="computing")]
    handles += [Patch(facecolor=_color_of(axis), label=f"communication over {axis}") for axis in names]
    handles += [Patch(facecolor=NEUTRAL_COLOR, label="neither (below)")]
    plain = {"fontsize": 9.5, "fontweight": "normal"}
    with picture_panels(2, 1, 2.2 + 0.95 * len(rows), title) as (figure, (above, below)):
        draw_lanes(above, rows)
        above.set_title("over time: above what is computed, below what is sent, both where it is exposed", **plain)
        draw_sums(below, rows)
        below.set_title("in sum: computing, exposed communication by axis, neither", **plain)
        figure.legend(handles=handles, loc="outside lower center", ncol=min(4, len(handles)))
