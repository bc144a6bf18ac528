"""A layout in pictures: which rank sits on which node, and whom it talks to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.lines import Line2D

from course_lib.layout import Layout
from course_lib.layout.mesh import AXES, AxisLinks, links_of_axes
from course_lib.palette import NEUTRAL_COLOR, RANK_COLORS, mix, text_on
from course_lib.plots.style import FULL_WIDTH_IN, bare, labelled_box, panel_title, picture_panels, write
from course_lib.validate import Size, checked

MAP_AXES = (*AXES, "ep")
MOST_RANKS = 16
BOX, ROW = 0.82, 1.44  # a rank's box, and from one row of nodes to the next, in places
DASHED = (0, (2, 1.2))  # a line between nodes; in a node it is solid


@dataclass(frozen=True)
class RankMap:
    """The groups of one axis on nodes of so many ranks: rank 0 .. ranks_per_node - 1 share the first, and so on."""

    axis: str
    ranks_per_node: int
    coordinates: list[dict[str, int]]  # of each rank
    groups: list[list[int]]  # in order of their first ranks
    links: AxisLinks

    @property
    def places(self) -> list[tuple[float, float]]:
        """Where each rank's box stands (x, y): nodes beside each other, eight ranks in a row."""
        across, found = max(1, 8 // self.ranks_per_node), []
        for rank in range(len(self.coordinates)):
            node, place = divmod(rank, self.ranks_per_node)
            row, column = divmod(node, across)
            found.append((column * (self.ranks_per_node + 0.5) + place, row * ROW))
        return found

    def on_nodes(self, group: Sequence[int]) -> dict[int, list[int]]:
        """The ranks of a group by their nodes."""
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(rank // self.ranks_per_node, []).append(rank)
        return by_node


def rank_map(layout: Layout, axis: str, ranks_per_node: int) -> RankMap:
    """Place the ranks of a layout on nodes, and group them along pp, dp, cp, tp or ep.

    Raises   ValueError if there are more ranks than the picture has room for
    """
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


def draw_rank_map(axes, picture: RankMap, long_axes: Sequence[str]) -> None:
    """Nodes as frames, ranks as boxes in the colour of their group with their places along the long axes."""
    at, per_node = picture.places, picture.ranks_per_node
    shown = min(per_node, len(at))
    for x, y in at[::per_node]:
        look = {"edgecolor": NEUTRAL_COLOR, "linewidth": 0.8, "zorder": 0}
        labelled_box(axes, (x - 0.52, y - 0.5), (shown + 0.04, 1.24), "#F3F3F3", **look)
    talks, used = picture.links.size > 1, {}
    for number, group in enumerate(picture.groups):
        color = RANK_COLORS[number % len(RANK_COLORS)] if talks else "#FFFFFF"
        if talks:
            _draw_lines(axes, picture, group, used, mix(color, "#000000", 0.25))
        for rank in group:
            (x, y), text = at[rank], {"color": text_on(color), "zorder": 4}
            corner = x - BOX / 2, y - BOX / 2
            labelled_box(axes, corner, (BOX, BOX), color, edgecolor="#444444", linewidth=0.6, zorder=3)
            write(axes, x, y - 0.15, str(rank), fontsize=7.5, fontweight="bold", **text)
            where = " ".join(str(picture.coordinates[rank][axis]) for axis in long_axes)
            write(axes, x, y + 0.2, where, fontsize=6.5 if len(where) < 7 else 6, **text)
    bare(axes, (-0.65, max(x for x, _ in at) + 0.6), (at[-1][1] + ROW - 0.6, -0.6))
    panel_title(axes, links_text(picture))


def _draw_lines(axes, picture: RankMap, group: Sequence[int], used: Mapping, color: str) -> None:
    """Lines of a group below its boxes, each as low as needed: solid in a node, dashed from node to node."""
    at, by_node = picture.places, picture.on_nodes(group)
    look = {"color": color, "linewidth": 1.5, "solid_capstyle": "butt"}
    for of_node in by_node.values():
        if len(of_node) > 1:
            _line_below(axes, [at[rank] for rank in of_node], used, look)
    for one, other in pairwise(at[of_node[0]] for of_node in by_node.values()):
        if one[1] == other[1]:  # side by side: a straight line would run through the boxes between them
            _line_below(axes, [one, other], used, look | {"linestyle": DASHED})
        else:
            axes.plot(*zip(one, other, strict=True), zorder=1, linestyle=DASHED, **look)


def _line_below(axes, boxes: Sequence[tuple[float, float]], used: dict, look: Mapping) -> None:
    """A line below boxes of one row, on the highest level where it meets no other, and from each box down to it."""
    (left, row), right = boxes[0], boxes[-1][0]
    lines = used.setdefault(row, [])  # (left, right, level) of lines that are there
    taken = {level for a, b, level in lines if a <= right and left <= b}
    level = next(level for level in range(len(taken) + 1) if level not in taken)
    lines.append((left, right, level))
    y = row + BOX / 2 + 0.08 + 0.075 * level
    axes.plot([left, right], [y, y], zorder=2, **look)
    for x, _ in boxes:
        axes.plot([x, x], [row + BOX / 2, y], zorder=2, **look)


@checked
def show_ranks(layout: Layout, ranks_per_node: Size = 8) -> None:
    """Show the ranks of a layout on nodes, a panel an axis: who talks to whom, inside a node and between nodes.

    Raises   ValueError if there are more ranks than the picture has room for
    """
    sizes = {axis: getattr(layout, axis) for axis in MAP_AXES}
    maps = [rank_map(layout, axis, ranks_per_node) for axis in MAP_AXES if sizes[axis] > 1]
    maps = maps or [rank_map(layout, "tp", ranks_per_node)]
    nodes, named = -(-layout.world_size // ranks_per_node), [axis for axis in layout.order if sizes[axis] > 1]
    said = f"{_counted(layout.world_size, 'rank')} on {_counted(nodes, 'node')}"
    said += f"; under each its place along {', '.join(named)}" if named else ""
    columns = min(2, len(maps))
    lines = -(-len(maps) // columns)
    places, free = maps[0].places, lines * columns - len(maps)
    box_in = min(FULL_WIDTH_IN / columns / (max(x for x, _ in places) + 1.5), 0.48)
    height = lines * ((places[-1][1] + ROW) * box_in + 0.32) + (0.4 if free else 0.65)
    look = {"color": "#444444", "linewidth": 1.5}
    handles = [Line2D([], [], label="links inside a node", **look)]
    handles += [Line2D([], [], label="network between nodes", linestyle=DASHED, **look)]
    with picture_panels(lines, columns, height, said, squeeze=False) as (figure, panels):
        for axes, picture in zip(panels.flat, maps, strict=False):  # a panel may stay free: for the legend
            draw_rank_map(axes, picture, named)
        if free:
            axes = panels.flat[-1]
            axes.set_axis_off()
            axes.legend(handles=handles, loc="center")
        else:
            figure.legend(handles=handles, loc="outside lower center", ncol=2)


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' if number != 1 else ''}"
