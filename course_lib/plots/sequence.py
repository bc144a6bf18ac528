"""Sequence parallelism in pictures: two ways to cut hidden states, what a rank holds along a block, and its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from course_lib.config import ModelConfig
from course_lib.palette import AXIS_COLORS, NEUTRAL_COLOR, OKABE_ITO, RANK_COLORS, mix
from course_lib.plots.style import key, keys_below, labelled_box, picture_panels, write
from course_lib.plots.tiles import Tile, draw_tiles
from course_lib.units import UNITS, show_bytes, three_digits, unit_for
from course_lib.validate import Size, checked

# ---------------------------------------------------------------- one tensor, cut in two ways

NUM_TOKENS, NUM_FEATURES = 4, 6
CUTS = {  # title, what a norm of the outlined token needs
    True: ("by tokens: $x_{BsD}$", "one rank has all its features:\nits norm needs no other rank"),
    False: ("by features: $x_{BSd}$", "every rank has a part of its features:\nits norm needs a sum over the ranks"),
}


def rank_of(token: int, feature: int, by_tokens: bool) -> int:
    """Return which of two ranks holds an element if x is cut along the sequence, or along the features."""
    return token // (NUM_TOKENS // 2) if by_tokens else feature // (NUM_FEATURES // 2)


def show_cuts() -> None:
    """Show hidden states cut along the sequence and along the features, and what the norm of one token needs."""
    with picture_panels(1, 2, 2.75) as (figure, panels):
        for axes, (by_tokens, (title, text)) in zip(panels, CUTS.items(), strict=True):
            held = [
                [rank_of(token, feature, by_tokens) for feature in range(NUM_FEATURES)] for token in range(NUM_TOKENS)
            ]
            rows = [[Tile(f"{rank}", mix(RANK_COLORS[rank], "#FFFFFF", 0.25)) for rank in row] for row in held]
            draw_tiles(axes, rows, [f"token {n}" for n in range(NUM_TOKENS)], fontsize=9)
            outline = {"facecolor": "none", "edgecolor": "black", "linewidth": 2, "zorder": 4}
            axes.add_patch(Rectangle((0, 1), NUM_FEATURES, 1, **outline))
            write(axes, NUM_FEATURES / 2, NUM_TOKENS + 0.25, text, fontsize=9.5, va="top")
            axes.set(ylim=(NUM_TOKENS + 1.5, -0.1), aspect="equal")
            axes.set_title(title, loc="center")
        figure.suptitle("The number in a tile is its rank; one token is outlined", x=0.01, ha="left", fontsize=10)


# ---------------------------------------------------------------- what one rank holds along half a block

FULL, TOKENS, FEATURES, PARTIAL = "full", "tokens", "features", "partial sum"
HOLDINGS = {  # colour, hatch, name
    FULL: (NEUTRAL_COLOR, "", "all of it, equal on all ranks"),
    TOKENS: (mix(OKABE_ITO["sky"], "#FFFFFF", 0.1), "..", "my tokens"),
    FEATURES: (mix(AXIS_COLORS["tp"], "#FFFFFF", 0.25), "//", "my heads or features"),
    PARTIAL: (OKABE_ITO["yellow"], "xx", "my partial sum"),
}
# Along half a block, from the residual stream back to it: each tensor, and what a rank holds of it; None: as outside.
# Source: Korthikanti et al. 2022 (arXiv:2205.05198), figures 4 and 5
HALF_BLOCK = (
    *(("x", None), ("norm(x)", None), ("input of\nq, k, v", FULL), ("q, k, v", FEATURES)),
    *(("heads'\noutput", FEATURES), ("output\nof o", PARTIAL), ("summed\noutput", None), ("x + output", None)),
)
# Before which tensor a border lies: its operator, and what that sends forward and backward, without SP and with it.
BORDERS = {
    2: (("copy_in", "nothing", "all-reduce"), ("gather_in", "all-gather", "reduce-scatter")),
    6: (("sum_out", "all-reduce", "nothing"), ("scatter_sum", "reduce-scatter", "all-gather")),
}


def part_of(holding: str, rank: int, num_ranks: int) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a rank's part in a tensor of size 1 x 1: features across, tokens down."""
    share = 1 / num_ranks
    parts = {TOKENS: (0.0, rank * share, 1.0, share), FEATURES: (rank * share, 0.0, share, 1.0)}
    return parts.get(holding, (0.0, 0.0, 1.0, 1.0))


