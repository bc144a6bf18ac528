"""Precision in pictures: which numbers a format has, where gradients lie in its range, one step with master weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.plots.formats import FORMATS, FloatFormat
from course_lib.plots.palette import KIND_COLORS, KIND_HATCHES, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.plots.style import labelled_box, panel_title, picture_axes, picture_panels
from course_lib.validate import Positive, checked, one_of

# ---------------------------------------------------------------- the numbers of a format


def numbers_between(fmt: FloatFormat, low: Positive, high: Positive) -> list[float]:
    """Return the numbers that a format has from `low` to `high`.

    Raises   ValueError if low is below the format's smallest normal number, or not below high
    """
    if not fmt.smallest_normal <= low < high:
        raise ValueError(f"low ({low}) and high ({high}) must be {fmt.smallest_normal:.2g} or more, low below high")
    found, value = [], low
    while value <= high:
        spacing = fmt.epsilon * 2.0 ** math.floor(math.log2(value))
        value = math.ceil(value / spacing) * spacing
        if value <= high:
            found.append(value)
        value += spacing / 2
    return found


@checked
def show_numbers(names: Sequence[str], low: Positive, high: Positive, sum_: Positive) -> None:
    """Show the numbers of each format as ticks on a line, and to which of them a sum is rounded."""
    for name in names:
        one_of("format", name, tuple(FORMATS))
    with picture_axes(0.9 + 0.7 * len(names)) as axes:
        for row, name in enumerate(names):
            numbers = numbers_between(FORMATS[name], low, high)
            nearest = min(numbers, key=lambda number: abs(number - sum_))
            axes.hlines(row, low, high, color=NEUTRAL_COLOR, linewidth=1)
            axes.vlines(numbers, row - 0.22, row + 0.22, color="black", linewidth=1)
            axes.plot([nearest], [row], "o", color=OKABE_ITO["vermillion"], markersize=9)
            label = f"is rounded to {nearest:.6g}"
            axes.text(sum_, row - 0.3, f" {label}", ha="left", va="bottom", fontsize=9, color=OKABE_ITO["vermillion"])
        axes.axvline(sum_, color=OKABE_ITO["blue"], linestyle="--", linewidth=1.4)
        axes.text(sum_, len(names) - 0.45, f" the sum, {sum_:g}", va="center", fontsize=9, color=OKABE_ITO["blue"])
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(low, high), ylim=(len(names) - 0.3, -0.8), xlabel="each tick is a number that the format has")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_title(f"A sum is rounded to the nearest number: {sum_:g}")


# ---------------------------------------------------------------- gradients in the range of a format


@dataclass(frozen=True)
class MagnitudePanel:
    """A histogram over powers of two, the shares that are zero and subnormal in the format, the largest."""

    title: str
    shares: dict[int, float]
    lost: float
    subnormal: float
    largest: float


def magnitude_panels(magnitudes: Mapping, fmt: FloatFormat) -> list[MagnitudePanel]:
    """Return a panel for each tensor of gradients: how its magnitudes lie in the range of a format.

    A magnitude below half of the smallest number becomes zero.
    """
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
    said = title or f"Gradients in the range of {name}"
    with picture_panels(len(panels), 1, 0.7 + 1.5 * len(panels), said, sharex=True, squeeze=False) as (_, all_axes):
        left = min(low - 8, *(min(panel.shares) for panel in panels))
        for axes, panel in zip(all_axes[:, 0], panels, strict=True):
            top = 115 * max(panel.shares.values())
            for start, end, color, text in (
                (left, low, mix(OKABE_ITO["vermillion"], "#FFFFFF", 0.6), f"becomes 0: {panel.lost:.0%}"),
                (low, normal, mix(OKABE_ITO["orange"], "#FFFFFF", 0.7), f"fewer digits: {panel.subnormal:.0%}"),
                (normal, high, "#FFFFFF", "all digits of the format"),
                (high, high + 6, mix(OKABE_ITO["vermillion"], "#FFFFFF", 0.6), "infinite"),
            ):
                axes.axvspan(start, end, color=color, zorder=0)
                axes.text((start + end) / 2, top, text, ha="center", va="top", fontsize=9)
            xs, heights = zip(*((exponent + 0.5, 100 * share) for exponent, share in panel.shares.items()), strict=True)
            axes.bar(xs, heights, width=0.9, color=KIND_COLORS["gradients"], edgecolor="black", linewidth=0.5)
            if panel.largest > 0:  # few are so large that their bar is invisible
                place = math.log2(panel.largest)
                axes.plot([place], [0], "v", color="black", markersize=6, clip_on=False)
                axes.text(place, 0.08 * top, "largest", ha="center", va="bottom", fontsize=9)
            axes.set(ylim=(0, 1.1 * top), ylabel="% of all")
            panel_title(axes, panel.title)
        ticks = range(-32, 20, 8)
        all_axes[-1, 0].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
        all_axes[-1, 0].set_xlim(left, high + 6)
        all_axes[-1, 0].set_xlabel("size of a gradient")


# ---------------------------------------------------------------- one step with master weights


@dataclass(frozen=True)
class StepBox:
    """One tensor of a step: its left edge and row, and its bytes per parameter, which are its width."""

    label: str
    kind: str
    x: float
    y: float
    width: float


def mixed_step_boxes() -> dict[str, StepBox]:
    """Return the boxes of a step with master weights; widths are bytes per parameter."""
    return {
        "parameters": StepBox("parameters\n16 bits", "parameters", 0, 1, 2),
        "gradients": StepBox("gradients\n16 bits", "gradients", 8, 1, 2),
        "moments": StepBox("two moments of Adam\nFP32", "optimizer", 8, 0, 8),
        "masters": StepBox("master weights\nFP32", "optimizer", 0, 0, 4),
    }


@checked
def show_mixed_step(scaled: bool = False, title: str = "") -> None:
    """Show one step with master weights as a cycle; with `scaled` also where loss scaling multiplies and divides."""
    arrows = {
        ("parameters", "gradients"): "forward, " + ("loss × scale, " if scaled else "") + "backward",
        ("gradients", "moments"): "to FP32" + (", ÷ scale" if scaled else ""),
        ("moments", "masters"): "AdamW\nupdate",
        ("masters", "parameters"): "round to\n16 bits",
    }
    boxes = mixed_step_boxes()
    with picture_axes(2.6) as axes:
        for box in boxes.values():
            color = KIND_COLORS[box.kind]
            corner, size, text = (box.x, box.y), (box.width, 0.42), f"{box.label}, {box.width} B"
            labelled_box(axes, corner, size, color, text, fontsize=9, hatch=KIND_HATCHES[box.kind])
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=LIMIT_COLOR))
        for (start, end), text in arrows.items():
            _draw_arrow(axes, boxes[start], boxes[end], text)
        axes.set(xlim=(-2.2, 16.2), ylim=(-0.1, 1.75))
        axes.set_axis_off()
        axes.set_title(title or "One step: 16 bits compute, FP32 remembers (widths: bytes per parameter)")


def _draw_arrow(axes, start: StepBox, end: StepBox, text: str) -> None:
    """An arrow between two boxes: along a row, or down and up between rows."""
    arrow = {
        "arrowstyle": "-|>",
        "mutation_scale": 16,
        "color": "#444444",
        "linewidth": 1.4,
        "shrinkA": 2,
        "shrinkB": 2,
    }
    if start.y == end.y:
        forward = start.x < end.x
        y = start.y + 0.21
        ends = (start.x + start.width, end.x) if forward else (start.x, end.x + end.width)
        axes.add_patch(FancyArrowPatch((ends[0], y), (ends[1], y), **arrow))
        axes.text(sum(ends) / 2, y + 0.06, text, ha="center", va="bottom", fontsize=9)
        return
    x = max(start.x, end.x) + min(start.width, end.width) / 2
    down = start.y > end.y
    ends = (start.y, end.y + 0.42) if down else (start.y + 0.42, end.y)
    axes.add_patch(FancyArrowPatch((x, ends[0]), (x, ends[1]), **arrow))
    axes.text(x + (0.2 if down else -0.2), sum(ends) / 2, text, ha="left" if down else "right", va="center", fontsize=9)
