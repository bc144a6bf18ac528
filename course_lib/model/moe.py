"""A mixture of experts in place of a block's MLP: a router chooses `top_k` of E experts for each token.

    x_TD -> scores -> choose (groups, top-k) -> weigh -> drop         a Routing: who goes where, with what weight
         -> dispatch -> each expert on its own rows -> combine        y_TD, beside the shared experts' output

`T` tokens (B S of them) · `k` assignments a token (top_k) · `A` all assignments (T k) · `R` rows: the assignments that
are kept · `E` experts · `G` groups of experts.

    model.blocks[i].mlp.router.weight               E x D
    model.blocks[i].mlp.experts[e].gate .up .down   D -> F, D -> F, F -> D with F = d_expert
    model.blocks[i].mlp.shared                      one MLP of width num_shared_experts x d_expert, or None

Expert parallelism is applied from outside. It keeps a part of `moe.experts`, and replaces

    moe.run_experts(experts, x_TD, routing) -> y_TD
    moe.sum_load(tokens_E) -> tokens_E      adds up the load of all ranks (here there is one)
    moe.enter(x_BsD) -> x_BSD               all tokens from each rank's own, where the residual stream between blocks is
                                            cut
    moe.leave(y_BSD) -> y_BsD               and back
    moe.aux_share                           of the auxiliary loss's gradient, where several ranks compute the same one
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.config import ModelConfig, MoeConfig, capacity_of
from course_lib.validate import Count, Size, checked


@dataclass(frozen=True)
class Routing:
    """Where each token goes. Only `weight_Tk` and `share_TE` carry a gradient.
    expert_Tk   the chosen experts, an expert at most once a token
    weight_Tk   what each one's output counts for
    kept_Tk     False where the expert's capacity was spent: this choice is dropped
    share_TE    each token's scores as shares that add up to 1, for the auxiliary loss
    """

    expert_Tk: Tensor
    weight_Tk: Tensor
    kept_Tk: Tensor
    share_TE: Tensor

    def detached(self) -> "Routing":
        return replace(self, weight_Tk=self.weight_Tk.detach(), share_TE=self.share_TE.detach())

    @property
    def tokens_E(self) -> Tensor:
        """The load: how many assignments fell on each expert, dropped ones included."""
        return self.expert_Tk.flatten().bincount(minlength=self.share_TE.shape[1])

    @property
    def dropped_E(self) -> Tensor:
        return self.expert_Tk[~self.kept_Tk].bincount(minlength=self.share_TE.shape[1])


# ---------------------------------------------------------------- the router, one step a function


def scores(logits_TE: Tensor, score: str) -> Tensor:
    """Affinity of each token to each expert, from 0 to 1: one softmax over the experts, or a sigmoid of each."""
    return logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()


@checked(num_groups=Size, max_groups=Size, top_k=Size)
def limit_groups(choice_TE: Tensor, num_groups: int, max_groups: int, top_k: int) -> Tensor:
    """The same affinities, minus infinity outside each token's `max_groups` best groups.

    A group's score is the sum of its top_k / max_groups highest affinities.
    Source   DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, "Node-Limited Routing"
    """
    if max_groups == num_groups:
        return choice_TE
    grouped_TGe = choice_TE.unflatten(-1, (num_groups, -1))
    best = min(max(top_k // max_groups, 1), grouped_TGe.shape[-1])
    score_TG = grouped_TGe.topk(best, dim=-1).values.sum(-1)
    chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, score_TG.topk(max_groups, dim=-1).indices, True)
    return grouped_TGe.masked_fill(~chosen_TG.unsqueeze(-1), -math.inf).flatten(-2)


def choose(score_TE: Tensor, bias_E: Tensor | None, config: MoeConfig) -> Tensor:
    """The experts of each token, best first: the highest scores, bias added. The bias chooses, it does not weigh.
    Shapes   score_TE -> expert_Tk
    """
    choice_TE = score_TE.detach() if bias_E is None else score_TE.detach() + bias_E
    choice_TE = limit_groups(choice_TE, config.num_groups, config.max_groups, config.top_k)
    return choice_TE.topk(config.top_k, dim=-1).indices


def weigh(score_TE: Tensor, expert_Tk: Tensor, config: MoeConfig) -> Tensor:
    """The weights of the chosen experts: their scores without bias, divided by their sum where the config says so."""
    weight_Tk = score_TE.gather(1, expert_Tk)
    if config.normalise_weights:
        weight_Tk = weight_Tk / (weight_Tk.sum(-1, keepdim=True) + 1e-20)
    return weight_Tk * config.routed_scale


def capacity(num_tokens: Count, config: MoeConfig) -> int | None:
    """How many assignments one expert takes; None: all of them."""
    if config.capacity_factor is None:
        return None
    return capacity_of(num_tokens, config.top_k, config.num_experts, config.capacity_factor)


def keep(expert_Tk: Tensor, num_experts: int, room: int | None) -> Tensor:
    """Which assignments fit: each expert takes its first `room`; all first assignments come before any second one.
    Shapes   expert_Tk -> kept_Tk
    Source   Lepikhin et al. 2020 (arXiv:2006.16668), algorithm 1
    """
    if room is None:
        return torch.ones_like(expert_Tk, dtype=torch.bool)
    expert_A = expert_Tk.t().flatten()  # all first assignments, then all second ones
    order_A = expert_A.argsort(stable=True)
    tokens_E = expert_A.bincount(minlength=num_experts)
    first_E = tokens_E.cumsum(0) - tokens_E
    place_A = torch.empty_like(expert_A)  # in its expert's queue
    place_A[order_A] = torch.arange(len(expert_A), device=expert_A.device) - first_E[expert_A[order_A]]
    return (place_A < room).unflatten(0, expert_Tk.t().shape).t()


def route(logits_TE: Tensor, config: MoeConfig, bias_E: Tensor | None = None) -> Routing:
    """All steps: scores, the choice, its weights, and what fits."""
    score_TE = scores(logits_TE, config.score)
    expert_Tk = choose(score_TE, bias_E, config)
    weight_Tk = weigh(score_TE, expert_Tk, config)
    kept_Tk = keep(expert_Tk, config.num_experts, capacity(len(logits_TE), config))
    share_TE = score_TE / (score_TE.sum(-1, keepdim=True) + 1e-20) if config.score == "sigmoid" else score_TE
    return Routing(expert_Tk, weight_Tk, kept_Tk, share_TE)


class Router(nn.Module):
    """One score for each expert, in FP32 at least, and the bias that balances where the config asks for it.

    The bias moves by +- bias_speed, so the number of steps up minus steps down says it exactly, in any precision.
    """

    def __init__(self, d_model: int, config: MoeConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, d_model))
        self.register_buffer("bias_steps_E", torch.zeros(config.num_experts, dtype=torch.int64))

    @property
    def bias_E(self) -> Tensor | None:
        """What is added to the scores for choosing; None unless balancing is "bias"."""
        return self.bias_steps_E * self.config.bias_speed if self.config.balancing == "bias" else None

    def forward(self, x_TD: Tensor) -> Routing:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
        return route(logits_TE, self.config, self.bias_E)


# ---------------------------------------------------------------- dispatch, experts, combine


def dispatch(x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """One row for each kept assignment, sorted by expert.
    Shapes   x_TD -> x_RD, assignment_R, rows_E     (assignment_R: t k + slot of each row; rows_E: rows of each expert)
    """
    expert_A = routing.expert_Tk.flatten()
    order_A = expert_A.argsort(stable=True)
    assignment_R = order_A[routing.kept_Tk.flatten()[order_A]]
    rows_E = expert_A[assignment_R].bincount(minlength=routing.share_TE.shape[1])
    return x_TD[assignment_R // routing.expert_Tk.shape[1]], assignment_R, rows_E


def apply_experts(experts: Iterable[nn.Module], x_RD: Tensor, rows: list[int]) -> Tensor:
    """Each expert on its own rows, which lie together. One without rows runs on none, so that its gradient is zero."""
    return torch.cat([expert(part_RD) for expert, part_RD in zip(experts, x_RD.split(rows), strict=True)])


def combine(y_RD: Tensor, assignment_R: Tensor, routing: Routing) -> Tensor:
    """Each token's sum of its experts' outputs, times their weights; a token dropped everywhere gets zero.
    Shapes   y_RD -> y_TD
    """
    num_tokens, top_k = routing.weight_Tk.shape
    weight_R1 = routing.weight_Tk.flatten()[assignment_R].to(y_RD.dtype).unsqueeze(1)
    y_TD = torch.zeros(num_tokens, y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    return y_TD.index_put(
        (assignment_R // top_k,), y_RD * weight_R1, accumulate=True
    )  # index_add would keep its addends


def run_experts(experts: nn.ModuleList, x_TD: Tensor, routing: Routing) -> Tensor:
    """Dispatch, experts, combine, where all experts are here. Expert parallelism puts its own in this one's place."""
    x_RD, assignment_R, rows_E = dispatch(x_TD, routing)
    y_RD = apply_experts(experts, x_RD, rows_E.tolist())
    return combine(y_RD, assignment_R, routing)


