"""Experts in pictures: their load, what was dropped, who sends what to whom, and what balancing does over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, Rectangle

from course_lib.plots.palette import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    EXPOSED_COLOR,
    LIMIT_COLOR,
    NEUTRAL_COLOR,
    OKABE_ITO,
    RANK_COLORS,
    channels,
    mix,
    text_on,
)
from course_lib.plots.style import FULL_WIDTH_IN, UNITS, finish, show_bytes, style, three_digits, unit_for
from course_lib.routing_traffic import ExpertLayout

WITHIN_COLOR, BETWEEN_COLOR = COMPUTE_COLOR, COMMUNICATION_COLOR
BETWEEN_HATCH = "////"
MOST_RANKS_WITH_NUMBERS = 16
MOST_RANKS = 64
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "handlelength": 1.4, "columnspacing": 1.4}

# ---------------------------------------------------------------- load


@dataclass(frozen=True)
class LoadPicture:
    """Choices that each expert computes and drops; `largest` is its share of the mean that sets the pace."""

    kept: list[int]
    dropped: list[int]
    mean: float
    capacity: int | None
    largest: float
    drop_rate: float


def load_picture(load: Sequence[int], capacity: int | None = None, dropped: Sequence[int] | None = None) -> LoadPicture:
    """Split each expert's load in what it computes and what it drops.

    Without `dropped`, what exceeds the capacity is dropped. Give it where ranks have capacities of their own: then
    `capacity` is that of all ranks together, and an expert may drop below it.
    Raises   ValueError if there is no load, or more is dropped than there is
    """
    load = [int(tokens) for tokens in load]
    if not load or sum(load) == 0:
        raise ValueError(f"the load of {len(load)} experts is empty; give how many choices fell on each expert")
    if dropped is None:
        dropped = [max(0, tokens - capacity) if capacity is not None else 0 for tokens in load]
    dropped = [int(tokens) for tokens in dropped]
    if len(dropped) != len(load) or any(lost > tokens for lost, tokens in zip(dropped, load)):
        raise ValueError("dropped must have one number an expert, none above its load")
    kept = [tokens - lost for tokens, lost in zip(load, dropped)]
    mean = sum(load) / len(load)
    return LoadPicture(kept, dropped, mean, capacity, max(kept) / mean, sum(dropped) / sum(load))


def load_title(picture: LoadPicture) -> str:
    """What the bars show: how much longer the fullest expert computes than the mean, and what is lost."""
    said = f"The fullest of {len(picture.kept)} experts computes {three_digits(picture.largest)} times the mean load"
    return said + (f"; {100 * picture.drop_rate:.1f} % of all choices are dropped" if picture.capacity else "")


def draw_load(axes, picture: LoadPicture, experts_per_rank: int | None = None) -> None:
    """A bar for each expert, drops hatched on top, lines for mean and capacity; borders between ranks dotted."""
    experts = range(len(picture.kept))
    edge = 0.8 if len(experts) <= 64 else 0
    width = 0.84 if len(experts) <= 64 else 1.0
    axes.bar(experts, picture.kept, width, color=COMPUTE_COLOR, edgecolor="white", linewidth=edge)
    lost = [expert for expert in experts if picture.dropped[expert]]
    axes.bar(
        lost, [picture.dropped[expert] for expert in lost], width, bottom=[picture.kept[expert] for expert in lost],
        color="white", edgecolor=EXPOSED_COLOR, hatch="////", linewidth=max(edge, 0.4),
    )  # fmt: skip
    top = max([k + d for k, d in zip(picture.kept, picture.dropped)] + [picture.capacity or 0, picture.mean])
    axes.axhline(picture.mean, color=LIMIT_COLOR, linewidth=1.2, linestyle=":")
    lines = [(picture.mean, f" mean {three_digits(picture.mean)}")]
    if picture.capacity is not None:
        axes.axhline(picture.capacity, color=LIMIT_COLOR, linewidth=1.4, linestyle="--")
        lines.append((picture.capacity, f" capacity {picture.capacity:,}"))
    _label_lines(axes, lines, top)
    if experts_per_rank:
        for first in range(experts_per_rank, len(experts), experts_per_rank):
            axes.axvline(first - 0.5, color=NEUTRAL_COLOR, linewidth=0.8, zorder=0)
    step = max(1, -(-len(experts) // 16))
    axes.set_xticks(range(0, len(experts), step))
    ranks = ", grey lines between ranks" if experts_per_rank and experts_per_rank < len(experts) else ""
    axes.set(
        xlim=(-0.6, len(experts) - 0.4), ylim=(0, top * 1.1), xlabel=f"expert{ranks}", ylabel="choices (token, slot)"
    )
    if lost:
        handles = [
            Patch(facecolor=COMPUTE_COLOR, label="computed"),
            Patch(facecolor="white", edgecolor=EXPOSED_COLOR, hatch="////", label="dropped"),
        ]
        axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


def _label_lines(axes, lines: Sequence[tuple[float, str]], top: float) -> None:
    """Each line's name right of the axes; of two that lie close together the upper one's name moves up."""
    gap = 0.075 * top
    (low, low_text), *rest = sorted(lines)
    places = [(low, low_text)] + [(max(value, low + gap), text) for value, text in rest]
    for value, text in places:
        axes.annotate(
            text, (1, value), xycoords=("axes fraction", "data"), va="center", fontsize=9, annotation_clip=False
        )


def show_load(load: Sequence[int], capacity: int | None = None, title: str = "", experts_per_rank=None) -> None:
    """Show the load of experts: choices that fell on each, with the mean, and with what a capacity drops."""
    picture = load_picture(load, capacity)
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, 3.2))
        draw_load(axes, picture, experts_per_rank)
        axes.set_title(title or load_title(picture))
        finish(figure)


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


def traffic_picture(rows: Sequence[Sequence[int]], row_bytes: int, ranks_per_node: int | None = None) -> TrafficPicture:
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
    """Bytes of all ranks together, and how many of them leave their node."""
    within, between = sum(picture.within_bytes), sum(picture.between_bytes)
    if within + between == 0:
        return "Nothing is sent: every row stays on its rank"
    share = 100 * between / (within + between)
    return f"{show_bytes(within + between)} sent by all ranks, {share:.0f} % of it between nodes"


def draw_traffic(axes, picture: TrafficPicture, unit: str) -> None:
    """Sender downwards, receiver to the right: the fuller the colour, the more bytes; frames around nodes."""
    ranks = len(picture.bytes_sent)
    most = max(max(row) for row in picture.bytes_sent) or 1
    colors = {"home": "#F2F2F2", "within": WITHIN_COLOR, "between": BETWEEN_COLOR}
    cells = [
        [mix(colors[link], "#FFFFFF", 0.0 if link == "home" else 0.85 * (1 - sent / most)) for sent, link in row]
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
                axes.text(dst + 0.5, src + 0.5, label, ha="center", va="center", fontsize=size, color=text_on(color))
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
    axes.set(ylim=(len(ranks) + 0.03, -0.03), xlabel=f"sent by each rank ({unit})")
    handles = [
        Patch(facecolor=WITHIN_COLOR, label="within the node"),
        Patch(facecolor=BETWEEN_COLOR, hatch=hatch, edgecolor="white", label="between nodes"),
    ]
    axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


def traffic_size_in(picture: TrafficPicture) -> float:
    """The height that keeps the matrix' cells square enough to read."""
    return min(4.6, 1.7 + 0.33 * len(picture.bytes_sent))


