"""The form of what ranks hold: rows of tiles, each with a word or a number; numbers as squares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from course_lib.palette import KIND_COLORS, NEUTRAL_COLOR, channels
from course_lib.plots.style import FULL_WIDTH_IN, key, labelled_box, picture_axes, write
from course_lib.validate import Size, checked

ABSENT_COLOR = "#F4F4F4"


@dataclass(frozen=True)
class Tile:
    """One tile, so many columns wide; look as Rectangle has it."""

    text: str = ""
    color: str = "#FFFFFF"
    width: float = 1
    look: Mapping = field(default_factory=dict)


EMPTY = Tile(look={"edgecolor": NEUTRAL_COLOR, "linestyle": ":", "linewidth": 0.8})  # a place where nothing is
OUTLINED = {"edgecolor": "black", "linewidth": 2.2, "zorder": 3}

TileRow = Sequence[Tile | float]  # from left to right; a number is so much room


def ranks(count: int) -> list[str]:
    """Return the names of so many rows."""
    return [f"rank {rank}" for rank in range(count)]


def draw_tiles(axes, rows: Sequence[TileRow], names: Sequence[str] = (), pitch=1.0, height=1.0, fontsize=8.5) -> None:
    """Draw rows downwards, `pitch` from one to the next, names at the left; nothing else is left of the axes."""
    right = 0.0
    for index, row in enumerate(rows):
        x = 0.0
        for tile in row:
            if isinstance(tile, Tile):
                look = {"linewidth": 1.5} | tile.look
                labelled_box(axes, (x, index * pitch), (tile.width, height), tile.color, tile.text, fontsize, **look)
            x += tile.width if isinstance(tile, Tile) else tile
        right = max(right, x)
    middles = [index * pitch + height / 2 for index in range(len(names))]
    axes.set_yticks(middles, names)
    bottom = (len(rows) - 1) * pitch + height
    axes.set(xlim=(-0.05, right + 0.05), ylim=(bottom + 0.05, -0.05), xticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_squares(axes, colors: Sequence[Sequence[str]], xlabel: str, ylabel: str) -> None:
    """Draw many small squares at once, [row][column], without words."""
    rows, columns = len(colors), len(colors[0])
    squares = [[channels(color) for color in row] for row in colors]
    axes.imshow(squares, extent=(0, columns, rows, 0), interpolation="nearest", aspect="auto")
    axes.hlines(range(rows + 1), 0, columns, color="white", linewidth=0.6)
    axes.vlines(range(columns + 1), 0, rows, color="white", linewidth=0.6)
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], xlabel=xlabel, ylabel=ylabel)
    axes.spines[:].set_visible(False)


@checked
def show_squares(kinds: Mapping[str, Size], caption: str, title: str) -> None:
    """Show {kind: numbers} as squares (`caption` says of what) in columns of 8; raises ValueError without a colour."""
    if not kinds or (unknown := set(kinds) - set(KIND_COLORS)):
        raise ValueError(f"kinds {sorted(unknown if kinds else [])} have no colour; use {', '.join(KIND_COLORS)}")
    rows, height = [[] for _ in range(8)], 8
    for kind, count in kinds.items():
        for row in range(height):
            across = len(range(row, count, height))
            rows[row] += [Tile(color=KIND_COLORS[kind], look={"linewidth": 0.8})] * across
            rows[row].append(-(-count // height) - across + 1.0)
    right = sum(-(-count // height) + 1 for count in kinds.values()) - 1
    with picture_axes(0.95 + min(0.2, (FULL_WIDTH_IN - 1.5) / right) * (height + 1.4)) as axes:
        draw_tiles(axes, rows)
        starts = accumulate((-(-count // height) + 1 for count in kinds.values()), initial=0)
        for left, count in zip(starts, kinds.values(), strict=False):  # the last end starts nothing
            write(axes, left, -0.1, str(count), "left", va="bottom")
        axes.set(xlim=(0, right), ylim=(height + 0.2, -1.1), aspect="equal", anchor="W")
        axes.set_title(title)
        handles = [key(KIND_COLORS[kind], kind) for kind in KIND_COLORS if kind in kinds]
        look = {"loc": "outside lower left", "ncol": len(kinds), "title": caption, "alignment": "left"}
        axes.figure.legend(handles=handles, **look)
