"""A run watched from a notebook: four pictures that are drawn again from its logs, while it trains and after it."""

import asyncio
from html import escape
from io import BytesIO
from pathlib import Path

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib.language import told
from course_lib.plots.run_log import HEIGHT_IN, draw_run, run_rows
from course_lib.plots.style import FULL_WIDTH_IN, picture_output, speak_korean, style
from course_lib.train.watch import RunNow, look, read_run, run_table
from course_lib.validate import Positive, checked

_DPI = 160  # the page stretches the picture to its width


class Watched(widgets.VBox):
    """The pictures of a run; a stored notebook keeps them as they were first, for readers without a kernel."""

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict] | dict:
        image = self.children[1]
        if not image.value:
            return super()._repr_mimebundle_(**kwargs)
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        alt = told("Pictures of a run: its loss, its speed, its memory; run the cell to renew them.")
        png, metadata = picture_output(image.value, alt, alt)
        return data | png, metadata


@checked
def _run_png(folder: str | Path, now: RunNow) -> bytes:
    rows = run_rows(read_run(folder))
    with style():
        figure = Figure(figsize=(FULL_WIDTH_IN, HEIGHT_IN))
        draw_run(figure, *rows, now.finding)
        speak_korean(figure)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


@checked
def watch(folder: str | Path, every_s: Positive = 2.0) -> widgets.VBox:
    """Show a run's pictures and table; with "Watch" they are renewed until the run has ended, or "Stop".

    Without a click they stand as they are: the run may be over. A cell that trains in this kernel keeps it busy, so
    watch a run of another process, or one in the background.
    """
    tooltip = told("renew the pictures until the run has ended")
    follow = widgets.ToggleButton(description=told("Watch"), tooltip=tooltip)
    refresh = widgets.Button(description=told("Refresh"), tooltip=told("look once more"), button_style="info")
    image, text = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none")), widgets.HTML()
    tasks: list[asyncio.Task] = []

    def show() -> bool:
        """Draw; whether there will be more to see."""
        try:
            now = look(folder)
            image.value = _run_png(folder, now)
        except Exception as error:  # a callback's error is seen nowhere else
            image.layout.display = "none"
            text.value = f"<b>{told('Not possible.')}</b> {escape(told(str(error)))}"
            return True
        lines = escape(told("\n".join(run_table(now))))
        text.value, image.layout.display = f'<pre style="overflow-x: auto">{lines}</pre>', None
        return not now.ended

    async def renew() -> None:
        while follow.value and show():
            await asyncio.sleep(every_s)
        follow.value = False

    def pressed(change: dict) -> None:
        follow.description = told("Stop" if follow.value else "Watch")
        if follow.value:
            tasks[:] = [asyncio.ensure_future(renew())]  # kept: a task that nobody holds may be collected

    follow.observe(pressed, names="value")
    refresh.on_click(lambda button: show())
    show()
    return Watched([widgets.HBox([follow, refresh]), image, text])
