"""Context parallelism in pictures: the mask shared out, who waits when, blocks that travel, memory by length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from course_lib.hardware import GPU
from course_lib.layout.block_pairs import all_pairs, idle_pairs, pairs, pairs_of_ranks, share_of_ideal, step_pairs
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS, check_context, tile
from course_lib.parallel.positions import positions
from course_lib.plots.curves import LINE_COLORS, LINE_STYLES, MARKERS
from course_lib.plots.palette import LIMIT_COLOR, NEUTRAL_COLOR, RANK_COLORS, channels, text_on
from course_lib.plots.style import (
    CENTRED,
    UNITS,
    ground,
    labelled_box,
    name_ranks,
    panel_title,
    picture_axes,
    picture_panels,
    rank_patches,
    three_digits,
)
from course_lib.validate import Amount, Size, checked

MASKED_COLOR = "#F4F4F4"
MOST_RANKS = len(RANK_COLORS)

# ---------------------------------------------------------------- the mask, shared out


def mask_ranks(sequence_sharding: str, seq_len: Size, cp_size: Size) -> list[list[int | None]]:
    """Which rank computes each pair: [query][key], None for later keys. A pair is its query's rank's.

    Raises   ValueError as `sequence_sharding.check_context`
    """
    check_context(seq_len, cp_size, sequence_sharding)
    owner = {
        place: rank
        for rank in range(cp_size)
        for place in positions(sequence_sharding, seq_len, cp_size, rank).tolist()
    }
    return [[owner[q] if k <= q else None for k in range(seq_len)] for q in range(seq_len)]


def mask_caption(sequence_sharding: str, seq_len: Size, cp_size: Size) -> str:
    """What a panel shows, in one line: how many pairs a rank has."""
    totals = pairs_of_ranks(pairs(sequence_sharding, seq_len, cp_size))
    each = f"{totals[0]:,} pairs each" if len(set(totals)) == 1 else f"{min(totals):,} to {max(totals):,} pairs a rank"
    return f"{sequence_sharding}\n{each}"


def draw_mask(axes, cells: Sequence[Sequence[int | None]], caption: str) -> None:
    """A square for each pair, queries downwards, keys to the right, coloured by rank."""
    size = len(cells)
    colors = [[MASKED_COLOR if of is None else RANK_COLORS[of % MOST_RANKS] for of in row] for row in cells]
    squares = [[channels(color) for color in row] for row in colors]
    axes.imshow(squares, extent=(0, size, size, 0), interpolation="nearest")
    borders = {"color": "white", "linewidth": 0.6}
    axes.hlines(range(size + 1), 0, size, **borders)
    axes.vlines(range(size + 1), 0, size, **borders)
    axes.set(xlim=(0, size), ylim=(size, 0), xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    panel_title(axes, caption, "center")


@checked
def show_mask(cp_size: Size = 4, seq_len: Size = 16) -> None:
    """Show which rank computes which (query, key) pair under each sequence sharding.

    Raises   ValueError for more ranks than there are colours, or more tokens than there is room for
    """
    _check_ranks(cp_size)
    if seq_len > 64:
        raise ValueError(f"seq_len is {seq_len}; the picture has room for 64, the pattern is the same")
    said = f"{all_pairs(seq_len):,} pairs of {seq_len} tokens, shared out over {cp_size} ranks"
    with picture_panels(1, len(SEQUENCE_SHARDINGS), 3.9, said) as (figure, panels):
        for axes, sharding in zip(panels, SEQUENCE_SHARDINGS, strict=True):
            draw_mask(axes, mask_ranks(sharding, seq_len, cp_size), mask_caption(sharding, seq_len, cp_size))
        handles = [*rank_patches(cp_size), Patch(facecolor=MASKED_COLOR, label="masked")]
        figure.legend(handles=handles, loc="outside lower center", ncol=min(len(handles), 5))


# ---------------------------------------------------------------- who waits at each step


@dataclass(frozen=True)
class WorkBar:
    """One rank at one step of a ring, in pairs: from `start` on it computes, then waits for the busiest."""

    rank: int
    step: int
    start: int
    pairs: int
    idle: int


def work_bars(table: Sequence[Sequence[int]]) -> list[WorkBar]:
    """A table of `block_pairs.pairs` as bars on a clock that counts pairs."""
    idle, lengths = idle_pairs(table), step_pairs(table)
    starts = [sum(lengths[:step]) for step in range(len(lengths))]
    return [
        WorkBar(rank, step, starts[step], done, idle[rank][step])
        for rank, row in enumerate(table)
        for step, done in enumerate(row)
    ]


def work_caption(sequence_sharding: str, table: Sequence[Sequence[int]]) -> str:
    """What a panel shows, in one line: the share of ideal speed."""
    return f"{sequence_sharding}: {100 * share_of_ideal(table):.1f} % of the ideal speed"


def draw_work(axes, bars: Sequence[WorkBar], caption: str, end: int) -> None:
    """Ranks downwards, pairs to the right: what each computes at each step, and hatched how long it waits."""
    for bar in bars:
        color = RANK_COLORS[bar.rank % MOST_RANKS]
        if bar.pairs:
            axes.barh(bar.rank, bar.pairs, left=bar.start, height=0.74, color=color, edgecolor="white", linewidth=1)
            if bar.pairs > 0.03 * end:
                centre = bar.start + bar.pairs / 2
                axes.text(centre, bar.rank, str(bar.step), **CENTRED, fontsize=8, color=text_on(color))
        if bar.idle:
            waits = {"facecolor": "none", "edgecolor": NEUTRAL_COLOR, "hatch": "////", "linewidth": 0}
            axes.barh(bar.rank, bar.idle, left=bar.start + bar.pairs, height=0.74, **waits)
    ranks = 1 + max(bar.rank for bar in bars)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set(xlim=(0, end), ylim=(ranks - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    panel_title(axes, caption)


@checked
def show_work(cp_size: Size = 4, seq_len: Size = 4096, shardings: Sequence[str] = SEQUENCE_SHARDINGS) -> None:
    """Show what each rank computes at each step of a ring, numbered, and how long it waits for the busiest.

    Raises   ValueError for more ranks than there are colours
    """
    _check_ranks(cp_size)
    tables = {sharding: pairs(sharding, seq_len, cp_size) for sharding in shardings}
    end = max(sum(step_pairs(table)) for table in tables.values())
    height = (0.5 + 0.24 * cp_size) * len(shardings) + 0.9
    said = f"A step of the ring ends with its busiest rank: {cp_size} ranks, {seq_len:,} tokens"
    with picture_panels(len(shardings), 1, height, said, sharex=True, squeeze=False) as (_, panels):
        for axes, (sequence_sharding, table) in zip(panels[:, 0], tables.items(), strict=True):
            draw_work(axes, work_bars(table), work_caption(sequence_sharding, table), end)
        in_millions = end >= 10**6
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}" if in_millions else f"{x:,.0f}")
        unit = "million pairs" if in_millions else "pairs"
        axes.set_xlabel(f"{unit} computed one after the other (numbers: steps of the ring; hatched: waiting)")


# ---------------------------------------------------------------- blocks that travel


@dataclass(frozen=True)
class Held:
    """Whose keys and values a rank has at a step, and how many pairs it computes with them."""

    key_rank: int
    pairs: int


def travel(cp_size: Size, sequence_sharding: str = "zigzag") -> list[list[Held]]:
    """What each rank has at each step of a ring, [rank][step]: at step t the block of rank r - t, of two tokens."""
    check_context(2 * cp_size, cp_size, sequence_sharding)

    def held(rank: int, step: int) -> Held:
        seen = tile(sequence_sharding, 2, rank, (rank - step) % cp_size)
        return Held((rank - step) % cp_size, seen.pairs if seen else 0)

    return [[held(rank, step) for step in range(cp_size)] for rank in range(cp_size)]


def draw_travel(axes, table: Sequence[Sequence[Held]]) -> None:
    """Steps to the right, ranks downwards: a cell in the colour of its keys' rank; pale where nothing may be seen."""
    size = len(table)
    for rank, row in enumerate(table):
        for step, held in enumerate(row):
            color = RANK_COLORS[held.key_rank % MOST_RANKS]
            face, look = (color, {}) if held.pairs else ("#FFFFFF", {"edgecolor": color, "hatch": "////"})
            text = f"k v of {held.key_rank}" if size <= 6 else str(held.key_rank)
            labelled_box(axes, (step + 0.04, rank + 0.08), (0.92, 0.84), face, text, linewidth=1.2, **look)
    axes.set_xticks([step + 0.5 for step in range(size)], [f"step {step}" for step in range(size)])
    name_ranks(axes, size)
    axes.set(xlim=(0, size), ylim=(size, 0))


