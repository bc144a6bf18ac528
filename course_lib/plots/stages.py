"""What each rank of a pipeline holds: which layers, and how many micro-batches' activations at each moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from course_lib.plots.palette import KIND_COLORS, KIND_HATCHES, NEUTRAL_COLOR, RANK_COLORS, mix, text_on
from course_lib.plots.style import (
    CENTRED,
    FULL_WIDTH_IN,
    finish,
    ground,
    labelled_box,
    name_ranks,
    picture_axes,
    style,
    three_digits,
)
from course_lib.schedules.simulator import Simulation
from course_lib.validate import Amount, checked

ALIVE_COLOR = KIND_COLORS["activations"]
WAITING_COLOR = mix(ALIVE_COLOR, "#FFFFFF", 0.65)
WAITING_HATCH = "\\\\\\\\"
MOST_RANKS = 8
MOST_NUMBERED = 32  # layers whose numbers fit into their boxes

# ---------------------------------------------------------------- alive over time

Steps = list[tuple[float, float]]


@dataclass(frozen=True)
class LivePicture:
    """For each rank (second, count) at each change; a count of 1 is one micro-batch through all of a rank's layers.

    `alive`: kept from the forward to the gradient of the input. `waiting`: after that, until the weights' gradients.
    """

    alive: list[Steps]
    waiting: list[Steps]
    peak_alive: list[float]
    peak_waiting: list[float]
    end_s: float


@checked
def live_picture(simulation: Simulation) -> LivePicture:
    """The simulation's counts, a stage of v counting 1 / v."""
    v = simulation.schedule.v
    scaled = [[[(at, n / v) for at, n in row] for row in counts] for counts in (simulation.live, simulation.waiting)]
    peaks = [[max((n for _, n in row), default=0.0) for row in rows] for rows in scaled]
    return LivePicture(*scaled, *peaks, simulation.makespan_s)


def live_title(picture: LivePicture) -> str:
    """The largest peak and the smallest."""
    most, least = max(picture.peak_alive), min(picture.peak_alive)
    most_at, least_at = picture.peak_alive.index(most), picture.peak_alive.index(least)
    if most == least:
        return f"every rank has up to {short(most)} micro-batches in flight"
    return f"rank {most_at} has up to {short(most)} micro-batches in flight, rank {least_at} at most {short(least)}"


def short(value: float) -> str:
    """Three digits, without zeros behind the point: 4, 4.5, 12.3."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def draw_live(axes, picture: LivePicture, end_s: Amount | None = None) -> None:
    """A strip for each rank: how much it keeps, with its peak at the right."""
    top = 1.1 * max(peaks_together(picture))
    for rank, (alive, waiting) in enumerate(zip(picture.alive, picture.waiting, strict=True)):
        floor, scale = rank + 0.45, -0.9 / top
        times, low, high = stacked(alive, waiting, picture.end_s)
        low, high = ([floor + scale * count for count in counts] for counts in (low, high))
        axes.fill_between(times, low, floor, step="post", facecolor=ALIVE_COLOR, linewidth=0)
        if waiting:
            look = {"facecolor": WAITING_COLOR, "edgecolor": ALIVE_COLOR, "hatch": WAITING_HATCH, "linewidth": 0}
            axes.fill_between(times, high, low, step="post", **look)
        axes.axhline(floor, color=NEUTRAL_COLOR, linewidth=0.8)
        said = f" peak {short(picture.peak_alive[rank])}"
        said += f", waiting {short(picture.peak_waiting[rank])}" if any(picture.peak_waiting) else ""
        axes.annotate(said, (1, rank), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ranks = len(picture.alive)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, end_s or picture.end_s), ylim=(ranks - 0.5, -0.5), xlabel="simulated time")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.0}
    axes.legend(handles=live_legend(picture), ncol=2, **below)


def stacked(alive: Steps, waiting: Steps, end_s: Amount) -> tuple[list[float], list[float], list[float]]:
    """Times of all changes, and from each of them on what is alive, and alive and waiting together."""
    times, low, high = [0.0], [0.0], [0.0]
    counts = [0.0, 0.0]
    changes = [(at, kind, count) for kind, steps in enumerate((alive, waiting)) for at, count in steps]
    for at, kind, count in sorted(changes, key=lambda change: change[0]):
        counts[kind] = count
        if at == times[-1]:
            low[-1], high[-1] = counts[0], sum(counts)
        else:
            times, low, high = [*times, at], [*low, counts[0]], [*high, sum(counts)]
    return [*times, end_s], [*low, low[-1]], [*high, high[-1]]


@checked
def peaks_together(picture: LivePicture) -> list[float]:
    """Most that each rank keeps at one time, alive and waiting together: less than the sum of the two peaks."""
    return [max(stacked(*row, picture.end_s)[2]) for row in zip(picture.alive, picture.waiting, strict=True)]


def live_legend(picture: LivePicture) -> list[Patch]:
    handles = [Patch(facecolor=ALIVE_COLOR, label="in flight: from F to B (or I)")]
    if any(picture.peak_waiting):
        look = {"facecolor": WAITING_COLOR, "hatch": WAITING_HATCH, "edgecolor": ALIVE_COLOR, "linewidth": 0}
        handles.append(Patch(**look, label="waiting for weight gradients"))
    return handles


def live_height_in(picture: LivePicture) -> float:
    """The height of the strips with title, time axis and legend."""
    return 1.15 + 0.34 * len(picture.alive)


@checked
def show_live(simulation: Simulation) -> None:
    """Show how many micro-batches' activations each rank keeps over time."""
    picture = live_picture(simulation)
    with picture_axes(live_height_in(picture)) as axes:
        draw_live(axes, picture)
        axes.set_title(f"{simulation.schedule.name}: {live_title(picture)}", fontsize=10)


