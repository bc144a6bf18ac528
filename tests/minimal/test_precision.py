"""The smallest mixed precision: planted bugs change master weights; stochastic rounding has the right mean."""

import math
from functools import partial

import pytest
import torch

from course_lib.compare.one_gpu import TINY as CONFIG
from course_lib.compare.one_gpu import train_tiny, zipf_batch
from course_lib.minimal.precision import LossScaling, OneDtype, stochastic_round
from course_lib.model import build
from course_lib.training import loss_of

bf16, fp16 = torch.bfloat16, torch.float16


def difference(found, expected) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(found, expected, strict=True))


class ForgetsToDivide(LossScaling):
    """Leaves the gradients `scale` times too large."""

    def move_gradients(self):
        super().move_gradients()
        for master in self.masters:
            master.grad *= self.scale


class DividesBeforeConverting(LossScaling):
    """Divides in 16 bits, where small gradients become zero again."""

    def move_gradients(self):
        for param in self.params:
            param.grad /= self.scale
        super().move_gradients()
        for master in self.masters:
            master.grad *= self.scale


def sgd_difference(trainer) -> float:
    """From the gradients of the tiny model in FP16, after one step of SGD without rounding of the result."""
    sgd, models = partial(torch.optim.SGD, lr=1.0), []
    for made in (trainer, LossScaling):
        model = build(CONFIG, dtype=fp16)
        made = made(model, sgd, scale=2.0**10)
        made.backward(loss_of(model, *zipf_batch()))
        made.update()
        models.append(made.masters)
    return difference(*models)


@pytest.mark.parametrize("wrong", [ForgetsToDivide, DividesBeforeConverting])
def test_a_planted_bug_in_the_scale_changes_the_master_weights(wrong):
    assert sgd_difference(LossScaling) == 0 and sgd_difference(wrong) > 0


def test_a_parameter_that_became_nan_did_not_move():
    naive = train_tiny(OneDtype, fp16, steps=2)  # AdamW's epsilon is 0 in fp16
    assert naive.moved == 0 and math.isnan(naive.losses[1])


def test_stochastic_rounding_gives_the_two_neighbours_and_the_right_mean():
    torch.manual_seed(0)
    for sign in (1, -1):
        x = torch.full((100_000,), sign * 1.001)
        rounded = stochastic_round(x).float()
        assert rounded.abs().unique().tolist() == [1.0, 1.0078125]
        assert rounded.mean().item() == pytest.approx(sign * 1.001, abs=5e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, 2.0**-126])
    assert torch.equal(stochastic_round(exact).float(), exact)
