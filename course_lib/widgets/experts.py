"""The explorer of experts: how even their load is, what a capacity drops, and what travels within and between nodes."""

import math
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from io import BytesIO
from typing import Literal

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure

from course_lib.layout.experts import ExpertLayout, check_choice
from course_lib.model.moe import capacity_of, keep
from course_lib.model.synthetic_routing import synthetic_routing
from course_lib.plots.experts import LoadPicture, draw_load, load_picture, load_title
from course_lib.plots.routing import (
    TrafficPicture,
    draw_sent,
    draw_traffic,
    traffic_picture,
    traffic_size_in,
    traffic_title,
)
from course_lib.plots.style import FULL_WIDTH_IN, show_bytes, style, unit_for
from course_lib.traffic.routing import (
    MoeTraffic,
    Rows,
    counts_of,
    moe_traffic,
    once_per_node_rows,
    once_per_rank_rows,
    padded_rows,
    plain_rows,
)
from course_lib.validate import Amount, Count, Positive, Size, check_fields, checked
from course_lib.widgets import parts

METHODS = [
    ("once for every assignment", "plain"),
    ("once to each rank", "once_per_rank"),
    ("once to each node", "once_per_node"),
    ("capacity rows to every expert", "padded"),
]
NO_LIMIT = 0
DROPLESS = math.inf
LOAD_IN = 2.7
MOST_SCORES = 2**21  # what a slider can wait for


@dataclass(frozen=True)
class ExpertChoice:
    """What the controls say. capacity_factor inf drops nothing; max_nodes 0 sets no limit; nodes have equal ranks."""

    num_experts: Size = 64
    top_k: Size = 4
    capacity_factor: Positive | Literal[DROPLESS] = DROPLESS
    ep_size: Size = 16
    num_nodes: Size = 2
    max_nodes: Count = NO_LIMIT
    skew: Amount = 0.5
    method: str = "plain"
    tokens_per_rank: Size = 128
    d_model: Size = 4096

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class ExpertView:
    """What the explorer shows of one draw: tokens choose experts at random, nothing is trained."""

    layout: ExpertLayout
    load: LoadPicture
    dispatch: TrafficPicture
    traffic: MoeTraffic
    text: str