def show_half_block() -> None:
    """Show which part of each tensor of half a block rank 1 of 4 holds, under TP and TP + SP, and what is sent."""
    side, step, gap = 0.9, 1.2, 0.75  # of a tensor; to the next tensor; at a border
    said = "What rank 1 of 4 holds along half a block (tokens down, features across)"
    with picture_panels(2, 1, 4.2, said) as (figure, panels):
        for axes, sequence_parallel in zip(panels, (False, True), strict=True):
            x = 0.0
            for index, (name, holding) in enumerate(HALF_BLOCK):
                if index in BORDERS:
                    operator, forward, backward = BORDERS[index][sequence_parallel]
                    middle = x + gap / 2 - 0.15
                    axes.plot([middle, middle], [-0.05, 1.0], color="black", linewidth=1.8)
                    write(axes, middle, 1.06, operator, va="top", fontweight="bold")
                    write(axes, middle, 1.28, f"\u2192 {forward}\n\u2190 {backward}", fontsize=8.5, va="top")
                    x += gap
                held = holding or (TOKENS if sequence_parallel else FULL)
                color, hatch, _ = HOLDINGS[held]
                left, top, width, height = (side * edge for edge in part_of(held, 1, 4))
                labelled_box(axes, (x, 0), (side, side), "#FFFFFF", edgecolor="0.6", linewidth=0.8)
                labelled_box(axes, (x + left, top), (width, height), color, hatch=hatch, linewidth=0)
                write(axes, x + side / 2, -0.08, name, fontsize=8.5, va="bottom")
                x += step
            axes.set(xlim=(-0.1, x - step + side + 0.1), ylim=(1.75, -0.55))
            axes.set_axis_off()
            axes.set_title("TP + SP" if sequence_parallel else "TP")
        keys_below(figure, [key(color, name, hatch) for color, hatch, name in HOLDINGS.values()])


# ---------------------------------------------------------------- bytes of each region of a block

MODES = {"none": "one GPU", "tp": "TP", "tp+sp": "TP + SP\nre-gather"}
HELD_NAMES = {
    FULL: "whole on every rank",
    FEATURES: "a part of heads or features (n, f)",
    TOKENS: "a part of the sequence (s)",
}
# Region, width in the picture, bytes a token and feature of 2-byte numbers: of D-wide tensors outside the sharded
# part, and inside it; dimensions inside. Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1; the sums
# are the 10 and the 24 of its table 2.
REGIONS = (
    ("norm", 0.85, 2, 0, ""),
    ("attention", 1.55, 2, 8, "N H"),  # input of q, k, v | q, k, v, input of o
    ("dropout, add", 1.25, 1, 0, ""),
    ("norm", 0.85, 2, 0, ""),
    ("MLP", 1.55, 2, 16, "F"),  # input of up | inputs of GELU and of down
    ("dropout, add", 1.25, 1, 0, ""),
)
# Sent before attention and the MLP and behind them: forward, backward. Under TP + SP backward gathers inputs again.
# Source: Shoeybi et al. 2019 (arXiv:1909.08053), figure 3; Korthikanti et al. 2022, figures 4 and 5
SENT = {
    "none": (),
    "tp": (("copy_in", "nothing", "all-reduce"), ("sum_out", "all-reduce", "nothing")),
    "tp+sp": (
        ("gather_in", "all-gather", "all-gather\nand reduce-scatter"),
        ("scatter_sum", "reduce-scatter", "all-gather"),
    ),
}


@dataclass(frozen=True)
class Region:
    """One region of a block on one rank: what it holds between borders, and bytes kept for backward, by how held."""

    name: str
    held: str
    dims: str
    bytes_by_held: dict[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.bytes_by_held.values())


