"""Floating-point formats as rows of bits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from course_lib.plots.palette import OKABE_ITO, mix, text_on
from course_lib.plots.style import CENTRED, ground, picture_axes, write_above
from course_lib.validate import checked

BIT_COLORS = {"sign": OKABE_ITO["black"], "exponent": OKABE_ITO["orange"], "mantissa": OKABE_ITO["sky"]}


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    `finite_only`: no infinities, so that the highest exponent holds numbers too (FP8 E4M3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False

    @property
    def bits(self) -> int:
        """All bits, the sign among them."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is taken from the stored exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number. In a finite-only format the top pattern alone is not a number."""
        if self.finite_only:
            return 2.0 ** (2**self.exponent_bits - 1 - self.bias) * (2 - 2 * 2.0**-self.mantissa_bits)
        return 2.0**self.bias * (2 - 2.0**-self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero (subnormal)."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits


# Source: IEEE 754-2019 (fp32, fp16); torch.finfo; OCP 8-bit floating point specification (OFP8)
FORMATS = {
    "fp32": FloatFormat("fp32", 8, 23),
    "tf32": FloatFormat("tf32", 8, 10),
    "bf16": FloatFormat("bf16", 8, 7),
    "fp16": FloatFormat("fp16", 5, 10),
    "fp8 e5m2": FloatFormat("fp8 e5m2", 5, 2),
    "fp8 e4m3": FloatFormat("fp8 e4m3", 4, 3, finite_only=True),
}


def format_cells(formats: Sequence[FloatFormat]) -> list[list[str]]:
    """For each format the part that each of its bits belongs to, from the left."""
    return [["sign"] + ["exponent"] * f.exponent_bits + ["mantissa"] * f.mantissa_bits for f in formats]


@checked
def show_float_formats(
    names: Sequence[str] = ("fp32", "bf16", "fp16"), title: str = "bf16 keeps fp32's range, fp16 keeps more digits"
) -> None:
    """Show formats as boxes of bits, with their range and their precision."""
    if missing := [name for name in names if name not in FORMATS]:
        raise ValueError(f"formats {missing} are unknown; choose from {', '.join(FORMATS)}")
    formats = [FORMATS[name] for name in names]
    widest = max(f.bits for f in formats)
    with picture_axes(0.8 + 0.62 * len(formats)) as axes:
        for row, (fmt, cells) in enumerate(zip(formats, format_cells(formats), strict=True)):
            _draw_format(axes, row, fmt, cells, widest)
        axes.set(xlim=(-4.2, widest + 0.2), ylim=(len(formats) * 1.6 - 0.2, -0.4))
        axes.set_axis_off()
        axes.set_title(title)


def _draw_format(axes, row: int, fmt: FloatFormat, cells: Sequence[str], widest: int) -> None:
    top = row * 1.6
    for bit, part in enumerate(cells):
        axes.add_patch(Rectangle((bit, top), 1, 0.8, facecolor=BIT_COLORS[part], edgecolor="white", linewidth=1.2))
    axes.text(-0.4, top + 0.4, f"{fmt.name}", ha="right", va="center", fontweight="bold")
    axes.text(0.5, top + 0.4, "±", **CENTRED, color="white", fontsize=9)
    for part, start, count in (
        ("exponent", 1, fmt.exponent_bits),
        ("mantissa", 1 + fmt.exponent_bits, fmt.mantissa_bits),
    ):
        label = f"{count} {part}" if count >= 5 else f"{count}"
        color = BIT_COLORS[part]
        look = {"fontsize": 9, "color": text_on(color), "bbox": ground(color)} | CENTRED
        axes.text(start + count / 2, top + 0.4, label, **look)
    facts = (
        f"{fmt.bits} bits · largest {fmt.largest:.3g} · smallest normal {fmt.smallest_normal:.2g}"
        f" · after 1 comes 1 + {fmt.epsilon:.2g}"
    )
    axes.text(0, top + 0.85, facts, ha="left", va="top", fontsize=8.5)


def draw_ranges(axes, formats: Sequence[FloatFormat], marks: Mapping[str, float]) -> None:
    """Each format's range as a bar over magnitudes, subnormal numbers pale, and lines at the values of interest."""
    for row, fmt in enumerate(formats):
        low, normal, high = (math.log10(value) for value in (fmt.smallest, fmt.smallest_normal, fmt.largest))
        pale = mix(BIT_COLORS["exponent"], "#FFFFFF", 0.6)
        axes.barh(row, normal - low, left=low, height=0.55, color=pale, hatch="//", edgecolor="white")
        axes.barh(row, high - normal, left=normal, height=0.55, color=BIT_COLORS["exponent"])
        axes.text(high, row, f" up to {fmt.largest:.3g}", va="center", fontsize=9)
        axes.text(low, row, f"from {fmt.smallest:.2g} ", va="center", ha="right", fontsize=9)
    for index, (name, value) in enumerate(marks.items()):
        axes.axvline(math.log10(value), color="black", linestyle=("--", ":")[index % 2], linewidth=1.6)
        write_above(axes, math.log10(value), f"{name} {value:.3g}", 3 + 13 * index)
    axes.set_yticks(range(len(formats)), [fmt.name for fmt in formats])
    ticks = range(-45, 46, 15)
    axes.set_xticks(ticks, [f"$10^{{{tick}}}$" for tick in ticks])
    axes.set(xlim=(-64, 54), ylim=(len(formats) - 0.5, -0.5), xlabel="magnitude (hatched: subnormal, fewer digits)")
