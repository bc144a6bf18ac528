"""A ladder: one measure after another, and what each of them gains."""

from collections.abc import Mapping

from course_lib.panels.svg import bars
from course_lib.plots.concepts import show_charts
from course_lib.validate import checked


@checked
def show_ladder(steps_bytes: Mapping[str, float], title: str, limits: Mapping[str, float] | None = None) -> None:
    """Show `{measure: bytes}` as steps, each with its gain over the one above, against limits in bytes."""
    lowest, notes, before = min((limits or {}).values(), default=None), {}, next(iter(steps_bytes.values()), 0)
    for label, value in steps_bytes.items():
        notes[label] = "" if lowest is None else ", fits" if value <= lowest else ", does not fit"
        if value != before:
            percent = 100 * abs(before - value) / before
            gain = f"  ({'−' if value < before else '+'}{percent:.{int(percent < 10)}f} %)"
            notes[label] = gain + notes[label]
        before = value
    rows = {label: {"activations": value} for label, value in steps_bytes.items()}
    show_charts(title, bars(title, rows, notes=notes, marks=limits or {}))
