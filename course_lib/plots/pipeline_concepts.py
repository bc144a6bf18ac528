"""A pipeline in pictures: its messages, what ranks did in order, which rank holds which layers, bubble and memory."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from matplotlib.ticker import PercentFormatter

from course_lib.palette import KIND_COLORS, OKABE_ITO, RANK_COLORS
from course_lib.plots.pipeline import (
    chart_height_in,
    draw_schedule,
    legend_below,
    legend_of,
    schedule_picture,
)
from course_lib.plots.pipeline_trace import measured_picture
from course_lib.plots.stages import peaks_of
from course_lib.plots.style import draw_arrows, labelled_box, picture_axes, picture_panels, write
from course_lib.plots.tiles import ranks
from course_lib.schedules.instructions import Schedule, needs
from course_lib.schedules.simulator import Simulation, simulate
from course_lib.span import Span
from course_lib.units import three_digits
from course_lib.validate import checked

ACTIVATION_COLOR, GRADIENT_COLOR = OKABE_ITO["blue"], OKABE_ITO["vermillion"]
_MOST_STAGES = 8

# ---------------------------------------------------------------- messages of a schedule in time


@dataclass(frozen=True)
class MessageArrow:
    """A message: from the end of what made it on one rank to the start of what needed it on another."""

    op: str
    src: int
    sent_s: float
    dst: int
    used_s: float


def message_arrows(simulation: Simulation) -> list[MessageArrow]:
    """Return each message between two ranks of a simulated schedule."""
    at = {one: (rank, span) for rank, row in enumerate(simulation.timed) for one, span in row}
    return [
        MessageArrow(one.op, at[need][0], at[need][1].stop_s, rank, span.start_s)
        for one, (rank, span) in at.items()
        for need in needs(one, simulation.schedule)
        if at[need][0] != rank
    ]


@checked
def show_messages(simulation: Simulation, title: str) -> None:
    """Show a simulated schedule as a chart, with an arrow for each message."""
    picture = schedule_picture(simulation)
    with picture_axes(chart_height_in(picture) + 0.95) as axes:
        draw_schedule(axes, picture)
        for one in message_arrows(simulation):
            down = 0.3 if one.dst > one.src else -0.3
            color = ACTIVATION_COLOR if one.op == "F" else GRADIENT_COLOR
            draw_arrows(axes, [((one.sent_s, one.src + down), (one.used_s, one.dst - down))], color, zorder=4)
        axes.set_title(title)
        axes.set_xlabel("simulated time (slots)")
        legend_below(axes, legend_of([picture]))


def in_order(traces: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return spans from as many ends as came before each to as many as have come with its own."""
    ends = sorted(span.stop_s for trace in traces for span in trace)
    return [
        [replace(s, start_s=float(bisect(ends, s.start_s)), stop_s=float(bisect(ends, s.stop_s))) for s in trace]
        for trace in traces
    ]


@checked
def show_trace(schedule: Schedule, traces: Sequence[Sequence[Span]], title: str) -> None:
    """Show in which order the ranks of a schedule computed what: a place for each end, whatever its seconds."""
    picture = measured_picture(simulate(schedule), in_order(traces)).measured
    with picture_axes(chart_height_in(picture) + 0.5) as axes:
        draw_schedule(axes, picture)
        axes.set_title(title)
        axes.set(xticks=[], xlabel="order of events, not time")
        legend_below(axes, legend_of([picture]))


# ---------------------------------------------------------------- which layers where


def _stages_title(layers_of_stage: Sequence[int], rank_of_stage: Sequence[int]) -> str:
    """How many layers, stages and ranks; and whether the first rank has the last stage too."""
    ends = "rank 0 has both ends of the model" if rank_of_stage[-1] == 0 else "embedding on the first, head on the last"
    counts = f"{len(layers_of_stage)} stages on {1 + max(rank_of_stage)} ranks"
    return f"{sum(layers_of_stage)} layers in {counts}: {ends}"


