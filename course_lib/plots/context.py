"""Context parallelism in pictures: tokens on ranks, the mask shared out, who waits, what travels, memory by length."""

from collections.abc import Iterable, Mapping, Sequence

from course_lib.hardware import GPU
from course_lib.layout.block_pairs import all_pairs, idle_pairs, pairs, pairs_of_ranks, share_of_ideal, step_pairs
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, check_context, tile
from course_lib.palette import COMMUNICATION_COLOR, LIMIT_COLOR, NEUTRAL_COLOR, RANK_COLORS, mix, text_on
from course_lib.parallel.positions import positions
from course_lib.plots.curves import LINE_COLORS, LINE_STYLES, MARKERS
from course_lib.plots.diagrams import diagram, draw_arrows
from course_lib.plots.style import (
    ground,
    key,
    keys_below,
    labelled_box,
    panel_title,
    picture_axes,
    picture_panels,
    plain_rows,
    rank_patches,
    write,
)
from course_lib.plots.tiles import ABSENT_COLOR, Tile, draw_squares, draw_tiles, rank_tile, ranks
from course_lib.units import UNITS, three_digits
from course_lib.validate import Positive, Size, checked

CP, TOKENS = 4, 16  # of the pictures whose numbers are nobody's

# ---------------------------------------------------------------- where tokens mix

PARTS = ("embedding", "norm", "q, k, v", "attention", "output", "norm", "MLP", "head, loss")


def show_cut() -> None:
    """Show the parts of a model from left to right, and the tokens of each rank as a row: only attention mixes rows."""
    boxes = [(x + 0.05, rank + 0.12, 0.9, 0.76, RANK_COLORS[rank], part) for rank in range(CP)
             for x, part in enumerate(PARTS) if part != "attention"]  # fmt: skip
    left = PARTS.index("attention") + 0.05
    boxes.append((left, 0.12, 0.9, CP - 0.24, "#E6E6E6", "attention:\nkeys and\nvalues of\nall ranks"))
    names = [(-0.1, rank + 0.5, f"rank {rank}", "right") for rank in range(CP)]
    said = "Each rank computes on its own tokens; only attention needs those of other ranks"
    diagram(1.2 + 0.4 * CP, said, ((-0.75, len(PARTS)), (CP, 0)), boxes, (), names)


# ---------------------------------------------------------------- two outputs become one


def merged(outputs: Sequence[float], weights: Sequence[float]) -> float:
    """Return the output over all keys: the mean of the outputs, each with its weight (its sum of exponentials).

    Raises   ValueError unless there are as many weights as outputs
    """
    if not outputs or len(outputs) != len(weights):
        raise ValueError(f"got {len(outputs)} outputs and {len(weights)} weights; give as many of both, at least one")
    return sum(o * w for o, w in zip(outputs, weights, strict=True)) / sum(weights)


@checked
def show_merge(outputs: Sequence[Positive], weights: Sequence[Positive]) -> None:
    """Show each output as a box as wide as its weight, and the merged one with the same area in all."""
    whole, total = merged(outputs, weights), sum(weights)
    with picture_panels(1, 2, 2.6, "The merged output is a weighted mean", sharey=True) as (figure, panels):
        figure.get_layout_engine().set(wspace=0.08)
        left = 0.0
        for index, (output, weight) in enumerate(zip(outputs, weights, strict=True)):
            text, color = f"block {index + 1}\noutput {output:g}", RANK_COLORS[index % len(RANK_COLORS)]
            labelled_box(panels[0], (left, 0), (weight, output), color, text)
            left += weight
        grey = mix(NEUTRAL_COLOR, "#FFFFFF", 0.5)
        labelled_box(panels[1], (0, 0), (total, whole), grey, f"all keys\noutput {whole:g}")
        for axes, caption in zip(panels, ("each block by itself", "merged: the same area"), strict=True):
            axes.set(xlim=(0, total), ylim=(0, 1.1 * max(outputs)), xlabel="weight: sum of exponentials")
            panel_title(axes, caption)
        panels[0].set(ylabel="output", yticks=sorted({0, *outputs, whole}))


# ---------------------------------------------------------------- gradients that travel


