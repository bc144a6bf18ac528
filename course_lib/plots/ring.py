"""The ring as a ring: ranks on a circle, each with its buffer of pieces, and the piece that travels to the right."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.patches import FancyArrowPatch

from course_lib.plots.collectives import RingStep, ring_all_reduce_steps
from course_lib.plots.palette import COMMUNICATION_COLOR, OKABE_ITO, mix
from course_lib.plots.style import CENTRED, labelled_box, panel_title, picture_panels
from course_lib.validate import Index, Positive, Share, checked

RADIUS, CELL_WIDTH, CELL_HEIGHT = 2.6, 0.78, 0.6


@dataclass(frozen=True)
class RingView:
    """One moment of a ring: what each rank has in its buffer, and the piece that each rank sends next (None: none)."""

    title: str
    values: list[list[float]]
    summed: list[list[int]]
    sends: list[int | None]


def ring_views(values: Iterable, moments: Sequence[Index]) -> list[RingView]:
    """Return the ring after so many steps of an all-reduce, for each number of steps in `moments`.

    Raises   ValueError if a moment is later than the last step
    """
    steps = ring_all_reduce_steps(values)
    if not moments or max(moments) >= len(steps):
        raise ValueError(f"moments {list(moments)} must be numbers of steps from 0 to {len(steps) - 1}")
    return [_view(steps, moment) for moment in moments]


def _view(steps: Sequence[RingStep], moment: int) -> RingView:
    """What a rank receives in the next step is what its left neighbour sends now."""
    step, num_ranks = steps[moment], len(steps[0].values)
    title = "start" if moment == 0 else f"after step {moment}"
    sends: list[int | None] = [None] * num_ranks
    if moment + 1 < len(steps):
        received = steps[moment + 1].received
        sends = [received[(rank + 1) % num_ranks] for rank in range(num_ranks)]
        title += "; the arrows show the next step" if moment else "; the arrows show the first step"
    return RingView(title, step.values, step.summed, sends)


def place_on_circle(turn: Share, radius: Positive = RADIUS) -> tuple[float, float]:
    """Return where a share of a turn ends: 0 is at the top, a quarter of a turn at the right."""
    angle = math.pi / 2 - 2 * math.pi * turn
    return radius * math.cos(angle), radius * math.sin(angle)


@checked
def show_ring(values: Iterable, moments: Sequence[Index], title: str) -> None:
    """Show a ring all-reduce as a ring, after so many steps each: buffers, and the piece that each rank sends."""
    views = ring_views(values, moments)
    with picture_panels(1, len(views), 4.2, title, squeeze=False) as (figure, panels):
        for axes, view in zip(panels[0], views, strict=True):
            _draw_ring(axes, view)
        legend = "outlined: the piece that is sent to the right neighbour"
        if any(len(view.values) in counts for view in views for counts in view.summed):
            legend += " \u00b7 green: the sum of all ranks"
        figure.supxlabel(legend, x=0.01, ha="left", fontsize=9)


def _draw_ring(axes, view: RingView) -> None:
    num_ranks = len(view.values)
    for rank in range(num_ranks):
        _draw_buffer(axes, view, rank)
        if view.sends[rank] is not None:
            _draw_message(axes, view, rank)
    reach = RADIUS + 0.5 * num_ranks * CELL_WIDTH + 0.2
    axes.set(xlim=(-reach, reach), ylim=(-RADIUS - 1, RADIUS + 1), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    panel_title(axes, view.title, "center")


def _draw_buffer(axes, view: RingView, rank: int) -> None:
    num_ranks = len(view.values)
    middle, height = place_on_circle(rank / num_ranks)
    left = middle - num_ranks * CELL_WIDTH / 2
    for piece, (value, count) in enumerate(zip(view.values[rank], view.summed[rank], strict=True)):
        share = 0.85 - 0.85 * (count - 1) / max(num_ranks - 1, 1)
        color = OKABE_ITO["green"] if count == num_ranks else mix(OKABE_ITO["sky"], "#FFFFFF", share)
        sent = piece == view.sends[rank]
        outline = {"edgecolor": "black", "linewidth": 2, "zorder": 3} if sent else {}
        corner = left + piece * CELL_WIDTH, height - CELL_HEIGHT / 2
        labelled_box(axes, corner, (CELL_WIDTH, CELL_HEIGHT), color, f"{value:g}", fontsize=8, **outline)
    axes.text(middle, height + CELL_HEIGHT / 2 + 0.12, f"rank {rank}", ha="center", va="bottom", fontsize=9)


def _draw_message(axes, view: RingView, rank: int) -> None:
    """Draw the arrow to the right neighbour along the inside of the circle, and the piece that it carries."""
    num_ranks = len(view.values)
    ends = [place_on_circle((rank + share) / num_ranks, 0.72 * RADIUS) for share in (0.16, 0.84)]
    arrow = FancyArrowPatch(*ends, connectionstyle="arc3,rad=-0.2", arrowstyle="-|>", mutation_scale=13, linewidth=1.8,
                            color=COMMUNICATION_COLOR)  # fmt: skip
    axes.add_patch(arrow)
    x, y = place_on_circle((rank + 0.5) / num_ranks, 0.44 * RADIUS)
    axes.text(x, y, f"piece {view.sends[rank]}", **CENTRED, fontsize=8.5)
