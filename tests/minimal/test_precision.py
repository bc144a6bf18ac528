"""The smallest mixed precision equals one dtype where nothing is rounded, and the engine in 16 bits; bugs do not."""

import math
from functools import partial

import pytest
import torch

from course_lib.memory.states import RECIPES, count_parameters
from course_lib.minimal.precision import (
    LossScaling,
    MasterWeights,
    OneDtype,
    StochasticRounding,
    stochastic_round,
)
from course_lib.minimal.tiny_training import CONFIG, train_tiny, zipf_batch
from course_lib.model import build
from course_lib.training import LossScaler, loss_of, make_optimizer, train_step

bf16, fp16 = torch.bfloat16, torch.float16
adamw = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)


def parameters_after(trainer, dtype=torch.float32, steps=5) -> list[torch.Tensor]:
    model = build(CONFIG, dtype=dtype)
    made = trainer(model, adamw)
    for step in range(steps):
        made.backward(loss_of(model, *zipf_batch(seed=step)))
        made.update()
    return list(model.parameters())


def difference(found, expected) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("trainer", [MasterWeights, LossScaling])
def test_where_nothing_is_rounded_a_step_is_that_of_one_dtype_bit_for_bit(trainer):
    assert difference(parameters_after(trainer), parameters_after(OneDtype)) == 0


def engine_after(precision, dtype, scaler=None, steps=5):
    model = build(CONFIG, dtype=dtype)
    optimizer = make_optimizer(model, precision, learning_rate=1e-3, weight_decay=0.0)
    scales = []
    for step in range(steps):
        scales.append(scaler.scale if scaler else 1.0)
        train_step(model, optimizer, *zipf_batch(seed=step), clip_norm=None, precision=precision, scaler=scaler)
    return list(model.parameters()), scales


@pytest.mark.slow
def test_master_weights_are_those_of_the_engine():
    found, expected = parameters_after(MasterWeights, bf16), engine_after("bf16-master", bf16)[0]
    unequal = sum((a != b).sum().item() for a, b in zip(found, expected, strict=True))
    assert unequal / count_parameters(CONFIG) < 1e-3  # the engine divides in another order: a last bit may differ
    assert difference(found, expected) < 1e-2


@pytest.mark.slow
def test_loss_scaling_skips_the_steps_that_the_engine_skips():
    found = train_tiny(partial(LossScaling, scale=2.0**20, growth_interval=4), fp16, steps=12, learning_rate=1e-3)
    scaler, scales = LossScaler(scale=2.0**20, growth_interval=4), []
    model = build(CONFIG, dtype=fp16)
    optimizer = make_optimizer(model, "fp16-master-fp32-grads", learning_rate=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(12):
        scales.append(scaler.scale)
        options = {"clip_norm": None, "precision": "fp16-master-fp32-grads", "scaler": scaler}
        losses.append(train_step(model, optimizer, *zipf_batch(), **options))
    assert found.scales == scales and len(set(scales)) > 2
    assert found.losses == pytest.approx(losses, abs=2e-3)


class RoundsTheMasters(MasterWeights):
    """Starts each update from the rounded parameters."""

    def update(self):
        for param, master in zip(self.params, self.masters, strict=True):
            master.data = param.detach().float()
        super().update()


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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_master_weights_keep_what_rounding_loses_and_a_planted_bug_does_not():
    right, wrong = (train_tiny(trainer, bf16, steps=20).moved for trainer in (MasterWeights, RoundsTheMasters))
    assert right > 0.7 and wrong < 0.25 and train_tiny(OneDtype, bf16, steps=20).moved < 0.25


def test_a_parameter_that_became_nan_did_not_move():
    naive = train_tiny(OneDtype, fp16, steps=2)  # AdamW's epsilon is 0 in fp16
    assert naive.moved == 0 and math.isnan(naive.losses[1])


@pytest.mark.parametrize(
    ("trainer", "dtype", "recipe", "bytes_per_param"),
    [
        (OneDtype, torch.float32, "fp32", 16),
        (OneDtype, bf16, "bf16", 8),
        (MasterWeights, bf16, "bf16-master", 16),
        (StochasticRounding, bf16, None, 12),
    ],
)
def test_bytes_per_parameter_are_those_of_the_recipe(trainer, dtype, recipe, bytes_per_param):
    held = train_tiny(trainer, dtype, steps=2).held_bytes
    assert sum(held.values()) == bytes_per_param * count_parameters(CONFIG)
    if recipe:
        known = RECIPES[recipe]
        each = [size / count_parameters(CONFIG) for size in held.values()]
        assert each == [known.param_bytes, known.grad_bytes, known.master_bytes + known.moment_bytes]


def test_stochastic_rounding_gives_the_two_neighbours_and_the_right_mean():
    torch.manual_seed(0)
    for sign in (1, -1):
        x = torch.full((100_000,), sign * 1.001)
        rounded = stochastic_round(x).float()
        assert rounded.abs().unique().tolist() == [1.0, 1.0078125]
        assert rounded.mean().item() == pytest.approx(sign * 1.001, abs=5e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, 2.0**-126])
    assert torch.equal(stochastic_round(exact).float(), exact)


def test_stochastic_rounding_moves_as_far_as_fp32_on_average():
    weights = torch.ones(1000, dtype=bf16)
    torch.manual_seed(0)
    for _ in range(200):
        weights = stochastic_round(weights.float() + 0.001)
    assert weights.float().mean().item() == pytest.approx(1.2, abs=0.005)
