"""Dispatch and combine over ranks: values and gradients against one process, bytes against traffic/routing.py."""

import copy
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import comm
from course_lib.launch import launch
from course_lib.layout.experts import ExpertLayout
from course_lib.measure import ByteMeter
from course_lib.model import Routing, moe
from course_lib.panels.synthetic_routing import popularity, synthetic_routing
from course_lib.parallel import dispatch
from course_lib.parallel.expert import expert_groups
from course_lib.traffic.routing import moe_traffic

D = 6


@dataclass(frozen=True)
class Case:
    """skew with `together` sends nearly all to the first rank's experts; rank r brings tokens[r]."""

    method: str
    experts: int = 8
    top_k: int = 2
    ranks_per_node: int | None = None
    skew: float = 0.5
    together: bool = False
    max_nodes: int | None = None
    tokens: tuple[int, ...] = (7, 4, 9, 5)
    drop: float = 0.0
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case("plain"),
    "plain, top-1, tokens on one rank only": Case("plain", top_k=1, skew=5.0, together=True, tokens=(0, 11, 0, 0)),
    "plain, all experts, drops": Case("plain", top_k=8, drop=0.3),
    "once a rank": Case("once_per_rank", top_k=4),
    "once a rank, skewed, drops": Case(
        "once_per_rank", top_k=3, skew=2.0, together=True, drop=0.3, tokens=(5, 0, 3, 8)
    ),
    "once a node": Case("once_per_node", top_k=4, ranks_per_node=2),
    "once a node, limited, skewed": Case("once_per_node", top_k=3, ranks_per_node=2, max_nodes=1, skew=3.0),
    "once a node, tokens on one rank only": Case("once_per_node", top_k=1, ranks_per_node=2, tokens=(0, 0, 9, 0)),
    "nobody has a token": Case("once_per_node", ranks_per_node=2, tokens=(0, 0, 0, 0)),
    "bfloat16": Case("once_per_node", top_k=4, ranks_per_node=2, dtype=torch.bfloat16),
}


def routing_of(expert_Tk, weight_Tk, kept_Tk, num_experts):
    return Routing(expert_Tk, weight_Tk, kept_Tk, torch.empty(len(expert_Tk), num_experts))


def numbers(case, layout):
    """For each rank x_TD, expert_Tk, weight_Tk, kept_Tk; all experts; what the gradient of y is."""
    generator = torch.Generator().manual_seed(3)
    whole = synthetic_routing(layout, max(1, *case.tokens), case.top_k, case.skew, case.max_nodes, 1)
    if case.together:  # experts get the numbers of their places, the most popular is 0
        chance_E = popularity(case.experts, case.skew, 1)
        place_E = [sorted(chance_E, reverse=True).index(chance) for chance in chance_E]
        whole = [[[place_E[expert] for expert in row] for row in expert_Tk] for expert_Tk in whole]
    ranks = []
    for expert_Tk, count in zip(whole, case.tokens, strict=True):
        weight_Tk = torch.rand(count, case.top_k, generator=generator, dtype=torch.float64) + 0.1
        kept_Tk = torch.rand(count, case.top_k, generator=generator) >= case.drop
        x_TD = torch.randn(count, D, generator=generator, dtype=torch.float64)
        out_TD = torch.randn(count, D, generator=generator, dtype=torch.float64)
        weight_dtype = torch.promote_types(case.dtype, torch.float32)
        ranks.append(
            (
                x_TD.to(case.dtype),
                torch.tensor(expert_Tk)[:count],
                weight_Tk.to(weight_dtype),
                kept_Tk,
                out_TD.to(case.dtype),
            )
        )
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(D, D) for _ in range(case.experts)).to(case.dtype)
    return ranks, experts


def run_of(case, groups):
    if case.method == "plain":
        return partial(dispatch.run_plain, groups.ep)
    if case.method == "once_per_rank":
        return partial(dispatch.run_once, groups.ep)
    return partial(dispatch.run_once_per_node, groups.across, groups.inside)


def one_run(run, experts, x_TD, expert_Tk, weight_Tk, kept_Tk, out_TD, num_experts):
    """y, and gradients of x, weights and experts; bytes sent forward and backward."""
    x_TD, weight_Tk = x_TD.clone().requires_grad_(), weight_Tk.clone().requires_grad_()
    with ByteMeter() as forward:
        y_TD = run(experts, x_TD, routing_of(expert_Tk, weight_Tk, kept_Tk, num_experts))
    with ByteMeter() as backward:
        (y_TD * out_TD).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (x_TD, weight_Tk)]
    zeros = {name: torch.zeros_like(param) for name, param in experts.named_parameters()}
    of_experts = {name: zeros[name] if p.grad is None else p.grad for name, p in experts.named_parameters()}
    return y_TD.detach(), *grads, of_experts, (forward, backward)


