"""One transformer block as a strip of regions: which dimension each rank holds a part of, and what crosses borders."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.config import ModelConfig
from course_lib.plots.palette import AXIS_COLORS, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plots.style import UNITS, labelled_box, picture_panels, show_bytes, three_digits, unit_for
from course_lib.validate import Size, checked

MODES = ("none", "tp", "tp+sp")
MODE_NAMES = {"none": "one GPU", "tp": "TP", "tp+sp": "TP + SP"}
WHOLE, HIDDEN, SEQUENCE = "whole", "hidden", "sequence"  # what of a tensor a rank holds
HELD_COLORS = {
    WHOLE: NEUTRAL_COLOR,
    HIDDEN: mix(AXIS_COLORS["tp"], "#FFFFFF", 0.25),
    SEQUENCE: mix(OKABE_ITO["sky"], "#FFFFFF", 0.1),
}
HELD_HATCHES = {WHOLE: "", HIDDEN: "//", SEQUENCE: ".."}
HELD_NAMES = {
    WHOLE: "whole on every rank",
    HIDDEN: "a part of heads or features (n, f)",
    SEQUENCE: "a part of the sequence (s)",
}

# Region -> bytes a token and feature of 2-byte numbers: of D-wide tensors outside the sharded part, and inside it.
# Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1; their sums are the 10 and the 24 of its table 2.
REGION_TERMS = {
    "norm": (2, 0),
    "attention": (2, 8),  # input of q, k, v | q, k, v, input of o
    "dropout, add": (1, 0),
    "norm ": (2, 0),
    "MLP": (2, 16),  # input of up | inputs of GELU and of down
    "dropout, add ": (1, 0),
}
TENSOR_PARALLEL_REGIONS = ("attention", "MLP")
_DIMS = {"attention": ("N H", "n H"), "MLP": ("F", "f")}


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


@dataclass(frozen=True)
class Border:
    """What is sent before region number `index`: forward and backward ("" where nothing is)."""

    index: int
    name: str
    forward: str
    backward: str


def block_regions(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    tp_size: Size,
    mode: str = "tp+sp",
    scores: bool = True,
    regather: bool = True,
) -> list[Region]:
    """The regions of a GPT block as one rank holds them; their bytes add up to Korthikanti's table 2.

    scores     whether attention's score matrices are kept (False: FlashAttention, or selective recomputation)
    regather   under TP + SP: keep the shard of a gathered input and gather again; False keeps the gathered input
    Raises     ValueError if the mode is unknown
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; choose from {', '.join(MODES)}")
    t = 1 if mode == "none" else tp_size
    sbh = seq_len * batch_size * config.d_model
    outside = SEQUENCE if mode == "tp+sp" else WHOLE
    inside = WHOLE if mode == "none" else HIDDEN
    score_term = 5 * config.num_heads * seq_len / config.d_model if scores else 0
    regions = []
    for name, (wide, inner) in REGION_TERMS.items():
        parallel = name in TENSOR_PARALLEL_REGIONS
        held_input = outside if regather or not parallel else WHOLE
        by_held = {held_input: sbh * wide / (t if held_input == SEQUENCE else 1)}
        if parallel:
            by_held[inside] = by_held.get(inside, 0) + sbh * (inner + (score_term if name == "attention" else 0)) / t
        regions.append(Region(name.strip(), inside if parallel else outside, _dims(name, mode), by_held))
    return regions


def _dims(name: str, mode: str) -> str:
    if name in TENSOR_PARALLEL_REGIONS:
        return f"S × {_DIMS[name][mode != 'none']}"
    return "s × D" if mode == "tp+sp" else "S × D"


def block_borders(mode: str, regather: bool = False) -> list[Border]:
    """The collectives of one block, into and out of attention and the MLP, named as in `course_lib.comm.conjugate`.

    regather   under TP + SP: backward gathers the input of attention and of the MLP once more
    Source   Shoeybi et al. 2019 (arXiv:1909.08053), figure 3; Korthikanti et al. 2022, figures 4 and 5
    """
    into = "all-gather\nand reduce-scatter" if regather else "reduce-scatter"
    pairs = {
        "none": (),
        "tp": (("copy_in", "", "all-reduce"), ("sum_out", "all-reduce", "")),
        "tp+sp": (("gather_in", "all-gather", into), ("scatter_sum", "reduce-scatter", "all-gather")),
    }[mode]
    return [Border(index + side, *pair) for index in (1, 4) for side, pair in enumerate(pairs)]


_BARS_FROM, _TALLEST = 1.0, 1.6
_WIDTHS = (0.85, 1.55, 1.25, 0.85, 1.55, 1.25)


