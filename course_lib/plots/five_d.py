"""A layout in pictures: which rank sits on which node, and whom it talks to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.lines import Line2D

from course_lib.layout import Layout
from course_lib.layout.mesh import AXES, AxisLinks, links_of_axes
from course_lib.plots.holdings import draw_boxes
from course_lib.plots.palette import NEUTRAL_COLOR, RANK_COLORS, mix, text_on
from course_lib.plots.style import FULL_WIDTH_IN, bare, picture_panels
from course_lib.validate import Index, Positive, Size, checked

# ---------------------------------------------------------------- ranks on nodes

MAP_AXES = (*AXES, "ep")
MOST_RANKS = 64
BOX, ROW = 0.82, 1.44  # a rank's box, and from one row of nodes to the next, in places
MOST_COORDINATES = 96  # boxes of all panels; of more only the ranks' numbers, once, can be read


@dataclass(frozen=True)
class RankMap:
    """The groups of one axis on nodes of so many ranks: rank 0 .. ranks_per_node - 1 share the first, and so on."""

    axis: str
    ranks_per_node: int
    coordinates: list[dict[str, int]]  # of each rank
    groups: list[list[int]]  # in order of their first ranks
    links: AxisLinks

    @property
    def group_of(self) -> list[int]:
        """The group of each rank, by its number."""
        places = {rank: number for number, group in enumerate(self.groups) for rank in group}
        return [places[rank] for rank in range(len(self.coordinates))]

    def on_nodes(self, group: Sequence[int]) -> dict[int, list[int]]:
        """The ranks of a group by their nodes."""
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(rank // self.ranks_per_node, []).append(rank)
        return by_node


def rank_map(layout: Layout, axis: str = "tp", ranks_per_node: Size = 8) -> RankMap:
    """Place the ranks of a layout on nodes, and group them along pp, dp, cp, tp or ep.

    Raises   ValueError if the axis is unknown, or there are more ranks than the picture has room for
    """
    if axis not in MAP_AXES:
        raise ValueError(f"axis is {axis!r}; choose from {', '.join(MAP_AXES)}")
    mesh = layout.mesh
    if mesh.world_size > MOST_RANKS:
        raise ValueError(f"{mesh.world_size} ranks; the picture has room for {MOST_RANKS}, the pattern is the same")
    links = links_of_axes(mesh, ranks_per_node, layout.ep, layout.folded)[axis]
    groups = sorted({tuple(layout.members(rank)[axis]) for rank in range(mesh.world_size)})
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    return RankMap(axis, ranks_per_node, coordinates, [list(group) for group in groups], links)


def links_text(picture: RankMap) -> str:
    """How a group of this axis lies: inside a node, or over how many."""
    links = picture.links
    if links.kind == "none":
        return f"{picture.axis} 1: nobody to talk to"
    if links.kind == "node":
        return f"{picture.axis} {links.size}: inside a node"
    where = f"{picture.axis} {links.size}: over {links.nodes} nodes"
    return where + (f", {links.in_node} ranks in each" if links.kind == "both" else ", one rank in each")


def _places(picture: RankMap) -> tuple[dict[int, tuple[float, float]], int, int]:
    """Where each rank's box stands (x, y); nodes beside each other; rows of nodes."""
    per_node = picture.ranks_per_node
    across = max(1, 8 // per_node)
    at = {}
    for rank in range(len(picture.coordinates)):
        node, place = divmod(rank, per_node)
        row, column = divmod(node, across)
        at[rank] = (column * (per_node + 0.5) + place, row * ROW)
    nodes = -(-len(at) // per_node)
    return at, min(across, nodes), -(-nodes // across)


def group_color(number: Index) -> str:
    """Eight colours, then the same, lighter, and again from the start."""
    color = RANK_COLORS[number % len(RANK_COLORS)]
    return mix(color, "#FFFFFF", 0.5) if number // len(RANK_COLORS) % 2 else color


def draw_rank_map(axes, picture: RankMap, coordinates: bool = True, numbers: bool = True) -> None:
    """Nodes as frames, ranks as boxes in the colour of their group; lines in a node solid, between nodes dashed."""
    at, across, rows = _places(picture)
    per_node, shown = picture.ranks_per_node, min(picture.ranks_per_node, len(at))
    frames = [(at[first][0] - 0.52, at[first][1] - 0.5, shown + 0.04, 1.24) for first in range(0, len(at), per_node)]
    draw_boxes(axes, frames, facecolor="#F3F3F3", edgecolor=NEUTRAL_COLOR, linewidth=0.8, zorder=0)
    talks, group_of = picture.links.size > 1, picture.group_of
    if talks:
        _draw_lines(axes, picture, at)
    colors = [group_color(group_of[rank]) if talks else "#FFFFFF" for rank in at]
    boxes = [(x - BOX / 2, y - BOX / 2, BOX, BOX) for x, y in at.values()]
    draw_boxes(axes, boxes, facecolor=colors, edgecolor="#444444", linewidth=0.6, zorder=3)
    long_axes = [axis for axis, size in _sizes(picture).items() if size > 1]
    for rank, (x, y) in at.items():
        text = {"ha": "center", "va": "center", "color": text_on(colors[rank]), "zorder": 4}
        if not coordinates:
            axes.text(x, y, str(rank) if numbers else "", fontsize=7, **text)
            continue
        axes.text(x, y - 0.15, str(rank), fontsize=7.5, fontweight="bold", **text)
        where = " ".join(str(picture.coordinates[rank][axis]) for axis in long_axes)
        axes.text(x, y + 0.2, where, fontsize=6.5 if len(where) < 7 else 6, **text)
    right = across * (shown + 0.5) - 1
    bare(axes, (-0.65, right + 0.15), (rows * ROW - 0.6, -0.6))
    axes.set_title(links_text(picture), fontsize=9, fontweight="normal")


def _sizes(picture: RankMap) -> dict[str, int]:
    return {axis: 1 + max(here[axis] for here in picture.coordinates) for axis in picture.coordinates[0]}


def _draw_lines(axes, picture: RankMap, at: Mapping[int, tuple[float, float]]) -> None:
    """Of each group lines below its boxes, each as low as needed: solid in a node, dashed from node to node."""
    used: dict[float, list[tuple[float, float, int]]] = {}  # of a row: (left, right, level) of lines that are there
    for number, group in enumerate(picture.groups):
        look = {"color": mix(group_color(number), "#000000", 0.25), "linewidth": 1.5, "solid_capstyle": "butt"}
        dashed = look | {"linestyle": (0, (2, 1.2))}
        by_node = picture.on_nodes(group)
        for ranks in by_node.values():
            if len(ranks) > 1:
                _line_below(axes, [at[rank] for rank in ranks], used, look)
        for one, other in pairwise(at[ranks[0]] for ranks in by_node.values()):
            if one[1] == other[1]:  # side by side: a straight line would run through the boxes between them
                _line_below(axes, [one, other], used, dashed)
            else:
                axes.plot(*zip(one, other, strict=True), zorder=1, **dashed)


def _line_below(axes, boxes: Sequence[tuple[float, float]], used: dict, look: Mapping) -> None:
    """A line below boxes of one row, on the highest level where it meets no other, and from each box down to it."""
    (left, row), right = boxes[0], boxes[-1][0]
    level = free_level(used.setdefault(row, []), left, right)
    used[row].append((left, right, level))
    y = row + BOX / 2 + 0.08 + 0.075 * level
    axes.plot([left, right], [y, y], zorder=2, **look)
    for x, _ in boxes:
        axes.plot([x, x], [row + BOX / 2, y], zorder=2, **look)


def free_level(lines: Sequence[tuple[float, float, int]], left: float, right: float) -> int:
    """The first level on which no line (left, right, level) meets this one."""
    taken = {level for a, b, level in lines if a <= right and left <= b}
    return next(level for level in range(len(taken) + 1) if level not in taken)


def map_height_in(picture: RankMap, width_in: Positive) -> float:
    """The height at which boxes are as wide as high, of a panel of this width."""
    _, across, rows = _places(picture)
    columns = across * (min(picture.ranks_per_node, len(picture.coordinates)) + 0.5)
    return rows * ROW * min(width_in / columns, 0.48)


def _lines_legend(figure, free_panel=None) -> None:
    """Below all panels, or in one that is empty."""
    handles = [
        Line2D([], [], color="#444444", linewidth=1.5, label="links inside a node"),
        Line2D([], [], color="#444444", linewidth=1.5, linestyle=(0, (2, 1.2)), label="network between nodes"),
    ]
    if free_panel is None:
        figure.legend(handles=handles, loc="outside lower center", ncol=2)
    else:
        free_panel.legend(handles=handles, loc="center")


def _show_maps(titled: Sequence[tuple[str, RankMap]], title: str) -> None:
    ranks = len(titled[0][1].coordinates)
    few = len(titled) * ranks <= MOST_COORDINATES
    columns = min(2 if few or ranks <= 32 else 3, len(titled))
    width_in = FULL_WIDTH_IN / columns
    rows = -(-len(titled) // columns)
    lines = max(name.count("\n") + bool(name) for name, _ in titled)
    free = rows * columns - len(titled)
    height = rows * (map_height_in(titled[0][1], width_in) + 0.32 + 0.16 * lines) + (0.4 if free else 0.65)
    with picture_panels(rows, columns, height, title, squeeze=False) as (figure, panels):
        for axes in panels.flat[len(titled) :]:
            axes.set_axis_off()
        for axes, (name, picture) in zip(panels.flat, titled, strict=False):  # a panel may stay free
            draw_rank_map(axes, picture, few, numbers=axes is panels[0, 0])
            if name:
                axes.set_title(f"{name}\n{links_text(picture)}", fontsize=9, fontweight="normal")
        _lines_legend(figure, panels.flat[-1] if free else None)


@checked
def show_ranks(layout: Layout, ranks_per_node: Size = 8, axes: Sequence[str] | None = None) -> None:
    """Show the ranks of a layout on nodes, a panel an axis: who talks to whom, inside a node and between nodes.

    axes     of MAP_AXES; by default those with more than one rank
    Raises   ValueError if there are more ranks than the picture has room for
    """
    sizes = {axis: getattr(layout, axis) for axis in MAP_AXES}
    chosen = list(axes) if axes else [axis for axis in MAP_AXES if sizes[axis] > 1] or ["tp"]
    pictures = [("", rank_map(layout, axis, ranks_per_node)) for axis in chosen]
    nodes = -(-layout.world_size // ranks_per_node)
    named = [axis for axis in layout.order if sizes[axis] > 1]
    said = f"{_counted(layout.world_size, 'rank')} on {_counted(nodes, 'node')}"
    if named:
        few = len(chosen) * layout.world_size <= MOST_COORDINATES
        said += f"; under each its place along {', '.join(named)}" if few else f", {' x '.join(named)}, innermost last"
    _show_maps(pictures, said)


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' if number != 1 else ''}"
