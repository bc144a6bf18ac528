"""How many micro-batches' activations each rank of a pipeline holds at each moment."""

from dataclasses import dataclass

from course_lib.palette import KIND_COLORS, NEUTRAL_COLOR, mix
from course_lib.plots.style import key, keys_below, picture_axes, plain_rows
from course_lib.plots.tiles import ranks
from course_lib.schedules.simulator import Simulation
from course_lib.validate import checked

_ALIVE_COLOR = KIND_COLORS["activations"]
HATCHED = {"edgecolor": _ALIVE_COLOR, "hatch": "\\\\\\\\", "linewidth": 0}
_WAITING = HATCHED | {"facecolor": mix(_ALIVE_COLOR, "#FFFFFF", 0.65)}

Steps = list[tuple[float, float]]


@dataclass(frozen=True)
class LivePicture:
    """For each rank (second, count) at each change; a count of 1 is one micro-batch through all of a rank's layers.

    `alive`: kept from the forward to the gradient of the input. `waiting`: after that, until the weights' gradients.
    """

    alive: list[Steps]
    waiting: list[Steps]
    peak_alive: list[float]
    peak_waiting: list[float]
    end_s: float


@checked
def live_picture(simulation: Simulation) -> LivePicture:
    """The simulation's counts, a stage of v counting 1 / v."""
    v = simulation.schedule.v
    scaled = [[[(at, n / v) for at, n in row] for row in counts] for counts in (simulation.live, simulation.waiting)]
    peaks = [[max((n for _, n in row), default=0.0) for row in rows] for rows in scaled]
    return LivePicture(*scaled, *peaks, simulation.makespan_s)


@checked
def peaks_of(simulation: Simulation) -> list[float]:
    """Most micro-batches alive at once on each rank; 1 is one micro-batch through all of the rank's layers."""
    return live_picture(simulation).peak_alive


@checked
def peaks_together(picture: LivePicture) -> list[float]:
    """Most that each rank keeps at one time, alive and waiting together: less than the sum of the two peaks."""
    return [max(stacked(*row, picture.end_s)[2]) for row in zip(picture.alive, picture.waiting, strict=True)]


def live_title(picture: LivePicture) -> str:
    """The largest peak and the smallest."""
    most, least = max(picture.peak_alive), min(picture.peak_alive)
    most_at, least_at = picture.peak_alive.index(most), picture.peak_alive.index(least)
    if most == least:
        return f"every rank has up to {most:.3g} micro-batches in flight"
    return f"rank {most_at} has up to {most:.3g} micro-batches in flight, rank {least_at} at most {least:.3g}"


def stacked(alive: Steps, waiting: Steps, end_s: float) -> tuple[list[float], list[float], list[float]]:
    """Times of all changes, and from each of them on what is alive, and alive and waiting together."""
    times, low, high = [0.0], [0.0], [0.0]
    counts = [0.0, 0.0]
    changes = [(at, kind, count) for kind, steps in enumerate((alive, waiting)) for at, count in steps]
    for at, kind, count in sorted(changes, key=lambda change: change[0]):
        counts[kind] = count
        if at == times[-1]:
            low[-1], high[-1] = counts[0], sum(counts)
        else:
            times, low, high = [*times, at], [*low, counts[0]], [*high, sum(counts)]
    return [*times, end_s], [*low, low[-1]], [*high, high[-1]]


@checked
def show_live(simulation: Simulation) -> None:
    """Show how many micro-batches' activations each rank keeps over time: a strip a rank, its peak at the right."""
    picture = live_picture(simulation)
    scale, waits = -0.9 / (1.1 * max(peaks_together(picture))), any(picture.peak_waiting)
    with picture_axes(1.15 + 0.34 * len(picture.alive)) as axes:
        for rank, row in enumerate(zip(picture.alive, picture.waiting, strict=True)):
            floor = rank + 0.45
            times, *counts = stacked(*row, picture.end_s)
            low, high = ([floor + scale * count for count in of_kind] for of_kind in counts)
            axes.fill_between(times, low, floor, step="post", facecolor=_ALIVE_COLOR, linewidth=0)
            axes.fill_between(times, high, low, step="post", **_WAITING)
            axes.axhline(floor, color=NEUTRAL_COLOR, linewidth=0.8)
            said = f" peak {picture.peak_alive[rank]:.3g}"
            said += f", waiting {picture.peak_waiting[rank]:.3g}" if waits else ""
            axes.annotate(said, (1, rank), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        plain_rows(axes, ranks(len(picture.alive)), -0.5, -0.5)
        axes.spines["left"].set_visible(False)
        axes.set(xlim=(0, picture.end_s), xlabel="simulated time")
        handles = [key(_ALIVE_COLOR, "in flight: from F to B (or I)", linewidth=0)]
        handles += [key(label="waiting for weight gradients", color=_WAITING["facecolor"], **HATCHED)] if waits else []
        keys_below(axes, handles)
        axes.set_title(f"{simulation.schedule.name}: {live_title(picture)}", fontsize=10)
