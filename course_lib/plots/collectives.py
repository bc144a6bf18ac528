"""Ranks that talk: values moving through collectives, the ring, the mesh's groups, the wires of a node."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D

from course_lib.hardware import GB, Cluster, Link
from course_lib.layout.mesh import Mesh
from course_lib.palette import (
    AXIS_COLORS,
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    NEUTRAL_COLOR,
    OKABE_ITO,
    RANK_COLORS,
    mix,
)
from course_lib.plots.diagrams import BORDERED, diagram, draw_arrows
from course_lib.plots.style import ground, labelled_box, panel_title, picture_axes, picture_panels, write
from course_lib.plots.tiles import EMPTY, OUTLINED, Row, Tile, draw_tiles, ranks
from course_lib.validate import Index, checked

MIXED = -1  # the origin of a value that no single rank had before: a sum, a mean, a maximum
MIXED_COLOR = "#333333"

# ---------------------------------------------------------------- collectives, before and after


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
    return MIXED_COLOR if origin == MIXED else mix(RANK_COLORS[origin % len(RANK_COLORS)], "#FFFFFF", 0.25)


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.2g}"


def _filled(row: Sequence[float], origins: Sequence[int | None], width: int) -> list[Tile]:
    tiles = [Tile(_number(value), _color_of(origin)) for value, origin in zip(row, origins, strict=True)]
    return tiles + [EMPTY] * (width - len(tiles))


def collective_rows(before: Iterable, after: Iterable) -> list[Row]:
    """Return tiles before and after a collective, a row a rank, each in the colour of the rank that it came from.

    Give every number of `before` a value of its own, and the picture shows where each one went.
    Raises   ValueError unless both have as many ranks
    """
    before, after = rows_of(before), rows_of(after)
    if len(before) != len(after):
        raise ValueError(
            f"before has {len(before)} ranks and after has {len(after)}; give one row for each rank in both"
        )
    left, right = (max([1, *map(len, rows)]) for rows in (before, after))
    return [
        [
            *_filled(old, [rank] * len(old), left),
            5.5 - left,
            *_filled(new, [origin_of(value, before) for value in new], right),
        ]
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
    ]


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

    def tiles(self, outlined: Sequence[int | None]) -> list[list[Tile]]:
        """Return a row a rank, the bluer the more is summed, with one piece of each rank outlined."""
        return [
            [
                Tile(_number(value), self._color(rank, piece), look=OUTLINED if outlined[rank] == piece else {})
                for piece, value in enumerate(row)
            ]
            for rank, row in enumerate(self.values)
        ]

    def _color(self, rank: int, piece: int) -> str:
        count, all_ranks = self.summed[rank][piece], len(self.values)
        if count == all_ranks:
            return OKABE_ITO["green"]
        return mix(OKABE_ITO["sky"], "#FFFFFF", 0.85 - 0.85 * (count - 1) / max(all_ranks - 1, 1))


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


@checked
def show_ring_all_reduce(values: Iterable, title: str) -> None:
    """Show a ring all-reduce of G ranks with G numbers each, step by step: `values[rank][piece]` before it."""
    steps = ring_all_reduce_steps(values)
    columns = min(len(steps), 4)
    lines = -(-len(steps) // columns)
    with picture_panels(lines, columns, 2.05 * lines + 0.75, title, squeeze=False) as (figure, panels):
        for axes in panels.flat[len(steps) :]:
            axes.set_axis_off()
        for index, (axes, step) in enumerate(zip(panels.flat, steps, strict=False)):
            names = ranks(len(step.values)) if index % columns == 0 else ()
            draw_tiles(axes, step.tiles(step.received), names, fontsize=9)
            axes.set_aspect("equal")
            panel_title(axes, step.label, "center")
        said = "outlined: just came from the left neighbour · bluer: more ranks summed · green: the sum of all"
        figure.supxlabel(said, fontsize=9)


RADIUS, CELL_WIDTH, CELL_HEIGHT = 2.6, 0.78, 0.6


def pieces_sent(steps: Sequence[RingStep], moment: int) -> list[int | None]:
    """Return the piece that each rank sends after so many steps: what its right neighbour receives in the next."""
    count = len(steps[0].values)
    if moment + 1 == len(steps):
        return [None] * count
    return [steps[moment + 1].received[(rank + 1) % count] for rank in range(count)]


def place_on_circle(turn: float, radius: float = RADIUS) -> tuple[float, float]:
    """Return where a share of a turn ends: 0 is at the top, a quarter of a turn at the right."""
    angle = math.pi / 2 - 2 * math.pi * turn
    return radius * math.cos(angle), radius * math.sin(angle)


@checked
def show_ring(values: Iterable, moments: Sequence[Index], title: str) -> None:
    """Show a ring all-reduce as a ring, after so many steps each: buffers, and the piece that each rank sends.

    Raises   ValueError if a moment is later than the last step
    """
    steps = ring_all_reduce_steps(values)
    if not moments or max(moments) >= len(steps):
        raise ValueError(f"moments {list(moments)} must be numbers of steps from 0 to {len(steps) - 1}")
    with picture_panels(1, len(moments), 4.2, title, squeeze=False) as (figure, panels):
        for axes, moment in zip(panels[0], moments, strict=True):
            _draw_ring(axes, steps[moment], pieces_sent(steps, moment))
            when = f"after step {moment}" if moment else "start"
            arrows = f"; the arrows show the {'next' if moment else 'first'} step" if moment + 1 < len(steps) else ""
            panel_title(axes, when + arrows, "center")
        legend = "outlined: the piece that is sent to the right neighbour"
        if any(len(steps[0].values) in counts for moment in moments for counts in steps[moment].summed):
            legend += " \u00b7 green: the sum of all ranks"
        figure.supxlabel(legend, x=0.01, ha="left", fontsize=9)


def _draw_ring(axes, step: RingStep, sends: Sequence[int | None]) -> None:
    count = len(step.values)
    for rank, row in enumerate(step.tiles(sends)):
        middle, height = place_on_circle(rank / count)
        for piece, tile in enumerate(row):
            corner = middle + (piece - count / 2) * CELL_WIDTH, height - CELL_HEIGHT / 2
            labelled_box(axes, corner, (CELL_WIDTH, CELL_HEIGHT), tile.color, tile.text, 8, **tile.look)
        write(axes, middle, height + CELL_HEIGHT / 2 + 0.12, f"rank {rank}", va="bottom")
        if sends[rank] is not None:
            ends = [place_on_circle((rank + share) / count, 0.72 * RADIUS) for share in (0.16, 0.84)]
            look = {"connectionstyle": "arc3,rad=-0.2", "mutation_scale": 13, "linewidth": 1.8}
            draw_arrows(axes, [ends], COMMUNICATION_COLOR, **look)
            write(axes, *place_on_circle((rank + 0.5) / count, 0.44 * RADIUS), f"piece {sends[rank]}", fontsize=8.5)
    reach = RADIUS + 0.5 * count * CELL_WIDTH + 0.2
    axes.set(xlim=(-reach, reach), ylim=(-RADIUS - 1, RADIUS + 1), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------- the mesh: the same ranks grouped along each axis

AXIS_MEANING = {
    "tp": "tp: same data, a part of each layer",
    "dp": "dp: other data, same weights",
    "pp": "pp: same data, other layers",
}
LINES = {"dp": "-", "tp": "--", "pp": ":"}


def groups_along(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """Return the groups of ranks along an axis."""
    return sorted({tuple(mesh.ranks_along(axis, rank)) for rank in range(mesh.world_size)})


@checked
def show_mesh(mesh: Mesh, title: str = "") -> None:
    """Show the ranks of a mesh in a slanted cube and the groups along tp (across), dp (into the depth) and pp (down).

    Raises   ValueError if the mesh has cp, or more ranks than the picture has room for
    """
    if mesh.cp != 1 or mesh.world_size > 32:
        raise ValueError(
            f"got cp={mesh.cp} and {mesh.world_size} ranks; the picture shows dp, tp and pp of at most 32 ranks"
        )
    steps = {"tp": (1.7, 0.0), "dp": (0.75, -0.6), "pp": (0.0, 1.3 + 0.6 * (mesh.dp - 1))}
    at = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    places = [tuple(sum(here[axis] * steps[axis][i] for axis in steps) for i in (0, 1)) for here in at]
    xs, ys = zip(*places, strict=True)
    lines = []
    with picture_axes(min(1.5 + 0.72 * (max(ys) - min(ys)), 6.5)) as axes:
        for axis in (axis for axis in steps if getattr(mesh, axis) > 1):
            groups, look = groups_along(mesh, axis), {"color": AXIS_COLORS[axis], "linewidth": 3.5}
            for group in groups:
                axes.plot(*zip(*(places[rank] for rank in group), strict=True), zorder=1, linestyle=LINES[axis], **look)
            named = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
            label = f"{AXIS_MEANING[axis]}\ngroups {named}" + (" ..." if len(groups) > 4 else "")
            lines.append(Line2D([], [], label=label, linestyle=LINES[axis], **look))
        for rank, (x, y) in enumerate(places):
            axes.scatter(x, y, s=620, color="#F4F4F4", edgecolor="black", linewidth=1.2, zorder=2)
            write(axes, x, y - 0.03, str(rank), fontsize=11, fontweight="bold", zorder=3)
            where = " ".join(f"{axis}{at[rank][axis]}" for axis in LINES if getattr(mesh, axis) > 1)
            look = {"fontsize": 8, "zorder": 3, "bbox": ground("white", 0.3, 0.8)}
            write(axes, x + 0.08, y + 0.17, where, "left", va="top", **look)
        axes.set(xlim=(min(xs) - 0.4, max(xs) + 0.95), ylim=(max(ys) + 0.5, min(ys) - 0.4), aspect="equal")
        axes.set_axis_off()
        side = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "labelspacing": 1.4, "handlelength": 3}
        axes.legend(handles=lines, **side)
        sizes = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in LINES)
        axes.set_title(title or f"{mesh.world_size} ranks as {sizes}")


# ---------------------------------------------------------------- a node and its wires

WIDEST = 0.62  # the fastest wire, where neighbouring GPUs are 1 apart


@checked
def show_node(cluster: Cluster, host: Link, title: str) -> None:
    """Show one node: a switch between its GPUs, PCIe to the processors, and a network card for each GPU.

    Wires are as wide as their bytes per second of one direction; `host` joins GPUs, processors and network cards.
    """
    gpus, fast = cluster.gpus_per_node, cluster.inside.bytes_per_s
    links = {
        "GPU to the NVSwitches": cluster.inside,
        "GPU to its PCIe switch": host,
        "network card to its switch": host,
        "network card to the network": cluster.between,
    }
    boxes, notes = [], []
    fastest = max(fast, *(link.bytes_per_s for link in links.values()))
    for row, (ends, link) in enumerate(links.items()):  # from the top, one wire for each GPU
        width, bottom = WIDEST * link.bytes_per_s / fastest, 3 - row
        boxes += [(gpu - width / 2, bottom, width, 1, COMMUNICATION_COLOR, "") for gpu in range(gpus)]
        said = f"{link.name}: {link.bytes_per_s / GB:.0f} GB/s each way\nfrom each {ends}"
        notes.append((gpus - 0.35, bottom + 0.5, said, "left"))

    def box(middle: float, row: float, width: float, color: str, text: str) -> None:
        boxes.append((middle - width / 2, row - 0.22, width, 0.44, color, text))

    wide, total = gpus - 0.2, gpus * cluster.between.bytes_per_s / GB
    box((gpus - 1) / 2, 4, wide, OKABE_ITO["green"], "NVSwitches: every GPU reaches every other GPU")
    for gpu in range(gpus):
        box(gpu, 3, 0.8, COMPUTE_COLOR, f"GPU {gpu}")
        box(gpu, 1, 0.8, NEUTRAL_COLOR, f"network\ncard {gpu}")
    for half in (0, 1):
        middle = (gpus / 2 - 1) / 2 + half * gpus / 2
        box(middle, 2, gpus / 2 - 0.2, NEUTRAL_COLOR, f"processor {half} and its PCIe switches")
    network = f"network to other nodes: {gpus} cards, {total:.0f} GB/s each way together"
    box((gpus - 1) / 2, 0, wide, "#FFFFFF", network)
    limits = (-0.6, gpus + 2.9), (-0.35, 4.35)
    diagram(4.3, title, limits, boxes, (), notes, **BORDERED)
