"""A curve that is drawn again while its points come, so that a training can be watched; its last picture stays.

with LiveCurve("Loss of each step", steps=200) as curve:
    launch(train, 4, on_report=curve.add)          # a rank calls report("loss", loss.item())
"""

import numbers
import time

import matplotlib.pyplot as plt

from course_lib.plots.curves import LINE_COLORS, LINE_STYLES
from course_lib.plots.style import FULL_WIDTH_IN, drawn, finish, in_notebook, style
from course_lib.validate import Size, checked

REDRAW_S = 0.5
_SHARE = 0.1  # of the time, at most, that drawing takes from the training


class LiveCurve:
    """Curves by step, one a name that `add` gets: a picture that changes in place, the last at the `with`'s end."""

    @checked
    def __init__(self, title: str, steps: Size | None = None):
        self.title, self.steps = title, steps
        self.values: dict[str, list[float]] = {}
        self._display_id = None
        self._next_s = time.monotonic() + REDRAW_S

    def add(self, name: str, value: float) -> None:
        """Take a curve's next value, a gap if it is not finite; draw if the last picture is old enough."""
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"add is given {name!r} and {value!r}; give the name of a curve and one number")
        self.values.setdefault(name, []).append(float(value))
        start_s = time.monotonic()
        if start_s >= self._next_s:
            if in_notebook():
                self._show()
            now_s = time.monotonic()
            self._next_s = now_s + max(REDRAW_S, (now_s - start_s) / _SHARE)

    def __enter__(self) -> "LiveCurve":
        return self

    def __exit__(self, *failure) -> None:
        """Draw the last picture, after a failure, too: it shows how far the training came."""
        if not self.values:
            return
        if in_notebook():
            self._show()
        else:
            finish(self.figure())

    def figure(self):
        """Draw what has come so far."""
        with style():
            figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN * 0.85, 3.0))
            for index, (name, values) in enumerate(self.values.items()):
                look = {"color": LINE_COLORS[index % 6], "linestyle": LINE_STYLES[index % 6]}
                steps, width = range(1, len(values) + 1), max(1, (self.steps or len(values)) // 40)
                parts = [values[max(stop - width, 0) : stop] for stop in steps]  # a running mean of so many
                smooth = [sum(part) / len(part) for part in parts]
                if smooth != values:
                    axes.plot(steps, values, color=look["color"], linewidth=0.8, alpha=0.3)
                axes.plot(steps, smooth, label=name, **look)
            axes.set(xlabel="step", ylabel="loss")
            if self.steps is not None:
                axes.set_xlim(0, self.steps)
            axes.set_title(self.title)
            axes.legend(loc="upper right")
            axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
        return figure

    def _show(self) -> None:
        from IPython.display import display, update_display

        figure = self.figure()
        with style():
            data, metadata = drawn(figure, f"<curves: {self.title}>")
        plt.close(figure)
        if self._display_id is None:
            self._display_id = display(data, raw=True, metadata=metadata, display_id=True).display_id
        else:
            update_display(data, raw=True, metadata=metadata, display_id=self._display_id)
