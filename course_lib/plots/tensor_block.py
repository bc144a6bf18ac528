"""Tensor parallelism as regions: f and g on a block, forward and backward; a loss from parts of the logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.layout.partition import piece_sizes
from course_lib.plots.matrices import WHOLE_COLOR
from course_lib.plots.palette import AXIS_COLORS, RANK_COLORS
from course_lib.plots.style import CENTRED, bare, labelled_box, picture_axes, picture_panels
from course_lib.validate import Index, Size, checked

# ---------------------------------------------------------------- f and g on a block

# What runs in a block, in order; f and g stand at the borders of what is cut.
REPLICATED = ("norm", "+  norm", "+")
CUT = (("q, k, v", "attention\nof its heads", "o"), ("gate, up", "SiLU,\nproduct", "down"))
DOES = {("f", "forward"): "", ("f", "backward"): "all-reduce", ("g", "forward"): "all-reduce", ("g", "backward"): ""}
_WIDTHS = {"norm": 0.8, "+  norm": 1.0, "+": 0.5}
_GAP = 0.62


@dataclass(frozen=True)
class BlockRegion:
    """One operation of a block: the same on every rank, or cut over the ranks."""

    name: str
    is_cut: bool
    left: float
    width: float


@dataclass(frozen=True)
class BlockBorder:
    """One place where f or g stands, and what it sends in this direction ("" where nothing is sent)."""

    name: str
    at: float
    sends: str


def block_regions_and_borders(direction: str) -> tuple[list[BlockRegion], list[BlockBorder]]:
    """Return the regions of a block from left to right, and the four borders with what they send.

    Raises   ValueError if the direction is neither forward nor backward
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction is {direction!r}; choose forward or backward")
    regions, borders, x = [], [], 0.0
    for index, name in enumerate(REPLICATED):
        regions.append(BlockRegion(name, False, x, _WIDTHS[name]))
        x += _WIDTHS[name]
        if index < len(CUT):
            borders.append(BlockBorder("f", x + _GAP / 2, DOES["f", direction]))
            x += _GAP
            for inner in CUT[index]:
                regions.append(BlockRegion(inner, True, x, 1.12))
                x += 1.12
            borders.append(BlockBorder("g", x + _GAP / 2, DOES["g", direction]))
            x += _GAP
    return regions, borders