@checked
def show_travel(cp_size: Size = 4, sequence_sharding: str = "contiguous") -> None:
    """Show whose keys and values each rank has at each step; hatched where its queries may see none of them.

    Raises   ValueError for more ranks than there are colours
    """
    _check_ranks(cp_size)
    table = travel(cp_size, sequence_sharding)
    idle = sum(held.pairs == 0 for row in table for held in row)
    said = f"{cp_size - 1} ring steps bring every block to every rank"
    said += f"; in {idle} of {cp_size**2} places it is of no use there" if idle else ""
    with picture_axes(1.1 + 0.42 * cp_size) as axes:
        draw_travel(axes, table)
        axes.set_title(said)


def _check_ranks(cp_size: int) -> None:
    if not 1 <= cp_size <= MOST_RANKS:
        raise ValueError(f"cp is {cp_size}; the picture has colours for 1 to {MOST_RANKS} ranks")


# ---------------------------------------------------------------- memory by length


def longest_drawn(curve: Mapping[int, float], limit_bytes: Amount) -> int | None:
    """The longest of the drawn sequences that fits; None if none does."""
    return max((seq_len for seq_len, size in curve.items() if size <= limit_bytes), default=None)


def show_length(seq_len: Size) -> str:
    """Tokens as one says them: 16k, 128k, 1M."""
    millions, thousands = divmod(seq_len, 2**20), divmod(seq_len, 1024)
    if millions[0] and not millions[1]:
        return f"{millions[0]}M"
    return f"{thousands[0]}k" if thousands[0] and not thousands[1] else str(seq_len)


