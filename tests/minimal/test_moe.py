"""The smallest mixture of experts equals the model's, token by token; balancing evens its load."""

import pytest
import torch

from course_lib.measure import ByteMeter
from course_lib.minimal import moe as minimal
from course_lib.minimal.compare_experts import MOE_CONFIG, layer_parts, put_experts, tokens_of_rank, train_experts
from course_lib.minimal.moe import MoE, balance_loss, choose_experts, combine, dispatch
from course_lib.model import build
from course_lib.model import moe as engine
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens


def one_token_at_a_time(layer, x_TD):
    expert_Tk, weight_Tk = choose_experts(layer.router(x_TD), layer.k)
    rows = []
    for x_D, chosen, weights in zip(x_TD, expert_Tk.tolist(), weight_Tk, strict=True):
        rows.append(sum(w * layer.experts[e](x_D) for e, w in zip(chosen, weights, strict=True)))
    return torch.stack(rows)


def test_sorted_rows_give_what_one_token_at_a_time_gives():
    layer, x_TD = MoE(*layer_parts()), tokens_of_rank(0)
    assert torch.allclose(layer(x_TD), one_token_at_a_time(layer, x_TD), atol=1e-12)


def test_a_llama_with_it_has_the_loss_and_the_gradients_of_the_engine():
    found = []
    for layer in (None, MoE):
        model = build(MOE_CONFIG, dtype=torch.float64)
        model = model if layer is None else put_experts(model, layer)
        loss = loss_of(model, *batch(tokens(100_000), 0, 4, 32))
        loss.backward()
        found.append((loss.item(), {name: param.grad for name, param in model.named_parameters()}))
    (engine_loss, expected), (loss, got) = found
    assert loss == pytest.approx(engine_loss, abs=1e-12) and got.keys() == expected.keys()
    assert max((got[name] - expected[name]).abs().max().item() for name in expected) < 1e-12


def test_the_weights_are_a_softmax_of_the_chosen_logits():
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expert_Tk, weight_Tk = choose_experts(logits_TE, 2)
    assert expert_Tk.tolist() == [[0, 1]]
    assert torch.allclose(weight_Tk, torch.tensor([[2.0, 1.0]]).softmax(-1))


def test_dispatch_sorts_by_expert_and_combine_brings_each_row_back():
    expert_Tk = torch.tensor([[0, 1], [1, 3], [0, 2]])
    x_RD, order_R, rows_E = dispatch(torch.tensor([[10.0], [20.0], [30.0]]), expert_Tk, 4)
    assert x_RD[:, 0].tolist() == [10, 30, 10, 20, 30, 20] and rows_E.tolist() == [2, 2, 1, 1]
    assert order_R.tolist() == [0, 4, 1, 2, 5, 3]
    weight_Tk = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    times_R1 = torch.tensor([1.0, 1, 2, 2, 3, 4])[:, None]
    assert combine(x_RD * times_R1, order_R, weight_Tk)[:, 0].tolist() == [12.5, 60, 60]


def test_an_expert_without_rows_gets_a_gradient_of_zeros():
    router, experts, _ = layer_parts()
    router.weight.data.zero_()
    router.weight.data[:2] = 1.0
    layer = MoE(router, experts, 2)
    layer(tokens_of_rank(0).abs()).sum().backward()
    assert experts[7].up.weight.grad.abs().max() == 0 and experts[0].up.weight.grad.abs().max() > 0


def test_the_balance_loss_is_that_of_the_engine():
    logits_TE = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    expert_Tk, _ = choose_experts(logits_TE, 2)
    load_E = expert_Tk.flatten().bincount(minlength=8)
    assert balance_loss(logits_TE, expert_Tk).item() == pytest.approx(
        engine.balance_loss(logits_TE.softmax(-1), load_E).item()
    )
    even = balance_loss(torch.zeros(8, 8), torch.arange(8)[:, None])
    one = balance_loss(torch.eye(8)[:1].expand(5, 8) * 1000, torch.zeros(5, 1, dtype=torch.long))
    assert (even.item(), one.item()) == (pytest.approx(1), pytest.approx(8))


def test_the_balance_loss_is_below_1_where_experts_with_little_load_have_high_scores():
    logits_TE = torch.tensor([0.4, 0.6]).log().expand(4, 2)
    assert balance_loss(logits_TE, torch.tensor([[0], [0], [0], [1]])).item() == pytest.approx(0.9)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_counts_every_assignment_and_balancing_lowers_the_largest_load():
    runs = {name: train_experts(balance=balance, steps=40) for name, balance in (("no", None), ("yes", balance_loss))}
    assert runs["no"].load.shape == (40, 2, 8) and (runs["no"].load.sum(-1) == 8 * 64 * 2).all()
    assert max(runs["yes"].imbalance()) < max(runs["no"].imbalance())
    assert runs["no"].losses[-1] < runs["no"].losses[0] - 0.5


def test_one_process_sends_nothing():
    with ByteMeter() as meter:
        MoE(*layer_parts())(tokens_of_rank(0)).sum().backward()
    assert meter.sent_bytes == 0


# ------------------------------------------------------------------------------------ planted bugs
def test_weights_in_the_order_of_tokens_differ(monkeypatch):
    layer, x_TD = MoE(*layer_parts()), tokens_of_rank(0)
    right = layer(x_TD)
    first = lambda y_RD, order_R, weight_Tk: combine(y_RD, order_R, weight_Tk.flip(0))  # noqa: E731
    monkeypatch.setattr(minimal, "combine", first)
    assert (layer(x_TD) - right).abs().max() > 1e-3
