"""Pipeline schedules as charts: a row for each rank, a box for each instruction, and the time in which a rank idles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch, Rectangle

from course_lib.palette import OKABE_ITO, mix, text_on
from course_lib.plots.style import FULL_WIDTH_IN, finish, key, keys_below, plain_rows, style
from course_lib.plots.tiles import ranks
from course_lib.plots.timeline import merge, subtract
from course_lib.schedules.instructions import Schedule, read_instruction
from course_lib.schedules.simulator import Simulation
from course_lib.span import Span
from course_lib.validate import Amount, Index, Positive, Size, checked

OP_COLORS = {"F": OKABE_ITO["sky"], "B": OKABE_ITO["vermillion"], "I": OKABE_ITO["orange"], "W": OKABE_ITO["green"]}
_OP_MEANINGS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
IDLE_COLOR = "#EDEDED"
_LIGHTEST = 0.55  # white mixed into the colour of a rank's last chunk
BOX_HEIGHT = 0.84
_ROW_IN = 0.29
DENSE_DPI = 130  # of charts whose numbers are small
CHART_POINTS = 0.9 * FULL_WIDTH_IN * 72  # the width of the axes of a full-width picture
DIGIT, CAPITAL = 0.64, 0.74  # width of a digit and height of a capital, in font sizes


@dataclass(frozen=True)
class Box:
    """One instruction as drawn. `chunk` counts the stages that its rank holds, from the model's first layers on.

    `half`: -1 or 1 for the two of a pair that run at once, in the upper and the lower half of the row; else 0.
    """

    rank: int
    op: str
    micro_batch: int
    chunk: int
    start_s: float
    stop_s: float
    half: int = 0


@dataclass(frozen=True)
class SchedulePicture:
    """A schedule in time: its boxes, and from when to when each rank idles before the last rank is done."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int
    boxes: list[Box]
    idle: list[tuple[int, float, float]]
    end_s: float
    bubble_of_ideal: float
    bubble_of_total: float


def schedule_picture(simulation: Simulation) -> SchedulePicture:
    """The boxes of a simulated schedule, and each rank's idle time until the last one is done."""
    boxes = boxes_of(simulation.schedule, simulation.rows)
    if simulation.costs.pair_s is not None:
        boxes = at_once(
            boxes, [one in simulation.schedule.pairs for row in simulation.schedule.instructions for one in row]
        )
    return picture_of(simulation.schedule, boxes)


def at_once(boxes: list[Box], starts_pair: Sequence[bool]) -> list[Box]:
    """The same boxes, but each that starts a pair lies above the one behind it, both as long as the pair."""
    drawn = list(boxes)
    for index, starts in enumerate(starts_pair):
        if starts:
            first, second = boxes[index : index + 2]
            whole = {"start_s": first.start_s, "stop_s": second.stop_s}
            drawn[index : index + 2] = replace(first, **whole, half=-1), replace(second, **whole, half=1)
    return drawn


def picture_of(schedule: Schedule, boxes: list[Box]) -> SchedulePicture:
    """Boxes with what lies between them: idle time from the first moment to the last, and its two shares."""
    end_s = max(box.stop_s for box in boxes)
    busy = {rank: merge([(b.start_s, b.stop_s) for b in boxes if b.rank == rank]) for rank in range(schedule.pp)}
    idle = [(rank, *part) for rank in busy for part in subtract((0.0, end_s), busy[rank])]
    idle_s, total_s = sum(stop - start for _, start, stop in idle), end_s * schedule.pp
    sizes = (schedule.name, schedule.pp, schedule.num_micro_batches, schedule.v)
    return SchedulePicture(*sizes, boxes, idle, end_s, idle_s / (total_s - idle_s), idle_s / total_s)