@checked
def explore_experts(chosen: ExpertChoice) -> ExpertView:
    """Draw a routing, drop what exceeds each expert's capacity for each rank, and count the bytes of the rest.

    Raises   ValueError for sizes that do not divide, k above the experts in reach, or padding without a capacity
    """
    if chosen.ep_size % chosen.num_nodes:
        divisors = [n for n in range(1, chosen.ep_size + 1) if chosen.ep_size % n == 0]
        raise ValueError(
            f"ep ({chosen.ep_size}) must be divisible by the nodes ({chosen.num_nodes}), so that all have equally "
            f"many ranks; choose nodes from {', '.join(map(str, divisors))}"
        )
    tokens = MOST_SCORES // (chosen.ep_size * chosen.num_experts)
    if chosen.tokens_per_rank > tokens:
        raise ValueError(
            f"{chosen.tokens_per_rank} tokens on each of {chosen.ep_size} ranks with {chosen.num_experts} scores each "
            f"are too many to draw at once; choose at most {tokens} tokens a rank"
        )
    layout = ExpertLayout(chosen.num_experts, chosen.ep_size, chosen.ep_size // chosen.num_nodes)
    limit = chosen.max_nodes or None
    check_choice(chosen.num_experts, chosen.top_k, layout.num_nodes, limit)
    experts = _routing(layout, chosen.tokens_per_rank, chosen.top_k, chosen.skew, limit)
    room = None
    if chosen.capacity_factor != DROPLESS:
        room = capacity_of(chosen.tokens_per_rank, chosen.top_k, chosen.num_experts, chosen.capacity_factor)
    kept = [torch.where(keep(e, chosen.num_experts, room), e, -1) for e in experts]
    before, after = (torch.tensor(counts_of(each, chosen.num_experts)).sum(0) for each in (experts, kept))
    load = load_picture(before.tolist(), room and room * chosen.ep_size, (before - after).tolist())
    traffic = moe_traffic(kept, layout, chosen.d_model, chosen.method, capacity=room)
    dispatch = _dispatch_picture(chosen.method, kept, layout, traffic, room)
    return ExpertView(layout, load, dispatch, traffic, describe_experts(chosen, layout, load, traffic))


@lru_cache(maxsize=4)
def _routing(layout: ExpertLayout, tokens_per_rank: int, top_k: int, skew: float, max_nodes: int | None) -> tuple:
    return tuple(synthetic_routing(layout, tokens_per_rank, top_k, skew, max_nodes))


def _dispatch_picture(
    method: str, kept, layout: ExpertLayout, traffic: MoeTraffic, capacity: int | None
) -> TrafficPicture:
    """Who sends what to whom on the way to the experts; of two hops their sum."""
    hops: list[Rows]
    if method == "plain":
        hops = [plain_rows(counts_of(kept, layout.num_experts), layout)]
    elif method == "padded":
        hops = [padded_rows(capacity, layout)]
    elif method == "once_per_rank":
        hops = [once_per_rank_rows(kept, layout)]
    else:
        hops = list(once_per_node_rows(kept, layout))
    rows = [[sum(numbers) for numbers in zip(*lines, strict=True)] for lines in zip(*hops, strict=True)]
    travelling = sum(n for src, row in enumerate(rows) for dst, n in enumerate(row) if src != dst)
    all_bytes = sum(sent.total_bytes for sent in traffic.dispatch)
    return traffic_picture(rows, all_bytes // max(travelling, 1), layout.ranks_per_node)


@checked
def describe_experts(chosen: ExpertChoice, layout: ExpertLayout, load: LoadPicture, traffic: MoeTraffic) -> str:
    """Ranks' load, and bytes of one layer for one micro-batch: of the rank that sends most, and of all."""
    width = layout.experts_per_rank
    by_rank = [sum(load.kept[first : first + width]) for first in range(0, len(load.kept), width)]
    mean = sum(by_rank) / len(by_rank)
    ranks = range(layout.ep_size)
    forward = [traffic.forward(rank) for rank in ranks]
    both = sum(traffic.sent_bytes(rank) for rank in ranks)
    within, between = (max(getattr(sent, f"{way}_bytes") for sent in forward) for way in ("within", "between"))
    said = f"The busiest rank computes {max(by_rank) / mean:.2f} times the mean. " if layout.ep_size > 1 else ""
    if load.capacity is not None:
        said += (
            f"Each expert takes {load.capacity // layout.ep_size} assignments of each rank's {chosen.tokens_per_rank} "
            f"tokens; {100 * load.drop_rate:.1f} % of the assignments are dropped. "
        )
    if both == 0:
        return said + "One rank alone sends nothing."
    return said + (
        f"Forward pass of one layer, one micro-batch: a rank sends at most {show_bytes(within)} within its node and "
        f"{show_bytes(between)} between nodes (dispatch and combine, BF16, {chosen.d_model:,} numbers a token). "
        f"Forward and backward, all ranks: {show_bytes(both)}."
    )


@checked
def experts_png(view: ExpertView) -> bytes:
    """The load above; below it who sends what to whom, and what each rank sends."""
    below_in = traffic_size_in(view.dispatch) if view.layout.ep_size > 1 else 0.0
    with style():
        figure = Figure(figsize=(FULL_WIDTH_IN, LOAD_IN + below_in))
        if below_in:
            heights = {"height_ratios": (LOAD_IN, below_in), "width_ratios": (1.35, 1)}
            panels = figure.subplot_mosaic([["load", "load"], ["matrix", "sent"]], **heights)
            _draw_dispatch(panels["matrix"], panels["sent"], view.dispatch)
        else:
            panels = figure.subplot_mosaic([["load"]])
        draw_load(panels["load"], view.load, view.layout.experts_per_rank)
        panels["load"].set_title(load_title(view.load), fontsize=10)
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=parts.WIDGET_DPI)
    return buffer.getvalue()


def _draw_dispatch(matrix, bars, picture: TrafficPicture) -> None:
    unit = unit_for(max(max(row) for row in picture.bytes_sent))
    draw_traffic(matrix, picture, unit)
    matrix.set_title(f"Dispatch ({unit}): {traffic_title(picture)}", fontsize=10)
    draw_sent(bars, picture, unit)


@checked
def expert_explorer(start: ExpertChoice | None = None) -> widgets.VBox:
    """Sliders over experts, k, capacity, ranks, nodes, limit and skew; load, drops and bytes follow."""
    start = start or ExpertChoice()
    capacities = [("none: dropless", DROPLESS), *((f"{c:g}", c) for c in (0.5, 1.0, 1.25, 1.5, 2.0, 4.0))]
    limits = [("no limit", NO_LIMIT), *((f"{m} nodes" if m > 1 else "1 node", m) for m in (1, 2, 3, 4))]
    fields = {
        "num_experts": parts.slider("experts", parts.powers_of_two(4, 256), start.num_experts),
        "top_k": parts.slider("k", [1, 2, 3, 4, 6, 8], start.top_k),
        "capacity_factor": parts.slider("capacity", capacities, start.capacity_factor),
        "ep_size": parts.slider("ranks (ep)", parts.powers_of_two(1, 64), start.ep_size),
        "num_nodes": parts.slider("nodes", parts.powers_of_two(1, 16), start.num_nodes),
        "max_nodes": parts.slider("nodes a token", limits, start.max_nodes),
        "skew": parts.slider("skew", [0.0, 0.25, 0.5, 0.75, 1.0, 1.5], start.skew),
        "method": parts.choice("a token travels", METHODS, start.method),
        "tokens_per_rank": parts.slider("tokens a rank", parts.powers_of_two(32, 1024), start.tokens_per_rank),
        "d_model": parts.slider("d_model", parts.powers_of_two(512, 8192), start.d_model),
    }

    def predict() -> tuple[bytes, str]:
        view = explore_experts(ExpertChoice(**parts.values_of(fields)))
        return experts_png(view), escape(view.text)

    return parts.picture_panel(list(fields.values()), predict)
