"""The README's pictures: the map of the course, and two schedules. `python -m course_lib.plots.course_map` writes them.

The map has a box for each chapter, and arrows from the chapters that it builds on.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from course_lib.palette import AXIS_COLORS, text_on
from course_lib.panels.pipeline import schedule_chart
from course_lib.panels.svg import drawing
from course_lib.plots.pipeline import chart_title
from course_lib.plots.style import FULL_WIDTH_IN, draw_arrows, finish, labelled_box, style, write
from course_lib.schedules import all_forward_all_backward, one_f_one_b, simulate

_PLAIN_COLOR = "#E6E6E6"
BOX_WIDTH, BOX_HEIGHT, HEIGHT_IN = 0.9, 0.72, 3.8
_MOST_COLUMNS = 2  # of a straight arrow: a longer one would cross boxes
PICTURES = ("course_map.svg", "schedules.svg")


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
    Chapter(3, "Data\nparallelism", "splits the batch", (0, 1), "dp"),
    Chapter(4, "ZeRO", "splits the states", (0, 1, 3), "dp"),
    Chapter(5, "Tensor\nparallelism", "splits the matrices", (0, 1, 4), "tp"),
    Chapter(6, "Sequence\nparallelism", "cuts what TP leaves", (1, 5), "tp"),
    Chapter(7, "Context\nparallelism", "splits the sequence", (0, 2, 5, 6), "cp"),
    Chapter(8, "Pipeline\nparallelism", "splits the layers", (0, 1, 2, 4), "pp"),
    Chapter(9, "Expert\nparallelism", "splits the experts", (3, 4, 5), "ep"),
    Chapter(10, "All five\nat once", "one layout of all", (4, 5, 6, 7, 8, 9)),
    Chapter(11, "Finding a\nconfiguration", "which layout to use", (1, 10)),
    Chapter(12, "On a\ncluster", "run, watch, repair", (3, 10, 11)),
    Chapter(13, "Inside\na GPU", "kernels, eight bits", (2, 11)),
)


def course_map() -> tuple[dict[int, tuple[int, float]], list[tuple[int, int]]]:
    """Return (column, row) of each chapter, one behind the last that it needs; and arrows that no others say."""
    before: dict[int, set[int]] = {}
    columns: dict[int, int] = {}
    for chapter in COURSE:
        before[chapter.number] = set(chapter.needs).union(*(before[needed] for needed in chapter.needs))
        columns[chapter.number] = max((columns[needed] + 1 for needed in chapter.needs), default=0)
    arrows = [
        (needed, chapter.number)
        for chapter in COURSE
        for needed in chapter.needs
        if not any(needed in before[other] for other in chapter.needs)
    ]
    places = {}
    for column in range(max(columns.values()) + 1):
        stacked = [number for number in columns if columns[number] == column]
        places |= {number: (column, row - (len(stacked) - 1) / 2) for row, number in enumerate(stacked)}
        rows = {places[start][1] for start, end in arrows if end == stacked[0]}
        if len(stacked) == len(rows) == 1:  # alone, behind others of one row: in their row
            places[stacked[0]] = (column, rows.pop())
    return places, arrows


def course_figure():
    """Return the map as a figure of pyplot; row 0 is in the middle."""
    places, arrows = course_map()
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, HEIGHT_IN))
        for start, end in arrows:
            (x, y), (to_x, to_y), grey = places[start], places[end], "#666666"
            if to_x - x <= _MOST_COLUMNS:
                tip = (to_x - BOX_WIDTH / 2, to_y)
                if to_x - x > 1 and to_y != y:  # to the near edge of the other row, past the box between
                    tip = (to_x, to_y - BOX_HEIGHT / 2 if to_y > y else to_y + BOX_HEIGHT / 2)
                draw_arrows(axes, [((x + BOX_WIDTH / 2, y), tip)], grey)
            else:  # around the boxes between them, above the upper row or below the lower one
                side = -1 if y < 0 else 1
                ends = [(at, row + side * BOX_HEIGHT / 2) for at, row in ((x, y), (to_x, to_y))]
                draw_arrows(axes, [ends], grey, connectionstyle=f"arc3,rad={0.9 * side / (to_x - x)}")
        for chapter in COURSE:
            x, y = places[chapter.number]
            color = AXIS_COLORS[chapter.axis] if chapter.axis else _PLAIN_COLOR
            corner = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2)
            labelled_box(axes, corner, (BOX_WIDTH, BOX_HEIGHT), color, edgecolor="#333333")
            texts = ((-0.22, f"{chapter.number:02d}", 9, "bold"), (0.0, chapter.name, 6.6, "bold"))
            for below, text, size, weight in (*texts, (0.25, chapter.subject, 5.2, "normal")):
                write(axes, x, y + below, text, fontsize=size, weight=weight, color=text_on(color), zorder=4)
        columns, rows = zip(*places.values(), strict=True)
        axes.set(xlim=(-0.5, max(columns) + 0.5), ylim=(max(rows) + 0.65, min(rows) - 0.65))
        axes.axis("off")
        axes.set_title("Each chapter builds on those that point to it")
    return figure


def show_course() -> None:
    """Show the map."""
    finish(course_figure())


def write_pictures(folder: Path) -> list[Path]:
    """Write each picture into the folder, the same bytes each time."""
    course, schedules = paths = [folder / name for name in PICTURES]
    figure = course_figure()
    with plt.rc_context({"svg.hashsalt": "course"}):
        figure.savefig(course, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    plt.close(figure)
    both = [simulate(make(4, 8)) for make in (all_forward_all_backward, one_f_one_b)]
    charts = [schedule_chart(chart_title(one), one.schedule, one.rows, both[0].makespan_s) for one in both]
    svg = drawing("Two pipeline schedules", " ".join(f"{chart.title}." for chart in charts), charts)
    schedules.write_text(svg, encoding="utf-8")
    return paths


if __name__ == "__main__":
    write_pictures(Path("docs"))