def boxes_of(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> list[Box]:
    """Boxes from each rank's spans, simulated or measured; a span's name is the instruction as text, such as F3@1."""
    chunk_of = {stage: c for rank in range(schedule.pp) for c, stage in enumerate(schedule.stages_of_rank(rank))}
    boxes = []
    for rank, row in enumerate(rows):
        for span in row:
            one = read_instruction(span.name, rank, f"rank {rank}")
            boxes.append(Box(rank, one.op, one.micro_batch, chunk_of[one.stage], span.start_s, span.stop_s))
    return boxes


def chart_title(picture: SchedulePicture) -> str:
    """What the chart shows, in one sentence: the bubble by both definitions."""
    ranks = f"{picture.num_ranks} rank{'s' if picture.num_ranks > 1 else ''}"
    micro_batches = f"{picture.num_micro_batches} micro-batch{'es' if picture.num_micro_batches > 1 else ''}"
    return (
        f"{picture.name}, {ranks}, {micro_batches}: "
        f"bubble {percent(picture.bubble_of_ideal)} of ideal time, {percent(picture.bubble_of_total)} of total"
    )


def percent(share: Amount) -> str:
    """A share as a reader wants it: 27.3 %, 75 %, 0 %."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def shade(op: str, chunk: Index, num_chunks: Size) -> str:
    """The colour of an operation, lighter for each later chunk of the rank."""
    return mix(OP_COLORS[op], "#FFFFFF", _LIGHTEST * chunk / max(num_chunks - 1, 1))


# ---------------------------------------------------------------- what is written in the boxes


@dataclass(frozen=True)
class Label:
    """How the boxes of one operation are numbered: with its letter or without, upright or turned; size in points."""

    letter: bool
    turned: bool
    size: float


def labels_of(picture: SchedulePicture, end_s: Amount | None = None, height: Positive = BOX_HEIGHT) -> dict[str, Label]:
    """The largest readable label for the narrowest box of each operation; an operation without room has none.

    All operations have their letters, or none has: a lone number is explained by the legend's colours.
    """
    points_per_s = CHART_POINTS / (end_s or picture.end_s)
    digits = len(str(picture.num_micro_batches - 1))
    widths = {
        op: points_per_s * min(box.stop_s - box.start_s for box in picture.boxes if box.op == op)
        for op in OP_COLORS
        if any(box.op == op for box in picture.boxes)
    }
    with_letters = min(widths.values()) >= (digits + 1) * DIGIT * 6.5 + 1.2
    labels = {}
    for op, width in widths.items():
        characters = digits + with_letters
        across = min((width - 1.2) / (DIGIT * characters), 8.0)
        turned = min((width - 0.9) / CAPITAL, _ROW_IN * 72 * height / (DIGIT * characters + 0.4), 7.0)
        if across >= 5.5:
            labels[op] = Label(with_letters, False, across)
        elif turned >= 4.5:
            labels[op] = Label(with_letters, True, turned)
    upright = min((label.size for label in labels.values() if not label.turned), default=0.0)
    return {op: label if label.turned else replace(label, size=upright) for op, label in labels.items()}


# ---------------------------------------------------------------- one chart


def draw_schedule(
    axes, picture: SchedulePicture, end_s: Amount | None = None, scale: Positive = 1.0, height: Positive = BOX_HEIGHT
) -> None:
    """A row for each rank, idle time grey behind its boxes. `end_s`: where the time axis ends; `scale`: its unit."""
    end_s = end_s or picture.end_s
    draw_boxes(axes, picture.idle, scale, BOX_HEIGHT, facecolor=IDLE_COLOR, linewidth=0, zorder=0.3)
    for op, chunk, half in sorted({(box.op, box.chunk, box.half) for box in picture.boxes}):
        same = [b for b in picture.boxes if (b.op, b.chunk, b.half) == (op, chunk, half)]
        spans = [(b.rank + half * height / 4, b.start_s, b.stop_s) for b in same]
        narrowest = min(stop - start for _, start, stop in spans) / end_s * CHART_POINTS
        look = {"facecolor": shade(op, chunk, picture.num_chunks), "linewidth": min(0.6, narrowest / 8)}
        draw_boxes(axes, spans, scale, height / 2 if half else height, **look)
    _number_boxes(axes, picture, labels_of(picture, end_s, height), scale, height)
    plain_rows(axes, ranks(picture.num_ranks), -0.5, -0.5)
    axes.set_xlim(0, end_s / scale)
    axes.spines["left"].set_visible(False)


def draw_boxes(axes, spans: Sequence[tuple[float, float, float]], scale: Positive, height: Positive, **look) -> None:
    """Many boxes, (row, start, stop), as one collection: a chart has up to two thousand."""
    boxes = [(a / scale, b / scale, row - height / 2, row + height / 2) for row, a, b in spans]
    corners = [[(left, top), (right, top), (right, bottom), (left, bottom)] for left, right, top, bottom in boxes]
    axes.add_collection(PolyCollection(corners, **({"edgecolor": "white"} | look)), autolim=False)


def _number_boxes(axes, picture: SchedulePicture, labels: Mapping[str, Label], scale: float, height: float) -> None:
    for box in picture.boxes:
        label = labels.get(box.op)
        if label is None or (label.turned and box.half):
            continue
        text = axes.text(
            (box.start_s + box.stop_s) / 2 / scale,
            box.rank + box.half * height / 4,
            f"{box.op if label.letter else ''}{box.micro_batch}",
            ha="center",
            va="center_baseline" if not label.turned else "center",
            fontsize=label.size,
            rotation=90 if label.turned else 0,
            color=text_on(shade(box.op, box.chunk, picture.num_chunks)),
        )
        text.set_in_layout(False)  # the layout need not measure a thousand numbers that lie inside the axes


def dpi_of(pictures: Sequence[SchedulePicture], end_s: Amount) -> float | None:
    """More dots where numbers are small or left out, the style's own otherwise."""
    for picture in pictures:
        labels = labels_of(picture, end_s)
        if len(labels) < len({box.op for box in picture.boxes}) or min(label.size for label in labels.values()) < 6.5:
            return DENSE_DPI
    return None


def legend_of(pictures: Sequence[SchedulePicture]) -> list[Patch]:
    """What the colours and shades mean, as far as these pictures use them."""
    used = {box.op for picture in pictures for box in picture.boxes}
    handles = [key(color, f"{op} {_OP_MEANINGS[op]}") for op, color in OP_COLORS.items() if op in used]
    handles += [key(IDLE_COLOR, "idle")] * any(picture.idle for picture in pictures)
    return handles + [key(shade("F", 1, 2), "lighter: later layers")] * any(p.num_chunks > 1 for p in pictures)


def chart_height_in(picture: SchedulePicture) -> float:
    """The height of one chart with its title and its time axis."""
    return 0.62 + _ROW_IN * picture.num_ranks


def draw_chart(axes, picture: SchedulePicture, title: str | None = None, end_s: Amount | None = None) -> None:
    """One chart by itself, with title, time axis and legend."""
    draw_schedule(axes, picture, end_s)
    axes.set_title(chart_title(picture) if title is None else title, fontsize=9.5)
    axes.set_xlabel("simulated time")
    legend_below(axes, legend_of([picture]))


def legend_below(axes, handles: Sequence[Patch]) -> None:
    """Put a chart's legend below its time axis."""
    keys_below(axes, handles, 4.1, handlelength=1.2, columnspacing=1.2, handletextpad=0.5, fontsize=8.5)


@checked
def show_schedule(simulation: Simulation) -> None:
    """Show a simulated schedule as a chart, with its bubble in both definitions as the title."""
    show_schedules([simulation])


@checked
def show_schedules(simulations: Sequence[Simulation]) -> None:
    """Show several simulated schedules one above the other, on one time axis; each says its bubbles.

    Raises   ValueError if there is none
    """
    if not simulations:
        raise ValueError("there is no simulation to draw; give at least one simulate(schedule, costs)")
    pictures = [schedule_picture(simulation) for simulation in simulations]
    end_s = max(picture.end_s for picture in pictures)
    heights = [chart_height_in(picture) for picture in pictures]
    with style():
        size = {"figsize": (FULL_WIDTH_IN, sum(heights) + 0.5), "dpi": dpi_of(pictures, end_s)}
        figure, panels = plt.subplots(len(pictures), 1, squeeze=False, height_ratios=heights, **size)
        for axes, picture in zip(panels[:, 0], pictures, strict=True):
            draw_schedule(axes, picture, end_s)
            axes.set_title(chart_title(picture), fontsize=9.5)
        panels[-1, 0].set_xlabel("simulated time")
        legend_below(panels[-1, 0], legend_of(pictures))
        finish(figure)


def warm_ups(simulation: Simulation) -> list[int]:
    """Count the forwards of each rank before its first backward: its warm-up, and the first of the steady state."""
    ops = ["".join(one.op for one in row) for row in simulation.schedule.instructions]
    return [len(row) - len(row.lstrip("F")) for row in ops]


@checked
def show_warm_up(simulation: Simulation) -> None:
    """Show a chart until its last rank has done its first backward, the forwards before each first backward framed."""
    counts, rows = warm_ups(simulation), simulation.times
    firsts_s = [row[count] for count, row in zip(counts, rows, strict=True)]
    end_s = max(stop for _, stop in firsts_s)
    picture = schedule_picture(simulation)
    shown = replace(picture, boxes=[box for box in picture.boxes if box.stop_s <= end_s])
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, chart_height_in(shown) + 0.5))
        draw_schedule(axes, shown, end_s)
        for rank, (count, row) in enumerate(zip(counts, rows, strict=True)):
            start_s, stop_s = row[0][0], row[count - 1][1]
            frame = Rectangle((start_s, rank - 0.46), stop_s - start_s, 0.92, fill=False, linewidth=1.4, zorder=5)
            axes.add_patch(frame)
        axes.set_title(f"{shown.name}: forwards before the first backward, by rank: {', '.join(map(str, counts))}")
        axes.set_xlabel("simulated time")
        legend_below(axes, legend_of([shown]))
        finish(figure)
