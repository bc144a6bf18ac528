"""Tokens on ranks, in pictures: where they mix, how outputs merge, gradients that travel, chunks, heads, documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from course_lib.layout.sequence_sharding import check_context
from course_lib.parallel.positions import positions
from course_lib.plots.context import MASKED_COLOR, draw_mask
from course_lib.plots.palette import COMMUNICATION_COLOR, NEUTRAL_COLOR, RANK_COLORS, mix
from course_lib.plots.style import (
    CENTRED,
    arrow,
    bare,
    labelled_box,
    panel_title,
    picture_axes,
    picture_panels,
    rank_patches,
)
from course_lib.validate import Positive, Size, checked

MOST_RANKS = len(RANK_COLORS)
MOST_TOKENS = 32


def _check_room(cp_size: int, seq_len: int = 1) -> None:
    if cp_size > MOST_RANKS or seq_len > MOST_TOKENS:
        raise ValueError(
            f"cp_size is {cp_size} and seq_len {seq_len}; the picture has room for {MOST_RANKS} ranks and "
            f"{MOST_TOKENS} tokens"
        )


# ---------------------------------------------------------------- where tokens mix

PARTS = ("embedding", "norm", "q, k, v", "attention", "output", "norm", "MLP", "head, loss")


@checked
def show_cut(cp_size: Size = 4) -> None:
    """Show the parts of a model from left to right, and the tokens of each rank as a row: only attention mixes rows.

    Raises   ValueError for more ranks than there are colours
    """
    _check_room(cp_size)
    place = PARTS.index("attention")
    with picture_axes(1.2 + 0.4 * cp_size) as axes:
        for rank in range(cp_size):
            for x, part in enumerate(PARTS):
                if x != place:
                    labelled_box(axes, (x + 0.05, rank + 0.12), (0.9, 0.76), RANK_COLORS[rank], part)
        labelled_box(
            axes, (place + 0.05, 0.12), (0.9, cp_size - 0.24), "#E6E6E6", "attention:\nkeys and\nvalues of\nall ranks"
        )
        bare(axes, (-0.75, len(PARTS)), (cp_size, 0))
        for rank in range(cp_size):
            axes.text(-0.1, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
        axes.set_title("Each rank computes on its own tokens; only attention needs those of other ranks")


# ---------------------------------------------------------------- two outputs become one


@dataclass(frozen=True)
class Part:
    """The output over some keys, and the sum of their exponentials, which is the weight of this output."""

    output: float
    weight: float


def merged_part(outputs: Sequence[float], weights: Sequence[Positive]) -> Part:
    """Return the output over all keys: the mean of the outputs, each with its weight.

    Raises   ValueError unless there are as many weights as outputs
    """
    if not outputs or len(outputs) != len(weights):
        raise ValueError(f"got {len(outputs)} outputs and {len(weights)} weights; give as many of both, at least one")
    total = sum(weights)
    return Part(sum(o * w for o, w in zip(outputs, weights, strict=True)) / total, total)


@checked
def show_merge(outputs: Sequence[Positive], weights: Sequence[Positive]) -> None:
    """Show each output as a box as wide as its weight, and the merged one with the same area in all.

    Raises   ValueError unless there are as many weights as outputs
    """
    whole = merged_part(outputs, weights)
    with picture_panels(1, 2, 2.6, "The merged output is a weighted mean", sharey=True) as (figure, panels):
        figure.get_layout_engine().set(wspace=0.08)
        left = 0.0
        for index, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
            text = f"block {index + 1}\noutput {output:g}"
            labelled_box(panels[0], (left, 0), (weight, output), RANK_COLORS[index % MOST_RANKS], text)
            left += weight
        text = f"all keys\noutput {whole.output:g}"
        labelled_box(panels[1], (0, 0), (whole.weight, whole.output), mix(NEUTRAL_COLOR, "#FFFFFF", 0.5), text)
        for axes, caption in zip(panels, ("each block by itself", "merged: the same area"), strict=True):
            axes.set(xlim=(0, whole.weight), ylim=(0, 1.1 * max(outputs)), xlabel="weight: sum of exponentials")
            panel_title(axes, caption)
        panels[0].set(ylabel="output", yticks=sorted({0, *outputs, whole.output}))


# ---------------------------------------------------------------- gradients that travel


def shares_on_the_way(cp_size: Size) -> list[list[int | None]]:
    """Return [rank][step] how many shares the gradient of rank 0's block has there after that rank added its own.

    At step t rank t has the block of rank 0. Its owner's share, of step 0, stays at home.
    """
    return [[step if rank == step else None for step in range(cp_size)] for rank in range(cp_size)]


@checked
def show_gradient_ring(cp_size: Size = 4) -> None:
    """Show the way of the keys and values of rank 0 in the backward pass, and of their gradient behind them.

    Raises   ValueError for more ranks than there are colours
    """
    _check_room(cp_size)
    table, color = shares_on_the_way(cp_size), RANK_COLORS[0]
    with picture_axes(1.3 + 0.55 * cp_size) as axes:
        for rank, row in enumerate(table):
            for step, shares in enumerate(row):
                color_here = "#F4F4F4" if shares is None else color
                labelled_box(axes, (step + 0.03, rank + 0.12), (0.94, 0.76), color_here, _said_of(shares))
        for step in range(1, cp_size):
            start, stop = (step + 0.5, step + 0.88), (step + 1.35, step + 1.12)
            if step < cp_size - 1:
                _arrow(axes, start, stop)
        home = cp_size + 0.03
        labelled_box(axes, (home, 0.12), (0.94, 0.76), color, f"dkv of 0:\n{cp_size} shares")
        if cp_size > 1:
            _arrow(axes, (cp_size, cp_size - 0.5), (home + 0.47, 0.9))
        bare(axes, (-0.6, cp_size + 1), (cp_size, -0.35))
        for rank in range(cp_size):
            axes.text(-0.05, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
            axes.text(rank + 0.5, -0.1, f"step {rank}", fontsize=9, **CENTRED)
        axes.text(cp_size + 0.5, -0.1, "at home", fontsize=9, **CENTRED)
        said = f"The gradient of a block makes {cp_size - 1} ring steps, one behind its keys and values"
        axes.set_title(said)


def _said_of(shares: int | None) -> str:
    if shares is None:
        return ""
    return f"k v of 0:\n{shares} share{'s' * (shares > 1)} in dkv" if shares else "k v of 0,\nown share stays"


def _arrow(axes, start: tuple, stop: tuple) -> None:
    arrow(axes, start, stop, mutation_scale=13, linewidth=1.8, color=COMMUNICATION_COLOR, shrinkA=2, zorder=4)


# ---------------------------------------------------------------- chunks of a sequence


def owners(sequence_sharding: str, seq_len: Size, cp_size: Size) -> list[int]:
    """Return which rank has each token.

    Raises   ValueError as `sequence_sharding.check_context`
    """
    check_context(seq_len, cp_size, sequence_sharding)
    found = [0] * seq_len
    for rank in range(cp_size):
        for place in positions(sequence_sharding, seq_len, cp_size, rank).tolist():
            found[place] = rank
    return found


@checked
def show_chunks(cp_size: Size = 4, seq_len: Size = 16) -> None:
    """Show each token as a bar as high as the keys that it sees, in the colour of its rank: contiguous, and zig-zag.

    Raises   ValueError for more ranks than colours, or more tokens than there is room for
    """
    _check_room(cp_size, seq_len)
    with picture_panels(2, 1, 3.6, "A late token sees more keys than an early one", sharex=True) as (_, panels):
        for axes, name in zip(panels, ("contiguous", "zigzag"), strict=True):
            totals = [0] * cp_size
            for token, rank in enumerate(owners(name, seq_len, cp_size)):
                axes.bar(token, token + 1, width=0.94, color=RANK_COLORS[rank])
                axes.text(token, token + 1 + 0.04 * seq_len, str(rank), fontsize=8, **CENTRED)
                totals[rank] += token + 1
            said = ", ".join(f"rank {rank}: {total}" for rank, total in enumerate(totals))
            panel_title(axes, f"{name}: pairs of {said}")
            axes.set(xlim=(-0.6, seq_len - 0.4), ylim=(0, 1.12 * seq_len), ylabel="keys seen", yticks=[1, seq_len])
        panels[-1].set_xticks(range(seq_len))
        panels[-1].set_xlabel("position of the token (above a bar and as its colour: its rank)")


# ---------------------------------------------------------------- heads for tokens


def head_token_owners(cp_size: Size, num_heads: Size, seq_len: Size) -> tuple[list[list[int]], list[list[int]]]:
    """Return [head][token] -> rank, before the all-to-all and after it.

    Raises   ValueError unless the ranks divide heads and tokens
    """
    if num_heads % cp_size or seq_len % cp_size:
        raise ValueError(
            f"num_heads is {num_heads} and seq_len {seq_len}; both must be multiples of cp_size ({cp_size})"
        )
    before = [[token * cp_size // seq_len for token in range(seq_len)] for _ in range(num_heads)]
    after = [[head * cp_size // num_heads] * seq_len for head in range(num_heads)]
    return before, after


@checked
def show_heads_for_tokens(cp_size: Size = 4, num_heads: Size = 8, seq_len: Size = 16) -> None:
    """Show which rank has which head of which token, before and after the all-to-all of Ulysses.

    Raises   ValueError unless the ranks divide heads and tokens, or where there is no room
    """
    _check_room(cp_size, max(num_heads, seq_len))
    tables = head_token_owners(cp_size, num_heads, seq_len)
    captions = (
        f"before: all {num_heads} heads of {seq_len // cp_size} tokens each",
        f"after: {num_heads // cp_size} heads of all {seq_len} tokens each",
    )
    said = "After the all-to-all a rank has few heads, and all tokens"
    with picture_panels(1, 2, 1.1 + 0.26 * num_heads, said) as (figure, panels):
        for axes, cells, caption in zip(panels, tables, captions, strict=True):
            for head, row in enumerate(cells):
                for token, rank in enumerate(row):
                    labelled_box(axes, (token, head), (1, 1), RANK_COLORS[rank])
            bare(axes, (0, seq_len), (num_heads, 0))
            axes.set(xlabel="tokens", ylabel="heads")
            panel_title(axes, caption, "center")
        figure.legend(handles=rank_patches(cp_size), loc="outside lower center", ncol=cp_size)


# ---------------------------------------------------------------- documents in one sequence


def document_cells(lengths: Sequence[Size], where: Sequence) -> list[list[int | None]]:
    """Return [query][key] -> the query's rank, None where the key is later or of another document.

    where    the positions of each rank's tokens
    Raises   ValueError unless every token has one rank
    """
    document = [index for index, length in enumerate(lengths) for _ in range(length)]
    owner = {int(place): rank for rank, places in enumerate(where) for place in places}
    if sorted(owner) != list(range(len(document))):
        raise ValueError(f"where has {len(owner)} tokens; give a rank to each of the {len(document)} tokens once")
    size = len(document)
    return [[owner[q] if k <= q and document[k] == document[q] else None for k in range(size)] for q in range(size)]


@checked
def document_pairs(lengths: Sequence[Size], where: Sequence) -> list[int]:
    """Return how many pairs each rank computes."""
    drawn = [of for row in document_cells(lengths, where) for of in row if of is not None]
    return [drawn.count(rank) for rank in range(len(where))]


@checked
def show_documents(lengths: Sequence[Size], cuts: Mapping[str, Sequence]) -> None:
    """Show the mask of documents packed into one sequence, each pair in the colour of its rank, for each cut.

    cuts     {name: the positions of each rank's tokens}
    Raises   ValueError where there is no room, or a token has no rank
    """
    if not lengths or not cuts:
        raise ValueError(f"got {len(lengths)} documents and {len(cuts)} cuts; give at least one of each")
    ranks = max(len(where) for where in cuts.values())
    _check_room(ranks, sum(lengths))
    said = f"{len(lengths)} documents in one sequence: a query sees keys of its own document"
    with picture_panels(1, len(cuts), 4.1, said, squeeze=False) as (figure, panels):
        for axes, (name, where) in zip(panels[0], cuts.items(), strict=True):
            pairs = ", ".join(map(str, document_pairs(lengths, where)))
            draw_mask(axes, document_cells(lengths, where), f"{name}\npairs by rank: {pairs}")
        handles = [*rank_patches(ranks), Patch(facecolor=MASKED_COLOR, label="masked")]
        figure.legend(handles=handles, loc="outside lower center", ncol=len(handles))
