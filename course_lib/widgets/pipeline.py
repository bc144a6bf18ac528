"""The explorer of pipeline schedules: the chart, its bubble by both definitions, and what each rank keeps alive."""

from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.plots.pipeline import SchedulePicture, chart_height_in, draw_chart, percent, schedule_picture
from course_lib.plots.stages import (
    LivePicture,
    draw_live,
    live_height_in,
    live_picture,
    live_title,
    peaks_together,
    short,
)
from course_lib.schedules import SCHEDULES, make, stages_per_rank
from course_lib.schedules.simulator import Costs, Simulation, simulate
from course_lib.validate import Amount, Size, check_fields, checked
from course_lib.widgets import parts

MOST_BOXES = 2048  # more cannot be told apart in one chart
NAMES = {
    "naive": "naive: one micro-batch after the other",
    "afab": "all forward, all backward (GPipe)",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zbv": "ZBV",
    "dualpipe_v": "DualPipeV",
}
TIMES = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
TRANSFERS = [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0]


@dataclass(frozen=True)
class PipelineChoice:
    """What the controls say. Times are of all layers of a rank, for one micro-batch; v: stages a rank (interleaved)."""

    schedule: str = "1f1b"
    pp: Size = 4
    num_micro_batches: Size = 8
    v: Size = 1
    forward_s: Amount = 1.0
    input_backward_s: Amount = 1.0
    weight_backward_s: Amount = 1.0
    transfer_s: Amount = 0.0

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class PipelineView:
    """What the explorer shows: nothing is measured, a clock runs the schedule with the given times."""

    simulation: Simulation
    chart: SchedulePicture
    live: LivePicture
    text: str


@checked
def explore_pipeline(chosen: PipelineChoice) -> PipelineView:
    """Clock the chosen schedule with the chosen times.

    Raises   ValueError if there is no such schedule, or more boxes than a chart has room for
    """
    schedule = make(chosen.schedule, chosen.pp, chosen.num_micro_batches, chosen.v)
    boxes = sum(map(len, schedule.instructions))
    if boxes > MOST_BOXES:
        raise ValueError(
            f"{boxes} instructions are more than one chart has room for ({MOST_BOXES}); choose fewer micro-batches, "
            "ranks or stages a rank"
        )
    v = stages_per_rank(chosen.schedule, chosen.v)
    times = (chosen.forward_s / v, chosen.input_backward_s / v, chosen.weight_backward_s / v, chosen.transfer_s)
    simulation = simulate(schedule, Costs(*times))
    live = live_picture(simulation)
    return PipelineView(simulation, schedule_picture(simulation), live, describe_pipeline(simulation, live))


@checked
def describe_pipeline(simulation: Simulation, live: LivePicture) -> str:
    """The times, both bubbles with their meaning, and the activations of rank 0 as a share of the whole model's."""
    pp, most = simulation.schedule.pp, max(live.peak_alive)
    between = ""
    if simulation.back_to_back_s < simulation.makespan_s - 1e-9:
        shares = (simulation.bubble_of_ideal_back_to_back, simulation.bubble_of_total_back_to_back)
        between = (
            f"Without a barrier the next step can follow after {short(simulation.back_to_back_s)}: then "
            f"{percent(shares[0])} and {percent(shares[1])}. "
        )
    return (
        f"Ideal {short(sum(simulation.busy_s) / pp)} (all work, no waiting), simulated {short(simulation.makespan_s)}: "
        f"idle time is {percent(simulation.bubble_of_ideal)} of the ideal time, "
        f"{percent(simulation.bubble_of_total)} of the total time. {between}"
        f"Peak: activations of {short(most)} micro-batches in 1/{pp} of the layers, as many bytes as "
        f"{short(most / pp)} in the whole model.{describe_waiting(live)}"
    )


@checked
def describe_waiting(live: LivePicture) -> str:
    """How many each rank keeps at once with those that wait for weight gradients; nothing where none waits."""
    if not any(live.peak_waiting):
        return ""
    peaks = [short(peak) for peak in peaks_together(live)]
    said = f"{peaks[0]} on every rank" if len(set(peaks)) == 1 else f"{', '.join(peaks)} on ranks 0 to {len(peaks) - 1}"
    return f" With those that wait for weight gradients, at most {said} at once."


@checked
def pipeline_png(view: PipelineView) -> bytes:
    """The chart, and below it on the same time axis what each rank keeps alive."""

    def draw_below(axes) -> None:
        draw_live(axes, view.live)
        axes.set_title(f"Activations: {live_title(view.live)}", fontsize=9.5)

    return parts.stacked_png(
        [
            (lambda axes: draw_chart(axes, view.chart), chart_height_in(view.chart) + 0.45),
            (draw_below, live_height_in(view.live)),
        ]
    )


@checked
def pipeline_explorer(start: PipelineChoice | None = None) -> widgets.VBox:
    """Sliders over schedule, stages, micro-batches, chunks and times; the chart and what is kept alive follow."""
    start = start or PipelineChoice()
    named = [(NAMES.get(key, key), key) for key in SCHEDULES]
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32]
    fields = {
        "schedule": parts.choice("schedule", named, start.schedule),
        "pp": parts.slider("ranks (pp)", range(1, 9), start.pp),
        "num_micro_batches": parts.slider("micro-batches", counts, start.num_micro_batches),
        "v": parts.slider("stages a rank", range(1, 5), start.v),
        "forward_s": parts.slider("forward", TIMES, start.forward_s),
        "input_backward_s": parts.slider("input gradient", TIMES, start.input_backward_s),
        "weight_backward_s": parts.slider("weight gradient", TIMES, start.weight_backward_s),
        "transfer_s": parts.slider("transfer", TRANSFERS, start.transfer_s),
    }

    def predict() -> tuple[bytes, str]:
        view = explore_pipeline(PipelineChoice(**parts.values_of(fields)))
        return pipeline_png(view), escape(view.text)

    return parts.picture_panel(list(fields.values()), predict)
