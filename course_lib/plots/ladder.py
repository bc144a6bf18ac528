"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_lib.plots.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR
from course_lib.plots.style import picture_axes, three_digits
from course_lib.validate import checked


@dataclass(frozen=True)
class LadderStep:
    """One step: the value after this measure was taken, and how much it took away from the step above."""

    label: str
    value: float
    gain: float
    gain_percent: float


@checked
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


@checked
def draw_ladder(axes, ladder_steps: Sequence[LadderStep], unit: str, limits: Mapping[str, float]) -> None:
    """Horizontal bars from the start downward; the ghost of a bar is what this step saved."""
    extent = (
        max([ladder_step.value + max(ladder_step.gain, 0) for ladder_step in ladder_steps] + list(limits.values()))
        * 1.42
    )
    lowest = min(limits.values(), default=float("inf"))
    for row, ladder_step in enumerate(ladder_steps):
        fits = ladder_step.value <= lowest
        color = (
            KIND_COLORS["optimizer"]
            if limits and fits
            else KIND_COLORS["activations"]
            if limits
            else KIND_COLORS["parameters"]
        )
        axes.barh(row, ladder_step.value, height=0.6, color=color)
        if ladder_step.gain > 0:
            axes.barh(
                row,
                ladder_step.gain,
                left=ladder_step.value,
                height=0.6,
                color="white",
                edgecolor=NEUTRAL_COLOR,
                hatch="///",
                linewidth=0.8,
            )
        text = f" {three_digits(ladder_step.value)} {unit}" + (
            f"  (−{_percent(ladder_step.gain_percent)} %)" if ladder_step.gain > 0 else ""
        )
        text = (
            text
            if ladder_step.gain >= 0
            else f" {three_digits(ladder_step.value)} {unit}  (+{_percent(-ladder_step.gain_percent)} %)"
        )
        verdict = ("  fits" if fits else "  does not fit") if limits else ""
        axes.text(
            ladder_step.value + max(ladder_step.gain, 0) + extent / 100,
            row,
            text.strip() + verdict,
            va="center",
            fontsize=9,
            zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # readable across the line of a limit
        )
    for name, limit in limits.items():
        axes.axvline(limit, color=LIMIT_COLOR, linestyle="--", linewidth=1.4)
        axes.annotate(
            f"{name}: {three_digits(limit)} {unit}",
            (limit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    axes.set_yticks(range(len(ladder_steps)), [ladder_step.label for ladder_step in ladder_steps])
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
