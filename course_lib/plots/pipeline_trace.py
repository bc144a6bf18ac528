"""What ranks did, laid over the simulated schedule: was the order kept, and where do the clocks part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import matplotlib.pyplot as plt

from course_lib.palette import mix
from course_lib.plots.pipeline import (
    DENSE_DPI,
    OP_COLORS,
    SchedulePicture,
    boxes_of,
    chart_height_in,
    draw_boxes,
    draw_schedule,
    legend_below,
    legend_of,
    percent,
    picture_of,
    schedule_picture,
)
from course_lib.plots.style import FULL_WIDTH_IN, finish, key, style
from course_lib.schedules.instructions import Schedule, read_instruction
from course_lib.schedules.simulator import Costs, Simulation
from course_lib.span import Span
from course_lib.units import TIME_UNITS, show_seconds, time_unit_for
from course_lib.validate import checked

_OUTLINE_COLOR = "#444444"


@dataclass(frozen=True)
class MeasuredPicture:
    """What ranks did and when, beside the simulation: both from the moment at which the first instruction began."""

    measured: SchedulePicture
    simulated: SchedulePicture
    in_order: bool  # every rank executed its instructions in the order of the schedule


@checked
def measured_picture(simulation: Simulation, traces: Sequence[Sequence[Span]]) -> MeasuredPicture:
    """Lay each rank's measured spans, as a pipeline's trace has them, on the simulated schedule.

    Raises   ValueError if there is not one trace for each rank, or all are empty
    """
    schedule = simulation.schedule
    if len(traces) != schedule.pp or not any(traces):
        raise ValueError(f"got {len(traces)} traces; give one for each of {schedule.pp} ranks, from a step with trace")
    first_s = min(span.start_s for trace in traces for span in trace)
    rows = [
        [replace(span, start_s=span.start_s - first_s, stop_s=span.stop_s - first_s) for span in trace]
        for trace in traces
    ]
    names = [[span.name for span in trace] for trace in traces]
    in_order = names == [[str(one) for one in row] for row in schedule.instructions]
    return MeasuredPicture(picture_of(schedule, boxes_of(schedule, rows)), schedule_picture(simulation), in_order)


def measured_title(picture: MeasuredPicture) -> str:
    """Whether the order is the schedule's, and how long it took beside how long it should."""
    order = "Executed in the order drawn" if picture.in_order else "NOT executed in the order drawn"
    measured, simulated = picture.measured, picture.simulated
    return (
        f"{order}: {show_seconds(measured.end_s)} measured, {show_seconds(simulated.end_s)} simulated; "
        f"idle {percent(measured.bubble_of_total)} and {percent(simulated.bubble_of_total)} of total"
    )


@checked
def show_measured(simulation: Simulation, traces: Sequence[Sequence[Span]]) -> None:
    """Show what ranks did and when, with the simulated schedule as outlines; simulate with the measured costs.

    The measured boxes are filled and narrower, so that both ends of each are seen.
    """
    picture = measured_picture(simulation, traces)
    end_s = max(picture.measured.end_s, picture.simulated.end_s)
    unit = time_unit_for(end_s)
    with style():
        size = {"figsize": (FULL_WIDTH_IN, chart_height_in(picture.measured) + 0.5)}
        figure, axes = plt.subplots(dpi=DENSE_DPI, **size)  # measured boxes can be small
        draw_schedule(axes, picture.measured, end_s * 1.005, TIME_UNITS[unit], height=0.5)
        for op in sorted({box.op for box in picture.simulated.boxes}):
            spans = [(box.rank, box.start_s, box.stop_s) for box in picture.simulated.boxes if box.op == op]
            look = {"facecolor": mix(OP_COLORS[op], "#FFFFFF", 0.8), "edgecolor": _OUTLINE_COLOR, "linewidth": 0.8}
            draw_boxes(axes, spans, TIME_UNITS[unit], 0.9, zorder=0.5, **look)
        axes.set_xlabel(f"time ({unit})")
        axes.set_title(measured_title(picture), fontsize=9.5)
        legend_below(axes, [*legend_of([picture.measured]), key("white", "simulated", edgecolor=_OUTLINE_COLOR)])
        finish(figure)


@checked
def measured_costs(schedule: Schedule, traces: Sequence[Sequence[Span]]) -> Costs:
    """What to simulate a measured step with: for each stage the median seconds of its forwards and backwards.

    A stage that ran only whole backwards gets half of their time for each part.
    Raises   ValueError if a stage has no forward or no backward in the traces
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        for span in trace:
            one = read_instruction(span.name, span.rank, f"rank {span.rank}")
            seconds.setdefault((one.op, one.stage), []).append(span.seconds)
    medians = {key: median(values) for key, values in seconds.items()}
    stages = range(schedule.num_stages)
    missing = [s for s in stages if ("F", s) not in medians or not {("B", s), ("I", s)} & set(medians)]
    if missing:
        raise ValueError(f"stages {missing} have no forward or no backward in the traces; give those of a whole step")
    input_s = [medians.get(("I", s), medians.get(("B", s), 0.0) / 2) for s in stages]
    weight_s = [medians.get(("W", s), medians.get(("B", s), 0.0) - input_s[s]) for s in stages]
    return Costs([medians["F", s] for s in stages], input_s, [max(seconds, 0.0) for seconds in weight_s])
