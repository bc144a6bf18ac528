"""The smallest ring attention: documents, empty rows and autocast; planted bugs are found."""

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_attention, as_context_step
from course_lib.launch import launch
from course_lib.minimal.ring_attention import (
    RingAttention,
    attend,
    context_parallel_step,
    merge,
    zigzag,
    zigzag_in_documents,
)
from course_lib.model import standard_attention
from course_lib.parallel import ring as engine

pytestmark = pytest.mark.launches


def test_every_document_is_cut_by_itself():
    first, second = zigzag_in_documents([8, 12, 4], 2)
    assert first.tolist() == [0, 1, 6, 7, 8, 9, 10, 17, 18, 19, 20, 23]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(24))


def gradients_under_autocast():
    """Return the gradients of my tokens of each attention: bf16 autocast in forward, backward outside of it."""
    group, found = dist.group.WORLD, {}
    where = zigzag(32, group.size())
    generator = torch.Generator().manual_seed(0)
    qkv = [4 * torch.randn(2, heads, 32, 16, generator=generator) for heads in (4, 2, 2)]
    ways = {
        "float64": lambda *qkv: standard_attention(*qkv)[:, :, where[group.rank()]],
        "one process": lambda *qkv: standard_attention(*qkv)[:, :, where[group.rank()]],
        "lesson": lambda *qkv: RingAttention.apply(*qkv, where, group),
        "engine, standard": lambda *qkv: engine.ring_attention(*qkv, group, kernel="standard"),
        "engine, fused": lambda *qkv: engine.ring_attention(*qkv, group, kernel="fused"),
    }
    for name, attention in ways.items():
        full = name in ("float64", "one process")
        inputs = [(x if full else x[:, :, where[group.rank()]]).clone() for x in qkv]
        inputs = [(x.double() if name == "float64" else x).requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "float64"):
            out = attention(*inputs)
        out.backward(torch.ones_like(out))
        grads = [comm.all_reduce(x.grad, group)[:, :, where[group.rank()]] if full else x.grad for x in inputs]
        found[name] = torch.cat([x.double().flatten() for x in grads])
    right = found.pop("float64")
    return {name: ((grads - right).norm() / right.norm()).item() for name, grads in found.items()}


def test_under_autocast_backward_makes_the_scores_of_forward_again():
    for errors in launch(gradients_under_autocast, 2):
        one_process = errors.pop("one process")
        assert max(errors.values()) < 1.3 * one_process, (one_process, errors)


def test_a_row_without_any_key_has_no_weight_in_a_merge():
    q, k, v = (torch.randn(1, 1, 2, 4, dtype=torch.float64) for _ in range(3))
    out, lse = attend(q, k, v, torch.ones(2, 2, dtype=torch.bool))
    nothing = attend(q, k, v, torch.zeros(2, 2, dtype=torch.bool))
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge(*pair)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def averaged(model, x_BS, y_BS, where, group):
    loss = context_parallel_step(model, x_BS, y_BS, where, group)
    for param in model.parameters():
        param.grad /= group.size()
    return loss


def from_zero(model, x_BS, y_BS, where, group):
    class Shifted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.blocks = inner, inner.blocks

        def forward(self, x_Bs, positions_s):
            return self.inner(x_Bs, torch.arange(len(positions_s)))

    return context_parallel_step(Shifted(model), x_BS, y_BS, where, group)


@pytest.mark.parametrize("wrong", [averaged, from_zero])
def test_a_planted_bug_in_a_step_shows_in_the_gradients_and_hardly_in_the_loss(wrong):
    errors = on_ranks(wrong, as_context_step).errors
    assert errors.pop("loss") < 0.01 and max(errors.values()) > 0.2


def test_tokens_that_see_their_own_rank_alone_are_right_on_the_first_rank_only():
    def alone(q, k, v, where, group):
        mine_s = where[group.rank()]
        return attend(q, k, v, mine_s <= mine_s[:, None])[0]

    differences = [record.matches["out"].largest for record in on_ranks(alone, as_attention, my_tokens=8)]
    assert differences[0] < 1e-12 and min(differences[1:]) > 0.1


def test_what_is_no_number_on_one_rank_is_not_passed_over():
    def no_number(q, k, v, where, group):
        out = RingAttention.apply(q, k, v, where, group)
        return out * float("nan") if group.rank() == 1 else out

    run = on_ranks(no_number, as_attention, 2, my_tokens=16)
    assert set(run.errors.values()) == {float("inf")} == {match.largest for match in run[1].matches.values()}

    def no_gradient(model, x_BS, y_BS, where, group):
        loss = context_parallel_step(model, x_BS, y_BS, where, group)
        model.norm.weight.grad *= float("nan")
        return loss

    assert on_ranks(no_gradient, as_context_step, 2).errors["norm.weight"] == float("inf")