def show_gradient_ring() -> None:
    """Show the way of rank 0's keys and values in the backward pass of three ranks, and of their gradient behind them.

    At step t rank t has the block of rank 0. Its owner's share, of step 0, stays at home.
    """
    count, color, boxes = 3, RANK_COLORS[0], []
    for rank in range(count):
        for step in range(count):
            shares = f"{step} share{'s' * (step > 1)} in dkv" if step else "own share stays"
            text = f"k v of 0{':' if step else ','}\n{shares}" if rank == step else ""
            boxes.append((step + 0.03, rank + 0.12, 0.94, 0.76, color if text else ABSENT_COLOR, text))
    boxes.append((count + 0.03, 0.12, 0.94, 0.76, color, f"dkv of 0:\n{count} shares"))
    with picture_axes(1.3 + 0.55 * count) as axes:
        for left, top, width, height, face, text in boxes:
            labelled_box(axes, (left, top), (width, height), face, text)
        hops = [((step + 0.5, step + 0.88), (step + 1.35, step + 1.12)) for step in range(1, count - 1)]
        hops.append(((count, count - 0.5), (count + 0.5, 0.9)))
        draw_arrows(axes, hops, COMMUNICATION_COLOR, mutation_scale=13, linewidth=1.8, zorder=4)
        for index in range(count):
            write(axes, -0.05, index + 0.5, f"rank {index}", "right")
            write(axes, index + 0.5, -0.1, f"step {index}")
        write(axes, count + 0.5, -0.1, "at home")
        axes.set(xlim=(-0.6, count + 1), ylim=(count, -0.35))
        axes.set_axis_off()
        axes.set_title(f"The gradient of a block makes {count - 1} ring steps, one behind its keys and values")


# ---------------------------------------------------------------- chunks of a sequence


def owners(sequence_sharding: str, seq_len: int, cp_size: int) -> list[int]:
    """Return which rank has each token.

    Raises   ValueError as `sequence_sharding.check_context`
    """
    check_context(seq_len, cp_size, sequence_sharding)
    found = [0] * seq_len
    for rank in range(cp_size):
        for place in positions(sequence_sharding, seq_len, cp_size, rank).tolist():
            found[place] = rank
    return found


def show_chunks() -> None:
    """Show each token as a bar as high as the keys that it sees, in the colour of its rank: contiguous, and zig-zag."""
    with picture_panels(2, 1, 3.6, "A late token sees more keys than an early one", sharex=True) as (_, panels):
        for axes, name in zip(panels, ("contiguous", "zigzag"), strict=True):
            totals = pairs_of_ranks(pairs(name, TOKENS, CP))
            for token, rank in enumerate(owners(name, TOKENS, CP)):
                axes.bar(token, token + 1, width=0.94, color=RANK_COLORS[rank])
                write(axes, token, token + 1 + 0.04 * TOKENS, str(rank), fontsize=8)
            said = ", ".join(f"rank {rank}: {total}" for rank, total in enumerate(totals))
            panel_title(axes, f"{name}: pairs of {said}")
            axes.set(xlim=(-0.6, TOKENS - 0.4), ylim=(0, 1.12 * TOKENS), ylabel="keys seen", yticks=[1, TOKENS])
        axes.set_xticks(range(TOKENS))
        axes.set_xlabel("position of the token (above a bar and as its colour: its rank)")


# ---------------------------------------------------------------- heads for tokens


def show_heads_for_tokens() -> None:
    """Show which rank has which of 8 heads of which token, before and after the all-to-all of Ulysses."""
    heads, said = 8, "After the all-to-all a rank has few heads, and all tokens"
    tables = {
        f"before: all {heads} heads of {TOKENS // CP} tokens each": lambda head, token: token * CP // TOKENS,
        f"after: {heads // CP} heads of all {TOKENS} tokens each": lambda head, token: head * CP // heads,
    }
    with picture_panels(1, 2, 1.1 + 0.26 * heads, said) as (figure, panels):
        for axes, (caption, rank_of) in zip(panels, tables.items(), strict=True):
            rows = [[RANK_COLORS[rank_of(head, token)] for token in range(TOKENS)] for head in range(heads)]
            draw_squares(axes, rows, "tokens", "heads")
            panel_title(axes, caption, "center")
        keys_below(figure, rank_patches(CP))


# ---------------------------------------------------------------- the mask, shared out


def pair_ranks(where: Iterable[Iterable[int]], lengths: Sequence[int]) -> list[list[int | None]]:
    """Return [query][key] -> the query's rank, None where the key is later or of another document.

    where    the positions of each rank's tokens
    lengths  of the documents in the sequence
    Raises   ValueError unless every token has one rank
    """
    document = [index for index, length in enumerate(lengths) for _ in range(length)]
    owner = {int(place): rank for rank, places in enumerate(where) for place in places}
    if sorted(owner) != list(range(len(document))):
        raise ValueError(f"where has {len(owner)} tokens; give a rank to each of the {len(document)} tokens once")
    size = len(document)
    return [[owner[q] if k <= q and document[k] == document[q] else None for k in range(size)] for q in range(size)]


def _show_masks(cells: Mapping[str, list[list[int | None]]], cp_size: int, height_in: float, title: str) -> None:
    with picture_panels(1, len(cells), height_in, title, squeeze=False) as (figure, panels):
        for axes, (caption, rows) in zip(panels[0], cells.items(), strict=True):
            colors = [[ABSENT_COLOR if rank is None else RANK_COLORS[rank] for rank in row] for row in rows]
            draw_squares(axes, colors, "keys", "queries")
            axes.set_aspect("equal")
            panel_title(axes, caption, "center")
        keys_below(figure, [*rank_patches(cp_size), key(ABSENT_COLOR, "masked")], ncol=5)


