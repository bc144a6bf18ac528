"""The smallest LoRA equals the engine; a planted bug does not."""

import pytest
import torch

from course_lib.compare.one_gpu import TINY as CONFIG
from course_lib.compare.one_gpu import zipf_batch
from course_lib.minimal.lora import add_lora
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


def test_a_planted_bug_in_the_scale_is_found():
    wrong = with_adapters(lambda model: add_lora(model, rank=4, alpha=8 * 4, targets=EVERY))  # forgets to divide
    assert loss_and_gradients(wrong)[0] != pytest.approx(loss_and_gradients(with_adapters(add_both))[0], abs=1e-6)
