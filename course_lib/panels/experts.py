"""Experts: how even their load is, what a capacity drops, what travels within and between nodes (lessons 9a, 9b)."""

from collections import Counter

from course_lib.config import capacity_of
from course_lib.layout.experts import ExpertLayout
from course_lib.panels.controls import controls, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import columns
from course_lib.panels.synthetic_routing import keep_fitting, synthetic_routing
from course_lib.traffic.routing import moe_traffic
from course_lib.units import show_bytes

METHODS = (
    ("once for every assignment", "plain"),
    ("once to each rank", "once_per_rank"),
    ("once to each node", "once_per_node"),
    ("capacity rows to every expert", "padded"),
)


def tokens_of(num_experts: int, ep: int) -> int:
    """Return how many tokens of each rank are drawn: what a slider can wait for."""
    return min(24, 24_576 // (num_experts * ep))


def _draw_experts(experts, top_k, capacity, ep, nodes, max_nodes, skew, method, d_model) -> Shown:  # noqa: PLR0913
    """Draw a routing, drop what exceeds each expert's capacity for each rank, and count the bytes of the rest."""
    if ep % nodes:
        raise ValueError(f"ep ({ep}) must be divisible by the nodes ({nodes}); choose fewer nodes, or more ranks")
    layout, tokens = ExpertLayout(experts, ep, ep // nodes), tokens_of(experts, ep)
    routing = synthetic_routing(layout, tokens, top_k, skew, max_nodes or None)
    room = capacity_of(tokens, top_k, experts, capacity) if capacity else None
    kept = [keep_fitting(expert_Tk, room) for expert_Tk in routing]
    before, after = (Counter(e for rank in each for row in rank for e in row) for each in (routing, kept))
    load = {str(e): {"computed": after[e], "dropped": before[e] - after[e]} for e in range(experts)}
    marks = {"capacity": room * ep} if room else {}
    charts = [columns("Assignments of each expert", load, "count", marks=marks)]
    width = layout.experts_per_rank if ep > 1 else 1  # of several ranks the busiest is told, of one its busiest expert
    busy = [sum(after[e] for e in range(first, first + width)) for first in range(0, experts, width)]
    said = (
        f"Drawn: {tokens} tokens on each of {ep} ranks. The busiest {'rank' if ep > 1 else 'expert'} computes "
        f"{max(busy) * len(busy) / sum(busy):.2f} times the mean. "
    )
    if room:
        said += f"{1 - sum(busy) / (ep * tokens * top_k):.1%} of the assignments are dropped. "
    if ep == 1:
        return charts, said + "One rank alone sends nothing."
    traffic = moe_traffic(kept, layout, d_model, method, capacity=room)
    sent = [traffic.forward(rank) for rank in range(ep)]
    ranks = {str(n): {"within the node": s.within_bytes, "between nodes": s.between_bytes} for n, s in enumerate(sent)}
    within, between = (show_bytes(max(sizes)) for sizes in zip(*map(dict.values, ranks.values()), strict=True))
    said += (
        f"Forward pass of one layer: a rank sends at most {within} within its node and {between} between nodes "
        "(dispatch and combine, BF16). Forward and backward, all ranks: "
        f"{show_bytes(sum(map(traffic.sent_bytes, range(ep))))}."
    )
    return [*charts, columns("Sent by each rank in forward", ranks)], said


EXPERTS = Panel(
    "Experts: load and traffic",
    controls(experts=64, top_k=4, capacity=0.0, ep=(16, powers(1, 32)), nodes=2, max_nodes=0, skew=0.5)
    | {"method": Control("a token travels", METHODS, "plain")}
    | controls(d_model=4096),
    _draw_experts,
)
