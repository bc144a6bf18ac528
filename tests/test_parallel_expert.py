"""Expert parallelism from scratch: gradients against one process, bytes against routing_traffic, planted mistakes."""

import copy
import dataclasses
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import model, moe, training
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import launch
from course_lib.mesh import Mesh, make_groups
from course_lib.meter import ByteMeter
from course_lib.parallel import dispatch, expert
from course_lib.precision import MasterAdamW
from course_lib.routing_traffic import ExpertLayout, moe_traffic
from course_lib.timing import ring_all_reduce_bytes

# d_expert divides by neither 2 nor 4
EXPERTS = MoeConfig(num_experts=8, top_k=2, d_expert=9)
TOP_1 = MoeConfig(num_experts=4, top_k=1, d_expert=10, normalise_weights=False)
LLAMA = ModelConfig("llama", 2, 16, num_heads=4, num_kv_heads=2, d_ff=27, vocab_size=39, max_seq_len=32, moe=EXPERTS)
S = 5

# rows of each micro-batch of each rank: different, none in one micro-batch, none at all
EVEN = ((2, 1),) * 4
UNEVEN = ((2, 1), (0, 3), (1, 0), (1, 1))
NOTHING = ((1, 2), (0, 0), (2, 2), (0, 0))


@dataclasses.dataclass(frozen=True)
class Case:
    """`dp` ranks with ep of them sharing the experts, times tp; `pull` draws tokens to the first experts."""

    ep: int
    dp: int
    experts: MoeConfig = EXPERTS
    tp: int = 1
    method: str = "plain"
    ranks_per_node: int | None = None
    rows: tuple = UNEVEN
    pull: float = 0.0
    tied: bool = False
    recompute: str = "none"
    frozen: tuple[str, ...] = ()

    @property
    def world_size(self):
        return self.dp * self.tp


def experts_with(base=EXPERTS, **changes):
    return dataclasses.replace(base, **changes)


SIGMOID = experts_with(score="sigmoid", num_shared_experts=1, routed_scale=2.5, num_groups=4, max_groups=2)
CASES = {
    "ep 2": Case(2, 2, tied=True),
    "ep 2, top-1, a rank without a token": Case(2, 2, TOP_1, rows=NOTHING, pull=4.0),
    "ep 2, once a rank, shared expert, groups": Case(2, 2, SIGMOID, method="once_per_rank"),
    "ep 4": Case(4, 4),
    "ep 4, top-1, skewed, ranks without a token": Case(4, 4, TOP_1, rows=NOTHING, pull=4.0),
    "ep 4, top-3, shared expert, groups": Case(4, 4, experts_with(SIGMOID, top_k=3)),
    "ep 4, once a rank": Case(4, 4, experts_with(top_k=4), method="once_per_rank"),
    "ep 4, once a node": Case(4, 4, experts_with(top_k=4), method="once_per_node", ranks_per_node=2, rows=NOTHING),
    "ep 4, once a node, groups": Case(4, 4, SIGMOID, method="once_per_node", ranks_per_node=2, pull=2.0),
    "ep 4, auxiliary loss, recompute": Case(4, 4, experts_with(balancing="aux_loss"), recompute="full"),
    "ep 4, capacity": Case(4, 4, experts_with(capacity_factor=0.6), method="once_per_node", ranks_per_node=2),
    "ep 2 x expert_dp 2": Case(2, 4, tied=True, pull=2.0),
    "ep 2 x expert_dp 2, capacity, a dense layer": Case(2, 4, experts_with(capacity_factor=0.5, first_dense_layers=1)),
    "ep 1 x expert_dp 4": Case(1, 4, experts_with(balancing="aux_loss"), rows=NOTHING),
    "ep 2 x tp 2": Case(2, 2, SIGMOID, tp=2, rows=NOTHING),
    "ep 2 x tp 2, top-1, auxiliary loss": Case(2, 2, experts_with(TOP_1, balancing="aux_loss"), tp=2, pull=2.0),
    "ep 4, frozen": Case(4, 4, frozen=("embed.weight", "router.weight", "attention.v.weight", "up.weight")),
    "ep 4, once a rank, frozen": Case(4, 4, method="once_per_rank", frozen=("embed.weight", "router.weight")),
}