def draw_regions(axes, regions: Sequence[Region], borders: Sequence[Border], highest: float, label: str) -> None:
    """A strip of regions, bars of bytes above it, and below each border what is sent there."""
    unit, x = unit_for(highest), 0.0
    lefts = []
    for region, width in zip(regions, _WIDTHS, strict=False):  # regions may be fewer
        lefts.append(x)
        color = HELD_COLORS[region.held]
        labelled_box(axes, (x, 0), (width, 0.8), color, f"{region.name}\n{region.dims}", linewidth=1.2)
        floor = _BARS_FROM
        for held, value in region.bytes_by_held.items():
            height = _TALLEST * value / highest
            look = {"facecolor": HELD_COLORS[held], "hatch": HELD_HATCHES[held], "edgecolor": "white"}
            axes.add_patch(Rectangle((x + width / 2 - 0.27, floor), 0.54, height, linewidth=0.5, **look))
            floor += height
        axes.text(x + width / 2, floor + 0.05, three_digits(region.bytes / UNITS[unit]), ha="center", fontsize=8.5)
        x += width
    for border in borders:
        at = lefts[border.index]
        axes.plot([at, at], [-0.12, 0.85], color="black", linewidth=1.6)
        sent = f"{border.name}\n→ {border.forward or 'nothing'}\n← {border.backward or 'nothing'}"
        axes.text(at, -0.16, sent, ha="center", va="top", fontsize=8, linespacing=1.25)
    total = sum(region.bytes for region in regions)
    axes.text(-0.12, 0.4, label, ha="right", va="center", fontsize=10, fontweight="bold")
    axes.text(-0.12, 1.0, f"kept for backward\n({unit})", ha="right", va="bottom", fontsize=8.5)
    axes.text(
        x + 0.12, 1.0, f"together\n{show_bytes(total, unit)}", ha="left", va="bottom", fontsize=9, fontweight="bold"
    )
    axes.set(xlim=(-1.35, x + 0.85), ylim=_ylim(regions, borders, highest))
    axes.set_axis_off()


def _ylim(regions: Sequence[Region], borders: Sequence[Border], highest: float) -> tuple[float, float]:
    """Room for the borders' texts below and for the tallest bar with its number above."""
    tallest = _TALLEST * max(region.bytes for region in regions) / highest
    lines = max((border.backward.count("\n") for border in borders), default=0)
    return -1.0 - 0.25 * lines if borders else -0.1, _BARS_FROM + max(tallest + 0.35, 0.75)


def regions_title(totals: dict[str, float], tp_size: Size) -> str:
    """What the picture shows, in one sentence: how many times less each step of sharding makes a rank keep."""
    if not {"tp", "tp+sp"} <= set(totals):
        return "What each region of a block keeps"
    ratio = totals["tp"] / totals["tp+sp"]
    return f"Sharding the rest along the sequence: {ratio:.1f} times less than TP {tp_size} alone keeps"


@checked
def show_regions(
    config: ModelConfig,
    batch_size: Size = 1,
    seq_len: Size = 2048,
    tp_size: Size = 8,
    modes: Sequence[str] = MODES,
    title: str = "",
) -> None:
    """Show one GPT block under no parallelism, TP and TP + SP: held dimensions, borders, bytes kept by one rank.

    Scores are not kept, and under TP + SP inputs are gathered again for backward.
    """
    strips = {mode: block_regions(config, batch_size, seq_len, tp_size, mode, scores=False) for mode in modes}
    highest = max(region.bytes for regions in strips.values() for region in regions)
    totals = {mode: sum(region.bytes for region in regions) for mode, regions in strips.items()}
    limits = [_ylim(regions, block_borders(mode, True), highest) for mode, regions in strips.items()]
    heights = [top - bottom for bottom, top in limits]
    said = title or regions_title(totals, tp_size)
    with picture_panels(len(modes), 1, 0.75 + 0.52 * sum(heights), said, squeeze=False, height_ratios=heights) as (
        figure,
        panels,
    ):
        for axes, (mode, regions) in zip(panels[:, 0], strips.items(), strict=True):
            label = MODE_NAMES[mode] + ("\nre-gather" if mode == "tp+sp" else "")
            draw_regions(axes, regions, block_borders(mode, True), highest, label)
        used = {held for regions in strips.values() for region in regions for held in region.bytes_by_held}
        handles = [
            Patch(facecolor=HELD_COLORS[held], hatch=HELD_HATCHES[held], edgecolor="white", label=HELD_NAMES[held])
            for held in HELD_NAMES
            if held in used
        ]
        figure.legend(handles=handles, loc="outside lower center", ncol=3)