@checked
def show_stages_of_model(
    layers_of_stage: Sequence[int],
    rank_of_stage: Sequence[int] | None = None,
    parameters_of_rank: Sequence[float] | None = None,
) -> None:
    """Show which layers are where, with embedding and head; beside it the parameters of each rank, if given.

    Without `rank_of_stage` stage s is on rank s.
    Raises   ValueError if there is no stage, a negative number of layers, or not one rank for each stage
    """
    owners = list(range(len(layers_of_stage)) if rank_of_stage is None else rank_of_stage)
    if not layers_of_stage or len(owners) != len(layers_of_stage) or min(layers_of_stage) < 0:
        raise ValueError(
            f"got {len(layers_of_stage)} stages with layers {list(layers_of_stage)} and {len(owners)} ranks; "
            "give the layers of each stage, 0 or more, and the rank of each"
        )
    count, layers = 1 + max(owners), sum(layers_of_stage)
    if count > _MOST_STAGES or layers > 32:
        raise ValueError(f"{layers} layers on {count} ranks; the picture has room for 32 on {_MOST_STAGES}")
    ends = max(1.0, 0.085 * layers)  # the width of embedding and head, which have names to write
    columns = 1 if parameters_of_rank is None else 2
    look = {"squeeze": False, "width_ratios": (4, 1)[:columns]}
    with picture_panels(1, columns, 0.95 + 0.44 * count, _stages_title(layers_of_stage, owners), **look) as (_, panels):
        axes, last = panels[0, 0], len(owners) - 1
        word = "stage " if min(layers_of_stage) >= 0.085 * layers else "s"
        for stage, (rank, stop) in enumerate(zip(owners, accumulate(layers_of_stage), strict=True)):
            first, color = stop - layers_of_stage[stage], RANK_COLORS[rank]
            boxes = [(ends + layer, 1.0, str(layer), "") for layer in range(first, stop)]
            boxes += [(0.0, ends, "embed", "....")] if stage == 0 else []
            boxes += [(ends + layers, ends, "head", "....")] if stage == last else []
            left = ends + first - ends * (stage == 0)
            right = ends + stop + ends * (stage == last)
            frame = {"edgecolor": "#777777", "linewidth": 0.8}
            labelled_box(axes, (left, rank + 0.03), (right - left, 0.94), "#F6F6F6", **frame)
            write(axes, (left + right) / 2, rank + 0.19, f"{word}{stage}", fontsize=8)
            for x, width, label, hatch in boxes:
                labelled_box(axes, (x, rank + 0.36), (width, 0.54), color, label, 7.5, hatch=hatch)
        _name_rows(axes, count)
        axes.set(xlim=(-0.01 * layers, layers * 1.01 + 2 * ends), xticks=[])
        axes.set_xlabel("the model from input to output, layers numbered from 0; in frames the stages")
        if parameters_of_rank is not None:
            _draw_parameters(panels[0, 1], parameters_of_rank)


def _name_rows(axes, count: int) -> None:
    axes.set_yticks([rank + 0.5 for rank in range(count)], ranks(count))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylim(count + 0.02, -0.02)


def _draw_parameters(axes, parameters_of_rank: Sequence[float]) -> None:
    """What each rank holds, as bars beside its row."""
    for rank, parameters in enumerate(parameters_of_rank):
        axes.barh(rank + 0.5, parameters / 1e9, height=0.54, color=KIND_COLORS["parameters"])
        write(axes, parameters / 1e9, rank + 0.5, f" {three_digits(parameters / 1e9)}", "left")
    axes.set(ylim=(len(parameters_of_rank) + 0.02, -0.02), yticks=[], xlabel="parameters (billions)")
    axes.set_xlim(0, max(parameters_of_rank) / 1e9 * 1.25)


# ---------------------------------------------------------------- between waiting and memory


@checked
def show_tradeoff(simulations: Sequence[Simulation]) -> None:
    """Show bubble against memory of the fullest rank; an arrow leads to the bubble without a barrier between steps.

    Raises   ValueError if there is no simulation
    """
    if not simulations:
        raise ValueError("there is no simulation to draw; give at least one simulate(schedule, costs)")
    points = [(max(peaks_of(one)), one.bubble_of_ideal) for one in simulations]
    widest, blue = max(x for x, _ in points) or 1.0, OKABE_ITO["blue"]
    with picture_axes(3.3) as axes:
        for one, (x, y) in zip(simulations, points, strict=True):
            axes.plot(x, y, "o", color=blue)
            left = any(abs(y - other) < 0.02 and 0 < near - x < 0.3 * widest for near, other in points)
            side = {"xytext": (-7, 2), "ha": "right"} if left else {"xytext": (7, 2)}
            axes.annotate(one.schedule.name, (x, y), fontsize=8.5, textcoords="offset points", **side)
            back_to_back = one.bubble_of_ideal_back_to_back
            if y - back_to_back > 0.004:  # closer ones are one point
                draw_arrows(axes, [((x, y), (x, back_to_back))], "#777777", arrowstyle="->", linestyle=":")
                axes.plot(x, back_to_back, "o", mfc="white", color=blue)
        top = 1.15 * max(y for _, y in points) or 1.0
        axes.set(xlim=(0, 1.3 * widest), ylim=(-0.06 * top, top), ylabel="bubble, of ideal time")
        axes.set_xlabel("peak in-flight micro-batches on a rank (through all of its layers)")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title("Filled: until the last rank is done. Open: from step to step", fontsize=10)
