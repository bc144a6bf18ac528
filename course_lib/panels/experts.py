"""Experts: how even their load is, what a capacity drops, what travels within and between nodes (lessons 9a, 9b)."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from operator import add
from random import Random

from course_lib.config import check_groups
from course_lib.layout.experts import ExpertLayout, capacity_of
from course_lib.panels.controls import controls, named, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Columns
from course_lib.traffic.routing import MoeTraffic, moe_traffic
from course_lib.units import show_bytes

METHODS = (
    ("once for every assignment", "plain"),
    ("once to each rank", "once_per_rank"),
    ("once to each node", "once_per_node"),
    ("capacity rows to every expert", "padded"),
)
NO_LIMIT, DROPLESS = 0, 0.0
MOST_SCORES, MOST_TOKENS = 32_768, 32  # what a slider can wait for: tokens x experts; tokens of a rank
SEED = 0


def tokens_of(num_experts: int, ep: int) -> int:
    """Return how many tokens of each rank are drawn."""
    return min(MOST_TOKENS, MOST_SCORES // (num_experts * ep))


@lru_cache(maxsize=1)
def _noise() -> list[float]:
    """Gumbel noise, from which each token takes a slice: with it the k largest scores are k draws without replacing."""
    random = Random(SEED)
    return [-math.log(-math.log(random.uniform(1e-9, 1 - 1e-7))) for _ in range(20_011)]


def popularity(num_experts: int, skew: float) -> list[float]:
    """Return how likely each expert is a first choice: 1 / place^skew (Zipf), the places mixed over the experts."""
    weights = [(place + 1.0) ** -skew for place in range(num_experts)]
    Random(SEED).shuffle(weights)
    return [weight / sum(weights) for weight in weights]


def best_groups(score_E: list[float], num_groups: int, max_groups: int, top_k: int) -> set[int]:
    """Return a token's best groups: those whose top_k / max_groups best scores have the largest sum.

    Source   DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, "Node-Limited Routing"; model/moe.py has it in torch
    """
    width = len(score_E) // num_groups
    best = min(max(top_k // max_groups, 1), width)
    sums = [sum(sorted(score_E[g * width : (g + 1) * width])[-best:]) for g in range(num_groups)]
    return set(sorted(range(num_groups), key=sums.__getitem__, reverse=True)[:max_groups])


def drawn(layout: ExpertLayout, tokens: int, top_k: int, skew: float, max_nodes: int) -> list[list[list[int]]]:
    """Return expert_Tk of each rank: k different experts a token, drawn by popularity, within so many nodes.

    Raises   ValueError if a token cannot choose that many experts
    """
    E, nodes = layout.num_experts, layout.num_nodes
    check_groups(E, top_k, nodes, max_nodes or None)
    log_p, noise, routing = [math.log(p) for p in popularity(E, skew)], _noise(), []
    for rank in range(layout.ep_size):
        expert_Tk = []
        for token in range(tokens):
            start = (rank * tokens + token) * 7919 % (len(noise) - E)
            score = list(map(add, log_p, noise[start : start + E]))
            allowed = range(E)
            if max_nodes and max_nodes < nodes:
                groups = best_groups([math.exp(one) for one in score], nodes, max_nodes, top_k)
                allowed = [expert for expert in range(E) if expert * nodes // E in groups]
            expert_Tk.append(sorted(allowed, key=score.__getitem__, reverse=True)[:top_k])
        routing.append(expert_Tk)
    return routing


def kept_of(expert_Tk: list[list[int]], room: int | None) -> list[list[int]]:
    """Return the choices that fit, -1 for the others: first assignments come before any second, as in model/moe.py."""
    if room is None:
        return expert_Tk
    taken, kept = Counter(), [list(row) for row in expert_Tk]
    for choice in range(len(expert_Tk[0])):
        for row in kept:
            taken[row[choice]] += 1
            if taken[row[choice]] > room:
                row[choice] = -1
    return kept


def _draw_experts(experts, top_k, capacity, ep, nodes, max_nodes, skew, method, d_model) -> Shown:  # noqa: PLR0913
    """Draw a routing, drop what exceeds each expert's capacity for each rank, and count the bytes of the rest."""
    if ep % nodes:
        raise ValueError(f"ep ({ep}) must be divisible by the nodes ({nodes}); choose fewer nodes, or more ranks")
    layout, tokens = ExpertLayout(experts, ep, ep // nodes), tokens_of(experts, ep)
    routing = drawn(layout, tokens, top_k, skew, max_nodes)
    room = capacity_of(tokens, top_k, experts, capacity) if capacity else None
    kept = [kept_of(expert_Tk, room) for expert_Tk in routing]
    before, after = (Counter(e for rank in each for row in rank for e in row) for each in (routing, kept))
    load = [{"computed": after[e], "dropped": before[e] - after[e]} for e in range(experts)]
    limit = {"capacity": room * ep} if room else {}
    forms = [Columns("Assignments of each expert", load, [str(e) for e in range(experts)], "count", limit)]
    traffic = moe_traffic(kept, layout, d_model, method, capacity=room)
    if ep > 1:
        sent = [traffic.forward(rank) for rank in range(ep)]
        columns = [{"within the node": one.within_bytes, "between nodes": one.between_bytes} for one in sent]
        forms.append(Columns("Sent by each rank in forward", columns, [str(rank) for rank in range(ep)]))
    dropped = 1 - sum(after[e] for e in range(experts)) / (ep * tokens * top_k)
    return forms, _said(layout, tokens, load, traffic, dropped if room else None)


def _said(layout: ExpertLayout, tokens: int, load: list, traffic: MoeTraffic, dropped: float | None) -> str:
    """The busiest rank, what is dropped, and bytes of one layer for one micro-batch."""
    ranks, width = range(layout.ep_size), layout.experts_per_rank
    by_rank = [sum(one["computed"] for one in load[rank * width : (rank + 1) * width]) for rank in ranks]
    said = f"Drawn: {tokens} tokens on each of {layout.ep_size} ranks. "
    if layout.ep_size > 1:
        said += f"The busiest rank computes {max(by_rank) * layout.ep_size / sum(by_rank):.2f} times the mean. "
    if dropped is not None:
        said += f"{dropped:.1%} of the assignments are dropped. "
    if layout.ep_size == 1:
        most = max(one["computed"] for one in load) * layout.num_experts / sum(by_rank)
        return said + f"The busiest expert computes {most:.2f} times the mean. One rank alone sends nothing."
    sent = [traffic.forward(rank) for rank in ranks]
    within, between = (max(getattr(one, f"{way}_bytes") for one in sent) for way in ("within", "between"))
    both = sum(traffic.sent_bytes(rank) for rank in ranks)
    return said + (
        f"Forward pass of one layer: a rank sends at most {show_bytes(within)} within its node and "
        f"{show_bytes(between)} between nodes (dispatch and combine, BF16). Forward and backward, all ranks: "
        f"{show_bytes(both)}."
    )


EXPERTS = Panel(
    "Experts: load and traffic",
    {
        "experts": Control("experts", powers(4, 128), 64, "slider"),
        "top_k": Control("k", named((1, 2, 3, 4, 6, 8)), 4, "slider"),
        "capacity": Control(
            "capacity",
            (("none: dropless", DROPLESS), *((f"{c:g}", c) for c in (0.5, 1.0, 1.25, 1.5, 2.0, 4.0))),
            DROPLESS,
            "slider",
        ),
        **controls(ep=(16, powers(1, 32))),
        "nodes": Control("nodes", powers(1, 16), 2, "slider"),
        "max_nodes": Control("nodes a token", (("no limit", NO_LIMIT), *named((1, 2, 3, 4))), NO_LIMIT, "slider"),
        "skew": Control("skew", named((0.0, 0.25, 0.5, 0.75, 1.0, 1.5)), 0.5, "slider"),
        "method": Control("a token travels", METHODS, "plain"),
        "d_model": Control("d_model", powers(512, 8192), 4096, "slider"),
    },
    _draw_experts,
)
