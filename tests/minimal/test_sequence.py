"""The smallest TP + SP: what does not divide is refused, a forgotten sum is found in the norms."""

import pytest
import torch
import torch.distributed as dist

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_learner
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal.sequence import TensorSequenceParallel, gather_in, scatter_sum
from course_lib.minimal.tensor import TensorParallel

pytestmark = pytest.mark.launches


def test_tokens_that_do_not_divide_are_refused_before_anything_is_sent():
    def inside():
        with ByteMeter() as meter, pytest.raises(ValueError, match="into 2 equal pieces"):
            scatter_sum(torch.zeros(2, 3, 4), dist.group.WORLD)
        return meter.sent_bytes

    assert list(launch(inside, 2)) == [0, 0]


class WithoutSum(TensorParallel):
    enter, leave = staticmethod(gather_in), staticmethod(scatter_sum)


def test_without_the_sum_ranks_hold_different_models_that_learn_alike():
    differing, losses = {}, {}
    for trainer in (WithoutSum, TensorSequenceParallel):
        (losses[trainer], mine), (_, other) = (one.result for one in on_ranks(trainer, as_learner, 2, steps=6))
        differing[trainer] = {name for name in mine if not torch.equal(mine[name], other[name])}
    assert differing == {WithoutSum: {name for name in mine if "norm" in name}, TensorSequenceParallel: set()}
    wrong, right = losses.values()
    assert wrong[0] == right[0] and abs(wrong[-1] - right[-1]) < 0.01