def show_traffic(
    rows: Sequence[Sequence[int]], row_bytes: int, ranks_per_node: int | None = None, title: str = ""
) -> None:
    """Show who sends how many bytes to whom, from rows[src][dst] of row_bytes each, and what crosses between nodes."""
    picture = traffic_picture(rows, row_bytes, ranks_per_node)
    unit = unit_for(max(max(row) for row in picture.bytes_sent))
    with style():
        size = (FULL_WIDTH_IN, traffic_size_in(picture))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, width_ratios=(1.35, 1))
        draw_traffic(left, picture, unit)
        draw_sent(right, picture, unit)
        left.set_title(f"each cell in {unit}", fontsize=9.5, fontweight="normal")
        figure.suptitle(title or traffic_title(picture), x=0.01, ha="left", fontsize=11, fontweight="bold")
        finish(figure)


# ---------------------------------------------------------------- the way of tokens


@dataclass(frozen=True)
class Route:
    """One choice of one token: from its rank to an expert's, with its weight; crosses home, within, between."""

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


def within_capacity(routes: Sequence[Route], capacity: int) -> list[Route]:
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
CROSSED_AT = 0.9  # of the way: where a dropped choice is crossed out
ROUTE_NAMES = {"home": "stays on its rank", "within": "to a rank of its node", "between": "to another node"}


