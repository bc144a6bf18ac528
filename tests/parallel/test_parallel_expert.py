"""Expert parallelism from scratch: what is refused; rows: test_dispatch.py, gradients: test_parallel_five_d.py."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import distance, one_process

from course_lib import model
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.layout.experts import check_expert_parallel
from course_lib.measure import ByteMeter
from course_lib.parallel import engine as engines
from course_lib.parallel import expert

# d_expert divides by neither 2 nor 4
EXPERTS = MoeConfig(num_experts=8, top_k=2, d_expert=9)
LLAMA = ModelConfig("llama", 2, 16, num_heads=4, num_kv_heads=2, d_ff=27, vocab_size=39, max_seq_len=32, moe=EXPERTS)
S = 5

UNEVEN = ((2, 1), (0, 3), (1, 0), (1, 1))


def uneven_batches():
    """For each of four ranks its micro-batches."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(39, (2, B, S), generator=generator).unbind(0) for B in rows] for rows in UNEVEN]


def from_one_process():
    whole, batches = model.build(LLAMA, 1, torch.float64), uneven_batches()
    engine = expert.build(copy.deepcopy(whole), dist.group.WORLD, 2)
    together = [tuple(map(torch.cat, zip(*of_ranks, strict=True))) for of_ranks in zip(*batches, strict=True)]
    loss = engines.accumulate_gradients(engine, batches[dist.get_rank()])
    return distance(engines.full_gradients(engine), loss, *one_process(whole, together))


@pytest.mark.exhaustive
def test_micro_batches_of_any_size_give_the_loss_and_gradients_of_one_process():
    for apart in launch(from_one_process, 4):
        assert max(apart.values()) < 1e-10


# --- refused


def unequal():
    """Ranks with another number of micro-batches, or no token anywhere: an error on each, before any row is sent."""
    messages = []
    for batches in (uneven_batches()[dist.get_rank()][: dist.get_rank() + 1], uneven_batches()[1][:1]):
        engine = expert.build(model.build(LLAMA), dist.group.WORLD)
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
    refused = {
        "ep (3) must divide the 4 ranks of dp; choose ep from 1, 2, 4": (LLAMA, 4, 3),
        "num_experts (8) must be divisible by ep (3); choose ep from 1, 2, 4, 8": (LLAMA, 3, 3),
        "ep (4) must be divisible by ranks_per_node (3)": (LLAMA, 4, 4, 3),
        "llama has no experts": (replace(LLAMA, moe=None), 2, 2),
    }
    for start, arguments in refused.items():
        with pytest.raises(ValueError) as error:
            check_expert_parallel(*arguments)
        assert str(error.value).startswith(start)
    narrow = replace(LLAMA, moe=replace(EXPERTS, d_expert=3))
    with pytest.raises(ValueError, match=re.escape("d_expert (3) leaves a rank of tp (4) with none")):
        Layout(tp=4).check_model(narrow)
    with pytest.raises(ValueError, match=re.escape("num_heads (4) must be divisible by tp (3); choose tp from 1, 2")):
        Layout(tp=3).check_model(narrow)


def refusals():
    group, messages = dist.group.WORLD, []
    odd = model.build(LLAMA)
    odd.blocks[0].mlp.experts[3].up.weight.requires_grad_(False)
    with ByteMeter() as meter:
        for whole, given, method in (
            (model.build(LLAMA), None, "plain"),
            (model.build(replace(LLAMA, moe=replace(EXPERTS, num_experts=7))), group, "plain"),
            (expert.build(model.build(LLAMA), group), group, "plain"),
            (odd, group, "plain"),
            (model.build(LLAMA), group, "twice"),
        ):
            before = [id(p) for p in whole.parameters()]
            with pytest.raises(ValueError) as error:
                expert.build(whole, given, 2, method)
            messages.append(str(error.value))
            assert before == [id(p) for p in whole.parameters()]
        with pytest.raises(ValueError, match=re.escape("ep (3) must divide the 2 ranks of dp; choose ep from 1, 2")):
            expert.expert_groups(group, 3)
    return messages, meter.calls


def test_build_refuses_before_anything_is_sent_or_changed():
    for messages, calls in launch(refusals, 2):
        expected = ["build got None as its group", "num_experts (7) must be", "experts of layer 0 are a ModuleDict"]
        expected.append("experts of layer 0 are frozen in different ways")
        expected.append("method 'twice' is unknown; choose from plain, once_per_rank, once_per_node")
        assert all(message.startswith(start) for message, start in zip(messages, expected, strict=True)), messages
        assert calls == {}
