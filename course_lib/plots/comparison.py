"""Predicted beside measured, kind by kind, with the error in percent."""

from collections.abc import Sequence

from course_lib.palette import MEASURED_COLOR, PREDICTED_COLOR
from course_lib.plots.style import picture_axes, plain_rows, write
from course_lib.units import UNITS, three_digits, unit_for
from course_lib.validate import checked


def error_text(error_percent: float) -> str:
    """Such as `+1.2 %`; an error too small to be seen is called exact only if it is zero."""
    if error_percent == 0:
        return "exact"
    if abs(error_percent) < 0.005:
        return "under 0.005 % off"
    return f"{error_percent:+.2f} %".replace("-", "−")


@checked
def show_comparison(rows: Sequence, title: str, what: str = "largest of each kind") -> None:
    """Show the rows of a `Comparison` that are not empty on both sides, each with its error; `what` names the axis."""
    rows = [row for row in rows if row.predicted_bytes or row.measured_bytes]
    if not rows:
        raise ValueError("there is no row with bytes; give the rows of a comparison")
    largest = max(max(row.predicted_bytes, row.measured_bytes) for row in rows)
    unit = unit_for(largest)
    size = UNITS[unit]
    with picture_axes(1.0 + 0.45 * len(rows)) as axes:
        for place, row in enumerate(rows):
            predicted, measured = row.predicted_bytes / size, row.measured_bytes / size
            names = ("predicted", "measured") if place == 0 else (None, None)
            axes.barh(place - 0.19, predicted, height=0.36, color=PREDICTED_COLOR, label=names[0])
            look = {"color": MEASURED_COLOR, "hatch": "//", "edgecolor": "white"}
            axes.barh(place + 0.19, measured, height=0.36, label=names[1], **look)
            text = f" {three_digits(predicted)} / {three_digits(measured)} {unit}: {error_text(row.error_percent)}"
            write(axes, max(predicted, measured), place, text, "left")
        plain_rows(axes, [row.kind for row in rows])
        axes.set(xlim=(0, largest / size * 1.55), xlabel=f"{what} ({unit})")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2)
        axes.set_title(title)
