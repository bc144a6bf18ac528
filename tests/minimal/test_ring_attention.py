"""The smallest ring attention equals one process and the engine: outputs, gradients, bytes; planted bugs do not."""

import copy

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal import compare_attention, ring_attention
from course_lib.minimal.compare_attention import (
    compare_step_with_one_process,
    compare_with_full_attention,
    kept_per_position,
    output_differences,
    sent_blocks,
    sharp_model,
)
from course_lib.minimal.ring_attention import (
    RingAttention,
    attend,
    context_parallel_step,
    contiguous,
    loss_of_my_tokens,
    merge,
    use_ring,
    zigzag,
    zigzag_in_documents,
)
from course_lib.model import standard_attention
from course_lib.parallel import context, positions
from course_lib.parallel import ring as engine
from course_lib.training.data import batch, tokens

pytestmark = pytest.mark.launches
CUTS = {"contiguous": contiguous, "zigzag": zigzag}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_positions_are_those_of_the_engine(name, cp):
    for rank, mine_s in enumerate(CUTS[name](24, cp)):
        assert torch.equal(mine_s, positions.positions(name, 24, cp, rank))


def test_every_document_is_cut_by_itself():
    first, second = zigzag_in_documents([8, 12, 4], 2)
    assert first.tolist() == [0, 1, 6, 7, 8, 9, 10, 17, 18, 19, 20, 23]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(24))


@pytest.mark.parametrize("cut", CUTS.values())
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_one_process(world_size, cut):
    differences = compare_with_full_attention(RingAttention.apply, world_size, 48, cut)
    assert set(differences) == {"out", "dq", "dk", "dv"} and max(differences.values()) < 1e-12


@pytest.mark.parametrize("cut", CUTS.values())
def test_a_ring_sends_a_block_per_step_forward_and_two_backward(cut):
    for world_size in (1, 2, 4):
        assert sent_blocks(RingAttention.apply, world_size, 32, cut) == (world_size - 1, 2 * (world_size - 1))


def test_what_is_kept_does_not_grow_with_the_ranks():
    assert {kept_per_position(RingAttention.apply, world_size) for world_size in (1, 2, 4)} == {1088.0}


def both_of(name, seq_len):
    """Outputs, gradients and bytes of the minimal ring and of the engine's, on the same tokens."""
    group, generator, found = dist.group.WORLD, torch.Generator().manual_seed(3), []
    where = CUTS[name](seq_len, group.size())
    mine_s = where[group.rank()]
    q, k, v = (torch.randn(2, n, seq_len, 8, generator=generator, dtype=torch.float64) for n in (8, 4, 4))
    for attention, how in ((RingAttention.apply, (where, group)), (engine.ring_attention, (group, name))):
        shards = [x[:, :, mine_s].clone().requires_grad_() for x in (q, k, v)]
        with ByteMeter() as meter:
            out = attention(*shards, *how)
            out.square().sum().backward()
        found.append(([out.detach(), *(x.grad for x in shards)], meter.sent_bytes))
    return found


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_outputs_gradients_and_bytes_are_those_of_the_engine(world_size, name):
    for (minimal, sent), (expected, engine_sent) in launch(both_of, world_size, name, 32):
        assert sent == engine_sent > 0
        assert max((a - b).abs().max().item() for a, b in zip(minimal, expected, strict=True)) < 1e-12


def models_of_both(name, micro_batches):
    """The gradients of a model by the minimal ring and by the engine, after some micro-batches."""
    group, parts = dist.group.WORLD, [batch(tokens(100_000), step, 2, 32) for step in range(micro_batches)]
    minimal, other = sharp_model(), sharp_model()
    where = CUTS[name](32, group.size())
    use_ring(minimal, where, group)
    for x_BS, y_BS in parts:
        (loss_of_my_tokens(minimal, x_BS, y_BS, where, group) / len(parts)).backward()
    built = context.build(other, group, sequence_sharding=name)
    context.accumulate_gradients(built, parts)
    expected = context.full_gradients(built)
    found = {key: comm.all_reduce(param.grad, group) for key, param in minimal.named_parameters()}
    return max((found[key] - expected[key]).abs().max().item() for key in expected)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_gradients_of_a_model_are_those_of_the_engine(name, micro_batches):
    assert max(launch(models_of_both, 4, name, micro_batches)) < 1e-6  # the engine's loss is in float32 at least


