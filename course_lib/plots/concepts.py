"""Pictures as SVG: files in svg/ that no cell computes, and bars of a cell's numbers, drawn as a panel draws them.

Each has its title and, in its `<desc>`, what it shows in words.

The files are their own source, one element a line: change them in an editor of text or of SVG. They come with the
package, so that they show on Colab and in a copy of one notebook. A test holds their numbers to the package's.
"""

import re
from html import unescape
from pathlib import Path
from textwrap import fill

from course_lib.language import told, told_svg
from course_lib.panels.svg import Chart, drawing
from course_lib.validate import checked, one_of

FOLDER = Path(__file__).parent / "svg"


class Concept:
    """A picture and its words, as a cell shows both."""

    def __init__(self, svg: str):
        self.svg = told_svg(svg)
        self.words = unescape(re.search(r"<desc>(.*?)</desc>", self.svg)[1])

    def __repr__(self) -> str:
        return fill(self.words, 96)

    def _repr_svg_(self) -> str:
        return self.svg


@checked
def show_concept(name: str) -> None:
    """Show a drawn picture by the name of its file; raises ValueError if there is none of that name."""
    from IPython.display import display

    one_of("picture", name, tuple(sorted(path.stem for path in FOLDER.glob("*.svg"))))
    display(Concept((FOLDER / f"{name}.svg").read_text(encoding="utf-8")))


@checked
def show_charts(title: str, *charts: Chart) -> None:
    """Show bars or columns one below the other; in words each row's name and what stands behind it."""
    from IPython.display import display

    if not all(chart.rows for chart in charts):
        raise ValueError("there is no bar to draw; give at least one row")
    said = []
    for chart in charts:
        rows = "; ".join(f"{told(label)} {told(chart.notes.get(label, ''))}".strip() for label in chart.rows)
        words = [told(chart.title)] * (chart.title != title) + [rows] * bool(chart.notes)
        said.append(f"{': '.join(words) or ', '.join(map(told, chart.rows))}.")
    display(Concept(drawing(f"Picture: {told(title)}", " ".join(said), charts)))
