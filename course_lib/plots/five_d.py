"""A layout in pictures: which rank sits on which node, whom it talks to, and which share of the model it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.five_d import five_d_states, layers_of, schedule_of
from course_lib.memory.states import count_parameters
from course_lib.mesh import AXES, AxisLinks, links_of_axes
from course_lib.plots.palette import NEUTRAL_COLOR, RANK_COLORS, mix, text_on
from course_lib.plots.style import FULL_WIDTH_IN, finish, show_seconds, style, three_digits

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


def rank_map(layout: Layout, axis: str = "tp", ranks_per_node: int = 8) -> RankMap:
    """Place the ranks of a layout on nodes, and group them along pp, dp, cp, tp or ep.

    Raises   ValueError if the axis is unknown, or there are more ranks than the picture has room for
    """
    if axis not in MAP_AXES:
        raise ValueError(f"axis is {axis!r}; choose from {', '.join(MAP_AXES)}")
    mesh = layout.mesh
    if mesh.world_size > MOST_RANKS:
        raise ValueError(f"{mesh.world_size} ranks; the picture has room for {MOST_RANKS}, the pattern is the same")
    links = links_of_axes(mesh, ranks_per_node, layout.ep)[axis]
    groups = sorted({tuple(mesh.members(rank, layout.ep)[axis]) for rank in range(mesh.world_size)})
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


def group_color(number: int) -> str:
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
    axes.set(xlim=(-0.65, right + 0.15), ylim=(rows * ROW - 0.6, -0.6), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(links_text(picture), fontsize=9, fontweight="normal")


def _sizes(picture: RankMap) -> dict[str, int]:
    return {axis: 1 + max(here[axis] for here in picture.coordinates) for axis in picture.coordinates[0]}


def _draw_lines(axes, picture: RankMap, at: Mapping[int, tuple[float, float]]) -> None:
    """Of each group a line below its boxes of a node, each as low as needed, and lines from node to node."""
    used: dict[int, list[tuple[int, int, int]]] = {}  # of a node: (first, last, level) of lines that are there
    for number, group in enumerate(picture.groups):
        color = mix(group_color(number), "#000000", 0.25)
        look = {"color": color, "linewidth": 1.5, "solid_capstyle": "butt", "zorder": 2}
        by_node = picture.on_nodes(group)
        for node, ranks in by_node.items():
            if len(ranks) == 1:
                continue
            taken = {level for a, b, level in used.get(node, []) if a <= ranks[-1] and ranks[0] <= b}
            level = next(level for level in range(len(picture.groups) + 1) if level not in taken)
            used.setdefault(node, []).append((ranks[0], ranks[-1], level))
            y = at[ranks[0]][1] + BOX / 2 + 0.08 + 0.075 * level
            axes.plot([at[ranks[0]][0], at[ranks[-1]][0]], [y, y], **look)
            for rank in ranks:
                axes.plot([at[rank][0]] * 2, [at[rank][1] + BOX / 2, y], **look)
        heads = [ranks[0] for ranks in by_node.values()]
        for one, other in pairwise(heads):
            axes.plot(*zip(at[one], at[other]), color=color, linewidth=1.5, linestyle=(0, (2, 1.2)), zorder=1)


def map_height_in(picture: RankMap, width_in: float) -> float:
    """The height at which boxes are as wide as high, of a panel of this width."""
    _, across, rows = _places(picture)
    columns = across * (min(picture.ranks_per_node, len(picture.coordinates)) + 0.5)
    return rows * ROW * min(width_in / columns, 0.48)


def _lines_legend(figure) -> None:
    handles = [
        Line2D([], [], color="#444444", linewidth=1.5, label="links inside a node"),
        Line2D([], [], color="#444444", linewidth=1.5, linestyle=(0, (2, 1.2)), label="network between nodes"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncol=2)


def _show_maps(titled: Sequence[tuple[str, RankMap]], title: str) -> None:
    ranks = len(titled[0][1].coordinates)
    few = len(titled) * ranks <= MOST_COORDINATES
    columns = min(2 if few or ranks <= 32 else 3, len(titled))
    width_in = FULL_WIDTH_IN / columns
    rows = -(-len(titled) // columns)
    lines = max(name.count("\n") + bool(name) for name, _ in titled)
    height = rows * (map_height_in(titled[0][1], width_in) + 0.32 + 0.16 * lines) + 0.65
    with style():
        figure, panels = plt.subplots(rows, columns, figsize=(FULL_WIDTH_IN, height), squeeze=False)
        for axes in panels.flat[len(titled) :]:
            axes.set_axis_off()
        for axes, (name, picture) in zip(panels.flat, titled):
            draw_rank_map(axes, picture, few, numbers=axes is panels[0, 0])
            if name:
                axes.set_title(f"{name}\n{links_text(picture)}", fontsize=9, fontweight="normal")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        _lines_legend(figure)
        finish(figure)


def show_ranks(layout: Layout, ranks_per_node: int = 8, axes: Sequence[str] | None = None, title: str = "") -> None:
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
    _show_maps(pictures, title or said)


def show_orders(
    layouts: Mapping[str, Layout],
    axis: str = "tp",
    ranks_per_node: int = 8,
    seconds: Mapping[str, float] | None = None,
    title: str = "",
) -> None:
    """Show the same axis under two or more orders of the axes, side by side.

    layouts   {label: layout}, which differ in `order`
    seconds   {label: modelled seconds of a step that are spent on this axis}, if they are to be said
    """
    pictures = []
    for label, layout in layouts.items():
        said = f"{label}; modelled: {show_seconds(seconds[label])} a step on {axis}" if seconds else label
        pictures.append((said, rank_map(layout, axis, ranks_per_node)))
    _show_maps(pictures, title or f"Where the groups of {axis} lie follows from the order of the axes")


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' if number != 1 else ''}"


# ---------------------------------------------------------------- who holds what

MOST_ROWS = 16
MOST_LAYERS = 8  # more are drawn stage by stage
MOST_SPLIT = 16  # more stages are one column each, without attention and MLP apart
PALE = 0.62  # of white in the colour of parameters
LEAST_WIDTH, LEAST_HEIGHT = 0.02, 0.06  # narrower columns are filled whole, lower shards drawn so high


@dataclass(frozen=True)
class Part:
    """A column: a part of the model, which is whole on one stage of the pipeline."""

    block: str  # "embed", "layer 3", "stage 2", "head"
    name: str  # "embed", "attn", "MLP", "MoE", "head", "all"
    stage: int

    @property
    def has_experts(self) -> bool:
        return self.name == "MoE"


@dataclass(frozen=True)
class Share:
    """What one rank has of one part: from `left` to `right` cut by tp and ep, from top to bottom by ZeRO (0 to 1)."""

    rank: int
    part: int
    left: Fraction
    right: Fraction
    parameters: tuple[Fraction, Fraction]
    states: tuple[Fraction, Fraction]  # of the optimizer; with ZeRO-2 and 3 gradients lie with them

    @property
    def of_parameters(self) -> Fraction:
        return (self.right - self.left) * (self.parameters[1] - self.parameters[0])

    @property
    def of_states(self) -> Fraction:
        return (self.right - self.left) * (self.states[1] - self.states[0])


@dataclass(frozen=True)
class Holdings:
    """Which share of each part each of these ranks holds, and of the whole model: (parameters, optimizer states)."""

    layout: Layout
    ranks: list[int]
    parts: list[Part]
    shares: list[Share]
    of_model: list[tuple[float, float]]


def holdings(config: ModelConfig, layout: Layout, ranks: Sequence[int] | None = None) -> Holdings:
    """Say who holds what; matrices alone are drawn as cut, norms and routers are whole on each rank of tp.

    ranks    by default all, of more than 16 one for each place along pp (of these at most 16)
    Raises   ValueError if the model cannot lie so
    """
    layout.check_model(config)
    ranks = list(ranks) if ranks is not None else shown_ranks(layout)
    parts = parts_of(config, layout)
    shares = [share for rank in ranks for share in _shares_of(layout, parts, rank)]
    return Holdings(layout, ranks, parts, shares, [_of_model(config, layout, rank) for rank in ranks])


def shown_ranks(layout: Layout) -> list[int]:
    """All ranks, or where these are many the first of each place along pp."""
    if layout.world_size <= MOST_ROWS:
        return list(range(layout.world_size))
    step = -(-layout.pp // MOST_ROWS)
    return [layout.mesh.rank(pp=place, dp=0, cp=0, tp=0) for place in range(0, layout.pp, step)]


def parts_of(config: ModelConfig, layout: Layout) -> list[Part]:
    """The columns: embedding, attention and MLP of each layer (or of each stage, if there are many), head."""
    layers, parts = layers_of(config, layout), [Part("embed", "embed", 0)]
    by_layer = config.num_layers <= MOST_LAYERS
    dense = config.moe.first_dense_layers if config.moe else config.num_layers
    layer = 0
    for stage, count in enumerate(layers):
        blocks = [(f"layer {layer + i}", layer + i) for i in range(count)] if by_layer else [(f"stage {stage}", layer)]
        for label, first in blocks:
            last = first if by_layer else layer + count - 1
            mlp = "MoE" if last >= dense else "MLP"
            if by_layer or len(layers) <= MOST_SPLIT:
                parts += [Part(label, "attn", stage), Part(label, mlp, stage)]
            else:
                parts.append(Part(label, mlp, stage))
        layer += count
    return [*parts, Part("head", "head", len(layers) - 1)]


def _shares_of(layout: Layout, parts: Sequence[Part], rank: int) -> list[Share]:
    here, members = layout.mesh.coordinates(rank), layout.mesh.members(rank, layout.ep)
    mine = schedule_of(layout).stages_of_rank(here["pp"])
    shares = []
    for index, part in enumerate(parts):
        if part.stage not in mine:
            continue
        left, width = Fraction(here["tp"], layout.tp), Fraction(1, layout.tp)
        if part.has_experts:  # first to the ranks of ep, then each expert over tp
            left, width = (members["ep"].index(rank) + left) / layout.ep, width / layout.ep
        over = members["expert_dp" if part.has_experts else "data"]
        shard = (Fraction(over.index(rank), len(over)), Fraction(over.index(rank) + 1, len(over)))
        whole = (Fraction(0), Fraction(1))
        cut = [shard if layout.zero >= stage else whole for stage in (3, 1)]
        shares.append(Share(rank, index, left, left + width, *cut))
    return shares


def _of_model(config: ModelConfig, layout: Layout, rank: int) -> tuple[float, float]:
    """Shares of the whole model that a rank has, to the byte: with norms, padding and copies."""
    here, numel = layout.mesh.coordinates(rank), count_parameters(config)
    states = five_d_states(config, layout, here["pp"], here["tp"], "fp32")
    return states.parameters / (4 * numel), states.optimizer / (8 * numel)


def holdings_title(picture: Holdings) -> str:
    """How much of the model the fullest of these ranks has."""
    parameters = max(parameters for parameters, _ in picture.of_model)
    states = max(states for _, states in picture.of_model)
    return (
        f"A rank holds at most {_percent(parameters)} of the parameters, {_percent(states)} of the optimizer's states"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.01 else f"{three_digits(100 * share)} %"


def draw_holdings(axes, picture: Holdings) -> None:
    """A frame for each rank and part; what the rank has is filled, pale its parameters, strong its optimizer states."""
    edges = _edges(picture.parts)
    rows = {rank: row for row, rank in enumerate(picture.ranks)}
    roomy = edges[0][1] - edges[0][0] > LEAST_WIDTH
    columns = edges if roomy else [(0.0, edges[-1][1])]
    frames = [(left, row + 0.1, right - left, 0.8) for row in rows.values() for left, right in columns]
    draw_boxes(axes, frames, facecolor="white", edgecolor="#D5D5D5", linewidth=0.6)
    boxes, paints = [], []
    for share in picture.shares:
        left, right = edges[share.part]
        x = left + float(share.left) * (right - left) if roomy else left
        width = float(share.right - share.left) * (right - left) if roomy else right - left
        place = picture.layout.mesh.coordinates(share.rank)["pp"]
        color = RANK_COLORS[place % len(RANK_COLORS)]
        for (top, bottom), paint in ((share.parameters, mix(color, "#FFFFFF", PALE)), (share.states, color)):
            height = max(0.8 * float(bottom - top), LEAST_HEIGHT)
            y = min(rows[share.rank] + 0.1 + 0.8 * float(top), rows[share.rank] + 0.9 - height)
            boxes.append((x, y, max(width, LEAST_HEIGHT / 10), height))
            paints.append(paint)
    draw_boxes(axes, boxes, facecolor=paints, linewidth=0)
    end = edges[-1][1]
    for rank, (parameters, states) in zip(picture.ranks, picture.of_model):
        for x, value in ((end + 0.09, parameters), (end + 0.2, states)):
            axes.text(x, rows[rank] + 0.5, _percent(value), ha="right", va="center", fontsize=8)
    _label_parts(axes, picture.parts, edges)
    for x, name in ((end + 0.09, "param."), (end + 0.2, "optim.")):
        axes.text(x, -0.12, name, ha="right", va="bottom", fontsize=8)
    axes.set_yticks([row + 0.5 for row in rows.values()], [row_label(picture.layout, rank) for rank in rows])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set(xlim=(-0.005, end + 0.2), ylim=(len(rows) + 0.02, -0.05), xticks=[])
    axes.spines[:].set_visible(False)
    base = RANK_COLORS[0]
    shards = {1: "optimizer states", 2: "gradients, optimizer states"}
    handles = [
        Patch(facecolor=mix(base, "#FFFFFF", PALE), label="parameters"),
        Patch(facecolor=base, label=shards.get(picture.layout.zero, "parameters, gradients, optimizer states")),
    ]
    handles = handles[1:] if picture.layout.zero in (0, 3) else handles
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0.4}
    axes.legend(handles=handles, ncol=2, fontsize=8.5, **below)


def draw_boxes(axes, boxes: Sequence[tuple[float, float, float, float]], **look) -> None:
    """Many boxes (left, top, width, height) at once: each by itself would take long."""
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
    axes.add_collection(PolyCollection(corners, **look), autolim=False)


def _edges(parts: Sequence[Part]) -> list[tuple[float, float]]:
    """Left and right of each column, 1 for all together; a gap between blocks."""
    gap = 0.25
    blocks = len({part.block for part in parts})
    width = 1 / (len(parts) + gap * (blocks - 1))
    edges, x = [], 0.0
    for index, part in enumerate(parts):
        x += gap * width if index and parts[index - 1].block != part.block else 0.0
        edges.append((x, x + width))
        x += width
    return edges


def _label_parts(axes, parts: Sequence[Part], edges: Sequence[tuple[float, float]]) -> None:
    """Names of blocks and of their parts above, as long as there is room."""
    blocks = list(dict.fromkeys(part.block for part in parts))
    by_block = {block: [edges[i] for i, part in enumerate(parts) if part.block == block] for block in blocks}
    roomy = edges[0][1] - edges[0][0] > 0.045
    step = 1 + len(blocks) // 20
    for number, (block, places) in enumerate(by_block.items()):
        inner = block not in ("embed", "head")
        word, _, index = block.partition(" ")
        short = block if not inner or roomy else f"{word[0]}{index}"
        if inner and step > 1 and (number == 1 or (number - 1) % step):  # the first would touch the embedding's
            continue
        text = {"ha": "center", "va": "bottom", "fontsize": 8}
        at = 0.5 * (places[0][0] + places[-1][1])
        if not inner and not roomy:
            short = "E" if block == "embed" else "H"
        axes.text(at, -0.12 if not (roomy and inner) else -0.52, short, **text)
    if roomy:
        for part, (left, right) in zip(parts, edges):
            if part.name not in ("embed", "head"):
                axes.text(0.5 * (left + right), -0.12, part.name, ha="center", va="bottom", fontsize=7.5)


def row_label(layout: Layout, rank: int) -> str:
    """A rank and its place along each axis that has several."""
    here = layout.mesh.coordinates(rank)
    named = [f"{axis}{here[axis]}" for axis in layout.order if getattr(layout, axis) > 1]
    return f"rank {rank:,}" + (f": {' '.join(named)}" if named else "")


def holdings_height_in(picture: Holdings) -> float:
    """The height of the matrix with title, names and legend."""
    return 1.25 + 0.26 * len(picture.ranks)


def show_holdings(config: ModelConfig, layout: Layout, ranks: Sequence[int] | None = None, title: str = "") -> None:
    """Show which share of each part of a model each rank holds; of more than 16 ranks one for each place along pp."""
    picture = holdings(config, layout, ranks)
    if len(picture.ranks) > MOST_ROWS:
        raise ValueError(f"{len(picture.ranks)} ranks; the picture has room for {MOST_ROWS}, choose some of them")
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, holdings_height_in(picture)))
        draw_holdings(axes, picture)
        axes.set_title(title or holdings_title(picture), pad=28)
        finish(figure)