def draw_routes(axes, routes: Sequence[Route], layout: ExpertLayout, num_tokens: int) -> None:
    """Tokens on the left by rank, experts on the right by rank, a line for each choice, thick where it weighs much."""
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
        axes.text(-1.72, middle, f"node {node}", rotation=90, ha="center", va="center", fontsize=9)
        if node:
            axes.axhline(height * node / layout.num_nodes, color=NEUTRAL_COLOR, linewidth=1)
    axes.set(xlim=(-1.85, 3.6), ylim=(height, -0.75), xticks=[], yticks=[])
    for x, text in ((-0.45, "tokens"), (2.45, "experts")):
        axes.text(x, -0.35, text, ha="center", va="center", fontsize=9)
    axes.spines[:].set_visible(False)
    links = [link for link in ROUTE_COLORS if any(route.link == link and route.kept for route in routes)]
    handles = [
        plt.Line2D([], [], color=ROUTE_COLORS[k], linestyle=ROUTE_STYLES[k], label=ROUTE_NAMES[k]) for k in links
    ]
    if any(not route.kept for route in routes):
        handles.append(plt.Line2D([], [], color="black", linestyle=":", marker="x", label="dropped: expert full"))
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
            axes.add_patch(Rectangle((x, y + 0.03), 0.9, box - 0.06, facecolor=color, edgecolor="white"))
            index = rank * per_rank + place
            middle[index] = y + box / 2
            axes.text(
                x + 0.45, middle[index], f"{letter}{index}", ha="center", va="center", fontsize=8, color=text_on(color)
            )
        side = {"ha": "right" if left else "left", "va": "center", "fontsize": 9}
        axes.text(x - 0.08 if left else x + 0.98, (rank + 0.5) * share, f"rank {rank}", **side)
    return middle


def routes_title(routes: Sequence[Route]) -> str:
    """How many rows stay, and how many leave their rank or node."""
    counts = {link: sum(route.kept and route.link == link for route in routes) for link in ROUTE_COLORS}
    lost = sum(not route.kept for route in routes)
    said = f"{len(routes)} choices: {counts['home']} on the token's own rank, {counts['within']} within its node"
    return said + f", {counts['between']} on another node" + (f", {lost} dropped" if lost else "")


def show_routes(
    experts: Sequence,
    layout: ExpertLayout,
    weights: Sequence | None = None,
    capacity: int | None = None,
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
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, 1.1 + 0.26 * height))
        draw_routes(axes, routes, layout, num_tokens)
        axes.set_title(title or routes_title(routes))
        finish(figure)


# ---------------------------------------------------------------- load while training


@dataclass(frozen=True)
class BalancePicture:
    """The load of each expert over the mean, step by step, and its largest at the end (mean of the last quarter)."""

    relative: list[list[float]]  # [expert][step]
    largest_at_end: float