# ---------------------------------------------------------------- peaks, rank by rank


@checked
def peaks_of(simulation: Simulation) -> list[float]:
    """Most micro-batches alive at once on each rank; 1 is one micro-batch through all of the rank's layers."""
    return live_picture(simulation).peak_alive


# ---------------------------------------------------------------- which layers where


@dataclass(frozen=True)
class StageBlock:
    """One stage: its rank, its layers from `first` up to before `stop`, and whether it has the embedding, the head."""

    stage: int
    rank: int
    first: int
    stop: int
    embedding: bool
    head: bool


def stage_blocks(layers_of_stage: Sequence[int], rank_of_stage: Sequence[int] | None = None) -> list[StageBlock]:
    """The stages along a model, from how many layers each has; without `rank_of_stage` stage s is on rank s.

    Raises   ValueError if there is no stage, a negative number of layers, or not one rank for each stage
    """
    rank_of_stage = range(len(layers_of_stage)) if rank_of_stage is None else rank_of_stage
    if not layers_of_stage or len(rank_of_stage) != len(layers_of_stage) or min(layers_of_stage) < 0:
        raise ValueError(
            f"got {len(layers_of_stage)} stages with layers {list(layers_of_stage)} and {len(rank_of_stage)} ranks; "
            "give the layers of each stage, 0 or more, and the rank of each"
        )
    last, first, blocks = len(layers_of_stage) - 1, 0, []
    for stage, (layers, rank) in enumerate(zip(layers_of_stage, rank_of_stage, strict=True)):
        blocks.append(StageBlock(stage, rank, first, first + layers, stage == 0, stage == last))
        first += layers
    return blocks


def stages_title(blocks: Sequence[StageBlock]) -> str:
    """How many layers, stages and ranks; and whether the first rank has the last stage too."""
    ranks = 1 + max(block.rank for block in blocks)
    said = f"{blocks[-1].stop} layers in {len(blocks)} stages on {ranks} ranks"
    if ranks == 1:
        return said
    ends = "rank 0 has both ends of the model" if blocks[-1].rank == 0 else "embedding on the first, head on the last"
    return f"{said}: {ends}"


