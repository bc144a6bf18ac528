"""Routing without a model: tokens choose experts at random, with given skew, k and limit; what a capacity drops."""

from collections import Counter
from heapq import nlargest
from math import log
from random import Random

from course_lib.config import check_groups
from course_lib.layout.experts import ExpertLayout
from course_lib.validate import Amount, Seed, Size, checked

Choices = list[list[int]]  # expert_Tk: the experts of each token, -1 where a choice was dropped


def popularity(num_experts: Size, skew: Amount = 0.0, seed: Seed = 0) -> list[float]:
    """How likely each expert is a token's first choice: 1 / place^skew (Zipf), mixed. 0 is uniform, 1 strong."""
    weights = [(place + 1.0) ** -skew for place in range(num_experts)]
    Random(seed).shuffle(weights)
    return [weight / sum(weights) for weight in weights]


def best_groups(score_E: list[float], num_groups: int, max_groups: int, top_k: int) -> set[int]:
    """Return a token's best groups: those whose top_k / max_groups best scores have the largest sum.

    Source   DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, "Node-Limited Routing"; model/moe.py has it in torch
    """
    width = len(score_E) // num_groups
    best = min(max(top_k // max_groups, 1), width)
    sums = [sum(sorted(score_E[g * width : (g + 1) * width])[-best:]) for g in range(num_groups)]
    return set(sorted(range(num_groups), key=sums.__getitem__, reverse=True)[:max_groups])


@checked
def synthetic_routing(
    layout: ExpertLayout,
    tokens_per_rank: Size,
    top_k: Size,
    skew: Amount = 0.0,
    max_nodes: Size | None = None,
    seed: Seed = 0,
) -> list[Choices]:
    """For each rank expert_Tk: k different experts a token, drawn by popularity one after the other.

    max_nodes: experts of at most so many nodes; those whose best top_k / max_nodes scores have the largest sum.
    """
    E, nodes, uniform = layout.num_experts, layout.num_nodes, Random(seed).random
    check_groups(E, top_k, nodes, max_nodes)
    p_E, node_E = popularity(E, skew, seed), [expert * nodes // E for expert in range(E)]
    routing = []
    for _ in range(layout.ep_size):
        expert_Tk = []
        for _ in range(tokens_per_rank):
            score_E = [-p / log(uniform() or 0.5) for p in p_E]  # the k largest: k draws without putting back
            allowed = range(E)
            if max_nodes and max_nodes < nodes:
                groups = best_groups(score_E, nodes, max_nodes, top_k)
                allowed = [expert for expert in allowed if node_E[expert] in groups]
            expert_Tk.append(nlargest(top_k, allowed, key=score_E.__getitem__))
        routing.append(expert_Tk)
    return routing


def keep_fitting(expert_Tk: Choices, room: int | None) -> Choices:
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
