"""How every picture of the course is drawn: sizes, fonts, units and the way it is shown."""

import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.font_manager import FontManager, fontManager
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

from course_lib.language import language, told
from course_lib.palette import text_on
from course_lib.validate import Positive, Share, Size

Place = tuple[float, float]

FULL_WIDTH_IN = 8.5
KOREAN_FONTS = (
    "NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Apple SD Gothic Neo", "AppleGothic", "Malgun Gothic",
)  # fmt: skip


def style():
    """The course's drawing settings, as a context manager: nothing is changed outside the `with`."""
    return plt.style.context(Path(__file__).with_name("course.mplstyle"))


@contextmanager
def picture_panels(
    rows: Size, columns: Size, height_in: Positive, title: str = "", width_in: Positive = FULL_WIDTH_IN, **look
) -> Iterator[tuple]:
    """A figure and its panels, look as plt.subplots has it, in the course's style; shown under its title when drawn."""
    with style():
        figure, panels = plt.subplots(rows, columns, figsize=(width_in, height_in), **look)
        try:
            yield figure, panels
        except BaseException:
            plt.close(figure)
            raise
        finish(figure, title)


@contextmanager
def picture_axes(height_in: Positive, width_in: Positive = FULL_WIDTH_IN) -> Iterator[Axes]:
    """Axes of a figure of their own, in the course's style; the figure is shown when they are drawn."""
    with picture_panels(1, 1, height_in, width_in=width_in) as (_, axes):
        yield axes


def panel_title(axes, text: str, loc: str = "left") -> None:
    """Say what one panel of several shows."""
    axes.set_title(text, fontsize=9.5, fontweight="normal", loc=loc)


def write(axes, x: float, y: float, text: str, align: str = "center", fontsize: float = 9, **look) -> Text:
    """Write a text at half of its height: its centre, or its `align` (left, right), stands at x."""
    return axes.text(x, y, text, **({"ha": align, "va": "center", "fontsize": fontsize} | look))


def key(color: str, label: str, hatch: str = "", **look) -> Patch:
    """Return the legend's entry of a colour."""
    return Patch(facecolor=color, label=label, hatch=hatch, **({"edgecolor": "white"} | look))


def keys_below(figure, handles: list, **look) -> None:
    """Put a legend below all panels of a figure."""
    figure.legend(loc="outside lower center", **({"handles": handles, "ncol": len(handles)} | look))


def plain_rows(axes, names: list[str], least: float = -0.6, most: float = -0.4) -> None:
    """Name rows of bars, the first on top, without ticks."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) + most, least)


def ground(color: str, pad: float = 1, alpha: Share = 1.0) -> dict:
    """The box behind a text that lies on something, as axes.text has it."""
    return {"facecolor": color, "edgecolor": "none", "pad": pad, "alpha": alpha}


def labelled_box(axes, corner: Place, size: Place, color: str, text: str = "", fontsize: float = 8.5, **look) -> None:
    """Draw a box, look as Rectangle has it, with its text in the middle, black or white, whichever reads better."""
    axes.add_patch(Rectangle(corner, *size, **({"facecolor": color, "edgecolor": "white"} | look)))
    if text:
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        write(axes, *middle, text, fontsize=fontsize, color=text_on(color), zorder=look.get("zorder", 2) + 1)


def draw_arrows(axes, ends: Iterable[tuple[Place, Place]], color: str = "#444444", **look) -> None:
    """Draw arrows from one place to another; look as FancyArrowPatch has it."""
    look = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0} | look
    for start, stop in ends:
        axes.add_patch(FancyArrowPatch(start, stop, color=color, **look))


SHARPNESS = 2  # pixels stored for each pixel shown, for screens that have twice as many


def finish(figure, title: str = "") -> None:
    """Show the figure, under a title of all panels if there is one, and free it: an open one is memory lost."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if in_notebook():
        data, metadata = drawn(figure, repr(figure), bbox_inches="tight")
        sys.modules["IPython"].display.display(data, raw=True, metadata=metadata)
    else:
        speak_korean(figure)
        plt.show()
    plt.close(figure)


