"""Ulysses: attention against one process; whole models and bytes: test_parallel_five_d.py."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from course_lib.comm.conjugate import InFlight
from course_lib.launch import launch
from course_lib.layout import SEQUENCE_SHARDINGS
from course_lib.model import fused_attention
from course_lib.parallel import ulysses
from course_lib.parallel.positions import positions

S, H = 16, 4


def attention_alone(sequence_sharding):
    """Largest difference of output and gradients; queries as a model has them, not contiguous; not causal either."""
    group, generator, apart = dist.group.WORLD, torch.Generator().manual_seed(0), []
    mine = positions(sequence_sharding, S, group.size(), group.rank())
    for causal in (True, False):
        heads = [torch.randn(2, S, n, H, generator=generator).double() for n in (8, 4, 4)]
        weights = torch.randn(2, 8, S, H, generator=generator).double()
        whole = [x.transpose(1, 2).clone().requires_grad_() for x in heads]
        parts = [x[:, mine].transpose(1, 2).detach().requires_grad_() for x in heads]
        expected = fused_attention(*whole, causal)
        out = ulysses.ulysses_core(group, sequence_sharding)(*parts, causal)
        (expected * weights).sum().backward()
        (out * weights[:, :, mine]).sum().backward()
        pairs = [(out, expected), *((part.grad, one.grad) for part, one in zip(parts, whole, strict=True))]
        apart += [(ours - one[:, :, mine]).abs().max().item() for ours, one in pairs]
    return max(apart)


def starts_and_waits():
    """In which order messages are begun and waited for, forward and backward."""
    log, group = [], dist.group.WORLD
    start, wait = ulysses.start_all_to_all, InFlight.wait
    x = torch.randn(1, 8, 2, H, requires_grad=True)
    with (
        patch.object(ulysses, "start_all_to_all", lambda *args: log.append("start") or start(*args)),
        patch.object(InFlight, "wait", lambda in_flight: log.append("wait") or wait(in_flight)),
    ):
        ulysses.ulysses_attention(x, x, x, group, "contiguous").sum().backward()
    return log


def on_ranks():
    alone = max(attention_alone(sequence_sharding) for sequence_sharding in SEQUENCE_SHARDINGS)
    return {"alone": alone, "order": starts_and_waits()}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.exhaustive), 4])
def ranks(request):
    return launch(on_ranks, request.param, quiet=True)


def test_attention_of_my_tokens_is_that_of_the_whole_sequence(ranks):
    assert max(found["alone"] for found in ranks) < 1e-12


def test_queries_keys_and_values_are_under_way_together(ranks):
    three, one = ["start"] * 3 + ["wait"] * 3, ["start", "wait"]
    assert all(found["order"] == three + one + one + three for found in ranks)


BOTH_TOGETHER = ", or both: Ulysses over 2 inside, a ring over 2 outside"
REFUSED = {  # (query heads, key/value heads, ranks): what is wrong, what would do, an end
    (8, 2, 4): ("num_kv_heads (2) must be divisible by cp (4)", "1, 2", BOTH_TOGETHER),
    (6, 6, 4): ("num_heads (6) must be divisible by cp (4)", "1, 2, 3, 6", BOTH_TOGETHER),
    (8, 1, 2): ("num_kv_heads (1) must be divisible by cp (2)", "1", ""),
}


@pytest.mark.parametrize("heads", REFUSED)
def test_the_limit_by_heads_says_what_to_choose(heads):
    with pytest.raises(ValueError) as error:
        ulysses.check_ulysses(*heads)
    wrong, choices, end = REFUSED[heads]
    choose = f'choose cp from {choices}, or method="ring", which has no such limit{end}'
    assert str(error.value) == f"{wrong}: Ulysses gives each rank whole heads; {choose}"
