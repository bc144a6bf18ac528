"""The same step on all ranks, side by side: what each computes, what it sends, and where it waits."""

from collections.abc import Sequence

from course_lib.measure.trace import RankTrace, seconds_of
from course_lib.panels.svg import Box, Chart, bars
from course_lib.plots.concepts import show_charts
from course_lib.plots.timeline import merge
from course_lib.span import COMPUTE
from course_lib.validate import checked

_GAP = 0.002  # of the longest step: what lies closer is drawn as one


def trace_charts(traces: Sequence[RankTrace]) -> tuple[Chart, Chart]:
    """Return two lanes of each rank over time, computing and sending by axis; and what their seconds add up to."""
    lanes, sums, notes = {}, {}, {}
    longest_s = max(trace.step_s for trace in traces)
    for trace in traces:
        label, seconds = f"rank {trace.rank}", seconds_of(trace)
        of_lane = {
            lane: merge([(span.start_s, span.stop_s) for span in trace.lane(lane)], _GAP * longest_s)
            for lane in (COMPUTE, *trace.axes)
        }
        lanes[f"{label} computes"] = [Box(*each, "computing") for each in of_lane.pop(COMPUTE)]
        lanes[f"{label} sends"] = [Box(*each, axis) for axis, intervals in of_lane.items() for each in intervals]
        sums[label] = {"computing": seconds.compute_s, **seconds.exposed_s, "neither": seconds.neither_s}
        notes[label] = f", {sum(seconds.exposed_s.values()) / seconds.step_s:.0%} exposed"
    return (
        Chart("Over time", lanes, longest_s, unit="seconds", ground=True),
        bars("In sum: computing, exposed communication by axis, neither", sums, "seconds", notes=notes),
    )


@checked
def show_rank_traces(traces: Sequence[RankTrace], title: str = "One step on every rank") -> None:
    """Show traces side by side: the lanes of each rank over time, and below what their seconds add up to."""
    if not traces:
        raise ValueError("there are no traces to draw; give at least one RankTrace")
    show_charts(title, *trace_charts(traces))
