"""Two hosts and a thin link: what crosses it, as wide as its bytes, for each layout."""

from collections.abc import Sequence

from course_lib.plots.palette import AXIS_COLORS, NEUTRAL_COLOR
from course_lib.plots.style import CENTRED, bare, labelled_box, picture_panels
from course_lib.simulate.two_hosts import HostRow
from course_lib.validate import Positive, checked

RANKS_AT = ((0.0, 1.0), (0.0, 0.0), (2.6, 1.0), (2.6, 0.0))  # two on each host
WIDEST_POINTS = 22.0  # of the line that stands for the most bytes
INSIDE_POINTS = 3.0  # inside a host bytes are not counted


def link_widths(rows: Sequence[HostRow]) -> list[float]:
    """Points of the line that each of the two pairs of ranks gets: true to the bytes on the link."""
    if not rows:
        raise ValueError("rows is empty; give measured rows")
    most = max(row.link_bytes for row in rows)
    return [WIDEST_POINTS * row.link_bytes / most for row in rows]


@checked
def show_two_hosts(rows: Sequence[HostRow]) -> None:
    """Show for each row which axis lies inside the hosts and which across, its bytes on the link, and its seconds."""
    widths = link_widths(rows)
    with picture_panels(1, len(rows), 2.1, squeeze=False) as (_, panels):
        for axes, row, width in zip(panels[0], rows, widths, strict=True):
            draw_two_hosts(axes, row, width)


def draw_two_hosts(axes, row: HostRow, width: Positive) -> None:
    """One layout: two hosts of two ranks, lines in the colours of the axes."""
    bare(axes, (-0.75, 3.35), (-1.45, 1.75))
    for left, name in ((-0.55, "host 0"), (2.05, "host 1")):
        labelled_box(axes, (left, -0.5), (1.1, 2.0), "#F4F4F4", edgecolor=NEUTRAL_COLOR, zorder=0)
        axes.text(left + 0.55, 1.55, name, ha="center", va="bottom", fontsize=8.5)
    for pair, axis, points in (
        ((0, 2), row.across, width),
        ((1, 3), row.across, width),
        ((0, 1), row.inside, INSIDE_POINTS),
        ((2, 3), row.inside, INSIDE_POINTS),
    ):
        ends = zip(*(RANKS_AT[rank] for rank in pair), strict=True)
        axes.plot(*ends, color=AXIS_COLORS[axis], linewidth=points, solid_capstyle="butt", zorder=1)
    for rank, (x, y) in enumerate(RANKS_AT):
        axes.scatter(x, y, s=190, color="white", edgecolor="black", zorder=2)
        axes.text(x, y - 0.02, str(rank), **CENTRED, fontsize=9, zorder=3)
    axes.set_title(f"{row.inside} inside, {row.across} across", fontsize=9.5)
    told = f"{row.link_bytes / 1e6:.1f} MB on the link\n{row.step_s:.1f} s for a step"
    axes.text(1.3, -0.75, told, ha="center", va="top", fontsize=9)
