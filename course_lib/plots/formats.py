"""Floating-point formats as rows of bits."""

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from course_lib.panels.precision import FORMATS, FloatFormat
from course_lib.plots.palette import OKABE_ITO, text_on
from course_lib.plots.style import CENTRED, ground, picture_axes
from course_lib.validate import checked

BIT_COLORS = {"sign": OKABE_ITO["black"], "exponent": OKABE_ITO["orange"], "mantissa": OKABE_ITO["sky"]}


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
