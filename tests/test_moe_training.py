"""Experts trained beside a dense model: what is counted is what was routed, and dropped."""

import dataclasses

import pytest
import torch

from course_lib.config import preset
from course_lib.memory.moe import dense_twin
from course_lib.moe import with_moe
from course_lib.moe_training import train_each, train_one
from course_lib.training import TrainConfig, train

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


def test_watching_changes_no_number():
    for config in (TOY, dense_twin(TOY)):
        assert train_one("x", config, PLAN).losses == train(config, PLAN, progress=False).losses


def test_held_out_loss_is_of_the_next_token_alone():
    run = train_one("x", with_moe(TOY, aux_coefficient=100.0), TrainConfig(steps=1, batch_size=2, seq_len=16))
    assert run.losses[0] > 200  # two layers' auxiliary losses, each 1 or more, times 100
    assert abs(run.held_out_loss - 5.5) < 0.2
    assert torch.isfinite(run.load).all()
