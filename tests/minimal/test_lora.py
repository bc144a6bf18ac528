"""The smallest LoRA equals the engine and a full matrix: outputs, gradients, merged weights, bytes; bugs do not."""

import pytest
import torch
from torch import nn

from course_lib.config import preset
from course_lib.memory.states import LoRA, state_bytes
from course_lib.minimal.lora import LoRALinear, add_lora
from course_lib.minimal.precision import MasterWeights
from course_lib.minimal.tiny_training import CONFIG, flops_of_a_pass, no_change, train_tiny, zipf_batch
from course_lib.model import apply_lora, build
from course_lib.training import loss_of

EVERY = ("q", "k", "v", "o", "gate", "up", "down")
float64 = torch.float64


def with_adapters(add, b_size=0.1):
    """A model with adapters whose values depend on their names alone."""
    model = build(CONFIG, dtype=float64)
    add(model)
    for number, (name, param) in enumerate(sorted(model.named_parameters())):
        if "lora" in name:
            param.data.normal_(std=b_size, generator=torch.Generator().manual_seed(number))
    return model


def add_both(model):
    add_lora(model, rank=4, alpha=8, targets=EVERY)


def loss_and_gradients(model):
    loss = loss_of(model, *zipf_batch())
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def test_loss_and_gradients_are_those_of_the_engine():
    found = loss_and_gradients(with_adapters(add_both))
    expected = loss_and_gradients(with_adapters(lambda model: apply_lora(model, rank=4, alpha=8.0, targets=EVERY)))
    assert found[0] == pytest.approx(expected[0], abs=1e-12) and found[1].keys() == expected[1].keys()
    assert len(found[1]) == 2 * 7 * 4  # A and B of seven matrices in four blocks, and nothing else
    assert all(torch.allclose(found[1][name], grad, rtol=0, atol=1e-12) for name, grad in expected[1].items())


def test_gradients_of_an_adapter_follow_from_the_gradient_of_the_full_matrix():
    torch.manual_seed(0)
    layer, x = LoRALinear(nn.Linear(6, 4, bias=False, dtype=float64), 2, 6.0), torch.randn(3, 6, dtype=float64)
    layer.lora_b.data.normal_()
    full = (layer.base.weight + 3 * layer.lora_b @ layer.lora_a).detach().requires_grad_()
    (x @ full.T).square().sum().backward()
    layer(x).square().sum().backward()
    assert torch.allclose(layer.lora_b.grad, 3 * full.grad @ layer.lora_a.T)
    assert torch.allclose(layer.lora_a.grad, 3 * layer.lora_b.T @ full.grad)


def test_at_first_nothing_changes():
    plain, fresh = build(CONFIG, dtype=float64), build(CONFIG, dtype=float64)
    add_both(fresh)
    (x_BS, _), trained = zipf_batch(), with_adapters(add_both)
    assert torch.equal(plain(x_BS), fresh(x_BS)) and not torch.allclose(trained(x_BS), plain(x_BS))


def test_a_planted_bug_in_the_scale_is_found():
    wrong = with_adapters(lambda model: add_lora(model, rank=4, alpha=8 * 4, targets=EVERY))  # forgets to divide
    assert loss_and_gradients(wrong)[0] != pytest.approx(loss_and_gradients(with_adapters(add_both))[0], abs=1e-6)


@pytest.mark.parametrize("targets", [("q", "v"), EVERY])
def test_bytes_of_states_are_those_of_the_formula(targets):
    def change(model):
        add_lora(model, 8, 16, targets)

    held = train_tiny(MasterWeights, torch.bfloat16, 2, change=change).held_bytes
    formula = state_bytes(CONFIG, lora=LoRA(8, targets))
    assert held == {name: getattr(formula, name) for name in ("parameters", "gradients", "optimizer")}


@pytest.mark.slow
def test_frozen_weights_need_no_gradient():
    share = flops_of_a_pass(lambda model: model.head.requires_grad_(False), CONFIG) / flops_of_a_pass(no_change, CONFIG)
    tokens, head = 8 * 128, CONFIG.vocab_size * CONFIG.d_model
    assert flops_of_a_pass(no_change, CONFIG) * (1 - share) == pytest.approx(2 * tokens * head)
    assert 0.6 < flops_of_a_pass(lambda model: add_lora(model, 8, 16), preset("mini")) / flops_of_a_pass(
        config=preset("mini")
    ) < 0.7  # fmt: skip
