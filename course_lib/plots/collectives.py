"""Ranks that talk: values moving through collectives, and a ring all-reduce step by step."""

from collections.abc import Iterable, Mapping, Sequence

from course_lib.palette import NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.panels.ring import RingState, ring_states
from course_lib.plots.style import panel_title, picture_panels, write
from course_lib.plots.tiles import EMPTY, OUTLINED, Tile, TileRow, draw_tiles, ranks
from course_lib.validate import checked

MIXED = -1  # the origin of a value that no single rank had before: a sum, a mean, a maximum
_MIXED_COLOR = "#333333"


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


def _color_of(origin: int | None) -> str:
    if origin is None:
        return NEUTRAL_COLOR
    return _MIXED_COLOR if origin == MIXED else mix(RANK_COLORS[origin % len(RANK_COLORS)], "#FFFFFF", 0.25)


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.2g}"


def _filled(row: Sequence[float], origins: Sequence[int | None], width: int) -> list[Tile]:
    tiles = [Tile(_number(value), _color_of(origin)) for value, origin in zip(row, origins, strict=True)]
    return tiles + [EMPTY] * (width - len(tiles))


def collective_rows(before: Iterable, after: Iterable) -> list[TileRow]:
    """Return tiles before and after a collective, a row a rank, each in the colour of the rank that it came from.

    Give every number of `before` a value of its own, and the picture shows where each one went.
    Raises   ValueError unless both have as many ranks
    """
    before, after = rows_of(before), rows_of(after)
    if (old := len(before)) != (new := len(after)):
        raise ValueError(f"before has {old} ranks and after has {new}; give one row for each rank in both")
    left, right = (max([1, *map(len, rows)]) for rows in (before, after))
    rows = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        origins = [origin_of(value, before) for value in new]
        rows.append([*_filled(old, [rank] * len(old), left), 5.5 - left, *_filled(new, origins, right)])
    return rows


@checked
def show_collectives(of_ranks: Sequence[Mapping], title: str) -> None:
    """Show collectives side by side, each as tiles before and after: `of_ranks[rank][name]` is (before, after)."""
    if not of_ranks or any(of_rank.keys() != of_ranks[0].keys() for of_rank in of_ranks):
        raise ValueError("ranks have different collectives; give every rank the same names, and at least one rank")
    count, lines = len(of_ranks), -(-len(of_ranks[0]) // 2)
    height = lines * (0.28 * count + 0.52) + 0.6
    with picture_panels(lines, 2, height, title, squeeze=False) as (figure, panels):
        for axes in panels.flat[len(of_ranks[0]) :]:
            axes.set_axis_off()
        for axes, name in zip(panels.flat, of_ranks[0], strict=False):
            rows = collective_rows(*zip(*(of_rank[name] for of_rank in of_ranks), strict=True))
            draw_tiles(axes, rows, ranks(count), fontsize=9)
            write(axes, 4.75, count / 2, "\u2192", fontsize=14)
            axes.set(xlim=(-0.05, 10.3))
            axes.tick_params(labelsize=8)
            axes.set_title(name, fontsize=10)
        said = "one colour for each rank's own numbers; dark: computed from several ranks"
        figure.supxlabel(said, x=0.01, ha="left", fontsize=9)


def _ring_tiles(state: RingState) -> list[list[Tile]]:
    """Return a row a rank, the bluer the more is summed, with the piece outlined that has just come."""
    rows = []
    for *row, came in zip(state.values, state.summed, state.received, strict=True):
        rows.append([])
        for piece, (value, summed) in enumerate(zip(*row, strict=True)):
            share = (summed - 1) / max(len(state.values) - 1, 1)
            color = OKABE_ITO["green"] if share == 1 else mix(OKABE_ITO["sky"], "#FFFFFF", 0.85 - 0.85 * share)
            rows[-1].append(Tile(_number(value), color, look=OUTLINED if came == piece else {}))
    return rows


@checked
def show_ring_all_reduce(values: Iterable, title: str) -> None:
    """Show a ring all-reduce of G ranks with G numbers each, step by step: `values[rank][piece]` before it."""
    steps = ring_states(rows_of(values))
    columns = min(len(steps), 4)
    lines = -(-len(steps) // columns)
    with picture_panels(lines, columns, 2.05 * lines + 0.75, title, squeeze=False) as (figure, panels):
        for axes in panels.flat[len(steps) :]:
            axes.set_axis_off()
        for index, (axes, step) in enumerate(zip(panels.flat, steps, strict=False)):
            names = ranks(len(step.values)) if index % columns == 0 else ()
            draw_tiles(axes, _ring_tiles(step), names, fontsize=9)
            axes.set_aspect("equal")
            panel_title(axes, step.label, "center")
        said = "outlined: just came from the left neighbour · bluer: more ranks summed · green: the sum of all"
        figure.supxlabel(said, fontsize=9)
