"""Expert parallelism from scratch: each rank has some of the experts, and a token travels to those that it chose.

`group` has dp = ep x expert_dp ranks. Neighbours share the experts among them, so that tokens travel as short a way
as possible; ranks at a distance of ep have the same experts:

    dp 8, ep 4         ranks 0 1 2 3 | 4 5 6 7 each have all experts; 0 and 4 have the same ones
    ep_group           where tokens travel                                 0 1 2 3
    expert_dp_group    where gradients of experts are summed               0 4
    group              where gradients of everything else are summed       0 1 2 3 4 5 6 7

An expert's gradient is already the sum over the tokens of its ep_group: they came to it. It is summed over fewer ranks
than other gradients, and yet divided by the same number, the tokens of ALL ranks. A mean over its own group instead
would be ep times too large, and Adam would hide it.

With tensor parallelism as well: parallel/five_d.py, whose blocks expert_tensor.py cuts.

Source   Lepikhin et al. 2020 (arXiv:2006.16668); Fedus et al. 2021 (arXiv:2101.03961), section 3.1
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.layout.experts import METHODS, ExpertLayout, check_ep, check_expert_parallel
from course_lib.model.moe import MoE, moe_layers
from course_lib.parallel.dispatch import run_once, run_once_per_node, run_plain
from course_lib.parallel.engine import MicroBatches, ModelEngine, trainable
from course_lib.parallel.tensor import sum_gradients
from course_lib.parallel.whole import put_together


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of one rank; across and inside (nodes) only for once_per_node."""

    dp: Group
    ep: Group
    expert_dp: Group
    across: Group | None = None
    inside: Group | None = None


def expert_groups(group: Group, ep_size: int, ranks_per_node: int | None = None) -> ExpertGroups:
    """Makes them from the ranks of `group`, all of which must call it.
    Raises   ValueError if ep does not divide the ranks, before any group is made
    """
    check_ep(group.size(), ep_size)
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    first = rank - rank % ep_size
    ep_ranks = ranks[first : first + ep_size]
    across = inside = None
    if ranks_per_node is not None:
        node = (rank - first) // ranks_per_node * ranks_per_node
        across = _group(ep_ranks[rank % ranks_per_node :: ranks_per_node])
        inside = _group(ep_ranks[node : node + ranks_per_node])
    return ExpertGroups(group, _group(ep_ranks), _group(ranks[rank % ep_size :: ep_size]), across, inside)


def _group(ranks: list[int]) -> Group:
    return dist.new_group(ranks, use_local_synchronization=True)


class ExpertParallel(ModelEngine):
    """A model whose experts are spread over ranks. Each rank brings its own micro-batches, equally many, of any size.
    Raises   ValueError on every rank if one brings more micro-batches than another, or none has a token
    """

    def __init__(self, module: nn.Module, groups: ExpertGroups, layout: ExpertLayout) -> None:
        super().__init__(module)
        self.groups, self.layout, self.loss_group, self.norm_groups = groups, layout, groups.dp, (groups.dp,)

    def count_tokens(self, micro_batches: MicroBatches) -> int:
        """The tokens of all ranks in this step. Bytes sent per rank: 16 (dp - 1)"""
        device = next(self.parameters()).device
        mine = torch.tensor([[sum(y_BS.numel() for _, y_BS in micro_batches), len(micro_batches)]], device=device)
        tokens, counts = comm.all_gather(mine, self.groups.dp).unbind(1)
        if counts.min() != counts.max():
            raise ValueError(
                f"ranks bring {counts.tolist()} micro-batches; all must bring equally many, for experts wait for every "
                "rank's rows: add micro-batches with 0 rows where there are fewer"
            )
        if tokens.sum() == 0:
            raise ValueError("no rank brings a token; give at least one micro-batch with a row")
        return int(tokens.sum())

    def finish(self) -> None:
        """Gradients of experts over the ranks that have the same ones, of everything else over all.
        Bytes    sent per rank: 2 (G - 1) / G of this rank's experts (G = expert_dp), 2 (dp - 1) / dp of the rest
        """
        groups, experts = self.groups, my_experts(self)
        sum_gradients([param for param in self.parameters() if param not in experts], groups.dp)
        if groups.expert_dp.size() > 1:
            sum_gradients([param for param in self.parameters() if param in experts], groups.expert_dp)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        experts = my_experts(self)
        for _, param in trainable(self.module):
            yield param, (self.groups.expert_dp if param in experts else self.groups.dp).size()

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        return put_together(self.config, super().whole(tensor_of), {}, self.groups.ep)


def build(
    model: nn.Module, group: Group, ep_size: int | None = None, method: str = "plain", ranks_per_node: int | None = None
) -> ExpertParallel:
    """Cuts the model in place; returns the engine. Every rank brings the same weights: `model.build` with one seed.

    ep_size: over how many neighbours experts are spread; without it over the whole group
    method: "plain" | "once_per_rank" | "once_per_node" (with ranks_per_node), as in traffic/routing.py
    Bytes    none
    Raises   ValueError if model or group do not allow it, before anything is sent or changed
    """
    dp_size = check_group(group, "build").size()
    layout = check_expert_parallel(model.config, dp_size, ep_size or dp_size, ranks_per_node)
    if method not in METHODS[:-1]:
        raise ValueError(f"method {method!r} is unknown; choose from {', '.join(METHODS[:-1])}")
    _check_experts(model)
    per_node = layout.ranks_per_node if method == "once_per_node" else None
    groups = expert_groups(group, layout.ep_size, per_node)
    for moe in moe_layers(model):
        keep_my_experts(moe, layout, groups.ep.rank())
        moe.run_experts = runner(method, groups)
        moe.sum_load = partial(sum_over, groups=(group,))
    return ExpertParallel(model, groups, layout)


def _check_experts(model: nn.Module) -> None:
    """Raises ValueError if experts are cut already, or some of a layer are frozen otherwise than others."""
    for index, moe in enumerate(moe_layers(model)):
        if not isinstance(moe.experts, nn.ModuleList):
            raise ValueError(f"experts of layer {index} are a {type(moe.experts).__name__}: cut already; build anew")
        if len({tuple(param.requires_grad for param in expert.parameters()) for expert in moe.experts}) > 1:
            raise ValueError(
                f"experts of layer {index} are frozen in different ways: ranks would exchange gradients of different "
                "experts; freeze the same parameters in all of them"
            )


def keep_my_experts(moe: MoE, layout: ExpertLayout, ep_rank: int) -> None:
    """Experts keep their numbers, so that parameters keep their names: a dictionary, not a list."""
    mine = range(ep_rank * layout.experts_per_rank, (ep_rank + 1) * layout.experts_per_rank)
    moe.experts = nn.ModuleDict({str(index): moe.experts[index] for index in mine})


def runner(method: str, groups: ExpertGroups) -> Callable:
    """What takes the place of `moe.run_experts`."""
    if method == "plain":
        return partial(run_plain, groups.ep)
    if method == "once_per_rank":
        return partial(run_once, groups.ep)
    return partial(run_once_per_node, groups.across, groups.inside)


def sum_over(tokens_E: Tensor, groups: Iterable[Group]) -> Tensor:
    """The load of all ranks. Bytes sent per rank: 2 (G - 1) / G * 8 E over each group"""
    for group in groups:
        tokens_E = comm.all_reduce(tokens_E, group)
    return tokens_E


def my_experts(engine: nn.Module) -> set[nn.Parameter]:
    return {param for moe in moe_layers(engine) for param in moe.experts.parameters()}
