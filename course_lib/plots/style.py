"""How every picture of the course is drawn: sizes, fonts, units and the way it is shown."""

import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.font_manager import fontManager
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter

from course_lib.language import language, told
from course_lib.palette import RANK_COLORS, text_on
from course_lib.validate import Positive, Share, Size

Place = tuple[float, float]

FULL_WIDTH_IN = 8.5
KOREAN_FONTS = (
    "NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Apple SD Gothic Neo", "AppleGothic", "Malgun Gothic",
)  # fmt: skip
_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "handlelength": 1.4, "columnspacing": 1.4}  # of a legend
CENTRED = {"ha": "center", "va": "center"}  # of a text

_STYLE = {
    "figure.dpi": 80,
    "savefig.dpi": 80,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 2,
}


def style():
    """The course's drawing settings, as a context manager: nothing is changed outside the `with`."""
    return matplotlib.rc_context(_STYLE)


@contextmanager
def picture_axes(height_in: Positive, width_in: Positive = FULL_WIDTH_IN) -> Iterator[Axes]:
    """Axes of a figure of their own, in the course's style; the figure is shown when they are drawn."""
    with style():
        figure, axes = plt.subplots(figsize=(width_in, height_in))
        with _closed_after_an_error(figure):
            yield axes
        finish(figure)


@contextmanager
def picture_panels(rows: Size, columns: Size, height_in: Positive, title: str = "", **look) -> Iterator[tuple]:
    """The figure and its panels, in the course's style; the figure is shown under its title when they are drawn.

    look   of the panels, as plt.subplots has it
    """
    with style():
        figure, panels = plt.subplots(rows, columns, figsize=(FULL_WIDTH_IN, height_in), **look)
        with _closed_after_an_error(figure):
            yield figure, panels
        finish(figure, title)


@contextmanager
def _closed_after_an_error(figure) -> Iterator[None]:
    try:
        yield
    except BaseException:
        plt.close(figure)
        raise


def panel_title(axes, text: str, loc: str = "left") -> None:
    """Say what one panel of several shows."""
    axes.set_title(text, fontsize=9.5, fontweight="normal", loc=loc)


def write(axes, x: float, y: float, text: str, align: str = "center", fontsize: float = 9, **look) -> Text:
    """Write a text at half of its height: its centre, or its `align` (left, right), stands at x."""
    return axes.text(x, y, text, **({"ha": align, "va": "center", "fontsize": fontsize} | look))


def key(color: str, label: str, hatch: str = "", **look) -> Patch:
    """Return the legend's entry of a colour."""
    return Patch(facecolor=color, label=label, hatch=hatch, **({"edgecolor": "white"} | look))


def keys_below(axes_or_figure, handles: list, pad: float = 4.0, **look) -> None:
    """Put a legend below axes, so far below them; or below all panels of a figure."""
    look = {"handles": handles, "ncol": len(handles)} | look
    if hasattr(axes_or_figure, "suptitle"):
        axes_or_figure.legend(loc="outside lower center", **look)
    else:
        axes_or_figure.legend(borderaxespad=pad, **(_BELOW | look))


def plain_rows(axes, names: list[str], least: float = -0.6, most: float = -0.4) -> None:
    """Name rows of bars, the first on top, without ticks."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) + most, least)


def ground(color: str, pad: float = 1, alpha: Share = 1.0) -> dict:
    """The box behind a text that lies on something, as axes.text has it."""
    return {"facecolor": color, "edgecolor": "none", "pad": pad, "alpha": alpha}


def rank_patches(count: Size) -> list[Patch]:
    """The legend's entries of so many ranks."""
    return [Patch(facecolor=RANK_COLORS[rank], label=f"rank {rank}") for rank in range(count)]


def labelled_box(
    axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    color: str,
    text: str = "",
    fontsize: float = 8.5,
    **look,
) -> Text | None:
    """Draw a filled box with its text in the middle, black or white, whichever reads better; return the text, if any.

    look   of the box, as Rectangle has it; below a hatch the text has a plain ground
    """
    axes.add_patch(Rectangle(corner, *size, **({"facecolor": color, "edgecolor": "white"} | look)))
    if not text:
        return None
    behind = ground(color) if look.get("hatch") else None
    text_look = CENTRED | {"fontsize": fontsize, "color": text_on(color), "bbox": behind}
    middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    return axes.text(*middle, text, zorder=look.get("zorder", 2) + 1, **text_look)


def draw_arrows(axes, ends: Iterable[tuple[Place, Place]], color: str = "#444444", **look) -> None:
    """Draw arrows from one place to another; look as FancyArrowPatch has it."""
    look = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0} | look
    for start, stop in ends:
        axes.add_patch(FancyArrowPatch(start, stop, color=color, **look))


SHARPNESS = 2  # pixels stored for each pixel shown, for screens that have twice as many


def finish(figure, title: str = "") -> None:
    """Show the figure, under a title of all panels if there is one, and free it.

    A figure that stays open is memory that a long notebook never gets back.
    """
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    if language() != "en":
        speak_korean(figure)
    ipython = sys.modules.get("IPython")  # the package draws without it, too
    if ipython and hasattr(ipython.get_ipython(), "kernel"):
        buffer = BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight", dpi=SHARPNESS * figure.dpi)
        data, metadata = picture_output(buffer.getvalue(), describe(figure), repr(figure))
        ipython.display.display(data, raw=True, metadata=metadata)
    else:
        plt.show()
    plt.close(figure)


@cache
def korean_font() -> str | None:
    """The name of a font with Korean letters that matplotlib finds, or None after a sentence that says what to do."""
    there = {font.name for font in fontManager.ttflist}
    if not there & set(KOREAN_FONTS) and (package := find_spec("koreanize_matplotlib")):
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
    """Put a figure's words into Korean, where there is a font for them."""
    font = korean_font()
    if font is None:
        return
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        if isinstance(axis.get_major_formatter(), FixedFormatter):
            axis.set_ticklabels([told(label.get_text()) for label in axis.get_ticklabels()])
    for text in figure.findobj(Text):
        text.set_text(told(text.get_text()))
        text.set_fontfamily(["DejaVu Sans", font])


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
    words = {name: "; ".join(dict.fromkeys(filter(None, map(_one_line, texts)))) for name, texts in parts.items()}
    words["Picture"] = words["Picture"] or "; ".join(_texts_in(panels)[:8])
    return " ".join(f"{name}: {text.rstrip('.')}." for name, text in words.items() if text)


def _texts_in(panels) -> list[str]:
    return list(dict.fromkeys(filter(None, (_one_line(text.get_text()) for panel in panels for text in panel.texts))))


def _one_line(text: str) -> str:
    return " ".join(text.split())
