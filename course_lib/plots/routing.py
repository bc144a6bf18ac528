"""Where tokens go: their way to experts on other ranks, and who sends how many bytes to whom."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from course_lib.layout.experts import ExpertLayout
from course_lib.plots.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    NEUTRAL_COLOR,
    OKABE_ITO,
    RANK_COLORS,
    channels,
    mix,
    text_on,
)
from course_lib.plots.style import (
    BELOW,
    CENTRED,
    UNITS,
    labelled_box,
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


@dataclass(frozen=True)
class Route:
    """One assignment of one token: from its rank to an expert's, with its weight; crosses home, within, between."""

    token: int
    expert: int
    weight: float
    kept: bool
    link: str


def token_routes(experts: Sequence, layout: ExpertLayout, weights: Sequence | None = None) -> list[Route]:
    """Every choice of a routing: one expert_Tk a rank (-1 where it was dropped on the way), and weight_Tk if known.

    Tokens are counted over all ranks.
    Raises   ValueError if the routing has another number of ranks than the layout
    """
    if len(experts) != layout.ep_size:
        raise ValueError(f"the routing has {len(experts)} ranks, ep is {layout.ep_size}; give one expert_Tk a rank")
    routes, token = [], 0
    for src, rows in enumerate(experts):
        for place, row in enumerate(rows):
            for slot, expert in enumerate(row):
                expert = int(expert)
                if expert >= 0:
                    dst = layout.rank_of_expert(expert)
                    same_node = layout.node_of_rank(src) == layout.node_of_rank(dst)
                    link = "home" if src == dst else "within" if same_node else "between"
                    weight = 1 / len(row) if weights is None else float(weights[src][place][slot])
                    routes.append(Route(token, expert, weight, True, link))
            token += 1
    return routes


def within_capacity(routes: Sequence[Route], capacity: Size) -> list[Route]:
    """The same routes, of which each expert takes the first `capacity`; the others are dropped."""
    taken: dict[int, int] = {}
    limited = []
    for route in routes:
        taken[route.expert] = taken.get(route.expert, 0) + 1
        kept = route.kept and taken[route.expert] <= capacity
        limited.append(Route(route.token, route.expert, route.weight, kept, route.link))
    return limited


ROUTE_COLORS = {"home": "#777777", "within": OKABE_ITO["blue"], "between": OKABE_ITO["vermillion"]}
ROUTE_STYLES = {"home": "-", "within": "-", "between": (0, (5, 1.5))}
CROSSED_AT = 0.9  # of the way: where a dropped assignment is crossed out
ROUTE_NAMES = {"home": "stays on its rank", "within": "to a rank of its node", "between": "to another node"}


