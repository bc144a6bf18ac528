"""The same step on all ranks, side by side: what each computes, what it sends, and where it waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.measure.trace import RankSeconds, RankTrace, seconds_of
from course_lib.palette import AXIS_COLORS, COMPUTE_COLOR, NEUTRAL_COLOR, OKABE_ITO
from course_lib.plots.style import key, keys_below, picture_panels, plain_rows, write
from course_lib.plots.tiles import ranks
from course_lib.plots.timeline import merge, subtract
from course_lib.span import COMPUTE
from course_lib.units import TIME_UNITS, show_seconds, time_unit_for
from course_lib.validate import checked

COLORS = AXIS_COLORS | {"data": AXIS_COLORS["dp"], "world": OKABE_ITO["orange"]}
_OTHER_COLOR = OKABE_ITO["green"]  # of axes without a colour of their own
_LANE = 0.38  # the height of one of a rank's two lanes; exposed communication fills both

_Intervals = list[tuple[float, float]]


@dataclass(frozen=True)
class RankRow:
    """What is drawn of a rank: intervals in seconds in which it computes, sends by axis, and sends exposed by axis."""

    seconds: RankSeconds
    compute: _Intervals
    communication: dict[str, _Intervals]
    exposed: dict[str, _Intervals]


def rank_row(trace: RankTrace) -> RankRow:
    """Turn a trace into what is drawn."""
    by_lane = {lane: merge([(s.start_s, s.stop_s) for s in trace.lane(lane)]) for lane in (COMPUTE, *trace.axes)}
    compute, exposed, covered = by_lane.pop(COMPUTE), {}, []
    for axis, intervals in by_lane.items():
        near = [*compute, *covered]
        exposed[axis] = [
            part
            for start, stop in intervals
            for part in subtract((start, stop), [(low, high) for low, high in near if low < stop and high > start])
        ]
        covered += intervals
    return RankRow(seconds_of(trace), compute, by_lane, exposed)


def _draw_lanes(axes, rows: Sequence[RankRow], scale: float) -> None:
    """Draw of each rank computation above communication; where it waits, the axis fills both lanes."""
    for index, row in enumerate(rows):
        drawn = [(row.compute, (index - _LANE, _LANE), COMPUTE_COLOR)]
        for axis, intervals in row.communication.items():
            color = COLORS.get(axis, _OTHER_COLOR)
            drawn += [(intervals, (index, _LANE), color), (row.exposed[axis], (index - _LANE, 2 * _LANE), color)]
        for intervals, place, color in drawn:
            bars = [(start / scale, (stop - start) / scale) for start, stop in intervals]
            axes.broken_barh(bars, place, facecolor=color, edgecolor=color, linewidth=0.3)


def draw_sums(axes, rows: Sequence[RankRow], scale: float) -> None:
    """Draw of each rank one bar: computing, exposed communication by axis, neither; together the step."""
    for index, row in enumerate(rows):
        start_s, seconds = 0.0, row.seconds
        parts = [(COMPUTE_COLOR, seconds.compute_s)]
        parts += [(COLORS.get(axis, _OTHER_COLOR), exposed_s) for axis, exposed_s in seconds.exposed_s.items()]
        for color, part_s in [*parts, (NEUTRAL_COLOR, seconds.neither_s)]:
            axes.barh(index, part_s / scale, left=start_s / scale, height=2 * _LANE, color=color, edgecolor="white")
            start_s += part_s
        share = sum(seconds.exposed_s.values()) / seconds.step_s
        write(axes, start_s / scale, index, f" {show_seconds(seconds.step_s)}, {share:.0%} exposed", "left", 8.5)


@checked
def show_rank_traces(traces: Sequence[RankTrace], title: str = "One step on every rank") -> None:
    """Show traces side by side: the lanes of each rank over time, and below what their seconds add up to."""
    if not traces:
        raise ValueError("there are no traces to draw; give at least one RankTrace")
    rows = [rank_row(trace) for trace in traces]
    names = dict.fromkeys(axis for row in rows for axis in row.communication)
    handles = [key(COMPUTE_COLOR, "computing")]
    handles += [key(COLORS.get(axis, _OTHER_COLOR), f"communication over {axis}") for axis in names]
    handles.append(key(NEUTRAL_COLOR, "neither (below)"))
    longest_s = max(row.seconds.step_s for row in rows)
    unit = time_unit_for(longest_s)
    panels_of = {
        "over time: above what is computed, below what is sent, both where it is exposed": _draw_lanes,
        "in sum: computing, exposed communication by axis, neither": draw_sums,
    }
    with picture_panels(2, 1, 2.2 + 0.95 * len(rows), title) as (figure, panels):
        for axes, (said, draw) in zip(panels, panels_of.items(), strict=True):
            draw(axes, rows, TIME_UNITS[unit])
            plain_rows(axes, ranks(len(rows)), -0.6, -0.5)
            axes.set(xlim=(0, 1.3 * longest_s / TIME_UNITS[unit]), xlabel=f"time ({unit})")
            axes.set_title(said, fontsize=9.5, fontweight="normal")
        keys_below(figure, handles, ncol=min(4, len(handles)))