def in_notebook() -> bool:
    """Whether a cell can show a picture that changes; the package draws without IPython, too."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@cache
def korean_font() -> str | None:
    """The name of a font with Korean letters that matplotlib finds, or None after a sentence that says what to do."""
    there = {font.name for font in fontManager.ttflist}
    if there.isdisjoint(KOREAN_FONTS):  # matplotlib knows the fonts of its first start: look again
        fontManager.ttflist = FontManager().ttflist
        there = {font.name for font in fontManager.ttflist}
    if there.isdisjoint(KOREAN_FONTS) and (package := find_spec("koreanize_matplotlib")):
        for file in ("NanumGothic.ttf", "NanumGothicBold.ttf"):
            fontManager.addfont(Path(package.origin).parent / "fonts" / file)
        return "NanumGothic"
    found = next((name for name in KOREAN_FONTS if name in there), None)
    if found is None:
        print(
            told(
                "There is no font with Korean letters, so the words of pictures stay English. Install one and restart "
                "the kernel: pip install koreanize-matplotlib, or apt install fonts-nanum; macOS and Windows have one."
            )
        )
    return found


def speak_korean(figure) -> None:
    """Put a figure's words into Korean, where that is asked for and there is a font for them."""
    if language() == "en" or (font := korean_font()) is None:
        return
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        if isinstance(axis.get_major_locator(), FixedLocator):  # names, or places, given by hand
            axis.set_ticklabels([told(label.get_text()) for label in axis.get_ticklabels()])
    for text in figure.findobj(Text):
        text.set_text(told(text.get_text()))
        text.set_fontfamily(["DejaVu Sans", font])


def drawn(figure, plain: str, **look) -> tuple[dict, dict]:
    """Return a figure in the reader's language as a cell's output; look as Figure.savefig has it."""
    speak_korean(figure)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=SHARPNESS * figure.dpi, **look)
    return picture_output(buffer.getvalue(), describe(figure), plain)


def picture_output(png: bytes | memoryview, alt: str, plain: str) -> tuple[dict, dict]:
    """Return a picture as the data and metadata of a cell's output: its size on the page, and what it shows in words.

    The words stand in the metadata, where nbconvert reads them: what is measured differs from run to run, and a run
    compares the plain text.
    """
    width, height = (int.from_bytes(png[start : start + 4]) // SHARPNESS for start in (16, 20))  # PNG's header
    data = {"image/png": b64encode(png).decode(), "text/plain": plain}
    return data, {"image/png": {"alt": alt, "width": width, "height": height}}


def describe(figure) -> str:
    """Return what a figure shows in words: its titles, what its axes measure, and its legend."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    titles = [figure.get_suptitle(), *(panel.get_title(loc) for panel in panels for loc in ("left", "center"))]
    legends = [legend for legend in [*figure.legends, *(panel.get_legend() for panel in panels)] if legend]
    parts = {
        "Picture": titles,
        "Horizontal axis": [panel.get_xlabel() for panel in panels],
        "Vertical axis": [panel.get_ylabel() for panel in panels],
        "Colours": [text.get_text() for legend in legends for text in legend.get_texts()],
    }
    words = {name: "; ".join(_distinct(texts)) for name, texts in parts.items()}
    inside = [text.get_text() for panel in panels for text in panel.texts]
    words["Picture"] = words["Picture"] or "; ".join(_distinct(inside)[:8])
    return " ".join(f"{told(name)}: {text.rstrip('.')}." for name, text in words.items() if text)


def _distinct(texts: Iterable[str]) -> list[str]:
    """The texts that are not empty, each on one line and once."""
    return list(dict.fromkeys(filter(None, (" ".join(text.split()) for text in texts))))
