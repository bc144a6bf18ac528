"""A step of ZeRO in pictures: what happens to each element on each rank, and the memory of one rank over the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.plots.memory import TimelinePicture, kind_patch, stack_kinds, timeline_picture
from course_lib.plots.palette import KIND_COLORS, KINDS, NEUTRAL_COLOR
from course_lib.plots.style import (
    CENTRED,
    UNITS,
    labelled_box,
    panel_title,
    picture_axes,
    picture_panels,
    show_bytes,
    unit_for,
)
from course_lib.validate import Index, Size, checked

# ---------------------------------------------------------------- elements on ranks, from row to row

ROW_HEIGHT = 1.75


@dataclass(frozen=True)
class FlowRow:
    """One moment of a step: of each rank its elements (None: not held), their kind, and what happens next."""

    label: str
    kind: str
    of_ranks: Sequence[Sequence[float | None]]
    then: str = ""


@dataclass(frozen=True)
class FlowTile:
    """One element on one rank; an empty text is an element that the rank does not hold."""

    rank: int
    x: float
    y: float
    text: str
    kind: str


def rank_left(rank: Index, num_elements: Size) -> float:
    """Return where the tiles of a rank begin."""
    return rank * (num_elements + 1.0)


def flow_tiles(rows: Sequence[FlowRow]) -> list[FlowTile]:
    """Return the tiles of all rows, one for each element of each rank."""
    return [
        FlowTile(
            rank,
            rank_left(rank, len(values)) + column,
            index * ROW_HEIGHT,
            "" if value is None else f"{value:g}",
            row.kind,
        )
        for index, row in enumerate(rows)
        for rank, values in enumerate(row.of_ranks)
        for column, value in enumerate(values)
    ]


def draw_flow(axes, rows: Sequence[FlowRow]) -> None:
    """Draw ranks side by side and moments downwards, with the operation between two moments."""
    tiles, num_elements = flow_tiles(rows), len(rows[0].of_ranks[0])
    for tile in tiles:
        color = KIND_COLORS[tile.kind] if tile.text else "#FFFFFF"
        look = {"fontsize": 9, "edgecolor": NEUTRAL_COLOR, "linewidth": 0.8}
        labelled_box(axes, (tile.x, tile.y), (0.94, 0.9), color, tile.text, **look)
    right = max(tile.x for tile in tiles) + 1
    for index, row in enumerate(rows):
        if row.then:
            axes.text(right / 2, (index + 0.76) * ROW_HEIGHT, f"\u2193 {row.then}", **CENTRED, fontsize=9)
    for rank in range(len(rows[0].of_ranks)):
        axes.text(rank_left(rank, num_elements) + num_elements / 2, -0.4, f"rank {rank}", ha="center", fontsize=10)
    axes.set_yticks([index * ROW_HEIGHT + 0.45 for index in range(len(rows))], [row.label for row in rows])
    axes.set(xlim=(-0.1, right), ylim=((len(rows) - 1) * ROW_HEIGHT + 1, -1), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@checked
def show_flow(rows: Sequence[FlowRow], title: str) -> None:
    """Show what each rank holds of each element, moment after moment."""
    with picture_axes(0.7 + 0.68 * len(rows)) as axes:
        draw_flow(axes, rows)
        axes.set_title(title)


@checked
def stage_1_rows(
    gradients: Sequence[Sequence[float]],
    mean_shards: Sequence[Sequence[float]],
    new_shards: Sequence[Sequence[float]],
    new_weights: Sequence[Sequence[float]],
) -> list[FlowRow]:
    """Return the four moments of a step of stage 1, each value of a shard in its place among all elements.

    Arguments   of each rank: its own gradient, its shards of the mean gradient and of the new weights, all new weights
    """

    def in_place(shards: Sequence[Sequence[float]]) -> list[list[float | None]]:
        held = [[None] * sum(map(len, shards)) for _ in shards]
        for rank, shard in enumerate(shards):
            start = sum(map(len, shards[:rank]))
            held[rank][start : start + len(shard)] = shard
        return held

    return [
        FlowRow("own gradient", "gradients", gradients, "reduce-scatter (mean)"),
        FlowRow("mean gradient", "gradients", in_place(mean_shards), "update of the shard"),
        FlowRow("new weights", "parameters", in_place(new_shards), "all-gather"),
        FlowRow("new weights", "parameters", new_weights),
    ]


# ---------------------------------------------------------------- memory of one rank over a step


@dataclass(frozen=True)
class StepPanel:
    """One panel: the measured step of one stage, its title with the peak, and the top of the common axis."""

    title: str
    picture: TimelinePicture
    limit: float


def step_panels(timelines: Mapping) -> list[StepPanel]:
    """Return a panel for each `Timeline`, all with the axis of the largest."""
    pictures = {name: timeline_picture(timeline) for name, timeline in timelines.items()}
    limit = 1.05 * max(picture.peak_bytes for picture in pictures.values())
    return [StepPanel(f"{name}\npeak {show_bytes(pic.peak_bytes)}", pic, limit) for name, pic in pictures.items()]


@checked
def show_step_memory(timelines: Mapping, title: str) -> None:
    """Show measured steps side by side on one axis of bytes, stacked by kind; B is backward, O the optimizer."""
    panels = step_panels(timelines)
    unit = unit_for(panels[0].limit)
    with picture_panels(1, len(panels), 3.2, title, sharey=True, squeeze=False) as (figure, all_axes):
        for axes, panel in zip(all_axes[0], panels, strict=True):
            stack_kinds(axes, panel.picture, unit)
            axes.set(xlim=(0, panel.picture.xs[-1]), ylim=(0, panel.limit / UNITS[unit]), xticks=[])
            panel_title(axes, panel.title, "center")
            _draw_marks(axes, panel)
        all_axes[0, 0].set_ylabel(f"tensors alive ({unit})")
        drawn = {kind for panel in panels for kind in panel.picture.bytes_by_kind}
        handles = [kind_patch(kind) for kind in KINDS if kind in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncol=len(handles))


def _draw_marks(axes, panel: StepPanel) -> None:
    """A dotted line where backward and where the optimizer begin, with the phase's initial."""
    top = axes.get_ylim()[1]
    for name, start, _ in panel.picture.phases:
        if name in ("backward", "optimizer"):
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
            axes.text(start, 0.97 * top, f"{name[0].upper()} ", va="top", ha="right", fontsize=9)
