"""A panel: controls by name, and a pure function from their values to pictures and a sentence. Nothing shows it here.

    panel.start                   {"tp": 8, "seq_len": 4096, ...}: plain values, as JSON or an address has them
    answer = panel.answer(tp=16)  the start with changes
    answer.svg, answer.said       a picture, and what it shows in words; of what cannot be no picture, and why

A host puts controls around it: widgets/host.py in a notebook; a web page can be another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from course_lib.panels.svg import Chart, drawing

Value = str | int | float | bool
Shown = tuple[list[Chart], str]  # charts one below the other, and what they show in words


@dataclass(frozen=True)
class Control:
    """One choice: its name for people, (label, value) of what can be chosen, and how a host lets people choose.

    list, slider   one value of the options
    strip          a switch for each option; the value is a text of 0s and 1s
    text           a line to type; the options are examples
    grid           cells to press, and the value as text: `cells(value)` are its words by row and column, the first
                   letter of each an option; `press(value, row, column, option)` is the value after a cell was pressed
    """

    label: str
    options: tuple[tuple[str, Value], ...]
    start: Value
    kind: Literal["list", "slider", "strip", "text", "grid"] = "list"
    cells: Callable[[str], list[list[str]]] | None = None
    press: Callable[[str, int, int, Value], str] | None = None

    def __post_init__(self) -> None:
        if not self.allows(self.start):
            values = [value for _, value in self.options]
            raise ValueError(f"{self.label} starts at {self.start!r}; choose from {values}")

    def allows(self, value: Value) -> bool:
        if self.kind in ("text", "grid"):
            return isinstance(value, str)
        if self.kind == "strip":
            return isinstance(value, str) and len(value) == len(self.options) and set(value) <= {"0", "1"}
        return any(value == other and isinstance(value, type(other)) for _, other in self.options)


@dataclass(frozen=True)
class Answer:
    """What a panel shows for some values: an SVG, empty for what cannot be, and a sentence for those who see none."""

    charts: tuple[Chart, ...]
    said: str
    svg: str = field(repr=False)

    @property
    def possible(self) -> bool:
        return bool(self.charts)


@dataclass(frozen=True)
class Panel:
    """Controls, and what they show.

    draw      the values by name -> charts and a sentence; ValueError for what cannot be
    presets   values to start from, by a name for people, each with what is to be said of them
    slow      functions like `draw` that take longer than a slider can wait for, by the name of their button
    """

    title: str
    controls: Mapping[str, Control]
    draw: Callable[..., Shown]
    presets: Mapping[str, tuple[Mapping[str, Value], str]] = field(default_factory=dict)
    slow: Mapping[str, Callable[..., Shown]] = field(default_factory=dict)

    @property
    def start(self) -> dict[str, Value]:
        return {name: control.start for name, control in self.controls.items()}

    def values(self, changes: Mapping[str, Value]) -> dict[str, Value]:
        """Return the start with changes; raises ValueError for a name or a value that no control has."""
        for name, value in changes.items():
            if name not in self.controls:
                raise ValueError(f"this panel has no {name!r}; choose from {', '.join(self.controls)}")
            if not self.controls[name].allows(value):
                allowed = ", ".join(repr(one) for _, one in self.controls[name].options)
                raise ValueError(f"{name} is {value!r}; choose from {allowed}")
        return self.start | dict(changes)

    def answer(self, **changes: Value) -> Answer:
        """Return what these values show; of what cannot be, why; raises ValueError as `values`."""
        values = self.values(changes)
        notes = [note for preset, note in self.presets.values() if self.start | dict(preset) == values]
        return answer_of(self.title, lambda: self.draw(**values), notes)


def answer_of(title: str, draw: Callable[[], Shown], notes: Iterable[str] = ()) -> Answer:
    """Return what `draw` makes as one picture with its words, or why it cannot be."""
    try:
        charts, said = draw()
    except ValueError as error:
        return Answer((), f"Not possible. {error}", "")
    said = " ".join(filter(None, [said, *notes]))
    return Answer(tuple(charts), said, drawing(title, said, charts))
