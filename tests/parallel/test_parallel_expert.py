"""Expert parallelism from scratch: gradients against one process, bytes by formula, planted mistakes."""

import copy
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from harness import one_process

from course_lib import model
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import launch
from course_lib.layout.experts import check_expert_parallel
from course_lib.measure import ByteMeter
from course_lib.model import moe
from course_lib.parallel import engine as engines
from course_lib.parallel import expert

# d_expert divides by neither 2 nor 4
EXPERTS = MoeConfig(num_experts=8, top_k=2, d_expert=9)
LLAMA = ModelConfig("llama", 2, 16, num_heads=4, num_kv_heads=2, d_ff=27, vocab_size=39, max_seq_len=32, moe=EXPERTS)
S = 5

UNEVEN = ((2, 1), (0, 3), (1, 0), (1, 1))
NOTHING = ((1, 2), (0, 0), (2, 2), (0, 0))


@dataclasses.dataclass(frozen=True)
class Case:
    """`dp` ranks with ep of them sharing the experts."""

    ep: int
    dp: int
    experts: MoeConfig = EXPERTS
    method: str = "plain"
    ranks_per_node: int | None = None
    rows: tuple = UNEVEN
    tied: bool = False
    recompute: str = "none"
    frozen: tuple[str, ...] = ()


def experts_with(base=EXPERTS, **changes):
    return dataclasses.replace(base, **changes)


SIGMOID = experts_with(score="sigmoid", num_shared_experts=1, routed_scale=2.5, num_groups=4, max_groups=2)
CASES = {
    "ep 2": Case(2, 2, tied=True),
    "ep 2, once a rank, shared expert, groups": Case(2, 2, SIGMOID, method="once_per_rank"),
    "ep 4": Case(4, 4),
    "ep 4, once a node": Case(4, 4, experts_with(top_k=4), method="once_per_node", ranks_per_node=2, rows=NOTHING),
    "ep 4, auxiliary loss, recompute": Case(4, 4, experts_with(balancing="aux_loss"), recompute="full"),
    "ep 4, capacity": Case(4, 4, experts_with(capacity_factor=0.6), method="once_per_node", ranks_per_node=2),
    "ep 2 x expert_dp 2": Case(2, 4, tied=True),
    "ep 2 x expert_dp 2, capacity, a dense layer": Case(2, 4, experts_with(capacity_factor=0.5, first_dense_layers=1)),
    "ep 1 x expert_dp 4": Case(1, 4, experts_with(balancing="aux_loss"), rows=NOTHING),
    "ep 4, frozen": Case(4, 4, frozen=("embed.weight", "router.weight", "attention.v.weight", "up.weight")),
}