def mask_caption(sequence_sharding: str, seq_len: int, cp_size: int) -> str:
    """What a panel shows, in one line: how many pairs a rank has."""
    totals = pairs_of_ranks(pairs(sequence_sharding, seq_len, cp_size))
    each = f"{totals[0]:,} pairs each" if len(set(totals)) == 1 else f"{min(totals):,} to {max(totals):,} pairs a rank"
    return f"{sequence_sharding}\n{each}"


def show_mask() -> None:
    """Show which rank computes which (query, key) pair under each sequence sharding."""
    places = {
        mask_caption(one, TOKENS, CP): [positions(one, TOKENS, CP, rank).tolist() for rank in range(CP)]
        for one in SEQUENCE_SHARDINGS
    }
    said = f"{all_pairs(TOKENS):,} pairs of {TOKENS} tokens, shared out over {CP} ranks"
    _show_masks({caption: pair_ranks(where, [TOKENS]) for caption, where in places.items()}, CP, 3.9, said)


@checked
def document_pairs(lengths: Sequence[Size], where: Sequence) -> list[int]:
    """Return how many pairs each rank computes."""
    drawn = [of for row in pair_ranks(where, lengths) for of in row if of is not None]
    return [drawn.count(rank) for rank in range(len(where))]


@checked
def show_documents(lengths: Sequence[Size], cuts: Mapping[str, Sequence]) -> None:
    """Show the mask of documents packed into one sequence, each pair in the colour of its rank, for each cut.

    cuts     {name: the positions of each rank's tokens}
    Raises   ValueError where there is no room, or a token has no rank
    """
    if not lengths or not cuts:
        raise ValueError(f"got {len(lengths)} documents and {len(cuts)} cuts; give at least one of each")
    count = max(len(where) for where in cuts.values())
    if count > len(RANK_COLORS) or sum(lengths) > 32:
        raise ValueError(f"got {count} ranks and {sum(lengths)} tokens; the picture has room for 8 ranks and 32 tokens")
    cells = {
        f"{name}\npairs by rank: {', '.join(map(str, document_pairs(lengths, where)))}": pair_ranks(where, lengths)
        for name, where in cuts.items()
    }
    said = f"{len(lengths)} documents in one sequence: a query sees keys of its own document"
    _show_masks(cells, count, 4.1, said)


# ---------------------------------------------------------------- who waits at each step


@checked
def show_work(shardings: Sequence[str]) -> None:
    """Show what each of 4 ranks computes at each step of a ring, numbered, and how long it waits for the busiest."""
    seq_len, height = 4096, (0.5 + 0.24 * CP) * len(shardings) + 0.9
    tables = {sharding: pairs(sharding, seq_len, CP) for sharding in shardings}
    if not tables:
        raise ValueError(f"shardings is empty; choose from {', '.join(SEQUENCE_SHARDINGS)}")
    end = max(sum(step_pairs(table)) for table in tables.values())
    said = f"A step of the ring ends with its busiest rank: {CP} ranks, {seq_len:,} tokens"
    with picture_panels(len(shardings), 1, height, said, sharex=True, squeeze=False) as (_, panels):
        for axes, (name, table) in zip(panels[:, 0], tables.items(), strict=True):
            draw_work(axes, table, end)
            plain_rows(axes, ranks(CP), -0.5, -0.5)
            axes.set_xlim(0, end)
            axes.spines["left"].set_visible(False)
            panel_title(axes, f"{name}: {100 * share_of_ideal(table):.1f} % of the ideal speed")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}")
        axes.set_xlabel("million pairs computed one after the other (numbers: steps of the ring; hatched: waiting)")


def draw_work(axes, table: Sequence[Sequence[int]], end: int) -> None:
    """Draw each rank's pairs step after step, on a clock that counts pairs, and hatched how long it waits."""
    for rank, (row, idle) in enumerate(zip(table, idle_pairs(table), strict=True)):
        start, color = 0, RANK_COLORS[rank]
        for step, (done, waits) in enumerate(zip(row, idle, strict=True)):
            axes.barh(rank, done, left=start, height=0.74, color=color, edgecolor="white", linewidth=1 if done else 0)
            if done > 0.03 * end:
                write(axes, start + done / 2, rank, str(step), fontsize=8, color=text_on(color))
            hatched = {"facecolor": "none", "edgecolor": NEUTRAL_COLOR, "hatch": "////", "linewidth": 0}
            axes.barh(rank, waits, left=start + done, height=0.74, **hatched)
            start += done + waits


