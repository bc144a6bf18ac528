"""What a pipeline is, in pictures: the cut and its messages, messages in time, two halves of backward, placements."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_lib.layout.partition import even_layers
from course_lib.plots.palette import OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.pipeline import (
    OP_COLORS,
    chart_height_in,
    draw_schedule,
    legend_below,
    legend_of,
    schedule_picture,
)
from course_lib.plots.pipeline_trace import measured_picture
from course_lib.plots.style import bare, labelled_box, picture_axes
from course_lib.schedules.instructions import Schedule, loop_placement, needs, v_placement
from course_lib.schedules.simulator import Simulation, simulate
from course_lib.span import Span
from course_lib.validate import Size, checked

ACTIVATION_COLOR, GRADIENT_COLOR = OKABE_ITO["blue"], OKABE_ITO["vermillion"]
MOST_STAGES = 8

# ---------------------------------------------------------------- a model cut between its layers


@dataclass(frozen=True)
class CutBox:
    """One stage: its rank, and what stands in it."""

    rank: int
    text: str


def cut_boxes(num_layers: Size, num_stages: Size) -> list[CutBox]:
    """Return what each stage has: its layers, the embedding on the first, the head on the last.

    Raises   ValueError if a stage would have no layer, or there are more stages than the picture has room for
    """
    if not 2 <= num_stages <= min(num_layers, MOST_STAGES):
        raise ValueError(
            f"num_stages is {num_stages}; give 2 to {min(num_layers, MOST_STAGES)} for {num_layers} layers"
        )
    boxes, first = [], 0
    for rank, size in enumerate(even_layers(num_layers, num_stages)):
        lines = ["embedding"] * (rank == 0) + [f"layer {layer}" for layer in range(first, first + size)]
        lines += ["norm, head"] * (rank == num_stages - 1)
        boxes.append(CutBox(rank, "\n".join(lines)))
        first += size
    return boxes


@checked
def show_cut(num_layers: Size, num_stages: Size) -> None:
    """Show a model cut into stages, and the two messages that cross each cut for every micro-batch."""
    boxes = cut_boxes(num_layers, num_stages)
    lines = max(box.text.count("\n") + 1 for box in boxes)
    with picture_axes(1.2 + 0.2 * lines) as axes:
        for box in boxes:
            color = mix(RANK_COLORS[box.rank % len(RANK_COLORS)], "#FFFFFF", 0.45)
            labelled_box(axes, (box.rank, 0), (0.62, 1), color, box.text, fontsize=9, edgecolor="black")
            axes.text(box.rank + 0.31, 1.12, f"rank {box.rank}", ha="center", fontsize=9.5, fontweight="bold")
        for rank in range(num_stages - 1):
            ends = (rank + 0.65, rank + 0.97)
            for y, (start, stop), color in ((0.7, ends, ACTIVATION_COLOR), (0.3, ends[::-1], GRADIENT_COLOR)):
                look = {"arrowstyle": "-|>", "color": color, "linewidth": 2}
                axes.annotate("", (stop, y), xytext=(start, y), arrowprops=look)
            middle = rank + 0.81
            axes.text(middle, 0.82, "x_BSD", ha="center", fontsize=8.5, color=ACTIVATION_COLOR)
            axes.text(middle, 0.12, "its grad", ha="center", fontsize=8.5, color=GRADIENT_COLOR)
        bare(axes, (-0.05, num_stages - 0.33), (-0.05, 1.3))
        axes.set_title("Only the cuts communicate: hidden states forward, their gradient backward")


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
    schedule = simulation.schedule
    at = {one: (rank, span) for rank, row in enumerate(simulation.timed) for one, span in row}
    arrows = []
    for one, (rank, span) in at.items():
        for need in needs(one, schedule):
            src, made = at[need]
            if src != rank:
                arrows.append(MessageArrow(one.op, src, made.stop_s, rank, span.start_s))
    return arrows


@checked
def show_messages(simulation: Simulation, title: str) -> None:
    """Show a simulated schedule as a chart, with an arrow for each message."""
    picture, arrows = schedule_picture(simulation), message_arrows(simulation)
    with picture_axes(chart_height_in(picture) + 0.95) as axes:
        draw_schedule(axes, picture)
        for arrow in arrows:
            color = ACTIVATION_COLOR if arrow.op == "F" else GRADIENT_COLOR
            down = 0.3 if arrow.dst > arrow.src else -0.3
            look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.4}
            axes.annotate(
                "", (arrow.used_s, arrow.dst - down), xytext=(arrow.sent_s, arrow.src + down), arrowprops=look
            )
        axes.set_title(title)
        axes.set_xlabel("simulated time (slots)")
        legend_below(axes, legend_of([picture]))


@checked
def show_trace(schedule: Schedule, traces: Sequence[Sequence[Span]], title: str) -> None:
    """Show in which order the ranks of a schedule computed what: a place for each end, whatever its seconds."""
    ends = sorted(span.stop_s for trace in traces for span in trace)
    rows = [[_placed(span, ends) for span in trace] for trace in traces]
    picture = measured_picture(simulate(schedule), rows).measured
    with picture_axes(chart_height_in(picture) + 0.5) as axes:
        draw_schedule(axes, picture)
        axes.set_title(title)
        axes.set(xticks=[], xlabel="order of events, not time")
        legend_below(axes, legend_of([picture]))


def _placed(span: Span, ends: Sequence[float]) -> Span:
    """From as many ends as came before it to as many as have come with its own."""
    return replace(span, start_s=float(bisect(ends, span.start_s)), stop_s=float(bisect(ends, span.stop_s)))


# ---------------------------------------------------------------- backward in two halves


@dataclass(frozen=True)
class HalfBox:
    """One box of the graph: its column (a layer), its row, what it says, and its operation."""

    column: int
    row: int
    text: str
    op: str


def half_boxes(num_layers: Size) -> list[HalfBox]:
    """Return for each linear layer of a stage its forward, its I and its W."""
    boxes = []
    for layer in range(num_layers):
        boxes.append(HalfBox(layer, 0, f"z = W{layer} x", "F"))
        boxes.append(HalfBox(layer, 1, f"dx = W{layer}ᵀ dz", "I"))
        boxes.append(HalfBox(layer, 2, f"dW{layer} = dz xᵀ", "W"))
    return boxes


@checked
def show_halves(num_layers: Size = 3) -> None:
    """Show which products of backward the rank before waits for, and which nobody waits for."""
    with picture_axes(2.7) as axes:
        for box in half_boxes(num_layers):
            labelled_box(axes, (box.column, box.row), (0.7, 0.55), OP_COLORS[box.op], box.text, fontsize=10)
        arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.5}
        for layer in range(num_layers + 1):
            axes.annotate("", (layer - 0.02, 0.275), xytext=(layer - 0.3, 0.275), arrowprops=arrow)
            axes.annotate("", (layer - 0.3, 1.275), xytext=(layer - 0.02, 1.275), arrowprops=arrow)
        for layer in range(num_layers):
            axes.annotate("", (layer + 0.35, 2.0), xytext=(layer + 0.35, 1.57), arrowprops=arrow)
        notes = {
            0.275: "x from the\nrank before",
            1.275: "the rank before\nwaits for this",
            2.275: "optimizer,\nat the end",
        }
        for y, text in notes.items():
            axes.text(-0.35, y, text, ha="right", va="center", fontsize=9)
        for y, text in {
            0.275: "forward F",
            1.275: "first half I",
            2.275: "second half W:\nat any time after I",
        }.items():
            axes.text(num_layers + 0.05, y, text, ha="left", va="center", fontsize=9)
        bare(axes, (-1.15, num_layers + 0.95), (2.65, -0.15))
        axes.set_title("Backward has two products per layer; only one of them is waited for")


# ---------------------------------------------------------------- which stages a rank holds


@checked
def placements(pp: Size) -> dict[str, list[tuple[int, ...]]]:
    """Return for each way of placing stages the stages of every rank.

    Source   DualPipe: DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.1: micro-batches enter at both ends
    """
    ways = {"interleaved (v = 2)": loop_placement(pp, 2), "V (ZBV, DualPipeV)": v_placement(pp)}
    placed = {
        name: [tuple(stage for stage, owner in enumerate(owners) if owner == rank) for rank in range(pp)]
        for name, owners in ways.items()
    }
    one = {"1F1B": [(rank,) for rank in range(pp)]}
    return one | placed | {"DualPipe (two directions)": [(rank, pp - 1 - rank) for rank in range(pp)]}


@checked
def show_placements(pp: Size = 4) -> None:
    """Show which stages each rank holds in four families of schedules.

    Raises   ValueError if there are more ranks than the picture has room for
    """
    if not 2 <= pp <= MOST_STAGES:
        raise ValueError(f"pp is {pp}; the picture has room for 2 to {MOST_STAGES} ranks")
    rows = placements(pp)
    with picture_axes(2.9) as axes:
        for row, (name, of_ranks) in enumerate(rows.items()):
            num_stages = 1 + max(stage for stages in of_ranks for stage in stages)
            for rank, stages in enumerate(of_ranks):
                for place, stage in enumerate(stages):
                    color = mix(OKABE_ITO["sky"], "#FFFFFF", 0.75 * stage / (num_stages - 1))
                    width = 0.86 / len(stages)
                    corner = rank + place * width, row
                    labelled_box(axes, corner, (width, 0.62), color, f"stage {stage}", fontsize=9, linewidth=2)
            axes.text(-0.1, row + 0.31, f"{name}\n{num_stages} stages", ha="right", va="center", fontsize=9)
        axes.set_xticks([rank + 0.43 for rank in range(pp)], [f"rank {rank}" for rank in range(pp)])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set(xlim=(-0.05, pp), ylim=(len(rows) - 0.25, -0.15), yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title("Which stages a rank holds; a lighter stage is nearer to the loss")
