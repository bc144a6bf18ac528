"""Tensor parallelism in pictures: matrices by column and row, heads and a vocabulary by rank, f and g, a loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.palette import AXIS_COLORS, RANK_COLORS, mix
from course_lib.plots.diagrams import draw_arrows, draw_diagram
from course_lib.plots.style import bare, ground, labelled_box, picture_axes, picture_panels, write
from course_lib.plots.tiles import ABSENT_COLOR, OUTLINED, Tile, draw_tiles, rank_tile, ranks
from course_lib.validate import Index, Size, checked

WHOLE_COLOR = "#E6E6E6"  # the same numbers on every rank


def piece_bounds(size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Where `size` is cut for each rank, as `piece_sizes` has it: (start, stop)."""
    stops = list(accumulate(piece_sizes(size, num_ranks)))
    return list(zip([0, *stops], stops, strict=False))  # the last stop starts no piece


# ---------------------------------------------------------------- column, then row

TOKENS, D_MODEL, D_FF, TP = 2048, 4096, 14336, 2
MATRICES = (  # name, rows and columns of one rank's piece, what is done with it, the sign that follows
    ("X", "TD", "replicated", "·"),
    ("A", "Df", "cut by columns", "="),
    ("Y", "Tf", "stays cut", "·"),
    ("B", "fD", "cut by rows", "="),
    ("Z", "TD", "partial sums", "sum\n→"),
    ("Z", "TD", "one all-reduce", ""),
)
DRAWN = {"T": 1.5, "D": 1.5, "f": 2.7 / TP}  # the picture's own sizes: what matters is which side is cut


