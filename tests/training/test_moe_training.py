"""Experts trained beside a dense model: what is counted is what was routed, and dropped."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib.config import preset
from course_lib.model import build, with_moe
from course_lib.tensors import dense_twin
from course_lib.training import TrainConfig
from course_lib.training.moe_training import (
    CONTEST,
    CONTEST_PLAN,
    train_each,
    train_one,
    train_side_by_side,
    warm_then_cosine,
)

pytestmark = pytest.mark.launches

TOY = dataclasses.replace(preset("toy-moe"), num_layers=2)
PLAN = TrainConfig(steps=6, batch_size=4, seq_len=32)


def test_load_and_drops_are_those_of_every_step():
    runs = train_each({"dense": dense_twin(TOY), "tight": with_moe(TOY, capacity_factor=1.0, balancing="none")}, PLAN)
    dense, tight = runs["dense"], runs["tight"]
    assert tight.load.shape == tight.dropped.shape == (6, 2, 8)
    assert (tight.load.sum(-1) == 4 * 32 * 2).all()
    assert (tight.load - tight.dropped == tight.load.clamp_max(32)).all()
    assert tight.dropped_share() == pytest.approx(tight.drop_share(1.0)) and tight.dropped_share() > 0.05
    assert tight.drop_share(8.0) == 0.0
    late_LE = tight.load[-2:].sum(0)
    assert tight.imbalance(2) == pytest.approx((late_LE.amax(-1) / 64).tolist())
    assert (dense.load.numel(), dense.dropped_share(), dense.drop_share(1.0), dense.imbalance()) == (0, 0.0, 0.0, [])


def test_held_out_loss_is_of_the_next_token_alone():
    run = train_one("x", with_moe(TOY, aux_coefficient=100.0), TrainConfig(steps=1, batch_size=2, seq_len=16))
    assert run.losses[0] > 200  # two layers' auxiliary losses, each 1 or more, times 100
    assert abs(run.held_out_loss - 5.5) < 0.2
    assert torch.isfinite(run.load).all()


def test_contest_is_of_equal_flops_router_included():
    def flops(config):
        x_BS = torch.zeros(2, 64, dtype=torch.long)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            build(config)(x_BS)
        return counted.get_total_flops()

    assert flops(CONTEST["experts"]) <= flops(CONTEST["dense"]) < 1.01 * flops(CONTEST["experts"])


def test_side_by_side_each_model_trains_as_it_does_alone():
    plan = dataclasses.replace(CONTEST_PLAN, steps=3, batch_size=2)
    runs = train_side_by_side(CONTEST, plan)
    assert list(runs) == list(CONTEST)
    for name, config in CONTEST.items():
        alone = train_one(name, config, plan, schedule=warm_then_cosine)
        assert runs[name].losses == pytest.approx(alone.losses)
        assert runs[name].held_out_loss == pytest.approx(alone.held_out_loss)
    assert runs["experts"].load.shape == (3, 1, 16) and runs["dense"].load.numel() == 0


def test_rate_rises_then_falls_and_is_what_the_step_uses():
    factors = [warm_then_cosine(index, 800) for index in range(800)]
    assert factors[0] == pytest.approx(0.02) and max(factors) > 0.98 and factors[-1] == pytest.approx(0.05, abs=1e-3)
    assert factors[50:] == sorted(factors[50:], reverse=True)
    rests = train_one("x", CONTEST["dense"], dataclasses.replace(PLAN, weight_decay=0.0), schedule=lambda *_: 0.0)
    assert abs(rests.held_out_loss - 5.5) < 0.1  # at rate 0 nothing is learned