def recomputing() -> bool:
    """Whether a backward pass runs now: then a checkpoint runs this forward pass again, for whom its graph ends."""
    return torch._C._current_graph_task_id() != -1


def alone(x: Tensor) -> Tensor:
    """What all ranks have together, where there is one: the tokens or the load as they are."""
    return x


class MoE(nn.Module):
    """Router, experts and shared experts. `make_mlp(width)` builds one MLP; `llama.py` brings its own.

    `routing` is that of the last forward pass: in the graph until the loss has been made, then without.
    """

    def __init__(self, d_model: int, config: MoeConfig, make_mlp: Callable[[int], nn.Module]):
        super().__init__()
        self.config = config
        self.router = Router(d_model, config)
        self.experts = nn.ModuleList(make_mlp(config.d_expert) for _ in range(config.num_experts))
        shared = config.num_shared_experts
        self.shared = make_mlp(shared * config.d_expert) if shared else None
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.run_experts = run_experts
        self.sum_load = self.enter = self.leave = alone
        self.aux_share = 1.0
        self.routing: Routing | None = None

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = self.enter(x_BSD)
        x_TD = x_BSD.flatten(0, -2)
        routing = self.router(x_TD)
        if not recomputing():
            self.routing = routing
        y_BSD = self.run_experts(self.experts, x_TD, routing).view_as(x_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        return self.leave(y_BSD)


# ---------------------------------------------------------------- balancing


def balance_loss(share_TE: Tensor, tokens_E: Tensor) -> Tensor:
    """E x sum over experts of (share of assignments) x (mean share of scores): 1 in balance, up to E when all go to
    one.

    The assignments are counted and have no gradient; it flows through the scores. `tokens_E` may be of more tokens than
    `share_TE`: of all ranks.
    Source   Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6, where top_k is 1. transformers' is top_k times it.
    """
    chosen_E = tokens_E.to(share_TE.dtype) / tokens_E.sum()
    return share_TE.shape[1] * (chosen_E * share_TE.mean(0)).sum()


def moe_layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def moe_losses(model: nn.Module) -> Tensor | None:
    """The auxiliary losses of the last forward pass, times their coefficients; None where no layer has one."""
    layers = [moe for moe in moe_layers(model) if moe.config.balancing == "aux_loss"]
    if not layers:
        return None
    return sum(aux_loss(moe) for moe in layers)


def aux_loss(moe: MoE) -> Tensor:
    """That of one layer. Its value is whole on every rank; of its gradient each rank takes `aux_share`."""
    loss = moe.config.aux_coefficient * balance_loss(moe.routing.share_TE, moe.sum_load(moe.routing.tokens_E))
    return loss if moe.aux_share == 1 else loss.detach() + moe.aux_share * (loss - loss.detach())


@torch.no_grad()
def count_load(model: nn.Module) -> None:
    """Adds the load of the last forward pass to `load_E` of each layer: once a micro-batch, before its backward."""
    for moe in moe_layers(model):
        moe.load_E += moe.routing.tokens_E
        moe.routing = moe.routing.detached()


def add_balancing(model: nn.Module, loss: Tensor) -> Tensor:
    """The loss of one micro-batch plus the auxiliary losses; the load is counted. Without experts the loss itself."""
    auxiliary = moe_losses(model)
    count_load(model)
    return loss if auxiliary is None else loss + auxiliary


@torch.no_grad()
def balance_after_step(model: nn.Module) -> None:
    """After the optimizer's step: biases of overloaded experts a step down, of others up; the count starts anew.

    Judged by the load of the whole batch: all micro-batches, all ranks.
    Source   DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; Wang et al. 2024 (arXiv:2408.15664), algorithm 1
    """
    for moe in moe_layers(model):
        if moe.config.balancing == "bias":
            load_E = moe.sum_load(moe.load_E)
            moe.router.bias_steps_E += (load_E.sum() - load_E * len(load_E)).sign()  # mean minus load, times E
        moe.load_E.zero_()


def with_moe(config: ModelConfig, **changes) -> ModelConfig:
    """The same model with other choices of its experts: with_moe(config, balancing="bias")."""
    return replace(config, moe=replace(config.moe, **changes))
