"""The smallest mixture of experts where lessons do not look: experts without rows, a balance below 1."""

import pytest
import torch

from course_lib.minimal.moe import MoE, balance_loss, layer_parts, tokens_of_rank


def test_an_expert_without_rows_gets_a_gradient_of_zeros():
    router, experts, _ = layer_parts()
    router.weight.data.zero_()
    router.weight.data[:2] = 1.0
    layer = MoE(router, experts, 2)
    layer(tokens_of_rank(0).abs()).sum().backward()
    assert experts[7].up.weight.grad.abs().max() == 0 and experts[0].up.weight.grad.abs().max() > 0


def test_the_balance_loss_is_below_1_where_experts_with_little_load_have_high_scores():
    logits_TE = torch.tensor([0.4, 0.6]).log().expand(4, 2)
    assert balance_loss(logits_TE, torch.tensor([[0], [0], [0], [1]])).item() == pytest.approx(0.9)
