"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt

from course_lib.plots.palette import KIND_COLORS, LIMIT_COLOR, NEUTRAL_COLOR
from course_lib.plots.style import FULL_WIDTH_IN, finish, style, three_digits
from course_lib.validate import checked


@dataclass(frozen=True)
class Rung:
    """One rung: the value after this measure was taken, and how much it took away from the rung above."""

    label: str
    value: float
    gain: float
    gain_percent: float


@checked
def ladder_rungs(steps: Mapping[str, float]) -> list[Rung]:
    """Each rung's gain over the one above it; the first rung is where one starts."""
    values = list(steps.values())
    above = [values[0], *values[:-1]]
    return [
        Rung(label, value, before - value, 100 * (before - value) / before if before else 0.0)
        for (label, value), before in zip(steps.items(), above)
    ]


def _percent(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


@checked
def draw_ladder(axes, rungs: Sequence[Rung], unit: str, limits: Mapping[str, float]) -> None:
    """Horizontal bars from the start downward; the ghost of a bar is what this rung saved."""
    extent = max([rung.value + max(rung.gain, 0) for rung in rungs] + list(limits.values())) * 1.42
    lowest = min(limits.values(), default=float("inf"))
    for row, rung in enumerate(rungs):
        fits = rung.value <= lowest
        color = (
            KIND_COLORS["optimizer"]
            if limits and fits
            else KIND_COLORS["activations"]
            if limits
            else KIND_COLORS["parameters"]
        )
        axes.barh(row, rung.value, height=0.6, color=color)
        if rung.gain > 0:
            axes.barh(
                row,
                rung.gain,
                left=rung.value,
                height=0.6,
                color="white",
                edgecolor=NEUTRAL_COLOR,
                hatch="///",
                linewidth=0.8,
            )
        text = f" {three_digits(rung.value)} {unit}" + (
            f"  (−{_percent(rung.gain_percent)} %)" if rung.gain > 0 else ""
        )
        text = text if rung.gain >= 0 else f" {three_digits(rung.value)} {unit}  (+{_percent(-rung.gain_percent)} %)"
        verdict = ("  fits" if fits else "  does not fit") if limits else ""
        axes.text(rung.value + max(rung.gain, 0), row, text + verdict, va="center", fontsize=9)
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
    axes.set_yticks(range(len(rungs)), [rung.label for rung in rungs])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, extent), ylim=(len(rungs) - 0.4, -0.6))


@checked
def show_ladder(
    steps: Mapping[str, float],
    title: str,
    xlabel: str = "peak memory (GB)",
    unit: str = "GB",
    limits: Mapping[str, float] | None = None,
) -> None:
    """Show `{measure: value}` as rungs, each with its gain over the one above; all numbers are in `unit`."""
    rungs = ladder_rungs(steps)
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, 1.3 + 0.4 * len(rungs)))
        draw_ladder(axes, rungs, unit, limits or {})
        axes.set_xlabel(xlabel)
        axes.set_title(title, pad=18 if limits else 6)
        finish(figure)
