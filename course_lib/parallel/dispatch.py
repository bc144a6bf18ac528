"""Dispatch and combine when experts live on other ranks: all-to-alls with uneven pieces, and their gradients.

Each function here has the signature of `moe.run_experts`, with the group before it, and takes its place:

    run_plain            a row for every assignment, to the rank of its expert; weights are applied at home
    run_once             a row to each rank that has an expert of the token; weights travel, and rows return added up
    run_once_per_node    a row to each node, at the rank with the sender's place there; then run_once inside the node

Nobody knows how many rows will come: counts are exchanged first. `exchange` then moves the rows, and in backward their
gradients, by the same all-to-all with its two lists of rows swapped. Plain `dist.all_to_all_single` would give the same
numbers forward and, without a word, no gradient.

Every rank takes part in every exchange, also with no rows to send or receive: experts run on none, too, so that
backward reaches each exchange on each rank.

Bytes    course_lib/traffic/routing.py, to the byte
Source   Lepikhin et al. 2020 (arXiv:2006.16668); DeepSeek-AI 2024 (arXiv:2412.19437), section 3.2.2
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.model.moe import Routing, apply_experts, combine, dispatch


class _Exchange(torch.autograd.Function):
    """Several tensors in one node of the graph: then backward sends them in the same order on every rank."""

    @staticmethod
    def forward(ctx, group, sent_rows, received_rows, *tensors):
        ctx.group, ctx.sent_rows, ctx.received_rows = group, sent_rows, received_rows
        return tuple(comm.all_to_all(x.contiguous(), group, sent_rows, received_rows) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        home = (comm.all_to_all(grad.contiguous(), ctx.group, ctx.received_rows, ctx.sent_rows) for grad in grads)
        return None, None, None, *home


def exchange(tensors: Iterable[Tensor], group: Group, sent_rows: list[int], received_rows: list[int]) -> tuple:
    """Rows of each tensor, sorted by destination, to their ranks; what comes back is sorted by source.
    Shapes   x_RD with R = sum(sent_rows) -> y_RD with R = sum(received_rows), for each
    Bytes    sent per rank: the rows for others forward; backward the gradients of the rows from others
    """
    return _Exchange.apply(check_group(group, "exchange"), sent_rows, received_rows, *tensors)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """counts[j], for rank j -> row i: what rank i has for me. Bytes sent per rank: (G - 1) / G * counts.nbytes"""
    return comm.all_to_all(counts.contiguous(), check_group(group, "exchange_counts"))


def run_plain(group: Group, experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
    """What `moe.run_experts` does alone, here over a group: each row travels. My experts are E / ep neighbours."""
    x_RD, assignment_R, rows_E = dispatch(x_TD, routing)
    to_rank = rows_E.view(group.size(), -1)
    from_rank = exchange_counts(to_rank, group)
    sent_rows, received_rows = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()

    (received_RD,) = exchange([x_RD], group, sent_rows, received_rows)  # by source, then by expert
    order_R = by_expert(from_rank)
    y_RD = apply_experts(experts.values(), received_RD[order_R], from_rank.sum(0).tolist())
    (returned_RD,) = exchange([y_RD[inverse(order_R)]], group, received_rows, sent_rows)
    return combine(returned_RD, assignment_R, routing)


def by_expert(from_rank: Tensor) -> Tensor:
    """The order that puts rows sorted by source, then expert, into one sorted by expert, then source."""
    ranks, experts = from_rank.shape
    expert_R = torch.arange(experts, device=from_rank.device).repeat(ranks)
    return expert_R.repeat_interleave(from_rank.flatten()).argsort(stable=True)


def inverse(order_R: Tensor) -> Tensor:
    """The order that undoes it: x[order][inverse(order)] is x."""
    undone_R = torch.empty_like(order_R)
    undone_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return undone_R


@dataclass(frozen=True)
class Assignments:
    """What travels beside rows: each one's k experts, counted from the first of the place where it is; -1 for none."""

    expert_Rk: Tensor
    weight_Rk: Tensor


_Inner = Callable[[Tensor, Assignments], Tensor]  # (x_RD, assignments) -> y_RD, weighted and added up


def run_once(group: Group, experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
    """`moe.run_experts` over a group: a token travels to a rank once, however many experts it has there."""
    return to_places(group, len(experts), x_TD, _assignments_of(routing), partial(_run_here, experts))


def run_once_per_node(across: Group, inside: Group, experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
    """The same over nodes, then ranks in a node: between nodes a token travels once to each node that it reaches.

    across: the ranks with my place in every node; inside: the ranks of my node
    """
    in_node = partial(to_places, inside, len(experts), inner=partial(_run_here, experts))
    return to_places(across, len(experts) * inside.size(), x_TD, _assignments_of(routing), in_node)


def _assignments_of(routing: Routing) -> Assignments:
    return Assignments(torch.where(routing.kept_Tk, routing.expert_Tk, -1).to(torch.int32), routing.weight_Tk)


def to_places(group: Group, width: int, x_RD: Tensor, assignments: Assignments, inner: _Inner) -> Tensor:
    """Each row to every place (rank of the group, with `width` experts) that it chose; there `inner`; back, and added.
    Shapes   x_RD -> y_RD
    """
    place_Rk = torch.where(assignments.expert_Rk < 0, group.size(), assignments.expert_Rk // width)
    goes_RG = torch.zeros(len(x_RD), group.size() + 1, dtype=torch.bool, device=x_RD.device)
    goes_RG = goes_RG.scatter_(1, place_Rk.long(), True)[:, :-1]
    place_C, row_C = goes_RG.t().nonzero().unbind(1)  # copies, sorted by place
    to_place_G = goes_RG.sum(0)
    received_rows, sent_rows = exchange_counts(to_place_G, group).tolist(), to_place_G.tolist()

    here_Ck = place_Rk[row_C] == place_C[:, None]
    expert_Ck = torch.where(here_Ck, assignments.expert_Rk[row_C] - (place_C * width).to(torch.int32)[:, None], -1)
    arrived_expert_Ck = comm.all_to_all(expert_Ck, group, sent_rows, received_rows)
    arrived_CD, arrived_weight_Ck = exchange(
        [x_RD[row_C], assignments.weight_Rk[row_C]], group, sent_rows, received_rows
    )
    y_CD = inner(arrived_CD, Assignments(arrived_expert_Ck, arrived_weight_Ck))
    (returned_CD,) = exchange([y_CD], group, received_rows, sent_rows)
    zeros_RD = torch.zeros_like(x_RD, dtype=returned_CD.dtype)
    return zeros_RD.index_put((row_C,), returned_CD, accumulate=True)


def _run_here(experts: nn.Module, x_RD: Tensor, assignments: Assignments) -> Tensor:
    """My experts on rows that have arrived: the weighted sum of those that each row chose."""
    kept_Rk = assignments.expert_Rk >= 0
    no_share_RE = x_RD.new_empty(len(x_RD), len(experts))
    routing = Routing(assignments.expert_Rk.clamp(min=0).long(), assignments.weight_Rk, kept_Rk, no_share_RE)
    part_RD, assignment_R, rows_e = dispatch(x_RD, routing)
    return combine(apply_experts(experts.values(), part_RD, rows_e.tolist()), assignment_R, routing)