@checked
def block_regions(config: ModelConfig, batch_size: Size, seq_len: Size, tp_size: Size, mode: str) -> list[Region]:
    """The regions of a GPT block as one rank holds them; their bytes add up to Korthikanti's table 2, without scores.

    Under TP + SP the shard of a gathered input is kept, and gathered again for backward.
    Raises   ValueError if the mode is unknown
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; choose from {', '.join(MODES)}")
    t, sbh = 1 if mode == "none" else tp_size, seq_len * batch_size * config.d_model
    outside, inside = TOKENS if mode == "tp+sp" else FULL, FULL if mode == "none" else FEATURES
    regions = []
    for name, _, wide, inner, dims in REGIONS:
        by_held = {outside: sbh * wide / (t if outside == TOKENS else 1)}
        if inner:
            by_held[inside] = by_held.get(inside, 0) + sbh * inner / t
        cut = dims if mode == "none" else dims.replace("N", "n").replace("F", "f")
        said = f"S × {cut}" if inner else "s × D" if outside == TOKENS else "S × D"
        regions.append(Region(name, inside if inner else outside, said, by_held))
    return regions


@checked
def show_regions(
    config: ModelConfig, batch_size: Size, seq_len: Size, tp_size: Size, modes: Sequence[str], title: str
) -> None:
    """Show one GPT block under no parallelism, TP or TP + SP: held dimensions, borders, bytes kept by one rank."""
    strips = {mode: block_regions(config, batch_size, seq_len, tp_size, mode) for mode in modes}
    highest = max(region.bytes for regions in strips.values() for region in regions)
    limits = {  # room for the borders' texts below and for the tallest bar with its number above
        mode: (-1.25 if mode == "tp+sp" else -1.0 if SENT[mode] else -0.1,
               1 + max(1.6 * max(region.bytes for region in regions) / highest + 0.35, 0.75))
        for mode, regions in strips.items()
    }  # fmt: skip
    heights = [top - bottom for bottom, top in limits.values()]
    look = {"squeeze": False, "height_ratios": heights}
    with picture_panels(len(modes), 1, 0.75 + 0.52 * sum(heights), title, **look) as (figure, panels):
        for axes, (mode, regions) in zip(panels[:, 0], strips.items(), strict=True):
            _draw_strip(axes, mode, regions, highest)
            axes.set_ylim(limits[mode])
        used = {held for regions in strips.values() for region in regions for held in region.bytes_by_held}
        handles = [key(HOLDINGS[held][0], name, HOLDINGS[held][1]) for held, name in HELD_NAMES.items() if held in used]
        keys_below(figure, handles)


def _draw_strip(axes, mode: str, regions: Sequence[Region], highest: float) -> None:
    """A strip of regions, bars of bytes above it, and below each border what is sent there."""
    unit, x = unit_for(highest), 0.0
    borders = {index + side: sent for index in (1, 4) for side, sent in enumerate(SENT[mode])}
    for index, (region, (_, width, *_)) in enumerate(zip(regions, REGIONS, strict=True)):
        if index in borders:
            operator, forward, backward = borders[index]
            axes.plot([x, x], [-0.12, 0.85], color="black", linewidth=1.6, zorder=4)
            sent = f"{operator}\n→ {forward}\n← {backward}"
            write(axes, x, -0.16, sent, fontsize=8, va="top", linespacing=1.25)
        text = f"{region.name}\n{region.dims}"
        labelled_box(axes, (x, 0), (width, 0.8), HOLDINGS[region.held][0], text, linewidth=1.2)
        floor = 1.0
        for held, value in region.bytes_by_held.items():
            color, hatch, _ = HOLDINGS[held]
            box = (x + width / 2 - 0.27, floor), (0.54, 1.6 * value / highest)
            labelled_box(axes, *box, color, hatch=hatch, linewidth=0.5)
            floor += box[1][1]
        write(axes, x + width / 2, floor + 0.05, three_digits(region.bytes / UNITS[unit]), fontsize=8.5, va="baseline")
        x += width
    write(axes, -0.12, 0.4, MODES[mode], "right", 10, fontweight="bold")
    write(axes, -0.12, 1.0, f"kept for backward\n({unit})", "right", 8.5, va="bottom")
    together = f"together\n{show_bytes(sum(region.bytes for region in regions), unit)}"
    write(axes, x + 0.12, 1.0, together, "left", fontweight="bold", va="bottom")
    axes.set_xlim(-1.35, x + 0.85)
    axes.set_axis_off()
