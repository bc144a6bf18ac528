"""A bar that shows how far a loop or a launch is: in a notebook below the cell, and gone when it ends; else as text.

In a notebook the bar is a widget and nothing else: no text of it is stored, so that two runs leave the same outputs.
"""

import importlib.util
import sys
import time
from collections.abc import Iterable

from tqdm.std import tqdm

from course_lib.language import told

PATIENCE_S = 1.0  # what is done sooner needs no bar
REDRAW_S = 0.2
SAY_AGAIN_S = 10.0  # in a terminal, where each time is a line
_VIEW = "application/vnd.jupyter.widget-view+json"


def open_bar():
    """Return a bar for where this process runs: a notebook with ipywidgets, or anything else."""
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    return CellBar() if in_notebook and importlib.util.find_spec("ipywidgets") else TextBar()


class CellBar:
    """A bar below the cell, from the first call of `draw` after `PATIENCE_S` until `close`."""

    def __init__(self):
        self._start = time.monotonic()
        self._drawn_at = 0.0
        self._box = None

    def draw(self, description: str, count: int, total: int | None, note: str = "") -> None:
        of_total = "" if total is None else f" of {total:,}"
        self._draw(total or max(count, 1), count, (description, f"{count:,}{of_total}", note))

    def say(self, sentence: str) -> None:
        """Draw an empty bar beside a sentence: why nothing goes on yet."""
        self._draw(1, 0, (sentence,))

    def wait(self, ranks_done: int, world_size: int) -> None:
        """Draw how many ranks are done, for a launch whose function tells nothing of its progress."""
        self.draw("ranks done", ranks_done, world_size)

    def close(self) -> None:
        if self._box is None:
            return
        bar, text = self._box.children
        for part in (bar.layout, bar.style, bar, text.layout, text.style, text, self._box.layout, self._box):
            part.close()

    def _draw(self, most: int, value: int, texts: Iterable[str]) -> None:
        now = time.monotonic()
        if now - self._start < PATIENCE_S or now - self._drawn_at < REDRAW_S:
            return
        self._drawn_at = now
        if self._box is None:
            import ipywidgets
            from IPython.display import display

            self._box = ipywidgets.HBox([ipywidgets.IntProgress(), ipywidgets.Label()])
            view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
            display({_VIEW: view}, raw=True)
        bar, text = self._box.children
        bar.max, bar.value = most, value
        text.value = told(" · ".join(filter(None, (*texts, f"{now - self._start:.0f} s"))))


class TextBar:
    """A bar in the terminal, which stays there."""

    def __init__(self):
        self._bar = None
        self._say_at = time.monotonic() + PATIENCE_S

    def say(self, sentence: str) -> None:
        """Write a sentence that says why nothing goes on yet, after a second and then every ten."""
        if time.monotonic() > self._say_at:
            print(sentence, file=sys.stderr, flush=True)
            self._say_at = time.monotonic() + SAY_AGAIN_S

    def draw(self, description: str, count: int, total: int | None, note: str = "") -> None:
        if self._bar is not None and (count < self._bar.n or self._bar.desc != description):
            self.close()
        if self._bar is None:
            self._bar = tqdm(desc=description, total=total, file=sys.stderr)
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(count - self._bar.n)

    def wait(self, ranks_done: int, world_size: int) -> None:
        """Draw nothing: a script's output has no line for a launch that works."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
