"""Context parallelism in pictures: heads for tokens, the mask shared out, who waits, memory by length."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.patches import Patch

from course_lib.hardware import GPU
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, pairs, pairs_of_ranks, share_of_ideal, step_pairs
from course_lib.palette import LIMIT_COLOR, NEUTRAL_COLOR, RANK_COLORS, text_on
from course_lib.parallel.positions import positions
from course_lib.plots.curves import LINE_COLORS, LINE_STYLES, MARKERS
from course_lib.plots.style import ground, key, keys_below, panel_title, picture_axes, picture_panels, plain_rows, write
from course_lib.plots.tiles import ABSENT_COLOR, draw_squares, ranks
from course_lib.units import UNITS, three_digits
from course_lib.validate import Size, checked

CP, TOKENS = 4, 16  # of the pictures whose numbers are nobody's


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
        keys_below(figure, _rank_patches(CP))


def _rank_patches(count: int) -> list[Patch]:
    return [Patch(facecolor=RANK_COLORS[rank], label=f"rank {rank}") for rank in range(count)]


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
        keys_below(figure, [*_rank_patches(cp_size), key(ABSENT_COLOR, "masked")], ncol=5)


def show_mask() -> None:
    """Show which rank computes which (query, key) pair under each sequence sharding, and how many pairs a rank has."""
    cells = {}
    for name in SEQUENCE_SHARDINGS:
        where = [positions(name, TOKENS, CP, rank).tolist() for rank in range(CP)]
        least, *_, most = sorted(pairs_of_ranks(pairs(name, TOKENS, CP)))
        each = f"{least:,} pairs each" if least == most else f"{least:,} to {most:,} pairs a rank"
        cells[f"{name}\n{each}"] = pair_ranks(where, [TOKENS])
    _show_masks(cells, CP, 3.9, f"{TOKENS * (TOKENS + 1) // 2:,} pairs of {TOKENS} tokens, shared out over {CP} ranks")


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
    for rank, row in enumerate(table):
        start, color = 0, RANK_COLORS[rank]
        for step, (done, most) in enumerate(zip(row, step_pairs(table), strict=True)):
            axes.barh(rank, done, left=start, height=0.74, color=color, edgecolor="white", linewidth=1 if done else 0)
            if done > 0.03 * end:
                write(axes, start + done / 2, rank, str(step), fontsize=8, color=text_on(color))
            hatched = {"facecolor": "none", "edgecolor": NEUTRAL_COLOR, "hatch": "////", "linewidth": 0}
            axes.barh(rank, most - done, left=start + done, height=0.74, **hatched)
            start += most


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
    """Show GiB of one GPU, `{name: {tokens: bytes}}`, and its limit; raises ValueError for more lines than looks."""
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
