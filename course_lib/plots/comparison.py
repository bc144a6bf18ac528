"""Predicted beside measured, kind by kind, with the error in percent."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.plots.palette import MEASURED_COLOR, PREDICTED_COLOR
from course_lib.plots.style import UNITS, picture_axes, three_digits, unit_for
from course_lib.validate import checked


@dataclass(frozen=True)
class PairOfBars:
    """One kind: what was predicted, what was measured, and how far the prediction is off."""

    kind: str
    predicted_bytes: int
    measured_bytes: int
    error_percent: float


def comparison_pairs(rows: Sequence) -> list[PairOfBars]:
    """The rows of a `Comparison` that are not empty on both sides."""
    pairs = [PairOfBars(row.kind, row.predicted_bytes, row.measured_bytes, row.error_percent) for row in rows]
    return [pair for pair in pairs if pair.predicted_bytes or pair.measured_bytes]


def error_text(error_percent: float) -> str:
    """Such as `+1.2 %`; an error too small to be seen is called exact only if it is zero."""
    if error_percent == 0:
        return "exact"
    if abs(error_percent) < 0.005:
        return "under 0.005 % off"
    return f"{error_percent:+.2f} %".replace("-", "−")


def draw_comparison(axes, pairs: Sequence[PairOfBars], what: str) -> None:
    """Two bars a kind; the numbers and the error stand beside them."""
    largest = max(max(pair.predicted_bytes, pair.measured_bytes) for pair in pairs)
    unit = unit_for(largest)
    size = UNITS[unit]
    for row, pair in enumerate(pairs):
        values = pair.predicted_bytes / size, pair.measured_bytes / size
        names = ("predicted", "measured") if row == 0 else (None, None)
        axes.barh(row - 0.19, values[0], height=0.36, color=PREDICTED_COLOR, label=names[0])
        axes.barh(
            row + 0.19, values[1], height=0.36, color=MEASURED_COLOR, hatch="//", edgecolor="white", label=names[1]
        )
        text = f" {three_digits(values[0])} / {three_digits(values[1])} {unit}: {error_text(pair.error_percent)}"
        axes.text(max(values), row, text, va="center", fontsize=9)
    axes.set_yticks(range(len(pairs)), [pair.kind for pair in pairs])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, largest / size * 1.55), ylim=(len(pairs) - 0.4, -0.6), xlabel=f"{what} ({unit})")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2)


@checked
def show_comparison(
    rows: Sequence, title: str = "Predicted beside measured", what: str = "largest of each kind"
) -> None:
    """Show the rows of a `Comparison` (of `course_lib.compare.profile`) with each error; `what` names the axis."""
    pairs = comparison_pairs(rows)
    with picture_axes(1.0 + 0.45 * len(pairs)) as axes:
        draw_comparison(axes, pairs, what)
        axes.set_title(title)
