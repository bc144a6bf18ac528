"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping

from course_lib.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR
from course_lib.plots.style import ground, picture_axes, plain_rows, write, write_above
from course_lib.units import three_digits
from course_lib.validate import checked


def gain_text(before: float, value: float) -> str:
    """What a step gains over the one above, such as `  (−50 %)`; nothing if it gains nothing."""
    if value == before:
        return ""
    percent = 100 * abs(before - value) / before
    return f"  ({'−' if value < before else '+'}{percent:.{int(percent < 10)}f} %)"


@checked
def show_ladder(
    steps: Mapping[str, float],
    title: str,
    xlabel: str = "peak memory (GB)",
    unit: str = "GB",
    limits: Mapping[str, float] | None = None,
) -> None:
    """Show `{measure: value}` as steps, each with its gain over the one above; all numbers are in `unit`.

    The ghost of a bar is what its step saved.
    """
    values, limits = list(steps.values()), limits or {}
    above = [values[0], *values[:-1]]
    extent = max([*values, *limits.values()]) * 1.42
    lowest = min(limits.values(), default=float("inf"))
    with picture_axes(1.3 + 0.4 * len(steps)) as axes:
        for row, (value, before) in enumerate(zip(values, above, strict=True)):
            kind = ("optimizer" if value <= lowest else "activations") if limits else "parameters"
            axes.barh(row, value, height=0.6, color=KIND_COLORS[kind])
            ghost = {"color": "white", "edgecolor": NEUTRAL_COLOR, "hatch": "///", "linewidth": 0.8}
            if before > value:
                axes.barh(row, before - value, left=value, height=0.6, **ghost)
            text = f"{three_digits(value)} {unit}{gain_text(before, value)}"
            text += ("  fits" if value <= lowest else "  does not fit") if limits else ""
            write(axes, max(value, before) + extent / 100, row, text, "left", zorder=3, bbox=ground("white"))
        for name, limit in limits.items():
            axes.axvline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1.4)
            write_above(axes, limit, f"{name}: {three_digits(limit)} {unit}")
        plain_rows(axes, list(steps))
        axes.set(xlim=(0, extent), xlabel=xlabel)
        axes.set_title(title, pad=18 if limits else 6)
