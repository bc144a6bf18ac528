"""Tensor parallelism in pictures: matrices cut by column and row, heads by rank, a vocabulary by rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.plots.palette import RANK_COLORS, mix
from course_lib.plots.style import CENTRED, labelled_box, name_ranks, picture_axes, picture_panels
from course_lib.validate import Size, checked

MOST_RANKS = 8
WHOLE_COLOR = "#E6E6E6"  # the same numbers on every rank


def chunk_bounds(size: Size, num_ranks: Size) -> list[tuple[int, int]]:
    """Where `size` is cut for each rank, as `piece_sizes` has it: (start, stop)."""
    stops = list(accumulate(piece_sizes(size, num_ranks)))
    return list(zip([0, *stops], stops, strict=False))  # the last stop starts no piece


def _check_ranks(num_ranks: int) -> None:
    if num_ranks > MOST_RANKS:
        raise ValueError(f"{num_ranks} ranks have no room; the picture shows {MOST_RANKS}, the pattern is the same")


# ---------------------------------------------------------------- column, then row


@dataclass(frozen=True)
class MatrixPiece:
    """A part of a matrix on one rank (None: the same on all), with its rows and columns as (start, stop).

    `partial` marks a partial sum: right shape, but the ranks' pieces have yet to be added.
    """

    matrix: str
    rank: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    partial: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


def linear_pair_pieces(tokens: Size, d_model: Size, d_ff: Size, tp_size: Size) -> list[MatrixPiece]:
    """Who holds what in Y = X A, Z = Y B when A is cut by columns and B by rows: Z is the first thing to be summed.

    Shapes   X (tokens, D) on all ranks · A (D, f) · Y (tokens, f) · B (f, D) · Z (tokens, D) partial on each
    Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Narayanan et al. 2021 (arXiv:2104.04473), figure 5
    """
    _check_ranks(tp_size)
    whole_T, whole_D = (0, tokens), (0, d_model)
    pieces = [MatrixPiece("X", None, whole_T, whole_D)]
    for rank, cut in enumerate(chunk_bounds(d_ff, tp_size)):
        pieces += [
            MatrixPiece("A", rank, whole_D, cut),
            MatrixPiece("Y", rank, whole_T, cut),
            MatrixPiece("B", rank, cut, whole_D),
            MatrixPiece("Z", rank, whole_T, whole_D, partial=True),
        ]
    return [*pieces, MatrixPiece("Z", None, whole_T, whole_D)]


# The picture's own sizes: what matters is which side is cut.
_SIZES = {"T": 1.5, "D": 1.5, "F": 2.7}
_GAP, _LIFT = 0.8, 0.16


def draw_linear_pair(axes, pieces: Sequence[MatrixPiece]) -> None:
    """X A = Y, Y B = Z from left to right; each rank's pieces in its colour, partial sums as a stack of sheets."""
    tp_size = sum(piece.matrix == "A" for piece in pieces)
    T, D, F = _SIZES["T"], _SIZES["D"], _SIZES["F"]
    boxes = {"X": (T, D), "A": (D, F), "Y": (T, F), "B": (F, D), "Z": (T, D)}
    spread = _LIFT * (tp_size - 1)
    x, places = 0.0, []
    for name, sign in (("X", "·"), ("A", "="), ("Y", "·"), ("B", "="), ("Z", "sum\n→"), ("Z whole", "")):
        height, width = boxes[name[0]]
        of_it = [p for p in pieces if p.matrix == name[0] and (name == "Z") == p.partial]
        places.append((name, x, width, height, of_it))
        stacked = spread if name == "Z" else 0
        x += width + stacked + _GAP
        if sign:
            axes.text(x - _GAP / 2, 0, sign, **CENTRED, fontsize=9 if len(sign) > 1 else 13)
    for name, left, width, height, of_it in places:
        _draw_matrix(axes, left, width, height, of_it)
        _name_matrix(axes, name, left + (width + (spread if name == "Z" else 0)) / 2, of_it)
    axes.set(xlim=(-0.1, x - _GAP + 0.1), ylim=(-2.35, 2.1), aspect="equal")
    axes.set_axis_off()


def _draw_matrix(axes, left: float, width: float, height: float, pieces: Sequence[MatrixPiece]) -> None:
    rows, columns = (max(getattr(p, side)[1] for p in pieces) for side in ("rows", "columns"))
    last = len(pieces) - 1
    for index, piece in enumerate(reversed(pieces)):
        lift = _LIFT * (last - index) if piece.partial else 0
        x0, x1 = (left + width * c / columns for c in piece.columns)
        y0, y1 = (height / 2 - height * r / rows for r in piece.rows)
        color = WHOLE_COLOR if piece.rank is None else RANK_COLORS[piece.rank % len(RANK_COLORS)]
        box = (x0 + lift, y1 + lift - (_LIFT * last / 2 if piece.partial else 0)), (x1 - x0, y0 - y1)
        edge = "black" if piece.partial else "white"
        labelled_box(axes, *box, color, _text_of(piece, last), linewidth=0.9, edgecolor=edge)


