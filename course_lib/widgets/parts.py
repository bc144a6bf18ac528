"""The pieces that every explorer is made of. Only what ipywidgets 7.7 and 8 share is used.

A picture is an `Image` whose bytes are replaced: it never piles up, and it behaves the same in
JupyterLab, Voila and Colab, with and without a running cell.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import BytesIO

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib.hardware import GPUS, LINKS
from course_lib.plots.comparison import comparison_pairs, draw_comparison
from course_lib.plots.style import FULL_WIDTH_IN, picture_output, style
from course_lib.validate import Positive, Size, checked

LABEL = {"description_width": "110px"}
WIDTH = "390px"
# (label, key) pairs of `course_lib.hardware`, for `choice`
ALL_GPUS, ALL_LINKS = ([(known.name, key) for key, known in table.items()] for table in (GPUS, LINKS))
BF16_GPUS = [(name, key) for name, key in ALL_GPUS if GPUS[key].bf16_flops]  # BF16 is what a step computes in
GPU_LINKS = [(name, key) for name, key in ALL_LINKS if key != "nvme"]
WIDGET_DPI = 160  # the page stretches the picture to its width


@checked
def figure_png(draw: Callable, height_in: Positive, width_in: Positive = FULL_WIDTH_IN) -> bytes:
    """Draw with `draw(axes)` and return the picture as PNG. No pyplot, so nothing stays open."""
    return stacked_png([(draw, height_in)], width_in)


@checked
def stacked_png(drawings: Sequence[tuple[Callable, float]], width_in: Positive = FULL_WIDTH_IN) -> bytes:
    """Several `(draw, height in inches)`, one below the other, as one PNG."""
    heights = [height_in for _, height_in in drawings]
    with style():
        figure = Figure(figsize=(width_in, sum(heights)))
        panels = figure.subplots(len(drawings), 1, squeeze=False, height_ratios=heights)
        for axes, (draw, _) in zip(panels[:, 0], drawings, strict=True):
            draw(axes)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=WIDGET_DPI)
    return buffer.getvalue()


def picture() -> widgets.Image:
    """A place for a picture, hidden until it has one."""
    return widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none"))


@checked
def set_picture(image: widgets.Image, png: bytes | None) -> None:
    """Replace the picture; None hides it."""
    image.layout.display = "none" if png is None else None
    if png is not None:
        image.value = png


@checked
def choice(description: str, options: Sequence | Mapping, value) -> widgets.Dropdown:
    """A list to choose from; options are values or (label, value) pairs."""
    return widgets.Dropdown(
        description=description, options=list(options), value=value, style=LABEL, layout=widgets.Layout(width=WIDTH)
    )


@checked
def slider(description: str, options: Sequence | Mapping, value) -> widgets.SelectionSlider:
    """A slider over given values, such as powers of two; it reports when it is released."""
    return widgets.SelectionSlider(
        description=description,
        options=list(options),
        value=value,
        continuous_update=False,
        style=LABEL,
        layout=widgets.Layout(width=WIDTH),
    )


@checked
def powers_of_two(first: int, last: int) -> list[tuple[str, int]]:
    """(label, value) pairs from `first` to `last`, doubling."""
    values = [first]
    while values[-1] * 2 <= last:
        values.append(values[-1] * 2)
    return [(f"{value:,}", value) for value in values]


@checked
def note(message: widgets.HTML, html: str) -> None:
    """Write text (HTML) under the controls; lines as close as a page's, not as far apart as controls are."""
    message.value = f'<div style="line-height: 1.5; overflow-wrap: anywhere">{html}</div>' if html else ""


@checked
def attempt(message: widgets.HTML, action: Callable[[], None]) -> bool:
    """Run an action; what it raises is shown in the widget, since a callback's error is seen nowhere else."""
    try:
        action()
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        note(message, f"<b>Not possible.</b> {escape(kind + str(error))}")
        return False
    return True


@checked
def follow(controls: Sequence[widgets.Widget], update: Callable[[], None]) -> None:
    """Call `update` now and whenever one of the controls changes."""
    for control in controls:
        control.observe(lambda change: update(), names="value")
    update()


class Explorer(widgets.VBox):
    """Controls with their picture; a stored notebook keeps the picture for readers without a kernel.

    Under ipywidgets 7 nothing asks for it, and the widget is shown as ever.
    """

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs), {}
        image = next((child for child in self.children if isinstance(child, widgets.Image) and child.value), None)
        if image is not None:
            alt = "First picture of a widget; run the cell to move its controls."
            data, metadata = picture_output(image.value, alt, alt)
            bundle |= data
        return bundle, metadata


@checked
def panel(controls: Sequence[widgets.Widget], *below: widgets.Widget) -> Explorer:
    """Controls in two columns, everything else below them."""
    half = -(-len(controls) // 2)
    columns = [widgets.VBox(list(controls[:half])), widgets.VBox(list(controls[half:]))]
    return Explorer([widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap")), *below])


@checked
def values_of(fields: Mapping[str, widgets.Widget]) -> dict:
    """What each control says, by its name."""
    return {name: control.value for name, control in fields.items()}


@checked
def show_in(image: widgets.Image, message: widgets.HTML, made: Callable[[], tuple[bytes, str]]) -> None:
    """Show what `made` returns, (PNG, HTML); or why it cannot, and no picture: the last one was of another choice."""

    def fill() -> None:
        png, html = made()
        set_picture(image, png)
        note(message, html)

    if not attempt(message, fill):
        set_picture(image, None)


@checked
def picture_panel(controls: Sequence[widgets.Widget], predict: Callable[[], tuple[bytes, str]]) -> widgets.VBox:
    """Controls, and a line and a picture that follow them. `predict` returns (PNG, HTML)."""
    image, text = picture(), widgets.HTML()
    follow(controls, lambda: show_in(image, text, predict))
    return panel(controls, text, image)


@checked
def stands_for(model: str, num_gpus: Size, num_ranks: Size) -> str:
    """What a toy measured on a few ranks stands for; nothing to say where that is what was chosen."""
    gpus = f"{num_gpus:,} GPUs" if num_gpus > 1 else "1 GPU"
    return "" if (model, num_gpus) == ("toy", num_ranks) else f"A small stand-in for {model} on {gpus}."


@checked
def comparison_png(rows: Sequence, what: str = "rank 0: largest of each kind, and bytes sent") -> bytes:
    """Predicted beside measured, row by row, as PNG."""
    pairs = comparison_pairs(rows)
    return figure_png(lambda axes: draw_comparison(axes, pairs, what), 1.0 + 0.45 * len(pairs))


@checked
def measured_panel(
    controls: Sequence[widgets.Widget],
    predict: Callable[[], tuple[bytes, str]],
    measure: Callable[[], tuple[bytes, str]],
    tooltip: str,
) -> widgets.VBox:
    """Controls, a picture and a line that follow them, and a button that lays what is measured on what is predicted.

    `predict` and `measure` return (PNG, HTML). A new choice takes the measurement away: it was of another one.
    """
    button = widgets.Button(description="Measure", tooltip=tooltip, button_style="info")
    image, text, pairs, result_text = picture(), widgets.HTML(), picture(), widgets.HTML()

    def update() -> None:
        set_picture(pairs, None)
        note(result_text, "")
        show_in(image, text, predict)

    def pressed(button: widgets.Button) -> None:
        button.disabled = True
        note(result_text, "measuring ...")
        try:
            show_in(pairs, result_text, measure)
        finally:
            button.disabled = False

    button.on_click(pressed)
    follow(controls, update)
    return panel(controls, text, image, button, result_text, pairs)
