"""Precision and fine-tuning in pictures: gradients in the range of a format, codes, blocks of codes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from course_lib.float_formats import FORMATS, FloatFormat
from course_lib.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plots.style import panel_title, picture_axes, picture_panels, plain_rows, write
from course_lib.validate import Size, checked, one_of


@dataclass(frozen=True)
class MagnitudePanel:
    """A histogram over powers of two, the shares that are zero and subnormal in the format, the largest."""

    title: str
    shares: dict[int, float]
    lost: float
    subnormal: float
    largest: float


def magnitude_panels(magnitudes: Mapping, fmt: FloatFormat) -> list[MagnitudePanel]:
    """Return where each tensor's magnitudes lie in a format's range; below half of its smallest they become 0."""
    panels = []
    for title, tensor in magnitudes.items():
        size = tensor.detach().abs().flatten().double()
        exponents, counts = size[size > 0].log2().floor().long().unique(return_counts=True)
        shares = {int(e): int(n) / len(size) for e, n in zip(exponents, counts, strict=True)}
        lost = (size <= fmt.smallest / 2).double().mean().item()
        below = (size < fmt.smallest_normal).double().mean().item()
        panels.append(MagnitudePanel(title, shares, lost, below - lost, size.max().item()))
    return panels


@checked
def show_magnitudes(magnitudes: Mapping, name: str = "fp16", title: str = "") -> None:
    """Show where gradients lie in the range of a format: what becomes zero, what is subnormal, what overflows."""
    one_of("format", name, tuple(FORMATS))
    fmt = FORMATS[name]
    panels = magnitude_panels(magnitudes, fmt)
    low, normal, high = (math.log2(value) for value in (fmt.smallest / 2, fmt.smallest_normal, fmt.largest))
    bad, poor = mix(OKABE_ITO["vermillion"], "#FFFFFF", 0.6), mix(OKABE_ITO["orange"], "#FFFFFF", 0.7)
    left, height = min(low - 8, *(min(panel.shares) for panel in panels)), 0.7 + 1.5 * len(panels)
    said = title or f"Gradients in the range of {name}"
    with picture_panels(len(panels), 1, height, said, sharex=True, squeeze=False) as (_, all_axes):
        for axes, panel in zip(all_axes[:, 0], panels, strict=True):
            top = 115 * max(panel.shares.values())
            for start, end, color, text in (
                (left, low, bad, f"becomes 0: {panel.lost:.0%}"),
                (low, normal, poor, f"fewer digits: {panel.subnormal:.0%}"),
                (normal, high, "#FFFFFF", "all digits of the format"),
                (high, high + 6, bad, "infinite"),
            ):
                axes.axvspan(start, end, color=color, zorder=0)
                write(axes, (start + end) / 2, top, text, va="top")
            xs, heights = zip(*((exponent + 0.5, 100 * share) for exponent, share in panel.shares.items()), strict=True)
            axes.bar(xs, heights, width=0.9, color=KIND_COLORS["gradients"], edgecolor="black", linewidth=0.5)
            if panel.largest > 0:  # few are so large that their bar is invisible
                axes.plot([math.log2(panel.largest)], [0], "v", color="black", markersize=6, clip_on=False)
                write(axes, math.log2(panel.largest), 0.08 * top, "largest", va="bottom")
            axes.set(ylim=(0, 1.1 * top), ylabel="% of all")
            panel_title(axes, panel.title)
        ticks = range(-32, 20, 8)
        axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
        axes.set(xlim=(left, high + 6), xlabel="size of a gradient")


@checked
def show_codes(codes: Mapping[str, Sequence[float]]) -> None:
    """Show the values of each code as ticks on a line from -1 to 1."""
    with picture_axes(0.8 + 0.55 * len(codes)) as axes:
        for row, values in enumerate(codes.values()):
            axes.hlines(row, -1, 1, color=NEUTRAL_COLOR, linewidth=1)
            axes.vlines(list(values), row - 0.3, row + 0.3, color="black", linewidth=0.8)
        plain_rows(axes, [f"{name}, {len(values)} values" for name, values in codes.items()], -0.5, -0.5)
        axes.set(xlim=(-1.03, 1.03), xlabel="value, as a share of the block's scale")
        axes.spines["left"].set_visible(False)
        axes.set_title("Which values a code can store")


@checked
def show_blocks(numbers: Sequence[float], stored: Mapping[str, Sequence[float]], block_size: Size) -> None:
    """Show numbers beside what is stored of them, in one panel for each way to choose the scales."""
    said, xs = "One large number spoils the scale of its block only", range(len(numbers))
    with picture_panels(1, len(stored), 2.7, said, sharey=True, squeeze=False) as (figure, panels):
        for axes, (name, values) in zip(panels[0], stored.items(), strict=True):
            axes.bar(xs, numbers, width=0.9, color="#D9D9D9", edgecolor=NEUTRAL_COLOR, label="number")
            mark = {"color": OKABE_ITO["vermillion"], "markersize": 14, "markeredgewidth": 2.5}
            axes.plot(xs, values, "_", label="stored", **mark)
            for edge in range(block_size, len(numbers), block_size):
                axes.axvline(edge - 0.5, color=LIMIT_COLOR, linestyle=":", linewidth=1)
            panel_title(axes, name, "center")
            axes.set_xticks([])
            axes.yaxis.set_major_locator(MaxNLocator(4, prune="both"))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncol=2)
