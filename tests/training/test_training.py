"""The reference loop: accumulation to 1e-10, every precision learns."""

import dataclasses

import pytest
import torch

from course_lib.config import preset
from course_lib.model import build
from course_lib.training import LossScaler, TrainConfig, accumulate_gradients, loss_of, make_optimizer, train_step
from course_lib.training import loop as training
from course_lib.training.data import batch, tokens
from course_lib.training.precision import PRECISIONS, gradient_norm

SMALL = dataclasses.replace(preset("toy"), num_layers=2)


def rows(count=6):
    return batch(tokens(50_000), 0, count, 24)


def losses_of(config, plan, device="cpu", **how):
    precision = training.precision_named(plan.precision)
    model = build(config, plan.seed, precision.param_dtype, device, **how)
    optimizer = make_optimizer(model, plan.precision, plan.learning_rate, plan.weight_decay)
    scaler, losses = LossScaler() if precision.loss_scaling else None, []
    for index in range(plan.steps):
        x_BS, y_BS = (t.to(device) for t in batch(tokens(), index, plan.batch_size, plan.seq_len))
        step = x_BS, y_BS, plan.micro_batches, plan.clip_norm, plan.precision, scaler
        losses.append(train_step(model, optimizer, *step))
    return losses


def gradients_of(run):
    model = build(SMALL, dtype=torch.float64)
    loss = run(model)
    return loss, [parameter.grad for parameter in model.parameters()]


def big_batch(model):
    loss = loss_of(model, *rows())
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])  # 4 and 5 do not divide six rows
def test_accumulated_gradients_equal_those_of_the_big_batch(count):
    expected_loss, expected = gradients_of(big_batch)
    loss, found = gradients_of(lambda model: accumulate_gradients(model, *rows(), count))
    assert abs(loss - expected_loss) < 1e-10
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_thirty_steps_teach_the_toy_much_of_python():
    losses = losses_of(preset("toy"), TrainConfig(steps=30, batch_size=4))
    assert abs(losses[0] - 5.545) < 0.1  # ln 256: it knows nothing
    assert sum(losses[-5:]) / 5 < 3.2


@pytest.mark.slow
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp32"])
def test_every_precision_learns(precision):
    plan = TrainConfig(steps=12, batch_size=4, seq_len=32, micro_batches=2, learning_rate=1e-2, precision=precision)
    losses = losses_of(SMALL, plan)
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16-master-fp32-grads", "bf16-master-both-grads"])
def test_a_step_forgets_the_gradients_of_the_step_before(precision):
    model = build(SMALL, dtype=training.precision_named(precision).param_dtype)
    optimizer = make_optimizer(model, precision, learning_rate=0.0, weight_decay=0.0)
    norms = []
    for _ in range(2):
        train_step(model, optimizer, *rows(), clip_norm=None, precision=precision)
        norms.append(gradient_norm(model.parameters()).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_an_overflowing_step_changes_no_weight():
    model = build(SMALL, dtype=torch.float16)
    optimizer = make_optimizer(model, "fp16-master-fp32-grads")
    scaler = LossScaler(scale=2.0**40)
    before = [parameter.clone() for parameter in model.parameters()]
    train_step(model, optimizer, *rows(), precision="fp16-master-fp32-grads", scaler=scaler)
    assert scaler.scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_clipping_bounds_the_gradient_that_the_optimizer_sees():
    model = build(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train_step(model, optimizer, *rows(), clip_norm=0.01)
    moved = torch.cat([(a - b).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 2, "micro_batches": 3}, "micro_batches .3. must not exceed batch_size .2."),
        ({"precision": "fp8"}, "precision is 'fp8'; choose from fp32, autocast"),
    ],
)
def test_a_wrong_plan_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


@pytest.mark.gpu
def test_a_gpu_trains_like_the_cpu():
    plan = TrainConfig(steps=5, batch_size=4, seq_len=32)
    assert losses_of(SMALL, plan, device="cuda") == pytest.approx(losses_of(SMALL, plan, device="cpu"), abs=1e-3)