def draw_routes(axes, routes: Sequence[Route], layout: ExpertLayout, num_tokens: Size) -> None:
    """Tokens on the left by rank, experts on the right by rank, a line for each assignment, thick where it weighs."""
    tokens_per_rank = num_tokens // layout.ep_size
    height = layout.ep_size * max(tokens_per_rank, layout.experts_per_rank) * 1.0
    token_at = _column(axes, -0.9, num_tokens, layout.ep_size, height, "t", left=True)
    expert_at = _column(axes, 2.0, layout.num_experts, layout.ep_size, height, "E", left=False)
    for route in routes:
        look = {"color": ROUTE_COLORS[route.link], "linestyle": ROUTE_STYLES[route.link], "alpha": 0.9}
        if not route.kept:
            look = {"color": "black", "linestyle": ":", "alpha": 0.9}
        xs, ys = (0.02, 1.98), (token_at[route.token], expert_at[route.expert])
        axes.plot(xs, ys, linewidth=0.5 + 2.4 * route.weight, **look)
        if not route.kept:
            crossed = [a + CROSSED_AT * (b - a) for a, b in (xs, ys)]
            axes.plot(*crossed, marker="x", color="black", markersize=7, markeredgewidth=2, zorder=3)
    for node in range(layout.num_nodes if layout.num_nodes > 1 else 0):
        middle = height * (node + 0.5) / layout.num_nodes
        axes.text(-1.72, middle, f"node {node}", rotation=90, **CENTRED, fontsize=9)
        if node:
            axes.axhline(height * node / layout.num_nodes, color=NEUTRAL_COLOR, linewidth=1)
    axes.set(xlim=(-1.85, 3.6), ylim=(height, -0.75), xticks=[], yticks=[])
    for x, text in ((-0.45, "tokens"), (2.45, "experts")):
        axes.text(x, -0.35, text, **CENTRED, fontsize=9)
    axes.spines[:].set_visible(False)
    links = [link for link in ROUTE_COLORS if any(route.link == link and route.kept for route in routes)]
    handles = [
        plt.Line2D([], [], color=ROUTE_COLORS[k], linestyle=ROUTE_STYLES[k], label=ROUTE_NAMES[k]) for k in links
    ]
    if any(not route.kept for route in routes):
        handles.append(plt.Line2D([], [], color="black", linestyle=":", marker="x", label="dropped: expert full"))
    if layout.ep_size == 1:
        del handles[: len(links)]  # with one rank there is nowhere else to go
    if handles:
        axes.legend(handles=handles, ncol=len(handles), borderaxespad=0.4, **(BELOW | {"handlelength": 2.6}))


def _column(axes, x: float, count: int, num_ranks: int, height: float, letter: str, left: bool) -> dict[int, float]:
    """Boxes numbered from 0, grouped by rank; returns the height of each one's middle."""
    share = height / num_ranks
    per_rank = count // num_ranks
    middle = {}
    for rank in range(num_ranks):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        box = min(0.8, share * 0.86 / per_rank)
        first = rank * share + (share - per_rank * box) / 2
        for place in range(per_rank):
            y = first + place * box
            index = rank * per_rank + place
            middle[index] = y + box / 2
            labelled_box(axes, (x, y + 0.03), (0.9, box - 0.06), color, f"{letter}{index}", fontsize=8)
        if num_ranks > 1:
            side = {"ha": "right" if left else "left", "va": "center", "fontsize": 9}
            axes.text(x - 0.08 if left else x + 0.98, (rank + 0.5) * share, f"rank {rank}", **side)
    return middle


def routes_title(routes: Sequence[Route]) -> str:
    """How many rows stay, and how many leave their rank or node."""
    counts = {link: sum(route.kept and route.link == link for route in routes) for link in ROUTE_COLORS}
    lost = sum(not route.kept for route in routes)
    said = f"{len(routes)} assignments: {counts['home']} on the token's own rank, {counts['within']} within its node"
    return said + f", {counts['between']} on another node" + (f", {lost} dropped" if lost else "")


@checked
def show_routes(
    experts: Sequence,
    layout: ExpertLayout,
    weights: Sequence | None = None,
    capacity: Size | None = None,
    title: str = "",
) -> None:
    """Show the way of a few tokens: from their ranks to their experts. One expert_Tk a rank, equally many tokens each.

    Raises   ValueError if there are more tokens or experts than the picture has room for
    """
    routes = token_routes(experts, layout, weights)
    if capacity is not None:
        routes = within_capacity(routes, capacity)
    num_tokens = sum(len(rows) for rows in experts)
    if max(num_tokens, layout.num_experts) > 32 or len({len(rows) for rows in experts}) > 1:
        raise ValueError(
            f"got {num_tokens} tokens and {layout.num_experts} experts; the picture has room for 32 of each, and each "
            "rank brings equally many tokens"
        )
    height = layout.ep_size * max(num_tokens // layout.ep_size, layout.experts_per_rank)
    with picture_axes(1.1 + 0.26 * height) as axes:
        draw_routes(axes, routes, layout, num_tokens)
        axes.set_title(title or routes_title(routes))


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