def measure(case):
    layout = ExpertLayout(case.experts, 4, case.ranks_per_node)
    ranks, experts = numbers(case, layout)
    rank, mine = dist.get_rank(), slice(sum(case.tokens[: dist.get_rank()]), sum(case.tokens[: dist.get_rank() + 1]))
    groups = expert_groups(dist.group.WORLD, 4, case.ranks_per_node)
    width = layout.experts_per_rank
    my_experts = nn.ModuleDict({str(e): copy.deepcopy(experts[e]) for e in range(rank * width, (rank + 1) * width)})

    y, grad_x, grad_w, of_experts, meters = one_run(run_of(case, groups), my_experts, *ranks[rank], case.experts)
    joined = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    whole_y, whole_x, whole_w, whole_experts, _ = one_run(moe.run_experts, experts, *joined, case.experts)
    apart = {
        "y": y - whole_y[mine],
        "x": grad_x - whole_x[mine],
        "weights": grad_w - whole_w[mine],
        **{name: grad - whole_experts[name] for name, grad in of_experts.items()},
    }
    kept = [torch.where(kept_Tk, expert_Tk, -1) for _, expert_Tk, _, kept_Tk, _ in ranks]
    traffic = moe_traffic(kept, layout, D, case.method, case.dtype.itemsize)
    return {
        "apart": {name: x.abs().max().item() for name, x in apart.items() if x.numel()},
        "sent": [meter.sent_bytes for meter in meters],
        "expected": [traffic.forward(rank).total_bytes, traffic.backward(rank).total_bytes],
        "calls": [meter.calls for meter in meters],
        "rows": int(sum((expert_Tk >= 0).sum() for expert_Tk in kept)),
    }


PLANTED = {
    "without its gradient": ("exchange", lambda tensors, *rest: tuple(comm.all_to_all(x, *rest) for x in tensors)),
    "unsorted as it was sorted": ("inverse", lambda order_R: order_R),
    "weights without a gradient": ("combine", lambda y, choice, routing: moe.combine(y, choice, routing.detached())),
    "weights of other choices": ("combine", lambda y, choice, routing: moe.combine(y, choice.flip(0), routing)),
}


def planted(name):
    place, wrong = PLANTED[name]
    with patch.object(dispatch, place, wrong):
        return measure(CASES["plain"])["apart"]


def everything():
    return {name: measure(case) for name, case in CASES.items()}, {name: planted(name) for name in PLANTED}


@pytest.fixture(scope="module")
def seen():
    return launch(everything, 4)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_one_process(seen, name):
    bound = 1e-12 if CASES[name].dtype == torch.float64 else 0.1
    for measured, _ in seen:
        assert all(apart <= bound for apart in measured[name]["apart"].values()), measured[name]["apart"]


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_moe_traffic_forward_and_backward(seen, name):
    for measured, _ in seen:
        assert measured[name]["sent"] == measured[name]["expected"]
        assert all(set(calls) == {"all_to_all"} for calls in measured[name]["calls"])
    assert (sum(sum(measured[name]["sent"]) for measured, _ in seen) > 1000) == (measured[name]["rows"] > 0)


def test_every_rank_calls_the_same_collectives_equally_often_also_without_a_row(seen):
    """Counts, rows, rows back; with weights ids as well, and all twice over nodes; then two exchanges of gradients."""
    expected = {"plain": (3, 2), "once_per_rank": (5, 3), "once_per_node": (10, 6)}
    for measured, _ in seen:
        for name, case in CASES.items():
            assert tuple(calls["all_to_all"] for calls in measured[name]["calls"]) == expected[case.method]


def test_planted_mistakes_are_found_where_they_are(seen):
    found = {name: set() for name in PLANTED}
    for _, planted_mistakes in seen:
        for name, apart in planted_mistakes.items():
            found[name] |= {"expert" if key[0].isdigit() else key for key, value in apart.items() if value > 1e-3}
    assert found["without its gradient"] == {"x", "expert"}, "values are right, and nothing tells of it"
    assert found["unsorted as it was sorted"] == {"y", "x", "weights", "expert"}
    assert found["weights without a gradient"] == {"weights"}
    assert found["weights of other choices"] >= {"y", "x"}


def one_row_too_many():
    x_RD, group = torch.zeros(3, D), dist.group.WORLD
    messages = []
    for arguments in (([x_RD], None, [3], [3]), ([x_RD], group, [2, 2], [1, 1]), ([x_RD], group, [3], [3])):
        with ByteMeter() as meter, pytest.raises(ValueError) as error:
            dispatch.exchange(*arguments)
        messages.append((str(error.value), meter.calls))
    return messages


def test_wrong_lists_of_rows_are_refused_before_anything_is_sent():
    for messages in launch(one_row_too_many, 2):
        (no_group, _), *of_rows = messages
        assert "needs a process group" in no_group
        assert all("must add up to the 3 rows of x" in text for text, _ in of_rows)
        assert all(calls == {} for _, calls in messages)
