"""Experts and tensor parallelism together: attention is cut over tp, and so is every matrix of an expert, or none.

All ranks of a tp_group have the same tokens, route them alike, and each sends whole rows to its parts of the experts:
works for few large experts, keeps one process's routing, and sends each row tp times. The other way is folded
(`fold_experts`): whole experts are spread over tp's ranks too, and each routes its own tokens of the sequence-sharded
residual stream. It sends each row once, gathers no tokens for experts, and takes ep up to dp x cp x tp.

What a rank computes of an expert's output is one term of a sum over tp. So is its part of all outputs combined: one
sum, after combine, serves all experts. The router is whole on each rank, as norms are.

Where the residual stream between blocks is cut along the sequence (parallel/sequence.py), the whole layer lies between
one all-gather and one reduce-scatter, and nothing inside is summed:

                          replicated residual stream             sharded residual stream
    tokens                x_BSD as it is                         all-gather x_BsD to x_BSD; backward reduce-scatter
    outputs               all-reduce after combine               reduce-scatter at the end; backward all-gather
    shared experts        an all-reduce of their own             in the same sum
    gradients of x and    all-reduced before they reach          of my part of the outputs alone, until the
    of chosen weights     the router                             reduce-scatter
    router's gradient     whole on every rank                    a part of a sum: of the kind norms (sums.py)
    auxiliary loss        the same on every rank, counts once    would count tp times: each takes 1 / tp of its gradient
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from course_lib.comm.conjugate import InFlight, copy_in, scatter_sum, sum_out
from course_lib.config import ModelConfig
from course_lib.model.moe import MoE, Routing
from course_lib.parallel import tensor
from course_lib.parallel.linear import ReplicatedResidual
from course_lib.parallel.sequence import SEQUENCE, ShardedResidual

_Residual = ReplicatedResidual | ShardedResidual


@dataclass(frozen=True)
class PartialResidual(ReplicatedResidual):
    """Inside an expert nothing is summed: what comes out is a part of a sum, and stays so until after combine."""

    def leave(self, x_partial: Tensor) -> Tensor:
        return x_partial

    def start_sum(self, grad_partial: Tensor) -> InFlight:
        return InFlight(None, lambda: grad_partial)


def cut_block(block: nn.Module, residual: _Residual, config: ModelConfig, folded: bool = False) -> None:
    """The matrices of one block, with experts or without; folded: experts stay whole. Routers are, as norms are."""
    tensor.cut_attention(block.attention, residual, config)
    if not isinstance(block.mlp, MoE):
        tensor.shard_mlp(block.mlp, residual)
    elif folded:
        fold_experts(block.mlp, residual)
    elif isinstance(residual, ShardedResidual):
        cut_experts_sharded(block.mlp, residual)
    else:
        _cut_experts(block.mlp, residual)


def _cut_experts(moe: MoE, residual: ReplicatedResidual) -> None:
    """One sum of inputs' gradients and one of outputs for all experts together, outside of dispatch and combine."""
    for expert in moe.experts.children():
        tensor.shard_mlp(expert, PartialResidual(residual.group))
    if moe.shared is not None:
        tensor.shard_mlp(moe.shared, residual)
    run, tp_group = moe.run_experts, residual.group

    def run_parts(experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
        """The weights enter as x does: each rank's gradient of them comes from its part of the outputs."""
        routing = replace(routing, weight_Tk=copy_in(routing.weight_Tk, tp_group))
        return sum_out(run(experts, copy_in(x_TD, tp_group), routing), tp_group)

    moe.run_experts = run_parts


def cut_experts_sharded(moe: MoE, residual: ShardedResidual) -> None:
    """My tokens become all, and the layer's outputs mine again; between, everything is a part of a sum.
    Bytes    sent per rank: (tp - 1) / tp of B S D (S padded), twice forward and twice backward
    """
    inside = PartialResidual(residual.group)
    for mlp in moe.experts.children():
        tensor.shard_mlp(mlp, inside)
    if moe.shared is not None:
        tensor.shard_mlp(moe.shared, inside)
    moe.enter = residual.enter
    moe.leave = partial(scatter_sum, group=residual.group, dim=SEQUENCE)
    moe.aux_share = 1 / residual.group.size()


def fold_experts(moe: MoE, residual: ShardedResidual) -> None:
    """Experts stay whole, and the router sees this rank's tokens alone. Shared experts are cut as a dense MLP is.

    The auxiliary loss is the mean over this rank's tokens, 1 / tp of all: so is its share of their mean.
    Bytes    sent per rank: those of a dense MLP, for shared experts only
    Source   Liu et al. 2025 (arXiv:2504.14960), MoE parallel folding
    """
    if moe.shared is not None:
        tensor.shard_mlp(moe.shared, residual)
    moe.aux_share = 1 / residual.group.size()
