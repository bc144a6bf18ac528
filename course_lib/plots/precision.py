"""Precision and fine-tuning in pictures: bits and numbers of formats, gradients in range, codes, first choices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from course_lib.palette import KIND_COLORS, KIND_HATCHES, LIMIT_COLOR, NEUTRAL_COLOR, OKABE_ITO, mix
from course_lib.panels.precision import FORMATS, FloatFormat
from course_lib.plots.diagrams import BORDERED, diagram, draw_arrows, draw_diagram
from course_lib.plots.style import panel_title, picture_axes, picture_panels, plain_rows, write
from course_lib.plots.tiles import Tile, draw_tiles
from course_lib.validate import Size, checked, one_of

BIT_COLORS = {"sign": OKABE_ITO["black"], "exponent": OKABE_ITO["orange"], "mantissa": OKABE_ITO["sky"]}

# ---------------------------------------------------------------- bits and numbers of a format


def show_float_formats() -> None:
    """Show FP32, BF16 and FP16 as boxes of bits, with their range and their precision."""
    names = ("fp32", "bf16", "fp16")
    with picture_axes(0.8 + 0.62 * len(names)) as axes:
        parts = {name: format_bits(FORMATS[name]) for name in names}
        rows = [[Tile(color=BIT_COLORS[part]) for part in bits] for bits in parts.values()]
        draw_tiles(axes, rows, names, pitch=1.6, height=0.8)
        for row, name in enumerate(names):
            fmt, y = FORMATS[name], 1.6 * row + 0.4
            write(axes, 0.5, y, "±", color="white")
            for part, middle, count in (
                ("exponent", 1 + fmt.exponent_bits / 2, fmt.exponent_bits),
                ("mantissa", 1 + fmt.exponent_bits + fmt.mantissa_bits / 2, fmt.mantissa_bits),
            ):
                behind = {"facecolor": BIT_COLORS[part], "edgecolor": "none", "pad": 1}
                write(axes, middle, y, f"{count} {part}", bbox=behind)
            facts = f"{fmt.bits} bits · largest {fmt.largest:.3g} · smallest normal {fmt.smallest_normal:.2g}"
            write(axes, 0, y + 0.45, f"{facts} · after 1 comes 1 + {fmt.epsilon:.2g}", "left", 8.5, va="top")
        axes.set(ylim=(4.6, -0.4))
        axes.set_title("bf16 keeps fp32's range, fp16 keeps more digits")


def format_bits(fmt: FloatFormat) -> list[str]:
    """Return the part that each bit belongs to, from the left."""
    return ["sign"] + ["exponent"] * fmt.exponent_bits + ["mantissa"] * fmt.mantissa_bits


def numbers_between(fmt: FloatFormat, low: float, high: float) -> list[float]:
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


def show_numbers() -> None:
    """Show the numbers of BF16 and FP16 around 1 as ticks on a line, and to which of them a sum is rounded."""
    names, low, high, sum_ = ("bf16", "fp16"), 0.985, 1.03, 1.001
    with picture_axes(0.9 + 0.7 * len(names)) as axes:
        for row, name in enumerate(names):
            numbers = numbers_between(FORMATS[name], low, high)
            nearest = min(numbers, key=lambda number: abs(number - sum_))
            axes.hlines(row, low, high, color=NEUTRAL_COLOR, linewidth=1)
            axes.vlines(numbers, row - 0.22, row + 0.22, color="black", linewidth=1)
            axes.plot([nearest], [row], "o", color=OKABE_ITO["vermillion"], markersize=9)
            look = {"va": "bottom", "color": OKABE_ITO["vermillion"]}
            write(axes, sum_, row - 0.3, f" is rounded to {nearest:.6g}", "left", **look)
        axes.axvline(sum_, color=OKABE_ITO["blue"], linestyle="--", linewidth=1.4)
        write(axes, sum_, len(names) - 0.45, f" the sum, {sum_:g}", "left", color=OKABE_ITO["blue"])
        plain_rows(axes, list(names), -0.8, -0.3)
        axes.set(xlim=(low, high), xlabel="each tick is a number that the format has")
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


# ---------------------------------------------------------------- one step with master weights

STEP_BOXES = {  # left, row, bytes per parameter (which are the width), kind
    "parameters": (0, 1, 2, "parameters", "parameters\n16 bits"),
    "gradients": (8, 1, 2, "gradients", "gradients\n16 bits"),
    "moments": (8, 0, 8, "optimizer", "two moments of Adam\nFP32"),
    "masters": (0, 0, 4, "optimizer", "master weights\nFP32"),
}


@checked
def show_mixed_step(scaled: bool = False) -> None:
    """Show one step with master weights as a cycle; with `scaled` also where loss scaling multiplies and divides."""
    with picture_axes(2.6) as axes:
        for x, y, width, kind, text in STEP_BOXES.values():
            box = (x, y, width, 0.42, KIND_COLORS[kind], f"{text}, {width} B")
            look = {"fontsize": 9, "hatch": KIND_HATCHES[kind]}
            draw_diagram(axes, ((-2.2, 16.2), (-0.1, 1.75)), [box], **look)
        forward = "forward, " + ("loss × scale, " if scaled else "") + "backward"
        ends = [((2, 1.21), (8, 1.21)), ((9, 1), (9, 0.42)), ((8, 0.21), (4, 0.21)), ((1, 0.42), (1, 1))]
        draw_arrows(axes, ends, mutation_scale=16, shrinkA=2, shrinkB=2)
        write(axes, 5, 1.27, forward, va="bottom")
        write(axes, 9.2, 0.71, "to FP32" + (", ÷ scale" if scaled else ""), "left")
        write(axes, 6, 0.27, "AdamW\nupdate", va="bottom")
        write(axes, 0.8, 0.71, "round to\n16 bits", "right")
        plain = "One step: 16 bits compute, FP32 remembers (widths: bytes per parameter)"
        axes.set_title("The same step with loss scaling" if scaled else plain)


# ---------------------------------------------------------------- fine-tuning

FROZEN_COLOR = "#D9D9D9"
LORA = {"W": (64, 64, "frozen"), "B": (64, 8, "trained"), "A": (8, 64, "trained")}  # rows, columns


def show_lora() -> None:
    """Show the frozen matrix beside the two thin ones that are trained; areas are true to their elements."""
    lefts, boxes, notes = {"W": 0, "B": 96, "A": 120}, [], [(80, 32, r"$+\ \frac{\alpha}{r}$")]
    with picture_axes(2.7) as axes:
        for name, (rows, columns, state) in LORA.items():
            x, y = lefts[name], (64 - rows) / 2
            boxes.append((x, y, columns, rows, KIND_COLORS["parameters"] if state == "trained" else FROZEN_COLOR, " "))
            text = f"{name}: {rows} x {columns}\n{rows * columns:,} elements, {state}"
            write(axes, x + columns / 2, y + rows + 3.84, text, va="top")
        draw_diagram(axes, ((-19.2, 203.2), (80, -3.2)), boxes, **BORDERED)
        write(axes, *notes[0], fontsize=16)
        axes.set_aspect("equal")
        axes.set_title("A frozen matrix, and two thin ones beside it (areas: elements)")


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
            axes.bar(xs, numbers, width=0.9, color=FROZEN_COLOR, edgecolor=NEUTRAL_COLOR, label="number")
            mark = {"color": OKABE_ITO["vermillion"], "markersize": 14, "markeredgewidth": 2.5}
            axes.plot(xs, values, "_", label="stored", **mark)
            for edge in range(block_size, len(numbers), block_size):
                axes.axvline(edge - 0.5, color=LIMIT_COLOR, linestyle=":", linewidth=1)
            panel_title(axes, name, "center")
            axes.set_xticks([])
            axes.yaxis.set_major_locator(MaxNLocator(4, prune="both"))
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncol=2)


CHOICES = {  # a question, whose answers lead on, or a technique; its place
    "large": ("out of memory:\nwhat is large?", 0, 0),
    "activations": ("activations", 1, -0.5),
    "states": ("model states", 1, 0.5),
    "cheap": ("bf16, fused attention,\nmicro-batch 1", 2.2, -0.9),
    "recompute": ("recomputation,\nthen offload", 2.2, -0.3),
    "adapt": ("fine-tuning:\nLoRA, QLoRA", 2.2, 0.3),
    "train": ("all weights:\n8-bit Adam, Adafactor", 2.2, 0.9),
    "gpus": ("more GPUs:\nfrom chapter 3 on", 3.4, 0.3),
}
STEPS = (
    ("large", "activations"), ("large", "states"), ("activations", "cheap"), ("activations", "recompute"),
    ("states", "adapt"), ("states", "train"), ("recompute", "gpus"), ("adapt", "gpus"), ("train", "gpus"),
)  # fmt: skip


def show_choices() -> None:
    """Show which technique helps against what, from the cheap ones down to the expensive ones."""
    technique = mix(OKABE_ITO["sky"], "#FFFFFF", 0.55)
    boxes = [
        (x - 0.46, y - 0.22, 0.92, 0.44, technique if x > 1 else "#FFFFFF", text) for text, x, y in CHOICES.values()
    ]
    places = {name: (x, y) for name, (_, x, y) in CHOICES.items()}
    arrows = [
        ((places[one][0] + 0.46, places[one][1]), (places[other][0] - 0.46, places[other][1])) for one, other in STEPS
    ]
    diagram(3.2, "First ask what is large", ((-0.55, 3.95), (1.2, -1.2)), boxes, arrows, **BORDERED)
