"""Values moving through a collective: ranks as rows, pieces as cells that show their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from course_lib.plots.palette import NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.style import CENTRED, labelled_box, panel_title, picture_panels
from course_lib.validate import checked

MIXED = -1  # the origin of a value that no single rank had before: a sum, a mean, a maximum
MIXED_COLOR = "#333333"


@dataclass(frozen=True)
class Cell:
    """One number on one rank, and the rank that it came from (MIXED: several, None: unknown)."""

    rank: int
    column: int
    value: float
    origin: int | None


def rows_of(values: Iterable) -> list[list]:
    """One list of numbers per rank, from tensors, arrays, lists or None (nothing there)."""
    rows = []
    for row in values:
        row = row.tolist() if hasattr(row, "tolist") else row
        rows.append([] if row is None else list(row) if isinstance(row, (list, tuple)) else [row])
    return rows


def origin_of(value: float, before: Sequence[Sequence]) -> int | None:
    """The only rank that held the value before; MIXED if none did; None if several did, so that nobody can tell."""
    holders = [rank for rank, row in enumerate(before) if value in row]
    if not holders:
        return MIXED
    return holders[0] if len(holders) == 1 else None


def collective_cells(before: Iterable, after: Iterable) -> tuple[list[Cell], list[Cell]]:
    """The cells before and after a collective, each with the rank that its value came from.

    Give every number of `before` a value of its own, and the picture shows where each one went.
    """
    before, after = rows_of(before), rows_of(after)
    if len(before) != len(after):
        raise ValueError(
            f"before has {len(before)} ranks and after has {len(after)}; give one row for each rank in both"
        )
    left = [Cell(r, c, value, r) for r, row in enumerate(before) for c, value in enumerate(row)]
    right = [Cell(r, c, value, origin_of(value, before)) for r, row in enumerate(after) for c, value in enumerate(row)]
    return left, right


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.2g}"


def _cell_color(origin: int | None) -> str:
    if origin is None:
        return NEUTRAL_COLOR
    return MIXED_COLOR if origin == MIXED else mix(RANK_COLORS[origin % len(RANK_COLORS)], "#FFFFFF", 0.25)


def _draw_cell(axes, rank: int, column: int, text: str, color: str, **outline) -> None:
    labelled_box(axes, (column, rank), (1, 1), color, text, fontsize=9, **({"linewidth": 1.5} | outline))


def _grid(axes, columns: int, ranks: int, title: str, label_ranks: bool = True) -> None:
    axes.set(xlim=(-0.05, columns + 0.05), ylim=(ranks + 0.05, -0.05), xticks=[], aspect="equal")
    axes.set_yticks([r + 0.5 for r in range(ranks)], [f"rank {r}" for r in range(ranks)] if label_ranks else [])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    panel_title(axes, title, "center")
    for rank in range(ranks):
        axes.add_patch(
            Rectangle((0, rank), columns, 1, facecolor="none", edgecolor=NEUTRAL_COLOR, linestyle=":", linewidth=0.8)
        )


def _origin_legend(cells: Sequence[Cell]) -> str:
    dark = any(cell.origin == MIXED for cell in cells)
    return "one colour for each rank's own numbers" + ("; dark: computed from several ranks" if dark else "")


# ---------------------------------------------------------------- several collectives, one pair of grids each


def collective_pairs(ranks: Sequence[Mapping]) -> dict[str, tuple[list[Cell], list[Cell]]]:
    """Return the cells of each collective before and after; `ranks[rank][name]` is (before, after) on that rank."""
    if not ranks or any(of_rank.keys() != ranks[0].keys() for of_rank in ranks):
        raise ValueError("ranks have different collectives; give every rank the same names, and at least one rank")
    return {
        name: collective_cells([of_rank[name][0] for of_rank in ranks], [of_rank[name][1] for of_rank in ranks])
        for name in ranks[0]
    }


@checked
def show_collectives(ranks: Sequence[Mapping], title: str) -> None:
    """Show collectives side by side, each as tiles before and after: `ranks[rank][name]` is (before, after)."""
    pairs, columns = collective_pairs(ranks), 2
    rows = -(-len(pairs) // columns)
    with picture_panels(rows, columns, rows * (0.28 * len(ranks) + 0.52) + 0.6, title, squeeze=False) as (
        figure,
        panels,
    ):
        for axes in panels.flat[len(pairs) :]:
            axes.set_axis_off()
        for axes, (name, (before, after)) in zip(panels.flat, pairs.items(), strict=False):
            _draw_pair(axes, name, before, after, len(ranks))
        legend = _origin_legend([cell for _, after in pairs.values() for cell in after])
        figure.supxlabel(legend, x=0.01, ha="left", fontsize=9)


def _draw_pair(axes, name: str, before: list[Cell], after: list[Cell], ranks: int) -> None:
    """Draw what ranks have before on the left and after on the right, in one panel."""
    columns = 4
    right = columns + 1.5
    for left, cells in ((0, before), (right, after)):
        width = max((cell.column + 1 for cell in cells), default=1)
        for rank in range(ranks):
            outline = {"edgecolor": NEUTRAL_COLOR, "linestyle": ":", "linewidth": 0.8}
            axes.add_patch(Rectangle((left, rank), width, 1, facecolor="none", **outline))
        for cell in cells:
            _draw_cell(axes, cell.rank, left + cell.column, _number(cell.value), _cell_color(cell.origin))
    axes.text(columns + 0.75, ranks / 2, "\u2192", **CENTRED, fontsize=14)
    axes.set(xlim=(-0.05, right + columns + 0.8), ylim=(ranks + 0.05, -0.05), xticks=[])
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(name, fontsize=10)


# ---------------------------------------------------------------- the ring, step by step


@dataclass(frozen=True)
class RingStep:
    """What every rank holds after one step: values and how many ranks are summed in each, by [rank][piece].

    `received[rank]` is the piece that has just come from the left neighbour, None at the start.
    """

    label: str
    values: list[list[float]]
    summed: list[list[int]]
    received: list[int | None]


@checked
def ring_all_reduce_steps(values: Iterable) -> list[RingStep]:
    """Every state of a ring all-reduce of G ranks with G pieces each: the start, then 2 (G - 1) steps.

    Rank r sends piece r - 1 - step first, to r + 1, so that it ends up responsible for piece r.

    Raises   ValueError if the values are not G rows of G numbers
    """
    values = rows_of(values)
    n = len(values)
    if any(len(row) != n for row in values):
        raise ValueError(
            f"{n} ranks need {n} pieces each, got rows of {[len(row) for row in values]}; cut each row into {n}"
        )
    summed = [[1] * n for _ in range(n)]
    steps = [RingStep("start", _copy(values), _copy(summed), [None] * n)]
    for step in range(2 * (n - 1)):
        reducing = step < n - 1
        received = [(rank - 2 - step) % n if reducing else (rank - 1 - (step - (n - 1))) % n for rank in range(n)]
        sent = [(values[rank - 1][piece], summed[rank - 1][piece]) for rank, piece in enumerate(received)]
        for rank, piece in enumerate(received):
            value, count = sent[rank]
            values[rank][piece] = values[rank][piece] + value if reducing else value
            summed[rank][piece] = summed[rank][piece] + count if reducing else count
        trip = "reduce-scatter" if reducing else "all-gather"
        steps.append(RingStep(f"{trip}, s = {step % (n - 1)}", _copy(values), _copy(summed), received))
    return steps


def _copy(rows: list[list]) -> list[list]:
    return [list(row) for row in rows]


def _draw_ring_step(axes, step: RingStep, label_ranks: bool) -> None:
    n = len(step.values)
    _grid(axes, n, n, step.label, label_ranks)
    for rank in range(n):
        for piece in range(n):
            count = step.summed[rank][piece]
            color = (
                OKABE_ITO["green"]
                if count == n
                else mix(OKABE_ITO["sky"], "#FFFFFF", 0.85 - 0.85 * (count - 1) / max(n - 1, 1))
            )
            _draw_cell(axes, rank, piece, _number(step.values[rank][piece]), color)
    for rank, piece in enumerate(step.received):
        if piece is not None:
            axes.add_patch(Rectangle((piece, rank), 1, 1, facecolor="none", edgecolor="black", linewidth=2.2, zorder=3))


@checked
def show_ring_all_reduce(
    values: Iterable, title: str = "Ring all-reduce: every piece is summed in the first phase, copied in the second"
) -> None:
    """Show a ring all-reduce of G ranks with G numbers each, step by step: `values[rank][piece]` before it."""
    steps = ring_all_reduce_steps(values)
    columns = min(len(steps), 4)
    rows = -(-len(steps) // columns)
    with picture_panels(rows, columns, 2.05 * rows + 0.75, title, squeeze=False) as (figure, panels):
        for index, axes in enumerate(panels.flat):
            if index < len(steps):
                _draw_ring_step(axes, steps[index], label_ranks=index % columns == 0)
            else:
                axes.set_axis_off()
        figure.supxlabel(
            "outlined: just came from the left neighbour · bluer: more ranks summed · green: the sum of all", fontsize=9
        )
