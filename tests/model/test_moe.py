"""A mixture of experts: each step of the router, dispatch and combine against a plain loop, and balancing in training.

(Equal to Mixtral in transformers: test_hf_weights.)
"""

import copy
import dataclasses

import pytest
import torch

from course_lib.config import ModelConfig, MoeConfig, preset
from course_lib.model import build, moe, moe_layers, with_moe
from course_lib.model.moe import balance_after_step, balance_loss, route
from course_lib.training import accumulate_gradients, loss_of, make_optimizer, train_step
from course_lib.training.data import batch, tokens

TOY = dataclasses.replace(preset("toy-moe"), num_layers=2)
EIGHT = MoeConfig(num_experts=8, top_k=2, d_expert=16)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def changed(**changes):
    return dataclasses.replace(EIGHT, **changes)


def text(rows=4, index=0):
    return batch(tokens(50_000), index, rows, 24)


# ---- the router


def test_weights_are_scores_without_bias_divided_by_their_sum_and_scaled():
    logits_TE, bias_E = random(50, 8), random(8, seed=1)
    for score in ("softmax", "sigmoid"):
        score_TE = logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()
        plain = route(logits_TE, changed(score=score, normalise_weights=False, routed_scale=3.0), bias_E)
        torch.testing.assert_close(plain.weight_Tk, 3.0 * score_TE.gather(1, plain.expert_Tk))
        torch.testing.assert_close(plain.expert_Tk, (score_TE + bias_E).topk(2).indices)
        divided = route(logits_TE, changed(score=score), bias_E)
        torch.testing.assert_close(divided.weight_Tk.sum(-1), torch.ones(50, dtype=torch.float64))
        torch.testing.assert_close(plain.share_TE.sum(-1), torch.ones(50, dtype=torch.float64))
        assert torch.equal(plain.expert_Tk.flatten().bincount(minlength=8), plain.tokens_E)