def draw_stages(axes, blocks: Sequence[StageBlock]) -> None:
    """The model from left to right, each layer in the row of its rank; embedding and head at its ends."""
    layers = blocks[-1].stop
    ranks = 1 + max(block.rank for block in blocks)
    ends = max(1.0, 0.085 * layers)  # the width of embedding and head, which have names to write
    numbered = layers <= MOST_NUMBERED
    stage_word = "stage " if all(b.stop - b.first >= 0.085 * layers for b in blocks) else "s"
    for block in blocks:
        color = RANK_COLORS[block.rank % len(RANK_COLORS)]
        _stage_frame(axes, block, ends, f"{stage_word}{block.stage}")
        for layer in range(block.first, block.stop):
            _layer_box(axes, ends + layer, 1.0, block.rank, color, str(layer) if numbered else "", layers)
        if not numbered and block.stop > block.first:
            _write_range(axes, block, ends, color)
        if block.embedding:
            _layer_box(axes, 0.0, ends, block.rank, color, "embed", layers, hatch="....")
        if block.head:
            _layer_box(axes, ends + layers, ends, block.rank, color, "head", layers, hatch="....")
    name_ranks(axes, ranks)
    axes.set(xlim=(-0.01 * layers, layers * 1.01 + 2 * ends), ylim=(ranks + 0.02, -0.02), xticks=[])
    axes.set_xlabel("the model from input to output, layers numbered from 0; in frames the stages")


def _stage_frame(axes, block: StageBlock, ends: float, label: str) -> None:
    start = ends + block.first - ends * block.embedding
    stop = ends + block.stop + ends * block.head
    frame = {"facecolor": "#F6F6F6", "edgecolor": "#777777", "linewidth": 0.8}
    axes.add_patch(Rectangle((start, block.rank + 0.03), stop - start, 0.94, **frame))
    axes.text((start + stop) / 2, block.rank + 0.19, label, **CENTRED, fontsize=8)


def _write_range(axes, block: StageBlock, ends: float, color: str) -> None:
    """First and last layer of a stage, where single layers have no room for their numbers."""
    label = f"{block.first}–{block.stop - 1}" if block.stop - block.first > 1 else str(block.first)
    text = {"fontsize": 7.5, "color": text_on(color), "bbox": ground(color, 0.8)} | CENTRED
    axes.text(ends + (block.first + block.stop) / 2, block.rank + 0.63, label, **text)


def _layer_box(axes, x: float, width: float, rank: int, color: str, label: str, layers: int, hatch: str = "") -> None:
    look = {"hatch": hatch, "linewidth": 1.0 if layers <= 48 else 0.4}
    labelled_box(axes, (x, rank + 0.36), (width, 0.54), color, label, fontsize=7.5, **look)


def draw_held(axes, bytes_by_kind: Sequence[Mapping[str, float]], unit: str, unit_size: float) -> None:
    """What each rank holds, by kind, as bars beside its row."""
    kinds = [kind for kind in KIND_COLORS if any(held.get(kind) for held in bytes_by_kind)]
    longest = max(sum(held.values()) for held in bytes_by_kind) / unit_size
    for rank, held in enumerate(bytes_by_kind):
        left = 0.0
        for kind in kinds:
            width = held.get(kind, 0.0) / unit_size
            look = {"color": KIND_COLORS[kind], "hatch": KIND_HATCHES[kind], "edgecolor": "white", "linewidth": 0.6}
            axes.barh(rank + 0.5, width, left=left, height=0.54, **look)
            left += width
        axes.text(left, rank + 0.5, f" {three_digits(left)}", va="center", fontsize=9)
    axes.set_yticks([])
    axes.set(xlim=(0, longest * 1.25), ylim=(len(bytes_by_kind) + 0.02, -0.02), xlabel=unit)


@checked
def show_stages_of_model(
    layers_of_stage: Sequence[int],
    rank_of_stage: Sequence[int] | None = None,
    parameters_of_rank: Sequence[float] | None = None,
) -> None:
    """Show which layers are where, with embedding and head; beside it the parameters of each rank, if given."""
    blocks = stage_blocks(layers_of_stage, rank_of_stage)
    ranks = 1 + max(block.rank for block in blocks)
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks; the picture has room for {MOST_RANKS}, the pattern is the same")
    with style():
        columns = 1 if parameters_of_rank is None else 2
        ratios = (4, 1)[:columns]
        size = (FULL_WIDTH_IN, 0.95 + 0.44 * ranks)
        figure, panels = plt.subplots(1, columns, figsize=size, squeeze=False, width_ratios=ratios)
        draw_stages(panels[0, 0], blocks)
        if parameters_of_rank is not None:
            held = [{"parameters": parameters} for parameters in parameters_of_rank]
            draw_held(panels[0, 1], held, "parameters (billions)", 1e9)
        finish(figure, stages_title(blocks))