def built(case, dtype=torch.float64):
    """The same on every rank. Routers with some preference, and with `pull` a strong one for the first experts."""
    config = dataclasses.replace(LLAMA, moe=case.experts, tied=case.tied)
    whole = model.build(config, 1, dtype, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for layer in moe.moe_layers(whole):
        layer.router.weight.data.normal_(generator=generator).mul_(0.3)
        layer.router.bias_steps_E[:2] += 1
    for name, param in whole.named_parameters():
        param.requires_grad_(not name.endswith(case.frozen) if case.frozen else True)
    if case.pull:  # by the choice alone, as in balancing by bias
        for layer in moe.moe_layers(whole):
            layer.router.register_forward_pre_hook(partial(attract, case.pull))
    return whole


def attract(pull, router, inputs):
    """A pre-hook that moves the router's input toward the first expert's row."""
    row_D = router.weight[0].detach()
    return (inputs[0] + pull * row_D / row_D.norm() ** 2 * router.weight.shape[1] ** 0.5,)


def batches_of(case, vocab_size=39, seed=0):
    """For each dp rank its micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(vocab_size, (2, B, S), generator=generator).unbind(0) for B in rows]
        for rows in case.rows[: case.dp]
    ]


def joined(batches):
    """What one process gets: each micro-batch that of all ranks, one below the other."""
    return [tuple(torch.cat(parts) for parts in zip(*of_ranks)) for of_ranks in zip(*batches)]


def one_process(whole, case, batches):
    """Mean loss of all tokens, and gradients by name. With a capacity each rank's tokens queue for themselves."""
    by_rank = case.experts.capacity_factor is not None
    parts = [part for of_rank in batches for part in of_rank if part[0].numel()] if by_rank else joined(batches)
    total = sum(y.numel() for _, y in parts)
    loss = sum(training.loss_of(whole, x, y) * (y.numel() / total) for x, y in parts)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def groups_of(case):
    groups = make_groups(Mesh(dp=case.dp, tp=case.tp))
    return groups["dp"], groups["tp"] if case.tp > 1 else None


def engine_of(case, whole):
    dp, tp = groups_of(case)
    return expert.build(whole, dp, case.ep, case.method, case.ranks_per_node, tp)


def measure(case):
    whole, batches = built(case), batches_of(case)
    engine = engine_of(case, copy.deepcopy(whole))
    expected_loss, expected = one_process(whole, case, batches)
    loss = expert.accumulate_gradients(engine, batches[dist.get_rank() // case.tp])
    gradients = expert.full_gradients(engine)
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    apart = {name: (gradients[name] - expected[name]).abs().max().item() for name in expected}
    parameters = expert.full_parameters(engine)
    same = all(torch.equal(parameters[name], param) for name, param in whole.named_parameters())
    return {
        "loss": abs(loss - expected_loss).item(),
        "apart": max(apart.values()),
        "worst": max(apart, key=apart.get),
        "size": max(grad.abs().max().item() for grad in expected.values()),
        "same parameters": same,
        "shapes": {name: tuple(param.shape) for name, param in engine.named_parameters()},
        "load": [tuple(x.tolist() for x in pair) for pair in expert.routing_load(engine)],
    }


def measure_all(names):
    return {name: measure(CASES[name]) for name in names}


@pytest.fixture(scope="module")
def measured():
    seen = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case.world_size == size]
        for rank, of_rank in enumerate(launch(measure_all, size, names)):
            for name, record in of_rank.items():
                seen.setdefault(name, []).append(record)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_process(measured, name):
    for record in measured[name]:
        assert record["size"] > 1e-3 and record["same parameters"]
        assert record["loss"] < 1e-12 and record["apart"] < 1e-10, record