@pytest.mark.parametrize("cut", CUTS.values())
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_is_that_of_one_process(world_size, cut):
    loss_error, worst = compare_step_with_one_process(context_parallel_step, world_size, 32, cut)
    assert loss_error < 1e-12 and worst < 1e-12


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


# ------------------------------------------------------------------------------------ planted bugs
def in_rank(name, wrong):
    """An attention whose rank has one function of the ring replaced."""

    def attention(*args):
        before = getattr(ring_attention, name)
        setattr(ring_attention, name, wrong)
        try:
            return HeldRing.apply(*args, name, wrong)
        finally:
            setattr(ring_attention, name, before)

    return attention


class HeldRing(torch.autograd.Function):
    """RingAttention with the replaced function in its backward pass too."""

    @staticmethod
    def forward(ctx, q, k, v, where, group, name, wrong):
        ctx.replaced = name, wrong
        return RingAttention.forward(ctx, q, k, v, where, group)

    @staticmethod
    def backward(ctx, grad):
        name, wrong = ctx.replaced
        before = getattr(ring_attention, name)
        setattr(ring_attention, name, wrong)
        try:
            return (*RingAttention.backward(ctx, grad), None, None)
        finally:
            setattr(ring_attention, name, before)


def first_not_shrunk(out, lse, part, part_lse):
    both = torch.logaddexp(lse, part_lse)
    return out + (part_lse - both).exp() * part, both


def mean_of_both(out, lse, part, part_lse):
    return (out + part) / 2, torch.logaddexp(lse, part_lse)


def passes_nothing_on(outgoing, group):
    return lambda: outgoing


_right_backward = ring_attention.attend_backward


def with_its_own_lse(grad, tensors, rows, allowed):
    _, own_lse = attend(*tensors, allowed)
    return _right_backward(grad, tensors, (rows[0], own_lse), allowed)


def without_the_mean(grad, tensors, rows, allowed):
    return _right_backward(grad, tensors, (torch.zeros_like(rows[0]), rows[1]), allowed)


@pytest.mark.parametrize(
    ("name", "wrong", "hit"),
    [
        ("merge", first_not_shrunk, {"out", "dq", "dk"}),
        ("merge", mean_of_both, {"out"}),
        ("pass_on", passes_nothing_on, {"out", "dq", "dk", "dv"}),
        ("attend_backward", with_its_own_lse, {"dq", "dk", "dv"}),
        ("attend_backward", without_the_mean, {"dq", "dk"}),
    ],
)
def test_a_planted_bug_in_the_ring_is_found(name, wrong, hit):
    differences = compare_with_full_attention(in_rank(name, wrong), 4, 32, zigzag)
    assert {key for key, value in differences.items() if value > 1e-3} >= hit
    if name == "attend_backward":
        assert differences["out"] < 1e-12


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
    loss_error, worst = compare_step_with_one_process(wrong, 4, 64)
    assert loss_error < 0.01 and worst > 0.2


def test_tokens_that_see_their_own_rank_alone_are_right_on_the_first_rank_only():
    def alone(q, k, v, where, group):
        mine_s = where[group.rank()]
        return attend(q, k, v, mine_s <= mine_s[:, None])[0]

    differences = output_differences(alone, 4, 32)
    assert differences[0] < 1e-12 and min(differences[1:]) > 0.1


def test_what_is_no_number_on_one_rank_is_not_passed_over():
    def no_number(q, k, v, where, group):
        out = RingAttention.apply(q, k, v, where, group)
        return out * float("nan") if group.rank() == 1 else out

    differences = compare_with_full_attention(no_number, 2, 32)
    assert set(differences.values()) == {float("inf")}
    assert output_differences(no_number, 2, 32)[1] == float("inf")

    def no_gradient(model, x_BS, y_BS, where, group):
        loss = context_parallel_step(model, x_BS, y_BS, where, group)
        model.norm.weight.grad *= float("nan")
        return loss

    assert compare_step_with_one_process(no_gradient, 2, 32)[1] == float("inf")


def test_the_model_of_the_comparison_is_the_same_on_every_rank():
    first, second = (copy.deepcopy(sharp_model(1)).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert compare_attention.CP_CONFIG.num_kv_heads < compare_attention.CP_CONFIG.num_heads