def _text_of(piece: MatrixPiece, last: int) -> str:
    if piece.rank is None:
        return "every\nrank"
    if not piece.partial:
        return str(piece.rank)
    return "0 + 1" + (" + ..." if last > 1 else "") if piece.rank == 0 else ""


MATRIX_DIMS = {"X": ("T", "D"), "A": ("D", "f"), "Y": ("T", "f"), "B": ("f", "D"), "Z": ("T", "D")}
MATRIX_NOTES = {
    "X": "replicated",
    "A": "cut by columns",
    "Y": "stays cut",
    "B": "cut by rows",
    "Z": "partial sums",
    "Z whole": "one all-reduce",
}


def _name_matrix(axes, name: str, x: float, pieces: Sequence[MatrixPiece]) -> None:
    rows, columns = MATRIX_DIMS[name[0]]
    axes.text(x, 1.98, name[0], ha="center", va="top", fontsize=11, fontweight="bold")
    shapes = sorted({piece.shape for piece in pieces}, reverse=True)
    shape = " or ".join(f"{r:,} × {c:,}" for r, c in shapes[:1])
    if pieces[0].rank is not None and len(shapes) == 1:
        shape += "\neach"
    more = "\n(last: {:,} × {:,})".format(*shapes[-1]) if len(shapes) > 1 else ""
    axes.text(x, -1.5, f"{rows} × {columns}\n{shape}{more}", ha="center", va="top", fontsize=8)
    axes.text(x, 1.63, MATRIX_NOTES[name], ha="center", va="top", fontsize=8.5)


@checked
def show_linear_pair(tokens: Size = 4096, d_model: Size = 4096, d_ff: Size = 14_336, tp_size: Size = 2) -> None:
    """Show Y = X A, Z = Y B cut by columns, then by rows, with the shape that one rank holds of each matrix."""
    pieces = linear_pair_pieces(tokens, d_model, d_ff, tp_size)
    with picture_axes(3.1) as axes:
        draw_linear_pair(axes, pieces)
        axes.set_title("Columns first, then rows: nothing is sent until Z, and there once")


# ---------------------------------------------------------------- attention heads


@dataclass(frozen=True)
class RankHeads:
    """The query heads and the key/value heads of one rank; `replicas` ranks hold the same key/value heads."""

    rank: int
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    replicas: int


