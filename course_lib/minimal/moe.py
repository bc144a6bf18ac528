"""A mixture of experts on one process without options: a router, rows sorted by expert, experts, a weighted sum.

    x_TD -> expert_Tk, weight_Tk     choose_experts   each token's k experts, and what their outputs count for
         -> x_RD, order_R, rows_E    dispatch         one row per assignment, sorted by expert
         -> y_RD                     run_experts      each expert on its own rows
         -> y_TD                     combine          each token's weighted sum

T tokens of all sequences, E experts, R = T k rows. The engine in model/moe.py adds sigmoid scores, a bias that
balances, limits on groups of experts, capacities, and the count of a load over ranks.

Source   Shazeer et al. 2017 (arXiv:1701.06538), section 2; Jiang et al. 2024 (arXiv:2401.04088), section 2.1
"""

from dataclasses import replace

import torch
from torch import nn

from course_lib.config import preset
from course_lib.devices import rank_device
from course_lib.model import build, with_moe

MOE_CONFIG = with_moe(replace(preset("toy-moe"), num_layers=2), balancing="none")


def choose_experts(logits_TE, k):
    """Return each token's k experts, best first, and their weights, which add up to 1."""
    score_TE = logits_TE.softmax(-1)
    score_Tk, expert_Tk = score_TE.topk(k)
    return expert_Tk, score_Tk / score_Tk.sum(-1, keepdim=True)


def dispatch(x_TD, expert_Tk, num_experts):
    """Return one row per assignment, sorted by expert; which assignment each row is; how many rows each expert has."""
    expert_A = expert_Tk.flatten()  # one for each assignment t k + slot
    order_R = expert_A.argsort(stable=True)
    rows_E = expert_A.bincount(minlength=num_experts)
    return x_TD[order_R // expert_Tk.shape[1]], order_R, rows_E


def run_experts(experts, x_RD, rows_E):
    """Run each expert once, on its own rows, which lie together."""
    parts = x_RD.split(rows_E.tolist())
    return torch.cat([expert(x) for expert, x in zip(experts, parts, strict=True)])


def combine(y_RD, order_R, weight_Tk):
    """Return each token's sum over its rows, each times its weight."""
    weighted_RD = y_RD * weight_Tk.flatten()[order_R, None].to(y_RD.dtype)
    y_TD = torch.zeros(len(weight_Tk), y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    return y_TD.index_add(0, order_R // weight_Tk.shape[1], weighted_RD)


class MoE(nn.Module):
    """A router and experts in place of a block's MLP."""

    def __init__(self, router, experts, k):
        super().__init__()
        self.router, self.experts, self.k = router, experts, k

    def forward(self, x_BSD):
        """Choose, then run; what the router chose stays readable."""
        x_TD = x_BSD.flatten(0, -2)
        self.logits_TE = self.router(x_TD)
        self.expert_Tk, weight_Tk = choose_experts(self.logits_TE, self.k)
        return self.run(x_TD, self.expert_Tk, weight_Tk).view_as(x_BSD)

    def run(self, x_TD, expert_Tk, weight_Tk):
        """Dispatch, experts, combine."""
        x_RD, order_R, rows_E = dispatch(x_TD, expert_Tk, self.router.out_features)
        y_RD = run_experts(self.experts, x_RD, rows_E)
        return combine(y_RD, order_R, weight_Tk)


def balance_loss(logits_TE, expert_Tk):
    """Return E sum_e f_e p_e: 1 where even, below 1 where scores oppose the load, up to E / k if all choose alike."""
    num_experts = logits_TE.shape[1]
    f_E = expert_Tk.flatten().bincount(minlength=num_experts) / expert_Tk.numel()  # a count has no gradient
    p_E = logits_TE.softmax(-1).mean(0)
    return num_experts * (f_E * p_E).sum()


# --- the layer in a Llama
def _linear_of(weight):
    """Return a linear layer without bias that has these weights."""
    linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype, device=weight.device)
    linear.weight = nn.Parameter(weight.detach().clone())
    return linear


def put_experts(model, layer):
    """Put layer(router, experts, k) in the place of each mixture of experts of a Llama; parameters keep their names."""
    for block in model.blocks:
        block.mlp = layer(_linear_of(block.mlp.router.weight), block.mlp.experts, model.config.moe.top_k)
    return model


def layer_parts():
    """Return a router, experts and k, the same on every rank, in float64; the router has preferences, as trained."""
    layer = build(MOE_CONFIG, dtype=torch.float64).blocks[0].mlp
    return _linear_of(random_numbers(2, *layer.router.weight.shape) / 4), layer.experts, MOE_CONFIG.moe.top_k


def tokens_of_rank(rank, num_tokens=64):
    """Return a rank's tokens: normal numbers, in float64."""
    return random_numbers(100 + rank, num_tokens, MOE_CONFIG.d_model)


def random_numbers(seed, *shape):
    """Return the same normal numbers on every rank, in float64, on the rank's device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(rank_device())