def balance_picture(loads: Sequence[Sequence[float]]) -> BalancePicture:
    """From loads[step][expert], choices that fell on each expert, to multiples of the step's mean.

    Raises   ValueError if there is no step, or one without load
    """
    if not loads or any(sum(step) <= 0 for step in loads):
        raise ValueError(f"got {len(loads)} steps; give loads[step][expert], with some load in each")
    relative = [[float(n) * len(step) / float(sum(step)) for n in step] for step in loads]
    last = relative[-max(1, len(relative) // 4) :]
    return BalancePicture([list(expert) for expert in zip(*relative)], sum(map(max, last)) / len(last))


def draw_balance(axes, picture: BalancePicture, top: float) -> None:
    """A thin line for each expert, the largest and the smallest of each step thick, and where all would be even."""
    steps = range(1, len(picture.relative[0]) + 1)
    for line in picture.relative:
        axes.plot(steps, line, color=NEUTRAL_COLOR, linewidth=0.8)
    by_step = list(zip(*picture.relative))
    axes.plot(steps, list(map(max, by_step)), color=OKABE_ITO["vermillion"], linewidth=1.8, label="fullest expert")
    axes.plot(
        steps, list(map(min, by_step)), color=OKABE_ITO["blue"], linewidth=1.8, linestyle="--", label="emptiest expert"
    )
    axes.axhline(1, color=LIMIT_COLOR, linewidth=1, linestyle=":")
    axes.set(xlim=(1, max(len(steps), 2)), ylim=(0, top), xlabel="training step")


def show_balance(loads: Mapping[str, Sequence[Sequence[float]]], title: str = "") -> None:
    """Show the load of experts while training, `{label: loads[step][expert]}`, side by side on one scale."""
    pictures = {label: balance_picture(steps) for label, steps in loads.items()}
    top = 1.08 * max(max(map(max, picture.relative)) for picture in pictures.values())
    with style():
        figure, panels = plt.subplots(1, len(pictures), figsize=(FULL_WIDTH_IN, 3.1), squeeze=False, sharey=True)
        for axes, (label, picture) in zip(panels[0], pictures.items()):
            draw_balance(axes, picture, top)
            said = f"{label}\nfullest at the end: {three_digits(picture.largest_at_end)} x mean"
            axes.set_title(said, fontsize=9.5, fontweight="normal")
        panels[0, 0].set_ylabel("load / mean load")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        handles += [
            plt.Line2D([], [], color=NEUTRAL_COLOR, linewidth=0.8),
            plt.Line2D([], [], color="black", linestyle=":", linewidth=1),
        ]
        figure.legend(handles, [*labels, "each expert", "even load"], loc="outside lower center", ncol=4)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        finish(figure)


# ---------------------------------------------------------------- total and active parameters


def parameters_title(parameters: Mapping[str, tuple[float, float]]) -> str:
    """How large the part is that computes for one token."""
    shares = [
        f"{100 * active / total:.3g} % of {name}" for name, (total, active) in parameters.items() if active < total
    ]
    return "A token passes through " + (" and ".join(shares) or "every parameter")


def draw_parameters(axes, parameters: Mapping[str, tuple[float, float]]) -> None:
    """`{model: (total, active)}` as bars: what is stored, and within it what computes for one token."""
    longest = max(total for total, _ in parameters.values())
    for row, (total, active) in enumerate(parameters.values()):
        axes.barh(row, total / 1e9, height=0.62, color="#E3E3E3", edgecolor="#777777", hatch="////", linewidth=0.8)
        axes.barh(row, active / 1e9, height=0.62, color=OKABE_ITO["blue"])
        part = "all active" if active == total else f"{three_digits(active / 1e9)} B active"
        said = f" {three_digits(total / 1e9)} B, {part}"
        axes.text(total / 1e9, row, said, va="center", fontsize=9)
    axes.set_yticks(range(len(parameters)), list(parameters))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, longest / 1e9 * 1.42), ylim=(len(parameters) - 0.45, -0.55), xlabel="parameters (billions)")
    handles = [
        Patch(facecolor=OKABE_ITO["blue"], label="active: compute for one token"),
        Patch(facecolor="#E3E3E3", edgecolor="#777777", hatch="////", label="experts that this token did not choose"),
    ]
    axes.legend(handles=handles, ncol=2, borderaxespad=4.0, **BELOW)


def show_parameters(parameters: Mapping[str, tuple[float, float]], title: str = "") -> None:
    """Show total and active parameters, `{model: (total, active)}`."""
    with style():
        figure, axes = plt.subplots(figsize=(FULL_WIDTH_IN, 1.3 + 0.4 * len(parameters)))
        draw_parameters(axes, parameters)
        axes.set_title(title or parameters_title(parameters))
        finish(figure)