def line_label(name: str, curve: Mapping[int, float], limit_bytes: Amount | None) -> str:
    """A line's name, the longest of its lengths that fits, and the next one."""
    if limit_bytes is None:
        return name
    longest = longest_drawn(curve, limit_bytes)
    too_long = min((seq_len for seq_len in curve if seq_len > (longest or 0)), default=None)
    fits = f"{show_length(longest)} fits" if longest else "nothing fits"
    return f"{name}: {fits}" + (f", {show_length(too_long)} does not" if longest and too_long else "")


@checked
def show_memory_by_length(curves: Mapping[str, Mapping[int, float]], gpu: GPU | None = None, title: str = "") -> None:
    """Show GiB of one GPU by tokens of a sequence, `{"cp 4": {16384: bytes, ...}, ...}`, and the GPU's limit.

    Raises   ValueError if there are more lines than looks to tell them apart
    """
    if not 1 <= len(curves) <= len(LINE_STYLES):
        raise ValueError(f"there are {len(curves)} lines; give 1 to {len(LINE_STYLES)}")
    limit, unit = gpu.usable_bytes if gpu else None, "GiB"
    with picture_axes(3.8) as axes:
        for index, (name, curve) in enumerate(curves.items()):
            look = {"color": LINE_COLORS[index], "linestyle": LINE_STYLES[index], "marker": MARKERS[index]}
            values = [size / UNITS[unit] for size in curve.values()]
            axes.plot(list(curve), values, label=line_label(name, curve, limit), markersize=5, **look)
        lengths = sorted({seq_len for curve in curves.values() for seq_len in curve})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [show_length(seq_len) for seq_len in lengths])
        axes.minorticks_off()
        powers = [value for value in (1, 3, 10, 30, 100, 300, 1000, 3000) if _within(value * UNITS[unit], curves)]
        axes.set_yticks(powers, [f"{value:,}" for value in powers])
        if gpu:
            axes.axhline(limit / UNITS[unit], color=LIMIT_COLOR, linewidth=1.2, linestyle=(0, (3, 2)), zorder=0)
            label = f"{gpu.name}: {three_digits(limit / UNITS[unit])} {unit}"
            place = {"xycoords": axes.get_yaxis_transform(), "xytext": (4, 3), "textcoords": "offset points"}
            look = {"ha": "left", "va": "bottom", "fontsize": 8.5, "bbox": ground("white", 0.5, 0.8)}
            axes.annotate(label, (0, limit / UNITS[unit]), **place, **look)
        axes.set(xlabel="tokens of one sequence", ylabel=f"{unit} of one GPU")
        axes.legend(loc="upper left")
        axes.set_title(
            title or "Activations grow with the sequence, and are divided by the ranks of context parallelism"
        )


def _within(value: float, curves: Mapping[str, Mapping[int, float]]) -> bool:
    sizes = [size for curve in curves.values() for size in curve.values()]
    return min(sizes) / 2 <= value <= 2 * max(sizes)