def test_a_token_reaches_no_more_groups_than_allowed_and_takes_the_best_in_them():
    config = changed(num_experts=16, top_k=4, num_groups=4, max_groups=2, score="sigmoid")
    logits_TE = random(300, 16)
    found = route(logits_TE, config)
    for t in range(300):
        score_E = logits_TE[t].sigmoid()
        groups = sorted(range(4), key=lambda g: -score_E[4 * g : 4 * g + 4].topk(2).values.sum())[:2]
        allowed = [e for g in groups for e in range(4 * g, 4 * g + 4)]
        best = sorted(allowed, key=lambda e: -score_E[e])[:4]
        assert sorted(found.expert_Tk[t].tolist()) == sorted(best)
    free = route(logits_TE, dataclasses.replace(config, max_groups=4))
    assert max(len(set((row // 4).tolist())) for row in free.expert_Tk) > 2


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_an_expert_takes_no_more_than_its_capacity_first_choices_before_second_ones(factor):
    config = changed(capacity_factor=factor)
    logits_TE = random(61, 8) + torch.arange(8) * 0.5  # the last experts are wanted most
    found = route(logits_TE, config)
    room = -int(-factor * 2 * 61 // 8)
    assert moe.capacity(61, config) == room
    left = [room] * 8
    for slot in range(2):
        for t in range(61):
            expert = found.expert_Tk[t, slot].item()
            assert found.kept_Tk[t, slot].item() == (left[expert] > 0)
            left[expert] -= left[expert] > 0
    assert found.dropped_E.tolist() == [max(0, load - room) for load in found.tokens_E.tolist()]
    assert found.dropped_E.sum() > 0
    assert route(logits_TE, EIGHT).kept_Tk.all()


# ---- dispatch, experts, combine


def layer(config, seed=0):
    made = moe.MoE(12, config, lambda width: ToyMlp(12, width)).double()
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + index))
    return made


class ToyMlp(torch.nn.Sequential):
    def __init__(self, d_model, width):
        super().__init__(torch.nn.Linear(d_model, width), torch.nn.Tanh(), torch.nn.Linear(width, d_model))


def by_hand(made, x_TD):
    """Token by token, choice by choice."""
    routing, rows = made.router(x_TD), []
    for t, x_D in enumerate(x_TD):
        y_D = torch.zeros_like(x_D) if made.shared is None else made.shared(x_D)
        for slot, expert in enumerate(routing.expert_Tk[t].tolist()):
            if routing.kept_Tk[t, slot]:
                y_D = y_D + routing.weight_Tk[t, slot] * made.experts[expert](x_D)
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "config",
    [EIGHT, changed(capacity_factor=0.6), changed(top_k=1, normalise_weights=False, num_shared_experts=2),
     changed(top_k=8, score="sigmoid"), changed(num_groups=4, max_groups=1, routed_scale=2.0)],
    ids=["dropless", "drops", "top-1 and shared", "all", "groups"],
)  # fmt: skip
def test_outputs_and_gradients_equal_a_loop_over_tokens_and_choices(config):
    made, x_BSD = layer(config), random(3, 7, 12, seed=99).requires_grad_()
    expected_TD = by_hand(made, x_BSD.flatten(0, 1))
    inputs = [x_BSD, *made.parameters()]
    upstream = random(21, 12, seed=98)
    wanted = torch.autograd.grad((expected_TD * upstream).sum(), inputs, materialize_grads=True)
    y_BSD = made(x_BSD)
    torch.testing.assert_close(y_BSD.flatten(0, 1), expected_TD, rtol=0, atol=1e-12)
    found = torch.autograd.grad((y_BSD.flatten(0, 1) * upstream).sum(), inputs)  # an idle expert has zeros, not None
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_rows_lie_sorted_by_expert_and_a_token_dropped_everywhere_gets_nothing():
    x_TD = random(40, 12)
    routing = route(random(40, 8, seed=3) + torch.arange(8), changed(capacity_factor=0.25))
    x_RD, assignment_R, rows_E = moe.dispatch(x_TD, routing)
    expert_R = routing.expert_Tk.flatten()[assignment_R]
    assert torch.equal(expert_R, expert_R.sort().values)
    assert torch.equal(rows_E, routing.tokens_E - routing.dropped_E)
    assert torch.equal(x_RD, x_TD[assignment_R // 2])
    y_TD = moe.combine(x_RD, assignment_R, routing)
    lost = ~routing.kept_Tk.any(-1)
    assert lost.any()
    assert (y_TD[lost] == 0).all()
    assert (y_TD[~lost].abs().sum(-1) > 0).all()


# ---- balancing


def test_balance_loss_is_one_in_balance_and_the_number_of_experts_where_all_go_to_one():
    even_TE = torch.full((16, 8), 1 / 8, dtype=torch.float64)
    assert balance_loss(even_TE, torch.full((8,), 4)).item() == pytest.approx(1.0)
    one_TE, all_on_one = torch.eye(8, dtype=torch.float64)[:1].expand(16, 8), torch.tensor([16] + [0] * 7)
    assert balance_loss(one_TE, all_on_one).item() == 8.0


@pytest.mark.slow
def test_transformers_balance_loss_is_top_k_times_ours():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits_TE = random(70, 8).float()
    found = route(logits_TE, EIGHT)
    theirs = load_balancing_loss_func((logits_TE,), num_experts=8, top_k=2)
    torch.testing.assert_close(2 * balance_loss(found.share_TE, found.tokens_E), theirs)


def test_the_auxiliary_loss_is_in_the_training_loss_with_a_gradient_through_the_scores():
    grads = {}
    for coefficient in (0.0, 0.5):
        model = build(with_moe(TOY, aux_coefficient=coefficient), dtype=torch.float64)
        x_BS, y_BS = text()
        loss = loss_of(model, x_BS, y_BS)
        loss.backward()
        grads[coefficient] = model.blocks[1].mlp.router.weight.grad
        with torch.no_grad():
            plain = loss_of(model.eval(), x_BS, y_BS)
            parts = [balance_loss(m.routing.share_TE, m.routing.tokens_E) for m in moe_layers(model)]
        torch.testing.assert_close(loss, plain + coefficient * sum(parts), rtol=0, atol=1e-12)
    logits_TE = random(60, 8).requires_grad_()
    found = route(logits_TE, EIGHT)
    (slope_TE,) = torch.autograd.grad(balance_loss(found.share_TE, found.tokens_E), logits_TE)
    crowded, empty = found.tokens_E.argmax(), found.tokens_E.argmin()
    assert slope_TE[:, crowded].sum() > 0 > slope_TE[:, empty].sum()  # downhill: fewer to the crowded one
    assert (grads[0.5] - grads[0.0]).abs().max() > 1e-5


def test_the_bias_moves_against_the_load_of_the_whole_batch_after_the_step():
    config = with_moe(TOY, balancing="bias", bias_speed=0.25)
    model = build(config)
    optimizer = make_optimizer(model)
    first = model.blocks[0].mlp
    seen = []
    first.router.register_forward_hook(lambda module, args, out: seen.append(out.tokens_E))
    train_step(model, optimizer, *text(), micro_batches=2)
    assert len(seen) == 2
    mean = 4 * 24 * 2 / 8
    expected = (mean - (seen[0] + seen[1])).sign() * 0.25
    assert torch.equal(first.router.bias_E, expected)
    assert not torch.equal(expected, (mean / 2 - seen[1]).sign() * 0.25), "one micro-batch alone would say otherwise"
    assert first.load_E.sum() == 0
    assert "blocks.0.mlp.router.bias_steps_E" in model.state_dict()
    assert build(with_moe(TOY, balancing="none")).blocks[0].mlp.router.bias_E is None


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_counts_the_load_once_and_leaves_no_graph(recompute):
    model = build(TOY, recompute=recompute, dtype=torch.float64)
    x_BS, y_BS = text()
    accumulate_gradients(model, x_BS, y_BS, 2)
    assert [made.load_E.sum().item() for made in moe_layers(model)] == [4 * 24 * 2] * 2
    balance_after_step(model)
    copy.deepcopy(model)  # refuses tensors that hang on a graph
    plain = build(TOY, dtype=torch.float64)
    accumulate_gradients(plain, x_BS, y_BS, 2)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_the_first_blocks_can_be_dense():
    model = build(with_moe(TOY, first_dense_layers=1))
    assert [type(block.mlp).__name__ for block in model.blocks] == ["MLP", "MoE"]
    assert (model.blocks[0].mlp.up.weight.shape, model.blocks[1].mlp.experts[7].up.weight.shape) == (
        (192, 64),
        (96, 64),
    )


# ---- what cannot be


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k .9. exceeds the 8 experts .*; choose 1 to 8"),
        ({"top_k": 1}, "every weight 1.*use normalise_weights=False"),
        ({"num_groups": 3}, "num_experts .8. must be divisible by num_groups .3.; choose from 1, 2, 4, 8"),
        ({"num_groups": 4, "max_groups": 5}, "max_groups is 5; required: 1 to num_groups .4."),
        ({"top_k": 3, "num_groups": 4, "max_groups": 1}, "top_k .3. exceeds the 2 experts .* .1 of 4 groups of 2."),
    ],
)
def test_impossible_experts_are_refused_when_the_config_is_made(change, message):
    with pytest.raises(ValueError, match=message):
        changed(**change)


def test_a_model_that_cannot_have_these_experts_is_refused():
    shape = {"name": "x", "num_layers": 2, "d_model": 64, "num_heads": 8, "num_kv_heads": 8, "d_ff": 8,
             "vocab_size": 8, "max_seq_len": 8}  # fmt: skip
    with pytest.raises(ValueError, match="the gpt family has no experts"):
        ModelConfig(**shape, family="gpt", moe=EIGHT)
    with pytest.raises(ValueError, match=r"first_dense_layers \(2\) must be below num_layers \(2\)"):
        ModelConfig(**shape, moe=changed(first_dense_layers=2))
