"""The smallest mixed precision: a parameter that became NaN did not move; stochastic rounding has the right mean."""

import math

import pytest
import torch

from course_lib.compare.one_gpu import train_tiny
from course_lib.minimal.precision import OneDtype, stochastic_round

bf16, fp16 = torch.bfloat16, torch.float16


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