# ---------------------------------------------------------------- blocks that travel


def travel(cp_size: int, sequence_sharding: str) -> list[list[tuple[int, int]]]:
    """What each rank has at each step of a ring, [rank][step]: whose block (of two tokens), and pairs computed with it.

    At step t rank r has the block of rank r - t.
    """
    check_context(2 * cp_size, cp_size, sequence_sharding)

    def held(rank: int, step: int) -> tuple[int, int]:
        seen = tile(sequence_sharding, 2, rank, (rank - step) % cp_size)
        return (rank - step) % cp_size, seen.pairs if seen else 0

    return [[held(rank, step) for step in range(cp_size)] for rank in range(cp_size)]


def show_travel() -> None:
    """Show whose keys and values each rank has at each step; hatched where its queries may see none of them."""
    table, rows = travel(CP, "contiguous"), []
    for row in table:
        look = {"linewidth": 1.2}
        hollow = [Tile(f"k v of {of}", width=0.92, look=look | {"edgecolor": RANK_COLORS[of], "hatch": "////"})
                  for of, _ in row]  # fmt: skip
        filled = [rank_tile(f"k v of {of}", of, 0.92, **look) for of, _ in row]
        tiles = [full if seen else pale for full, pale, (_, seen) in zip(filled, hollow, row, strict=True)]
        rows.append([0.04] + [part for one in tiles for part in (one, 0.08)])
    idle = sum(not seen for row in table for _, seen in row)
    with picture_axes(1.1 + 0.42 * CP) as axes:
        draw_tiles(axes, rows, ranks(CP), height=0.84)
        axes.set_xticks([step + 0.5 for step in range(CP)], [f"step {step}" for step in range(CP)])
        said = f"{CP - 1} ring steps bring every block to every rank"
        axes.set_title(f"{said}; in {idle} of {CP**2} places it is of no use there")


# ---------------------------------------------------------------- memory by length


def show_length(seq_len: int) -> str:
    """Tokens as one says them: 16k, 128k, 1M."""
    for size, letter in ((2**20, "M"), (1024, "k")):
        if seq_len >= size and seq_len % size == 0:
            return f"{seq_len // size}{letter}"
    return str(seq_len)


def line_label(name: str, curve: Mapping[int, float], limit_bytes: float) -> str:
    """A line's name, the longest of its lengths that fits, and the next one."""
    longest = max((seq_len for seq_len, size in curve.items() if size <= limit_bytes), default=None)
    too_long = min((seq_len for seq_len in curve if seq_len > (longest or 0)), default=None)
    fits = f"{show_length(longest)} fits" if longest else "nothing fits"
    return f"{name}: {fits}" + (f", {show_length(too_long)} does not" if longest and too_long else "")


@checked
def show_memory_by_length(curves: Mapping[str, Mapping[int, float]], gpu: GPU, title: str) -> None:
    """Show GiB of one GPU by tokens of a sequence, `{"cp 4": {16384: bytes, ...}, ...}`, and the GPU's limit.

    Raises   ValueError if there are more lines than looks to tell them apart
    """
    if not 1 <= len(curves) <= len(LINE_STYLES):
        raise ValueError(f"there are {len(curves)} lines; give 1 to {len(LINE_STYLES)}")
    unit, limit = UNITS["GiB"], gpu.usable_bytes / UNITS["GiB"]
    sizes = [size / unit for curve in curves.values() for size in curve.values()]
    with picture_axes(3.8) as axes:
        for index, (name, curve) in enumerate(curves.items()):
            look = {"color": LINE_COLORS[index], "linestyle": LINE_STYLES[index], "marker": MARKERS[index]}
            label = line_label(name, curve, gpu.usable_bytes)
            axes.plot(list(curve), [size / unit for size in curve.values()], label=label, markersize=5, **look)
        lengths = sorted({seq_len for curve in curves.values() for seq_len in curve})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [show_length(seq_len) for seq_len in lengths])
        axes.minorticks_off()
        powers = [power for power in (1, 3, 10, 30, 100, 300, 1000, 3000) if min(sizes) / 2 <= power <= 2 * max(sizes)]
        axes.set_yticks(powers, [f"{value:,}" for value in powers])
        axes.axhline(limit, color=LIMIT_COLOR, linewidth=1.2, linestyle=(0, (3, 2)), zorder=0)
        place = {"xycoords": axes.get_yaxis_transform(), "xytext": (4, 3), "textcoords": "offset points"}
        look = {"fontsize": 8.5, "bbox": ground("white", 0.5, 0.8)}
        axes.annotate(f"{gpu.name}: {three_digits(limit)} GiB", (0, limit), **place, **look)
        axes.set(xlabel="tokens of one sequence", ylabel="GiB of one GPU")
        axes.legend(loc="upper left")
        axes.set_title(title)
