"""Pipeline schedules between waiting and memory: a point for each, to the end of a step and from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import PercentFormatter

from course_lib.plots.palette import OKABE_ITO
from course_lib.plots.stages import peaks_of
from course_lib.plots.style import picture_axes
from course_lib.schedules.simulator import Simulation
from course_lib.validate import checked

SAME = 0.004  # shares closer than this are one point


@dataclass(frozen=True)
class Point:
    """A schedule: most micro-batches alive on any rank, and its bubble of ideal time, with a barrier and without."""

    name: str
    alive: float
    to_the_end: float
    step_to_step: float


def tradeoff_points(simulations: Sequence[Simulation]) -> list[Point]:
    """Where each schedule lies; memory is that of the rank which keeps most."""
    return [
        Point(one.schedule.name, max(peaks_of(one)), one.bubble_of_ideal, one.bubble_of_ideal_back_to_back)
        for one in simulations
    ]


def names_left(points: Sequence[Point]) -> list[bool]:
    """Whether a point's name stands left of it: there is another close to its right."""
    near = 0.3 * (max(point.alive for point in points) or 1.0)
    return [
        any(abs(p.to_the_end - q.to_the_end) < 0.02 and 0 < q.alive - p.alive < near for q in points) for p in points
    ]


@checked
def show_tradeoff(simulations: Sequence[Simulation]) -> None:
    """Show bubble against memory; an arrow leads to the bubble that is left without a barrier between steps.

    Raises   ValueError if there is no simulation
    """
    if not simulations:
        raise ValueError("there is no simulation to draw; give at least one simulate(schedule, costs)")
    points = tradeoff_points(simulations)
    with picture_axes(3.3) as axes:
        for point, left in zip(points, names_left(points), strict=True):
            axes.plot(point.alive, point.to_the_end, "o", color=OKABE_ITO["blue"])
            place = {"xytext": (-7 if left else 7, 2), "textcoords": "offset points", "ha": "right" if left else "left"}
            axes.annotate(point.name, (point.alive, point.to_the_end), fontsize=8.5, **place)
            if point.to_the_end - point.step_to_step > SAME:
                ends = (point.alive, point.step_to_step), (point.alive, point.to_the_end)
                axes.annotate("", *ends, arrowprops={"arrowstyle": "->", "linestyle": ":", "color": "#777777"})
                axes.plot(point.alive, point.step_to_step, "o", mfc="white", color=OKABE_ITO["blue"])
        top = 1.15 * max(point.to_the_end for point in points) or 1.0
        axes.set(xlim=(0, 1.3 * max(point.alive for point in points)), ylim=(-0.06 * top, top))
        axes.set_xlabel("peak in-flight micro-batches on a rank (through all of its layers)")
        axes.set_ylabel("bubble, of ideal time")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title("Filled: until the last rank is done. Open: from step to step", fontsize=10)
