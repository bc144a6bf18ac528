"""Which share of each part of a model a rank of a layout holds: a row a rank, a column a part."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.flats import layers_of, placed_by
from course_lib.memory.states import count_parameters
from course_lib.memory.zero import five_d_states
from course_lib.plots.palette import RANK_COLORS, mix
from course_lib.plots.style import picture_axes, three_digits
from course_lib.validate import Index, checked

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
    layer = 0
    for stage, count in enumerate(layers):
        blocks = [(f"layer {layer + i}", layer + i) for i in range(count)] if by_layer else [(f"stage {stage}", layer)]
        for label, first in blocks:
            last = first if by_layer else layer + count - 1
            mlp = "MoE" if config.moe_layers_before(last + 1) > config.moe_layers_before(first) else "MLP"
            if by_layer or len(layers) <= MOST_SPLIT:
                parts += [Part(label, "attn", stage), Part(label, mlp, stage)]
            else:
                parts.append(Part(label, mlp, stage))
        layer += count
    return [*parts, Part("head", "head", len(layers) - 1)]


def _shares_of(layout: Layout, parts: Sequence[Part], rank: int) -> list[Share]:
    here, members = layout.mesh.coordinates(rank), layout.members(rank)
    mine = placed_by(layout).stages_of_rank(here["pp"])
    shares = []
    for index, part in enumerate(parts):
        if part.stage not in mine:
            continue
        left, width = Fraction(here["tp"], layout.tp), Fraction(1, layout.tp)
        if part.has_experts:  # first to the ranks of ep, then each expert over tp, unless it is whole
            left, width = (Fraction(0), Fraction(1)) if layout.folded else (left, width)
            left, width = (members["ep"].index(rank) + left) / layout.ep, width / layout.ep
        over = members[layout.shard_axes[part.has_experts]]
        shard = (Fraction(over.index(rank), len(over)), Fraction(over.index(rank) + 1, len(over)))
        whole = (Fraction(0), Fraction(1))
        cut = [shard if layout.zero_stage >= stage else whole for stage in (3, 1)]
        shares.append(Share(rank, index, left, left + width, *cut))
    return shares


def _of_model(config: ModelConfig, layout: Layout, rank: int) -> tuple[float, float]:
    """Shares of the whole model that a rank has, to the byte: with norms, padding and copies."""
    here, numel = layout.mesh.coordinates(rank), count_parameters(config)
    states = five_d_states(config, layout, here["pp"], here["tp"], "fp32")
    return states.parameters / (4 * numel), states.optimizer / (8 * numel)


def holdings_title(picture: Holdings) -> str:
    """How much of the model the most loaded of these ranks has."""
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
    for rank, (parameters, states) in zip(picture.ranks, picture.of_model, strict=True):
        for x, value in ((end + 0.1, parameters), (end + 0.2, states)):
            axes.text(x, rows[rank] + 0.5, _percent(value).removesuffix(" %"), ha="right", va="center", fontsize=8)
    _label_parts(axes, picture.parts, edges)
    for x, name in ((end + 0.1, "param. %"), (end + 0.2, "optim. %")):
        axes.text(x, -0.12, name, ha="right", va="bottom", fontsize=7)
    axes.set_yticks([row + 0.5 for row in rows.values()], [row_label(picture.layout, rank) for rank in rows])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set(xlim=(-0.005, end + 0.2), ylim=(len(rows) + 0.02, -0.05), xticks=[])
    axes.spines[:].set_visible(False)
    base = RANK_COLORS[0]
    shards = {1: "optimizer states", 2: "gradients, optimizer states"}
    handles = [
        Patch(facecolor=mix(base, "#FFFFFF", PALE), label="parameters"),
        Patch(facecolor=base, label=shards.get(picture.layout.zero_stage, "parameters, gradients, optimizer states")),
    ]
    if picture.layout.zero_stage in (1, 2):
        handles[1].set_label(f"of these with {handles[1].get_label()}: {strong_in_pale(picture)}")
    handles = handles[1:] if picture.layout.zero_stage in (0, 3) else handles
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 0.4}
    axes.legend(handles=handles, ncol=2, fontsize=8.5, **below)


def strong_in_pale(picture: Holdings) -> str:
    """Which share of the parameters that a rank holds its optimizer states are for: 1/data, of experts 1/expert_dp."""
    of_pale = {picture.parts[s.part].has_experts: s.of_states / s.of_parameters for s in picture.shares}
    if len(set(of_pale.values())) == 1:
        return str(of_pale[False])
    return f"{of_pale[True]} of experts, {of_pale[False]} of the rest"


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
        for part, (left, right) in zip(parts, edges, strict=True):
            if part.name not in ("embed", "head"):
                axes.text(0.5 * (left + right), -0.12, part.name, ha="center", va="bottom", fontsize=7.5)


def row_label(layout: Layout, rank: Index) -> str:
    """A rank and its place along each axis that has several."""
    here = layout.mesh.coordinates(rank)
    named = [f"{axis}{here[axis]}" for axis in layout.order if getattr(layout, axis) > 1]
    return f"rank {rank:,}" + (f": {' '.join(named)}" if named else "")


def holdings_height_in(picture: Holdings) -> float:
    """The height of the matrix with title, names and legend."""
    return 1.25 + 0.26 * len(picture.ranks)


@checked
def show_holdings(config: ModelConfig, layout: Layout, ranks: Sequence[int] | None = None) -> None:
    """Show which share of each part of a model each rank holds; of more than 16 ranks one for each place along pp."""
    picture = holdings(config, layout, ranks)
    if len(picture.ranks) > MOST_ROWS:
        raise ValueError(f"{len(picture.ranks)} ranks; the picture has room for {MOST_ROWS}, choose some of them")
    with picture_axes(holdings_height_in(picture)) as axes:
        draw_holdings(axes, picture)
        axes.set_title(holdings_title(picture), pad=28)
