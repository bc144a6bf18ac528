"""The map of the course: a box for each chapter, and arrows from the chapters that it builds on."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt

from course_lib.plots.palette import AXIS_COLORS, text_on
from course_lib.plots.style import CENTRED, FULL_WIDTH_IN, finish, style
from course_lib.validate import checked

PLAIN_COLOR = "#E6E6E6"
BOX_WIDTH, BOX_HEIGHT, HEIGHT_IN = 0.9, 0.72, 3.8
MOST_COLUMNS = 2  # of a straight arrow: a longer one would cross boxes


@dataclass(frozen=True)
class Chapter:
    """One chapter: its number, its name, what it is about in a few words, and the chapters that it needs."""

    number: int
    name: str
    subject: str
    needs: tuple[int, ...] = ()
    axis: str | None = None


COURSE = (
    Chapter(0, "Ranks and\ncollectives", "how ranks talk"),
    Chapter(1, "What fills\none GPU", "bytes of training", (0,)),
    Chapter(2, "Techniques\nfor one GPU", "smaller and faster", (1,)),
    Chapter(3, "Data\nparallelism", "splits the batch", (0,), "dp"),
    Chapter(4, "ZeRO", "splits the states", (0, 1, 3), "dp"),
    Chapter(5, "Tensor\nparallelism", "splits the matrices", (0, 1, 4), "tp"),
    Chapter(6, "Sequence\nparallelism", "cuts what TP leaves", (1, 5), "tp"),
    Chapter(7, "Context\nparallelism", "splits the sequence", (0, 2, 5, 6), "cp"),
    Chapter(8, "Pipeline\nparallelism", "splits the layers", (0, 1, 2, 4), "pp"),
    Chapter(9, "Expert\nparallelism", "splits the experts", (3, 4, 5), "ep"),
    Chapter(10, "All five\nat once", "one layout of all", (4, 5, 6, 7, 8, 9)),
    Chapter(11, "Finding a\nconfiguration", "which layout to use", (1, 10)),
    Chapter(12, "On a\ncluster", "run, watch, repair", (3, 10, 11)),
)


@dataclass(frozen=True)
class CourseMap:
    """Where each chapter's box stands (column, row), and the arrows between them."""

    places: dict[int, tuple[int, float]]
    arrows: list[tuple[int, int]]


def course_map(course: Sequence[Chapter] = COURSE) -> CourseMap:
    """Place each chapter one column behind the last that it needs; leave out arrows that others already say."""
    before: dict[int, set[int]] = {}
    columns: dict[int, int] = {}
    for chapter in course:
        before[chapter.number] = set(chapter.needs).union(*(before[needed] for needed in chapter.needs))
        columns[chapter.number] = max((columns[needed] + 1 for needed in chapter.needs), default=0)
    arrows = [
        (needed, chapter.number)
        for chapter in course
        for needed in chapter.needs
        if not any(needed in before[other] for other in chapter.needs)
    ]
    places = {}
    for column in range(max(columns.values()) + 1):
        stacked = [number for number in columns if columns[number] == column]
        places |= {number: (column, row - (len(stacked) - 1) / 2) for row, number in enumerate(stacked)}
        sources = [start for start, end in arrows if end == stacked[0]]
        rows = {places[source][1] for source in sources}
        if len(stacked) == len(rows) == 1:  # alone, behind others of one row: in their row
            places[stacked[0]] = (column, rows.pop())
    return CourseMap(places, arrows)


def draw_course(axes, course: Sequence[Chapter] = COURSE) -> None:
    """Draw the boxes and the arrows; row 0 is in the middle."""
    drawn = course_map(course)
    for start, end in drawn.arrows:
        (x, y), (to_x, to_y) = drawn.places[start], drawn.places[end]
        arrow = {"arrowstyle": "-|>", "color": "#666666", "shrinkA": 0, "shrinkB": 0}
        if to_x - x <= MOST_COLUMNS:
            axes.annotate("", (to_x - BOX_WIDTH / 2, to_y), (x + BOX_WIDTH / 2, y), arrowprops=arrow)
        else:  # around the boxes between them, above the upper row or below the lower one
            side = -1 if y < 0 else 1
            bend = arrow | {"connectionstyle": f"arc3,rad={0.3 * side}"}
            ends = [(at, row + side * BOX_HEIGHT / 2) for at, row in ((to_x, to_y), (x, y))]
            axes.annotate("", *ends, arrowprops=bend)
    for chapter in course:
        x, y = drawn.places[chapter.number]
        color = AXIS_COLORS[chapter.axis] if chapter.axis else PLAIN_COLOR
        corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
        axes.add_patch(plt.Rectangle(corner, BOX_WIDTH, BOX_HEIGHT, facecolor=color, edgecolor="#333333"))
        texts = ((-0.22, f"{chapter.number:02d}", 9, "bold"), (0.0, chapter.name, 7, "bold"))
        for below, text, size, weight in (*texts, (0.25, chapter.subject, 5.8, "normal")):
            axes.text(x, y + below, text, **CENTRED, size=size, weight=weight, color=text_on(color))
    columns, rows = zip(*drawn.places.values(), strict=True)
    axes.set(xlim=(-0.5, max(columns) + 0.5), ylim=(max(rows) + 0.65, min(rows) - 0.65))
    axes.axis("off")


def course_figure():
    """Return the map as a figure of pyplot."""
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, HEIGHT_IN))
        draw_course(axes, COURSE)
        axes.set_title("Each chapter builds on those that point to it")
    return figure


@checked
def show_course() -> None:
    """Show the map."""
    finish(course_figure())
