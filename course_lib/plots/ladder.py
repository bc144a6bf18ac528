"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.plots.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR
from course_lib.plots.style import ground, picture_axes, three_digits, write_above
from course_lib.validate import checked


@dataclass(frozen=True)
class LadderStep:
    """One step: the value after this measure was taken, and how much it took away from the step above."""

    label: str
    value: float
    gain: float
    gain_percent: float


def gains_of_steps(steps: Mapping[str, float]) -> list[LadderStep]:
    """Each step's gain over the one above it; the first step is where one starts."""
    values = list(steps.values())
    above = [values[0], *values[:-1]]
    return [
        LadderStep(label, value, before - value, 100 * (before - value) / before if before else 0.0)
        for (label, value), before in zip(steps.items(), above, strict=True)
    ]


def _percent(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def draw_ladder(axes, ladder_steps: Sequence[LadderStep], unit: str, limits: Mapping[str, float]) -> None:
    """Horizontal bars from the start downward; the ghost of a bar is what this step saved."""
    ends = [one.value + max(one.gain, 0) for one in ladder_steps]
    extent = max([*ends, *limits.values()]) * 1.42
    lowest = min(limits.values(), default=float("inf"))
    for row, (one, end) in enumerate(zip(ladder_steps, ends, strict=True)):
        fits = one.value <= lowest
        kind = ("optimizer" if fits else "activations") if limits else "parameters"
        axes.barh(row, one.value, height=0.6, color=KIND_COLORS[kind])
        if one.gain > 0:
            ghost = {"color": "white", "edgecolor": NEUTRAL_COLOR, "hatch": "///", "linewidth": 0.8}
            axes.barh(row, one.gain, left=one.value, height=0.6, **ghost)
        text = f"{three_digits(one.value)} {unit}"
        if one.gain:
            text += f"  ({'−' if one.gain > 0 else '+'}{_percent(abs(one.gain_percent))} %)"
        if limits:
            text += "  fits" if fits else "  does not fit"
        axes.text(
            end + extent / 100, row, text, va="center", fontsize=9, zorder=3, bbox=ground("white")
        )  # readable across a limit
    for name, limit in limits.items():
        axes.axvline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1.4)
        write_above(axes, limit, f"{name}: {three_digits(limit)} {unit}")
    axes.set_yticks(range(len(ladder_steps)), [one.label for one in ladder_steps])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, extent), ylim=(len(ladder_steps) - 0.4, -0.6))


@checked
def show_ladder(
    steps: Mapping[str, float],
    title: str,
    xlabel: str = "peak memory (GB)",
    unit: str = "GB",
    limits: Mapping[str, float] | None = None,
) -> None:
    """Show `{measure: value}` as steps, each with its gain over the one above; all numbers are in `unit`."""
    ladder_steps = gains_of_steps(steps)
    with picture_axes(1.3 + 0.4 * len(ladder_steps)) as axes:
        draw_ladder(axes, ladder_steps, unit, limits or {})
        axes.set_xlabel(xlabel)
        axes.set_title(title, pad=18 if limits else 6)
