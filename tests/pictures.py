"""Looking at pictures in tests: drawn once, closed again, no text on another, not too many bytes for a notebook."""

from collections.abc import Callable
from io import BytesIO
from itertools import combinations

import matplotlib
import matplotlib.pyplot as plt


def overlapping_texts(figure) -> list[tuple[str, str]]:
    """Pairs of texts of which one lies on the other."""
    figure.canvas.draw()
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent().padded(-1.5)) for t in texts]
    return [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]


def look(draw: Callable[[], None], monkeypatch, max_bytes: int, dpi: float | str | None = None) -> None:
    """Draws, and asserts all of that. dpi: "figure" for a figure's own; otherwise the style's."""
    seen = []

    def show():
        (number,) = plt.get_fignums()
        figure, buffer = plt.figure(number), BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight", **({} if dpi is None else {"dpi": dpi}))
        seen.append((len(buffer.getvalue()), overlapping_texts(figure)))

    monkeypatch.setattr(plt, "show", show)
    assert draw() is None
    ((png_bytes, overlaps),) = seen
    assert 3_000 < png_bytes < max_bytes and overlaps == []
    assert plt.get_fignums() == []


def drawn(monkeypatch, show, *args) -> list[str]:
    """The texts in the panels of the picture that show(*args) draws."""
    texts = []

    def note():
        plt.gcf().canvas.draw()
        texts.extend(text.get_text() for axes in plt.gcf().axes for text in axes.texts)

    monkeypatch.setattr(plt, "show", note)
    show(*args)
    return texts
