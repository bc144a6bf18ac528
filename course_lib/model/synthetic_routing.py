"""Routing without a model: tokens that choose experts at random, with given skew, k and limit.

experts = synthetic_routing(layout, tokens_per_rank=512, top_k=4, skew=0.5, max_nodes=2)     # one expert_Tk a rank
moe_traffic(experts, layout, ...)                                                            # bytes of this draw
"""

import torch
from torch import Tensor

from course_lib.config import check_groups
from course_lib.layout.experts import ExpertLayout
from course_lib.model.moe import limit_groups
from course_lib.validate import Amount, Seed, Size, checked


def popularity(num_experts: Size, skew: Amount = 0.0, seed: Seed | None = None) -> list[float]:
    """How likely each expert is a token's first choice: 1 / place^skew (Zipf). 0 is uniform, 1 already strong.

    Without a seed expert 0 is the most popular, so neighbours, which share a rank, are popular together. A seed mixes.
    """
    weights = [(place + 1.0) ** -skew for place in range(num_experts)]
    if seed is not None:
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed)).tolist()
        weights = [weights[place] for place in order]
    return [weight / sum(weights) for weight in weights]


@checked
def synthetic_routing(
    layout: ExpertLayout,
    tokens_per_rank: Size,
    top_k: Size,
    skew: Amount = 0.0,
    max_nodes: Size | None = None,
    seed: Seed = 0,
    mixed: bool = True,
) -> list[Tensor]:
    """For each rank expert_Tk: k different experts a token, drawn by popularity one after the other.

    max_nodes: experts of at most so many nodes; those whose best top_k / max_nodes scores have the largest sum.
    mixed: popular experts lie anywhere; otherwise together, on the first ranks.
    """
    check_groups(layout.num_experts, top_k, layout.num_nodes, max_nodes)
    generator = torch.Generator().manual_seed(seed)
    log_p_E = torch.tensor(popularity(layout.num_experts, skew, seed if mixed else None)).log()
    routing = []
    for _ in range(layout.ep_size):
        uniform_TE = torch.rand(tokens_per_rank, layout.num_experts, generator=generator).clamp(1e-9, 1 - 1e-7)
        score_TE = (log_p_E - (-uniform_TE.log()).log()).exp()  # the k largest: k draws without putting back
        if max_nodes is not None:
            score_TE = limit_groups(score_TE, layout.num_nodes, max_nodes, top_k)
        routing.append(score_TE.topk(top_k, dim=1).indices)
    return routing
