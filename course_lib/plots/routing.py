"""Where tokens go: their way to experts on other ranks, and who sends how many bytes to whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.layout.experts import ExpertLayout
from course_lib.plots.diagrams import draw_diagram
from course_lib.plots.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    RANK_COLORS,
    channels,
    mix,
    text_on,
)
from course_lib.plots.style import (
    BELOW,
    UNITS,
    panel_title,
    picture_axes,
    picture_panels,
    show_bytes,
    unit_for,
)
from course_lib.validate import Index, Size, checked

WITHIN_COLOR, BETWEEN_COLOR = COMPUTE_COLOR, COMMUNICATION_COLOR
BETWEEN_HATCH = "////"
MOST_RANKS_WITH_NUMBERS = 16
MOST_RANKS = 64

# ---------------------------------------------------------------- the way of tokens


@checked
def show_routes(experts: Sequence, layout: ExpertLayout, weights: Sequence, title: str) -> None:
    """Show the way of a few tokens of one rank to their experts: lines as thick as weights.

    experts, weights   expert_Tk and weight_Tk of each rank, of which there is one
    Raises   ValueError if there are several ranks, or more tokens or experts than the picture has room for
    """
    if layout.ep_size != 1 or len(experts) != 1 or max(len(experts[0]), layout.num_experts) > 32:
        raise ValueError(
            f"got {layout.ep_size} ranks and {layout.num_experts} experts; give one rank, 32 experts at most"
        )
    (expert_Tk,), (weight_Tk,) = experts, weights
    height = max(len(expert_Tk), layout.num_experts)

    def middles(count: int) -> list[float]:
        return [(height - 0.8 * count) / 2 + 0.8 * (index + 0.5) for index in range(count)]

    token_at, expert_at = middles(len(expert_Tk)), middles(layout.num_experts)
    boxes = [(-0.9, y - 0.37, 0.9, 0.74, RANK_COLORS[0], f"t{index}") for index, y in enumerate(token_at)]
    boxes += [(2.0, y - 0.37, 0.9, 0.74, RANK_COLORS[0], f"E{index}") for index, y in enumerate(expert_at)]
    with picture_axes(1.1 + 0.26 * height) as axes:
        notes = [(-0.45, -0.35, "tokens"), (2.45, -0.35, "experts")]
        draw_diagram(axes, ((-1.85, 3.6), (height, -0.75)), boxes, (), notes, fontsize=8)
        for token, chosen in enumerate(expert_Tk):
            for expert, weight in zip(chosen, weight_Tk[token], strict=True):
                ends = (0.02, 1.98), (token_at[token], expert_at[int(expert)])
                axes.plot(*ends, color="#777777", linewidth=0.5 + 2.4 * float(weight), alpha=0.9)
        axes.set_title(title)


# ---------------------------------------------------------------- who sends what to whom


@dataclass(frozen=True)
class TrafficPicture:
    """bytes_sent[src][dst], and what each rank sends to its own node and to others; nothing is sent to oneself."""

    bytes_sent: list[list[int]]
    ranks_per_node: int
    within_bytes: list[int]
    between_bytes: list[int]

    def link(self, src: int, dst: int) -> str:
        """home, within or between: what a row from src to dst crosses."""
        if src == dst:
            return "home"
        return "within" if src // self.ranks_per_node == dst // self.ranks_per_node else "between"


def traffic_picture(
    rows: Sequence[Sequence[int]], row_bytes: Index, ranks_per_node: Size | None = None
) -> TrafficPicture:
    """Bytes from each rank to each other, from rows[src][dst] of row_bytes; the diagonal stays at home.

    Raises   ValueError if the table is not square, or there are more ranks than the picture has room for
    """
    ranks = len(rows)
    if any(len(row) != ranks for row in rows) or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"got {ranks} rows; give a square table of 1 to {MOST_RANKS} ranks: rows[src][dst]")
    sent = [[0 if src == dst else n * row_bytes for dst, n in enumerate(row)] for src, row in enumerate(rows)]
    empty = TrafficPicture(sent, ranks_per_node or ranks, [], [])
    sums = {
        link: [sum(n for dst, n in enumerate(row) if empty.link(src, dst) == link) for src, row in enumerate(sent)]
        for link in ("within", "between")
    }
    return TrafficPicture(sent, empty.ranks_per_node, sums["within"], sums["between"])


def traffic_title(picture: TrafficPicture) -> str:
    """Bytes of all ranks together, and how many of them leave their node, if there are several."""
    within, between = sum(picture.within_bytes), sum(picture.between_bytes)
    if within + between == 0:
        return "Nothing is sent: every row stays on its rank"
    if picture.ranks_per_node >= len(picture.bytes_sent):
        return f"{show_bytes(within)} sent by all ranks"
    share = 100 * between / (within + between)
    return f"{show_bytes(within + between)} sent by all ranks, {share:.0f} % of it between nodes"


def draw_traffic(axes, picture: TrafficPicture, unit: str) -> None:
    """Sender downwards, receiver to the right: the fuller the colour, the more bytes; frames around nodes."""
    ranks = len(picture.bytes_sent)
    most = max(max(row) for row in picture.bytes_sent) or 1
    colors = {"home": "#F2F2F2", "within": WITHIN_COLOR, "between": BETWEEN_COLOR}
    cells = [
        [mix(colors[link], "#FFFFFF", 0.85 * (1 - sent / most)) if sent else colors["home"] for sent, link in row]
        for row in (
            [(sent, picture.link(src, dst)) for dst, sent in enumerate(row)]
            for src, row in enumerate(picture.bytes_sent)
        )
    ]
    corners = (0, ranks, ranks, 0)
    axes.imshow(
        [[channels(color) for color in row] for row in cells], extent=corners, aspect="auto", interpolation="nearest"
    )
    for border in range(1, ranks if ranks <= MOST_RANKS_WITH_NUMBERS else 1):
        axes.axhline(border, color="white", linewidth=0.6)
        axes.axvline(border, color="white", linewidth=0.6)
    for src, row in enumerate(picture.bytes_sent):
        for dst, sent in enumerate(row):
            color = cells[src][dst]
            if ranks <= MOST_RANKS_WITH_NUMBERS and src != dst:
                label, size = _digits(sent / UNITS[unit]), 9 if ranks <= 8 else 6.5
                look = {"ha": "center", "va": "center", "fontsize": size, "color": text_on(color)}
                axes.text(dst + 0.5, src + 0.5, label, **look).set_in_layout(False)
    for first in range(0, ranks, picture.ranks_per_node):
        frame = {"facecolor": "none", "edgecolor": "black", "linewidth": 1.4}
        axes.add_patch(Rectangle((first, first), *[min(picture.ranks_per_node, ranks - first)] * 2, **frame, zorder=3))
    step = max(1, ranks // 16)
    axes.set_xticks([rank + 0.5 for rank in range(0, ranks, step)], range(0, ranks, step))
    axes.set_yticks([rank + 0.5 for rank in range(0, ranks, step)], range(0, ranks, step))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlim=(-0.03, ranks + 0.03), ylim=(ranks + 0.03, -0.03), xlabel="to rank", ylabel="from rank")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def draw_sent(axes, picture: TrafficPicture, unit: str) -> None:
    """What each rank sends, beside its row of the matrix: within its node, and between nodes (hatched)."""
    ranks = range(len(picture.bytes_sent))
    scaled = [[n / UNITS[unit] for n in part] for part in (picture.within_bytes, picture.between_bytes)]
    rows = [rank + 0.5 for rank in ranks]
    look = {"height": 0.7, "edgecolor": "white", "linewidth": 0.6 if len(ranks) <= 16 else 0}
    hatch = BETWEEN_HATCH if len(ranks) <= MOST_RANKS_WITH_NUMBERS else ""  # on thin bars it would hide them
    axes.barh(rows, scaled[0], color=WITHIN_COLOR, **look)
    axes.barh(rows, scaled[1], left=scaled[0], color=BETWEEN_COLOR, hatch=hatch, **look)
    axes.set_yticks([])
    longest = max(map(sum, zip(*scaled, strict=True))) or 1.0
    axes.set(xlim=(0, longest * 1.05), ylim=(len(ranks) + 0.03, -0.03), xlabel=f"sent by each rank ({unit})")
    if picture.ranks_per_node >= len(ranks):
        return  # one node: no need to say so
    handles = [
        Patch(facecolor=WITHIN_COLOR, label="within the node"),
        Patch(facecolor=BETWEEN_COLOR, hatch=hatch, edgecolor="white", label="between nodes"),
    ]
    axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


def traffic_size_in(picture: TrafficPicture) -> float:
    """The height that keeps the matrix' cells square enough to read."""
    return min(4.6, 1.7 + 0.33 * len(picture.bytes_sent))


@checked
def show_traffic(
    rows: Sequence[Sequence[int]], row_bytes: Index, ranks_per_node: Size | None = None, title: str = ""
) -> None:
    """Show who sends how many bytes to whom, from rows[src][dst] of row_bytes each, and what crosses between nodes."""
    picture = traffic_picture(rows, row_bytes, ranks_per_node)
    unit = unit_for(max(max(row) for row in picture.bytes_sent))
    said = title or traffic_title(picture)
    with picture_panels(1, 2, traffic_size_in(picture), said, width_ratios=(1.35, 1)) as (_, (left, right)):
        draw_traffic(left, picture, unit)
        draw_sent(right, picture, unit)
        panel_title(left, f"each cell in {unit}")