def draw_block(axes, direction: str, num_ranks: Size = 2) -> None:
    """Draw the regions in lanes, one for each rank; what is the same on all ranks spans the lanes."""
    regions, borders = block_regions_and_borders(direction)
    for region in regions:
        lanes = range(num_ranks) if region.is_cut else [None]
        for rank in lanes:
            color = WHOLE_COLOR if rank is None else RANK_COLORS[rank % len(RANK_COLORS)]
            bottom, height = (0, num_ranks) if rank is None else (num_ranks - 1 - rank, 1)
            corner, size = (region.left, bottom), (region.width, height)
            labelled_box(axes, corner, size, color, region.name, fontsize=8, linewidth=1.5)
    for border in borders:
        color = AXIS_COLORS["tp"] if border.sends else "#8C8C8C"
        axes.plot([border.at] * 2, [-0.1, num_ranks + 0.1], color=color, linewidth=5 if border.sends else 1.5)
        axes.text(border.at, num_ranks + 0.2, border.name, ha="center", va="bottom", fontsize=11, style="italic")
        sends = border.sends or "nothing"
        weight = "bold" if border.sends else "normal"
        axes.text(border.at, -0.2, sends, ha="center", va="top", fontsize=8.5, color=color, fontweight=weight)
    _draw_residuals(axes, regions, direction, num_ranks)
    right = regions[-1].left + regions[-1].width
    arrow = (right + 0.15, -0.15) if direction == "forward" else (-0.15, right + 0.15)
    look = {"arrowstyle": "->", "linewidth": 1.4, "color": "#404040"}
    axes.annotate("", xy=(arrow[0], -0.85), xytext=(arrow[1], -0.85), arrowprops=look)
    for rank in range(num_ranks):
        axes.text(-0.2, num_ranks - rank - 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
    bare(axes, (-1.0, right + 0.25), (-1.0, num_ranks + 1.3))


def _draw_residuals(axes, regions: list[BlockRegion], direction: str, num_ranks: int) -> None:
    """Draw the two residual connections above f and g, from before a norm to the next sum."""
    norm, sum_and_norm, last_sum = (region for region in regions if not region.is_cut)
    top = num_ranks + 1.05
    for start, stop in ((norm.left - 0.08, sum_and_norm.left), (sum_and_norm.left + 0.42, last_sum.left)):
        ends = (start, stop + 0.23) if direction == "forward" else (stop + 0.23, start)
        axes.plot([ends[0], ends[0], ends[1]], [num_ranks, top, top], color="#404040", linewidth=1.4)
        arrow = {"arrowstyle": "->", "linewidth": 1.4, "color": "#404040", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(ends[1], num_ranks), xytext=(ends[1], top), arrowprops=arrow)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text((start + stop) / 2, top, "residual", ha="center", va="center", fontsize=8.5, bbox=box)


@checked
def show_f_and_g(num_ranks: Size = 2) -> None:
    """Show a block of a Llama on ranks: which operations are cut, and what f and g send in each direction."""
    if num_ranks > 4:
        raise ValueError(f"num_ranks is {num_ranks}; the picture has room for 4, the pattern is the same")
    said = "A block has two all-reduces forward (g) and two backward (f)"
    with picture_panels(2, 1, 3.0 + 0.75 * num_ranks, said) as (_, panels):
        for axes, direction in zip(panels, ("forward", "backward"), strict=True):
            draw_block(axes, direction, num_ranks)
            axes.set_title(direction, fontsize=10, fontweight="normal")


# ---------------------------------------------------------------- a loss from parts of the logits


@dataclass(frozen=True)
class LossColumn:
    """One of the three quantities of the loss: of each rank, the all-reduce, and its result on every rank."""

    name: str
    of_ranks: tuple[float, ...]
    operation: str
    result: float


def loss_columns(logits: Sequence[float], target: Index, tp_size: Size) -> tuple[list[LossColumn], float]:
    """Return the three quantities that cross the ranks for one token, and the loss that follows from them.

    Raises   ValueError if the target is outside the vocabulary
    """
    if target >= len(logits):
        raise ValueError(f"target is {target}; choose 0 to {len(logits) - 1}, a place among the logits")
    parts = _parts(logits, tp_size)
    m = max(logits)
    sums = tuple(sum(math.exp(z - m) for z in part) for _, part in parts)
    targets = tuple(part[target - first] - m if first <= target < first + len(part) else 0.0 for first, part in parts)
    columns = [
        LossColumn("largest logit", tuple(max(part) for _, part in parts), "max", m),
        LossColumn("sum of exp(z - $z_{max}$)", sums, "sum", sum(sums)),
        LossColumn("target: z - $z_{max}$, or 0", targets, "sum", sum(targets)),
    ]
    return columns, math.log(sum(sums)) - sum(targets)


def _parts(logits: Sequence[float], tp_size: int) -> list[tuple[int, Sequence[float]]]:
    """Of each rank its first token and its logits."""
    sizes = piece_sizes(len(logits), tp_size)
    if 0 in sizes:
        raise ValueError(f"{len(logits)} logits leave a rank of {tp_size} with none; use fewer ranks")
    starts = [sum(sizes[:rank]) for rank in range(tp_size)]
    return [(start, logits[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def draw_vocab_loss(axes, logits: Sequence[float], target: Index, tp_size: Size) -> None:
    """Draw each rank's logits, then the three quantities with the all-reduce below each; the last row is the loss."""
    columns, loss = loss_columns(logits, target, tp_size)
    parts, width = _parts(logits, tp_size), max(len(part) for _, part in _parts(logits, tp_size))
    for rank, (first, part) in enumerate(parts):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        for index, logit in enumerate(part):
            _tile(axes, (index, rank), 1, color, f"{logit:g}", outlined=first + index == target)
        for index, column in enumerate(columns):
            _tile(axes, (width + 0.7 + 2.5 * index, rank), 2.2, color, f"{column.of_ranks[rank]:.4g}")
        axes.text(-0.2, rank + 0.45, f"rank {rank}", ha="right", va="center", fontsize=9)
    axes.text(width / 2, -0.15, "logits z (frame: target)", ha="center", va="bottom", fontsize=9)
    for index, (column, symbol) in enumerate(zip(columns, ("$z_{max}$", "s", "$z_t$ - $z_{max}$"), strict=True)):
        left = width + 0.7 + 2.5 * index
        axes.text(left + 1.1, -0.15, column.name, ha="center", va="bottom", fontsize=9)
        look = {"fontsize": 8.5, "color": AXIS_COLORS["tp"], "fontweight": "bold"}
        axes.text(left + 1.1, tp_size + 0.4, f"\u2193 all-reduce ({column.operation})", **CENTRED, **look)
        _tile(axes, (left, tp_size + 0.75), 2.2, WHOLE_COLOR, f"{symbol} = {column.result:.4g}")
    axes.text(width + 0.4, tp_size + 1.2, "every rank", ha="right", va="center", fontsize=9)
    right = width + 0.7 + 2.5 * len(columns)
    said = f"loss = log s - ($z_t$ - $z_{{max}}$) = {loss:.4f}"
    axes.text(right - 0.3, tp_size + 2.15, said, ha="right", va="center", fontsize=10, fontweight="bold")
    axes.set(xlim=(-1.2, right), ylim=(tp_size + 2.6, -0.75))
    axes.set_axis_off()


def _tile(axes, corner: tuple[float, float], width: float, color: str, text: str, outlined: bool = False) -> None:
    edge = {"edgecolor": "black", "linewidth": 2.2, "zorder": 3} if outlined else {}
    labelled_box(axes, corner, (width - 0.06, 0.9), color, text, fontsize=9, **edge)


@checked
def show_vocab_loss(logits: Sequence[float], target: Index, tp_size: Size = 2) -> None:
    """Show how three all-reduces give every rank the loss of one token, although each has a part of the logits."""
    with picture_axes(1.5 + 0.42 * tp_size) as axes:
        draw_vocab_loss(axes, logits, target, tp_size)
        axes.set_title("Three numbers per token cross the ranks, whatever the size of the vocabulary is")
