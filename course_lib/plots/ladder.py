"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping

from course_lib.panels.svg import bars
from course_lib.plots.concepts import show_charts
from course_lib.validate import checked


def gain_text(before: float, value: float) -> str:
    """What a step gains over the one above, such as `  (−50 %)`; nothing if it gains nothing."""
    if value == before:
        return ""
    percent = 100 * abs(before - value) / before
    return f"  ({'−' if value < before else '+'}{percent:.{int(percent < 10)}f} %)"


@checked
def show_ladder(steps_bytes: Mapping[str, float], title: str, limits: Mapping[str, float] | None = None) -> None:
    """Show `{measure: bytes}` as steps, each with its gain over the one above, against limits in bytes."""
    values = list(steps_bytes.values())
    lowest = min((limits or {}).values(), default=None)
    notes = {
        label: gain_text(before, value) + ("" if lowest is None else ", fits" if value <= lowest else ", does not fit")
        for (label, value), before in zip(steps_bytes.items(), [values[0], *values], strict=False)
    }
    rows = {label: {"activations": value} for label, value in steps_bytes.items()}
    show_charts(title, bars(title, rows, notes=notes, marks=limits or {}))
