"""A panel in a notebook: ipywidgets for its controls, its picture and its sentence below. Works from the keyboard.

    play(ZERO)                              the panel with its own start
    play(SEQUENCE, tp=4)                    with another one
    play(MEMORY, measure=measure_memory)    with a button that takes longer than a slider can wait for

Only what ipywidgets 7.7 and 8 share is used. A stored notebook keeps the first picture, for readers without a kernel.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from html import escape
from textwrap import fill

import ipywidgets as widgets
from traitlets import Unicode

from course_lib.language import told, told_svg
from course_lib.palette import text_on
from course_lib.panels.record import Answer, Control, Panel, Shown, answer_of
from course_lib.panels.svg import COLORS
from course_lib.validate import checked

LABEL = {"description_width": "120px"}
WIDTH = "390px"
OWN = "your own"


class Strip(widgets.HBox):
    """A switch for each option; its value is a text of 0s and 1s."""

    value = Unicode()

    def __init__(self, control: Control, value: str):
        look = widgets.Layout(width="38px", padding="0")
        self.switches = [widgets.ToggleButton(description=name, layout=look) for name, _ in control.options]
        label = widgets.Label(told(control.label))
        super().__init__([label, *self.switches], layout=widgets.Layout(flex_flow="row wrap"))
        self.observe(self._set, "value")
        self.value = value
        for switch in self.switches:
            switch.observe(self._read, "value")

    def _set(self, change: Mapping) -> None:
        for switch, one in zip(self.switches, change["new"], strict=True):
            switch.value = one == "1"

    def _read(self, change: Mapping) -> None:
        self.value = "".join("01"[switch.value] for switch in self.switches)


class Grid(widgets.VBox):
    """Cells to press, a row for each line of the value, in the colours of the options; the value can be typed too."""

    value = Unicode()

    def __init__(self, control: Control, value: str):
        self.control = control
        self.colors = {option: COLORS[name] for name, option in control.options}
        self.option = widgets.ToggleButtons(options=_named(control), description=told(control.label))
        self.typed = widgets.Textarea(description=told("or type"), continuous_update=False)
        self.typed.layout, self.typed.rows = widgets.Layout(width="95%"), value.count("\n") + 1
        look = widgets.Layout(width="29px", min_width="29px", padding="0", margin="1px")
        self.cells = [[widgets.Button(layout=look) for _ in row] for row in control.cells(value)]
        for r, row in enumerate(self.cells):
            for c, cell in enumerate(row):
                cell.tooltip = told(f"rank {r}, column {c}")
                cell.on_click(partial(self._press, r, c))
        rows = [widgets.HBox([widgets.Label(str(r), layout=look), *row]) for r, row in enumerate(self.cells)]
        super().__init__([self.option, widgets.VBox(rows, layout=widgets.Layout(overflow="auto")), self.typed])
        self.typed.observe(lambda change: setattr(self, "value", change["new"]), "value")
        self.observe(self._set, "value")
        self.value = value

    def _press(self, row: int, column: int, cell: widgets.Button) -> None:
        with suppress(ValueError):  # of what is typed and cannot be read the answer tells
            self.value = self.control.press(self.value, row, column, self.option.value)

    def _set(self, change: Mapping) -> None:
        self.typed.value = change["new"]
        with suppress(ValueError):
            for row, words in zip(self.cells, self.control.cells(change["new"]), strict=True):
                color = None
                for cell, word in zip(row, words, strict=True):
                    color = color if word == "-" else self.colors.get(word[0])
                    cell.description, cell.style.button_color = word, color
                    cell.style.text_color = text_on(color) if color else None  # ipywidgets 8 has it


class Played(widgets.VBox):
    """Controls with their picture; the bundle that a notebook stores has the first picture as SVG, and its words."""

    first: Answer | None = None

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict] | dict:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        words = fill(told(self.first.said), 96)
        return data | {"image/svg+xml": told_svg(self.first.svg), "text/plain": words}, metadata


@checked
def play(panel: Panel, measure: Callable[..., Shown] | None = None, **start) -> Played:
    """Show a panel from `start`, with `measure` behind a button; raises ValueError for what the panel has not."""
    values = panel.values(start)
    made = {name: _widget(control, values[name]) for name, control in panel.controls.items()}
    picture, result = widgets.HTML(), widgets.HTML()
    held: list[str] = []  # not empty while several controls are set: what they say in between is nobody's choice

    def current() -> dict:
        return {name: widget.value for name, widget in made.items()}

    def update(change: Mapping | None = None) -> None:
        if not held:
            picture.value, result.value = html(panel.answer(**current())), ""

    def slowly(name: str, function: Callable[..., Shown]) -> widgets.Button:
        def pressed(button: widgets.Button) -> None:
            button.disabled, result.value = True, told("working ...")
            try:
                result.value = html(answer_of(name, lambda: function(**current())))
            except Exception as error:  # a callback's error is seen nowhere else
                result.value = html(Answer((), f"{type(error).__name__}: {error}", ""))
            finally:
                button.disabled = False

        button = widgets.Button(description=told(name), button_style="info")
        button.on_click(pressed)
        return button

    starts = [(told(name), name) for name in (OWN, *panel.presets)]
    menu = widgets.Dropdown(description=told("start from"), options=starts, **_look())

    def set_all(change: Mapping) -> None:
        if held or menu.value == OWN:
            return
        held.append(menu.value)
        for name, value in (panel.start | dict(panel.presets[menu.value][0])).items():
            made[name].value = value
        held.clear()
        update()

    def own(change: Mapping) -> None:
        if not held:
            menu.value = OWN

    menu.observe(set_all, "value")
    for widget in made.values():
        widget.observe(own, "value")
        widget.observe(update, "value")
    update()
    actions = dict(panel.slow) | ({"Measure": measure} if measure else {})
    buttons = [slowly(name, function) for name, function in actions.items()]
    played = Played([_columns([menu] * bool(panel.presets) + list(made.values())), picture, *buttons, result])
    played.first = panel.answer(**values)
    return played


def html(answer: Answer) -> str:
    """Return an answer as HTML: the sentence, read out where it changes, and the picture."""
    said = escape(told(answer.said))
    said = said if answer.possible else f"<b>{said}</b>"
    picture = told_svg(answer.svg)
    return f'<div style="line-height:1.5;overflow-wrap:anywhere"><p aria-live="polite">{said}</p>{picture}</div>'


def _widget(control: Control, value) -> widgets.Widget:
    if control.kind in ("strip", "grid"):
        return {"strip": Strip, "grid": Grid}[control.kind](control, value)
    if control.kind == "text":
        look = {"options": [word for _, word in control.options], "continuous_update": False} | _look()
        return widgets.Combobox(description=told(control.label), value=value, **look)
    make = widgets.SelectionSlider if control.kind == "slider" else widgets.Dropdown
    return make(description=told(control.label), options=_named(control), value=value, **_look())


def _named(control: Control) -> list[tuple[str, object]]:
    return [(told(label), value) for label, value in control.options]


def _look() -> dict:
    return {"style": LABEL, "layout": widgets.Layout(width=WIDTH)}


def _columns(controls: list[widgets.Widget]) -> widgets.VBox:
    """Lists and sliders in two columns, below what needs the whole width."""
    wide = [one for one in controls if isinstance(one, Strip | Grid)]
    narrow = [one for one in controls if one not in wide]
    half = -(-len(narrow) // 2)
    columns = [widgets.VBox(narrow[:half]), widgets.VBox(narrow[half:])]
    return widgets.VBox([*wide, widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap"))])