def piece_shape(dims: str) -> tuple[int, int]:
    """Return the rows and columns of one rank's piece."""
    sizes = {"T": TOKENS, "D": D_MODEL, "f": D_FF // TP}
    return sizes[dims[0]], sizes[dims[1]]


def show_linear_pair() -> None:
    """Show Y = X A, Z = Y B cut by columns, then by rows, with the shape that one rank holds of each matrix.

    Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Narayanan et al. 2021 (arXiv:2104.04473), figure 5
    """
    gap, lift = 0.8, 0.16
    with picture_axes(3.1) as axes:
        x = 0.0
        for name, dims, note, sign in MATRICES:
            (height, width), partial = (DRAWN[dim] for dim in dims), note == "partial sums"
            whole_height, whole_width = (
                size * (TP if dim == "f" else 1) for dim, size in zip(dims, (height, width), strict=True)
            )
            if "f" in dims:
                for rank in range(TP):
                    right, down = (rank * width, 0) if dims[1] == "f" else (0, rank * height)
                    corner = x + right, whole_height / 2 - down - height
                    labelled_box(axes, corner, (width, height), RANK_COLORS[rank], f"{rank}", linewidth=0.9)
            elif partial:  # a stack of sheets, of equal shape, that have yet to be added
                for rank in reversed(range(TP)):
                    corner = x + lift * rank, lift * rank - height / 2 - lift * (TP - 1) / 2
                    look = {"linewidth": 0.9, "edgecolor": "black"}
                    labelled_box(axes, corner, (width, height), RANK_COLORS[rank], "" if rank else "0 + 1", **look)
                whole_width += lift * (TP - 1)
            else:
                labelled_box(axes, (x, -height / 2), (width, height), WHOLE_COLOR, "every\nrank")
            middle, (rows, columns) = x + whole_width / 2, piece_shape(dims)
            each = "\neach" if "f" in dims or partial else ""
            write(axes, middle, 1.98, name, fontsize=11, fontweight="bold", va="top")
            write(axes, middle, 1.63, note, fontsize=8.5, va="top")
            write(axes, middle, -1.5, f"{dims[0]} × {dims[1]}\n{rows:,} × {columns:,}{each}", fontsize=8, va="top")
            x += whole_width + gap
            write(axes, x - gap / 2, 0, sign, fontsize=9 if len(sign) > 1 else 13)
        axes.set(xlim=(-0.1, x - gap + 0.1), ylim=(-2.35, 2.1), aspect="equal")
        axes.set_axis_off()
        axes.set_title("Columns first, then rows: nothing is sent until Z, and there once")


# ---------------------------------------------------------------- attention heads


@dataclass(frozen=True)
class RankHeads:
    """The query heads and the key/value heads of one rank; `replicas` ranks hold the same key/value heads."""

    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    replicas: int


def heads_by_rank(num_heads: int, num_kv_heads: int, tp_size: int) -> list[RankHeads]:
    """Which heads each rank computes; with more ranks than key/value heads, several ranks hold the same ones.

    Raises   ValueError if the heads cannot be dealt out evenly
    """
    check_heads(num_heads, num_kv_heads, tp_size)
    q_each, group = num_heads // tp_size, num_heads // num_kv_heads
    found = []
    for rank in range(tp_size):
        q_heads = tuple(range(rank * q_each, (rank + 1) * q_each))
        kv_heads = tuple(sorted({head // group for head in q_heads}))
        found.append(RankHeads(q_heads, kv_heads, max(1, tp_size // num_kv_heads)))
    return found


def heads_title(of_ranks: Sequence[RankHeads]) -> str:
    """What the picture shows, in one sentence."""
    first = of_ranks[0]
    if first.replicas > 1:
        return f"More ranks than key/value heads: each of them is held by {first.replicas} ranks (hatched)"
    return f"{len(first.q_heads)} query and {len(first.kv_heads)} key/value heads a rank, none held twice"


@checked
def show_heads(tp_sizes: Sequence[Size]) -> None:
    """Show which of 8 query and 4 key/value heads each rank computes, for one tp size or one below the other."""
    if not tp_sizes:
        raise ValueError("tp_sizes is empty; give one size or more, such as [2, 8]")
    said = "8 query heads and 4 key/value heads, dealt out by rank"
    with picture_panels(len(tp_sizes), 1, 0.4 + 1.35 * len(tp_sizes), said, squeeze=False) as (_, panels):
        for axes, size in zip(panels[:, 0], tp_sizes, strict=True):
            of_ranks, queries, keys = heads_by_rank(8, 4, size), [], []
            for rank, held in enumerate(of_ranks):
                color, width = RANK_COLORS[rank], len(held.q_heads)
                write(axes, rank * (width + 0.5) + width / 2, -0.12, f"rank {rank}", va="bottom")
                queries += [Tile(f"q{head}", mix(color, "#FFFFFF", 0.35)) for head in held.q_heads] + [0.5]
                look = {"hatch": "//"} if held.replicas > 1 else {}
                keys += [rank_tile(f"k{h} v{h}", rank, width / len(held.kv_heads), **look) for h in held.kv_heads]
                keys.append(0.5)
            draw_tiles(axes, [queries[:-1], keys[:-1]], pitch=1.1)
            axes.set(ylim=(2.15, -0.6))
            axes.set_title(f"tp {size}: {heads_title(of_ranks)}", fontsize=10, fontweight="normal")


# ---------------------------------------------------------------- a vocabulary by rows

VOCABULARY, VOCABULARY_RANKS, TOKEN_IDS = 128_256, 4, (9906, 40_000, 70_123, 127_999, 11)


def show_vocabulary() -> None:
    """Show an embedding table cut by rows: of each token one rank has the row, the others give zeros; below the sum."""
    bounds = piece_bounds(VOCABULARY, VOCABULARY_RANKS)
    rows, gap = [], 0.9
    for rank, (start, stop) in enumerate(bounds):
        has = [start <= token < stop for token in TOKEN_IDS]
        answers = [rank_tile("row", rank) if own else Tile("0", ABSENT_COLOR) for own in has]
        rows.append([rank_tile(f"{start:,} to {stop - 1:,}", rank, 2.3), gap, *answers])
    owners = [next(rank for rank, (start, stop) in enumerate(bounds) if start <= t < stop) for t in TOKEN_IDS]
    with picture_axes(1.3 + 0.34 * VOCABULARY_RANKS) as axes:
        draw_tiles(axes, rows, ranks(VOCABULARY_RANKS))
        write(axes, 1.15, -0.15, "rows of the table", fontsize=8.5, va="bottom")
        write(axes, 3.1, -0.15, "token", "right", 8.5, va="bottom")
        write(axes, 3.05, VOCABULARY_RANKS + 0.75, "all-reduce: the sum", "right", 8.5)
        for column, (token, owner) in enumerate(zip(TOKEN_IDS, owners, strict=True)):
            write(axes, 3.7 + column, -0.15, f"{token:,}", fontsize=8.5, va="bottom")
            corner = 3.2 + column, VOCABULARY_RANKS + 0.25
            labelled_box(axes, corner, (1, 1), RANK_COLORS[owner], "row", linewidth=1.5)
        axes.set(ylim=(VOCABULARY_RANKS + 1.3, -0.6))
        axes.set_title("Each token's row is on one rank; the others add zeros")


# ---------------------------------------------------------------- f and g on a block

# What runs in a block, in order: its width, and whether it is cut; f and g stand at the borders of what is cut.
REGIONS = (
    *(("norm", 0.8, False), ("q, k, v", 1.12, True), ("attention\nof its heads", 1.12, True), ("o", 1.12, True)),
    *(("+  norm", 1.0, False), ("gate, up", 1.12, True), ("SiLU,\nproduct", 1.12, True), ("down", 1.12, True)),
    ("+", 0.5, False),
)
SENDS = {("g", "forward"): "all-reduce", ("f", "backward"): "all-reduce"}


def block_borders() -> tuple[list[float], list[tuple[str, float]]]:
    """Return where each region begins, and (name, place) of the four borders between what is cut and what is not."""
    lefts, borders, x, gap = [], [], 0.0, 0.62
    for index, (_, width, is_cut) in enumerate(REGIONS):
        if index and is_cut != REGIONS[index - 1][2]:
            borders.append(("f" if is_cut else "g", x + gap / 2))
            x += gap
        lefts.append(x)
        x += width
    return lefts, borders


def draw_block(axes, direction: str, num_ranks: int = 2) -> None:
    """Draw the regions in lanes, one for each rank; what is the same on all ranks spans the lanes."""
    lefts, borders = block_borders()
    boxes, dark, top = [], "#404040", num_ranks + 1.05
    for left, (name, width, is_cut) in zip(lefts, REGIONS, strict=True):
        boxes += [(left, num_ranks - 1 - rank, width, 1, RANK_COLORS[rank], name) for rank in range(num_ranks * is_cut)]
        boxes += [] if is_cut else [(left, 0, width, num_ranks, WHOLE_COLOR, name)]
    right = lefts[-1] + REGIONS[-1][1]
    draw_diagram(axes, ((-1.0, right + 0.25), (-1.0, num_ranks + 1.3)), boxes, fontsize=8, linewidth=1.5)
    for name, at in borders:
        sends = SENDS.get((name, direction))
        color, weight, width = (AXIS_COLORS["tp"], "bold", 5) if sends else ("#8C8C8C", "normal", 1.5)
        axes.plot([at, at], [-0.1, num_ranks + 0.1], color=color, linewidth=width)
        write(axes, at, num_ranks + 0.2, name, fontsize=11, va="bottom", style="italic")
        write(axes, at, -0.2, sends or "nothing", fontsize=8.5, va="top", color=color, fontweight=weight)
    for start, stop in ((lefts[0] - 0.08, lefts[4]), (lefts[4] + 0.42, lefts[8])):  # residuals, to the next sum
        ends = (start, stop + 0.23)[:: 1 if direction == "forward" else -1]
        axes.plot([ends[0], ends[0], ends[1]], [num_ranks, top, top], color=dark, linewidth=1.4)
        draw_arrows(axes, [((ends[1], top), (ends[1], num_ranks))], dark, arrowstyle="->")
        write(axes, (start + stop) / 2, top, "residual", fontsize=8.5, bbox=ground("white"))
    along = ((-0.15, -0.85), (right + 0.15, -0.85))
    draw_arrows(axes, [along[:: 1 if direction == "forward" else -1]], dark, arrowstyle="->")
    for rank in range(num_ranks):
        write(axes, -0.2, num_ranks - rank - 0.5, f"rank {rank}", "right")


def show_f_and_g() -> None:
    """Show a block of a Llama on two ranks: which operations are cut, and what f and g send in each direction."""
    said = "A block has two all-reduces forward (g) and two backward (f)"
    with picture_panels(2, 1, 4.5, said) as (_, panels):
        for axes, direction in zip(panels, ("forward", "backward"), strict=True):
            draw_block(axes, direction)
            axes.set_title(direction, fontsize=10, fontweight="normal")


# ---------------------------------------------------------------- a loss from parts of the logits


@dataclass(frozen=True)
class LossColumn:
    """One of the three quantities of the loss: of each rank, the all-reduce, and its result on every rank."""

    name: str
    symbol: str
    of_ranks: tuple[float, ...]
    operation: str
    result: float


@checked
def loss_columns(logits: Sequence[float], target: Index, tp_size: Size) -> tuple[list[LossColumn], float]:
    """Return the three quantities that cross the ranks for one token, and the loss that follows from them.

    Raises   ValueError if the target is outside the vocabulary, or a rank has no logit
    """
    if target >= len(logits):
        raise ValueError(f"target is {target}; choose 0 to {len(logits) - 1}, a place among the logits")
    parts = [(start, logits[start:stop]) for start, stop in piece_bounds(len(logits), tp_size)]
    if not all(part for _, part in parts):
        raise ValueError(f"{len(logits)} logits leave a rank of {tp_size} with none; use fewer ranks")
    m = max(logits)
    sums = tuple(sum(math.exp(z - m) for z in part) for _, part in parts)
    targets = tuple(part[target - first] - m if first <= target < first + len(part) else 0.0 for first, part in parts)
    columns = [
        LossColumn("largest logit", "$z_{max}$", tuple(max(part) for _, part in parts), "max", m),
        LossColumn("sum of exp(z - $z_{max}$)", "s", sums, "sum", sum(sums)),
        LossColumn("target: z - $z_{max}$, or 0", "$z_t$ - $z_{max}$", targets, "sum", sum(targets)),
    ]
    return columns, math.log(sum(sums)) - sum(targets)


@checked
def show_vocab_loss(logits: Sequence[float], target: Index, tp_size: Size = 2) -> None:
    """Show how three all-reduces give every rank the loss of one token, although each has a part of the logits."""
    columns, loss = loss_columns(logits, target, tp_size)
    bounds, rows = piece_bounds(len(logits), tp_size), []
    width = max(stop - start for start, stop in bounds)
    for rank, (start, stop) in enumerate(bounds):
        own = [rank_tile(f"{logits[i]:g}", rank, **(OUTLINED if i == target else {})) for i in range(start, stop)]
        row = [*own, width - len(own) + 0.7]
        for column in columns:
            row += [rank_tile(f"{column.of_ranks[rank]:.4g}", rank, 2.14), 0.36]
        rows.append(row)
    with picture_axes(1.5 + 0.42 * tp_size) as axes:
        draw_tiles(axes, rows, height=0.9, fontsize=9)
        for rank in range(tp_size):
            write(axes, -0.2, rank + 0.45, f"rank {rank}", "right")
        write(axes, width / 2, -0.15, "logits z (frame: target)", va="bottom")
        for index, column in enumerate(columns):
            left = width + 0.7 + 2.5 * index
            write(axes, left + 1.1, -0.15, column.name, va="bottom")
            look = {"color": AXIS_COLORS["tp"], "fontweight": "bold"}
            write(axes, left + 1.1, tp_size + 0.4, f"\u2193 all-reduce ({column.operation})", fontsize=8.5, **look)
            said = f"{column.symbol} = {column.result:.4g}"
            labelled_box(axes, (left, tp_size + 0.75), (2.14, 0.9), WHOLE_COLOR, said, fontsize=9)
        write(axes, width + 0.4, tp_size + 1.2, "every rank", "right")
        right = width + 0.7 + 2.5 * len(columns)
        said = f"loss = log s - ($z_t$ - $z_{{max}}$) = {loss:.4f}"
        write(axes, right - 0.3, tp_size + 2.15, said, "right", 10, fontweight="bold")
        bare(axes, (-1.2, right), (tp_size + 2.6, -0.75))
        axes.set_title("Three numbers per token cross the ranks, whatever the size of the vocabulary is")