def built(case, dtype=torch.float64):
    """The same on every rank. Routers with some preference."""
    config = dataclasses.replace(LLAMA, moe=case.experts, tied=case.tied)
    whole = model.build(config, 1, dtype, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for layer in moe.moe_layers(whole):
        layer.router.weight.data.normal_(generator=generator).mul_(0.3)
        layer.router.bias_steps_E[:2] += 1
    for name, param in whole.named_parameters():
        param.requires_grad_(not name.endswith(case.frozen) if case.frozen else True)
    return whole


def batches_of(case, vocab_size=39, seed=0):
    """For each dp rank its micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(vocab_size, (2, B, S), generator=generator).unbind(0) for B in rows]
        for rows in case.rows[: case.dp]
    ]


def joined(batches):
    """What one process gets: each micro-batch that of all ranks, one below the other."""
    return [tuple(torch.cat(parts) for parts in zip(*of_ranks, strict=True)) for of_ranks in zip(*batches, strict=True)]


def parts_of(case, batches):
    """What one process gets in turn. With a capacity each rank's tokens queue for themselves."""
    by_rank = case.experts.capacity_factor is not None
    return [part for of_rank in batches for part in of_rank if part[0].numel()] if by_rank else joined(batches)


def measure(case):
    whole, batches = built(case), batches_of(case)
    engine = expert.build(copy.deepcopy(whole), dist.group.WORLD, case.ep, case.method, case.ranks_per_node)
    expected_loss, expected = one_process(whole, parts_of(case, batches))
    loss = engines.accumulate_gradients(engine, batches[dist.get_rank()])
    gradients, parameters = engines.full_gradients(engine), engines.full_parameters(engine)
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    apart = {name: (gradients[name] - expected[name]).abs().max().item() for name in expected}
    return {
        "loss": abs(loss - expected_loss).item(),
        "apart": apart,
        "size": max(grad.abs().max().item() for grad in expected.values()),
        "same parameters": all(torch.equal(parameters[name], param) for name, param in whole.named_parameters()),
    }


def measure_all(names):
    return {name: measure(CASES[name]) for name in names}


@pytest.fixture(scope="module")
def measured():
    seen = {}
    for size in (2, 4):
        for of_rank in launch(measure_all, size, [name for name, case in CASES.items() if case.dp == size]):
            for name, record in of_rank.items():
                seen.setdefault(name, []).append(record)
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_one_process(measured, name):
    for record in measured[name]:
        assert record["size"] > 1e-3 and record["same parameters"]
        assert record["loss"] < 1e-12 and max(record["apart"].values()) < 1e-10, record["apart"]


# --- refused


def unequal():
    """Ranks with another number of micro-batches, or no token anywhere: an error on each, before any row is sent."""
    messages = []
    for batches in (batches_of(CASES["ep 4"])[dist.get_rank()][: dist.get_rank() + 1], batches_of(Case(4, 4))[1][:1]):
        engine = expert.build(built(CASES["ep 4"]), dist.group.WORLD)
        with ByteMeter() as meter, pytest.raises(ValueError) as error:
            engines.accumulate_gradients(engine, batches)
        messages.append((str(error.value), meter.calls))
    return messages


@pytest.mark.exhaustive
def test_ranks_with_unequal_micro_batches_or_no_token_are_refused_on_every_rank():
    for (uneven, first_calls), (nothing, second_calls) in launch(unequal, 4):
        assert "ranks bring [1, 2, 2, 2] micro-batches" in uneven and "no rank brings a token" in nothing
        assert first_calls == second_calls == {"all_gather": 1}


# --- errors


def test_what_cannot_be_spread_is_refused_before_any_rank_starts():
    config, narrow = (dataclasses.replace(LLAMA, moe=experts_with(d_expert=width)) for width in (9, 3))
    refused = {
        "ep (3) must divide the 4 ranks of dp; choose ep from 1, 2, 4": (config, 4, 3),
        "num_experts (8) must be divisible by ep (3); choose ep from 1, 2, 4, 8": (config, 3, 3),
        "ep (4) must be divisible by ranks_per_node (3)": (config, 4, 4, 1, 3),
        "d_expert (3) leaves a rank of tp (4) with none": (narrow, 2, 2, 4),
        "num_heads (4) must be divisible by tp (3); choose tp from 1, 2, 4": (config, 2, 2, 3),
        "method 'twice' is unknown; choose from plain, once_per_rank, once_per_node": (config, 2, 2, 1, None, "twice"),
        "llama has no experts": (dataclasses.replace(LLAMA, moe=None), 2, 2),
    }
    for start, arguments in refused.items():
        with pytest.raises(ValueError) as error:
            check_expert_parallel(*arguments)
        assert str(error.value).startswith(start)


def refusals():
    group, messages = dist.group.WORLD, []
    odd = built(Case(2, 2))
    odd.blocks[0].mlp.experts[3].up.weight.requires_grad_(False)
    with ByteMeter() as meter:
        for whole, given, ep_size in (
            (built(Case(2, 2)), None, 2),
            (model.build(dataclasses.replace(LLAMA, moe=experts_with(num_experts=7))), group, 2),
            (expert.build(built(Case(2, 2)), group), group, 2),
            (odd, group, 2),
        ):
            before = [id(p) for p in whole.parameters()]
            with pytest.raises(ValueError) as error:
                expert.build(whole, given, ep_size)
            messages.append(str(error.value))
            assert before == [id(p) for p in whole.parameters()]
        with pytest.raises(ValueError, match=re.escape("ep (3) must divide the 2 ranks of dp; choose ep from 1, 2")):
            expert.expert_groups(group, 3)
    return messages, meter.calls


def test_build_refuses_before_anything_is_sent_or_changed():
    for messages, calls in launch(refusals, 2):
        expected = ["build got None as its group", "num_experts (7) must be", "experts of layer 0 are a ModuleDict"]
        expected.append("experts of layer 0 are frozen in different ways")
        assert all(message.startswith(start) for message, start in zip(messages, expected, strict=True)), messages
        assert calls == {}