def heads_by_rank(num_heads: Size, num_kv_heads: Size, tp_size: Size) -> list[RankHeads]:
    """Which heads each rank computes; with more ranks than key/value heads, several ranks hold the same ones.

    Raises   ValueError if the heads cannot be dealt out evenly
    """
    check_heads(num_heads, num_kv_heads, tp_size)
    q_each, group = num_heads // tp_size, num_heads // num_kv_heads
    ranks = []
    for rank in range(tp_size):
        q_heads = tuple(range(rank * q_each, (rank + 1) * q_each))
        kv_heads = tuple(sorted({head // group for head in q_heads}))
        ranks.append(RankHeads(rank, q_heads, kv_heads, max(1, tp_size // num_kv_heads)))
    return ranks


def draw_heads(axes, ranks: Sequence[RankHeads]) -> None:
    """Query heads above, the key/value heads that they read below; a rank is a frame of its colour."""
    x, width = 0.0, len(ranks[0].q_heads)
    for of_rank in ranks:
        color = RANK_COLORS[of_rank.rank % len(RANK_COLORS)]
        axes.text(x + width / 2, -0.12, f"rank {of_rank.rank}", ha="center", va="bottom", fontsize=9)
        for index, head in enumerate(of_rank.q_heads):
            labelled_box(axes, (x + index, 0), (1, 1), mix(color, "#FFFFFF", 0.35), f"q{head}", linewidth=1.5)
        each = width / len(of_rank.kv_heads)
        for index, head in enumerate(of_rank.kv_heads):
            hatch = "//" if of_rank.replicas > 1 else ""
            look = {"hatch": hatch, "linewidth": 1.5}
            labelled_box(axes, (x + index * each, 1.1), (each, 1), color, f"k{head} v{head}", **look)
        x += width + 0.5
    axes.set(xlim=(-0.05, x - 0.45), ylim=(2.15, -0.6))
    axes.set_axis_off()


def heads_title(ranks: Sequence[RankHeads]) -> str:
    """What the picture shows, in one sentence."""
    first = ranks[0]
    if first.replicas > 1:
        return f"More ranks than key/value heads: each of them is held by {first.replicas} ranks (hatched)"
    return f"{len(first.q_heads)} query and {len(first.kv_heads)} key/value heads a rank, none held twice"


@checked
def show_heads(num_heads: Size = 8, num_kv_heads: Size = 4, tp_size: Size | Sequence[int] = (2, 8)) -> None:
    """Show which heads each rank computes, for one tp size or one below the other for several."""
    sizes = [tp_size] if isinstance(tp_size, int) else list(tp_size)
    if num_heads > 16:
        raise ValueError(f"num_heads is {num_heads}; the picture has room for 16, the pattern is the same")
    said = f"{num_heads} query heads and {num_kv_heads} key/value heads, dealt out by rank"
    with picture_panels(len(sizes), 1, 0.4 + 1.35 * len(sizes), said, squeeze=False) as (_, panels):
        for axes, size in zip(panels[:, 0], sizes, strict=True):
            ranks = heads_by_rank(num_heads, num_kv_heads, size)
            draw_heads(axes, ranks)
            axes.set_title(f"tp {size}: {heads_title(ranks)}", fontsize=10, fontweight="normal")


# ---------------------------------------------------------------- a vocabulary by rows


@dataclass(frozen=True)
class VocabularyRows:
    """The rows of the embedding table on one rank, and which of the asked tokens it can answer (others: zeros)."""

    rank: int
    start: int
    stop: int
    answers: tuple[bool, ...]


def vocabulary_rows(vocab_size: Size, tp_size: Size, token_ids: Sequence[int] = ()) -> list[VocabularyRows]:
    """The rows of each rank, and who answers which token: exactly one rank each, so that the sum is the embedding.

    Raises   ValueError if a token is outside the vocabulary
    """
    _check_ranks(tp_size)
    if outside := [token for token in token_ids if not 0 <= token < vocab_size]:
        raise ValueError(f"tokens {outside} are outside the vocabulary of {vocab_size}; choose 0 to {vocab_size - 1}")
    return [
        VocabularyRows(rank, start, stop, tuple(start <= token < stop for token in token_ids))
        for rank, (start, stop) in enumerate(chunk_bounds(vocab_size, tp_size))
    ]


def draw_vocabulary(axes, rows: Sequence[VocabularyRows], token_ids: Sequence[int]) -> None:
    """Left the table cut into rows, right what each rank gives for each token: a row, or zeros; below their sum."""
    left, ranks = 3.2, len(rows)
    for of_rank in rows:
        color = RANK_COLORS[of_rank.rank % len(RANK_COLORS)]
        y = of_rank.rank
        held = f"{of_rank.start:,} to {of_rank.stop - 1:,}" if of_rank.stop > of_rank.start else "no row"
        labelled_box(axes, (0, y), (2.3, 1), color, held, linewidth=1.5)
        for column, answered in enumerate(of_rank.answers):
            _token_box(axes, left + column, y, color if answered else "#F4F4F4", "row" if answered else "0")
    for column, token in enumerate(token_ids):
        owner = next(row.rank for row in rows if row.answers[column])
        axes.text(left + column + 0.5, -0.15, f"{token:,}", ha="center", va="bottom", fontsize=8.5)
        _token_box(axes, left + column, ranks + 0.25, RANK_COLORS[owner % len(RANK_COLORS)], "row")
    axes.text(1.15, -0.15, "rows of the table", ha="center", va="bottom", fontsize=8.5)
    axes.text(left - 0.1, -0.15, "token", ha="right", va="bottom", fontsize=8.5)
    axes.text(left - 0.15, ranks + 0.75, "all-reduce: the sum", ha="right", va="center", fontsize=8.5)
    name_ranks(axes, ranks)
    axes.set(xlim=(-0.05, left + len(token_ids) + 0.05), ylim=(ranks + 1.3, -0.6), xticks=[])


def _token_box(axes, x: float, y: float, color: str, text: str) -> None:
    label = labelled_box(axes, (x, y), (1, 1), color, text, linewidth=1.5)
    if color == "#F4F4F4":
        label.set_color("#595959")


@checked
def show_vocabulary(
    vocab_size: Size = 128_256, tp_size: Size = 4, token_ids: Sequence[int] = (9906, 40_000, 70_123, 127_999, 11)
) -> None:
    """Show an embedding table cut by rows, and how a sum over ranks puts each token's row together."""
    rows = vocabulary_rows(vocab_size, tp_size, token_ids)
    with picture_axes(1.3 + 0.34 * tp_size) as axes:
        draw_vocabulary(axes, rows, token_ids)
        axes.set_title("Each token's row is on one rank; the others add zeros")
