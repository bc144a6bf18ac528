"""What each rank of a pipeline holds: which layers, and how many micro-batches' activations at each moment."""

from dataclasses import dataclass

from matplotlib.patches import Patch

from course_lib.plots.palette import KIND_COLORS, NEUTRAL_COLOR, mix
from course_lib.plots.style import (
    picture_axes,
)
from course_lib.schedules.simulator import Simulation
from course_lib.validate import Amount, checked

ALIVE_COLOR = KIND_COLORS["activations"]
WAITING_COLOR = mix(ALIVE_COLOR, "#FFFFFF", 0.65)
WAITING_HATCH = "\\\\\\\\"
MOST_RANKS = 8
MOST_NUMBERED = 32  # layers whose numbers fit into their boxes

# ---------------------------------------------------------------- alive over time

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


def live_title(picture: LivePicture) -> str:
    """The largest peak and the smallest."""
    most, least = max(picture.peak_alive), min(picture.peak_alive)
    most_at, least_at = picture.peak_alive.index(most), picture.peak_alive.index(least)
    if most == least:
        return f"every rank has up to {short(most)} micro-batches in flight"
    return f"rank {most_at} has up to {short(most)} micro-batches in flight, rank {least_at} at most {short(least)}"


def short(value: float) -> str:
    """Three digits, without zeros behind the point: 4, 4.5, 12.3."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def draw_live(axes, picture: LivePicture, end_s: Amount | None = None) -> None:
    """A strip for each rank: how much it keeps, with its peak at the right."""
    top = 1.1 * max(peaks_together(picture))
    for rank, (alive, waiting) in enumerate(zip(picture.alive, picture.waiting, strict=True)):
        floor, scale = rank + 0.45, -0.9 / top
        times, low, high = stacked(alive, waiting, picture.end_s)
        low, high = ([floor + scale * count for count in counts] for counts in (low, high))
        axes.fill_between(times, low, floor, step="post", facecolor=ALIVE_COLOR, linewidth=0)
        if waiting:
            look = {"facecolor": WAITING_COLOR, "edgecolor": ALIVE_COLOR, "hatch": WAITING_HATCH, "linewidth": 0}
            axes.fill_between(times, high, low, step="post", **look)
        axes.axhline(floor, color=NEUTRAL_COLOR, linewidth=0.8)
        said = f" peak {short(picture.peak_alive[rank])}"
        said += f", waiting {short(picture.peak_waiting[rank])}" if any(picture.peak_waiting) else ""
        axes.annotate(said, (1, rank), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    ranks = len(picture.alive)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, end_s or picture.end_s), ylim=(ranks - 0.5, -0.5), xlabel="simulated time")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.0}
    axes.legend(handles=live_legend(picture), ncol=2, **below)


def stacked(alive: Steps, waiting: Steps, end_s: Amount) -> tuple[list[float], list[float], list[float]]:
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
def peaks_together(picture: LivePicture) -> list[float]:
    """Most that each rank keeps at one time, alive and waiting together: less than the sum of the two peaks."""
    return [max(stacked(*row, picture.end_s)[2]) for row in zip(picture.alive, picture.waiting, strict=True)]


def live_legend(picture: LivePicture) -> list[Patch]:
    handles = [Patch(facecolor=ALIVE_COLOR, label="in flight: from F to B (or I)")]
    if any(picture.peak_waiting):
        look = {"facecolor": WAITING_COLOR, "hatch": WAITING_HATCH, "edgecolor": ALIVE_COLOR, "linewidth": 0}
        handles.append(Patch(**look, label="waiting for weight gradients"))
    return handles


def live_height_in(picture: LivePicture) -> float:
    """The height of the strips with title, time axis and legend."""
    return 1.15 + 0.34 * len(picture.alive)


@checked
def show_live(simulation: Simulation) -> None:
    """Show how many micro-batches' activations each rank keeps over time."""
    picture = live_picture(simulation)
    with picture_axes(live_height_in(picture)) as axes:
        draw_live(axes, picture)
        axes.set_title(f"{simulation.schedule.name}: {live_title(picture)}", fontsize=10)


# ---------------------------------------------------------------- peaks, rank by rank


@checked
def peaks_of(simulation: Simulation) -> list[float]:
    """Most micro-batches alive at once on each rank; 1 is one micro-batch through all of the rank's layers."""
    return live_picture(simulation).peak_alive
