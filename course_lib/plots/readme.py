"""The README's pictures: `python -m course_lib.plots.readme` writes them into docs/."""

from pathlib import Path

import matplotlib.pyplot as plt

from course_lib.plots.course_map import course_figure
from course_lib.plots.pipeline import chart_height_in, draw_chart, schedule_picture
from course_lib.plots.style import FULL_WIDTH_IN, style
from course_lib.schedules import all_forward_all_backward, one_f_one_b, simulate

PICTURES = ("course_map.svg", "schedules.svg")


def schedules_figure():
    """Return two pipeline schedules of 4 ranks and 8 micro-batches on one axis of time."""
    drawn = [schedule_picture(simulate(make(4, 8))) for make in (all_forward_all_backward, one_f_one_b)]
    end_s = max(one.end_s for one in drawn)
    with style():
        figure, panels = plt.subplots(2, 1, figsize=(FULL_WIDTH_IN, sum(map(chart_height_in, drawn)) + 0.9))
        for axes, one in zip(panels, drawn, strict=True):
            draw_chart(axes, one, None, end_s)
    return figure


def write_pictures(folder: Path) -> list[Path]:
    """Write each picture into the folder, the same bytes each time."""
    paths = [folder / name for name in PICTURES]
    for path, figure in zip(paths, (course_figure(), schedules_figure()), strict=True):
        with plt.rc_context({"svg.hashsalt": "course"}):
            figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
        plt.close(figure)
    return paths


if __name__ == "__main__":
    write_pictures(Path("docs"))
