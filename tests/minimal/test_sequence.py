"""The smallest TP + SP: planted bugs are found in the parameters that they concern."""

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_learner, as_trainer
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


class JoinsInPlaceOfGathering(TensorSequenceParallel):
    """The backward of `join` keeps my slice of the gradient without a sum."""

    enter = staticmethod(lambda x_BsD, group: comm.join(x_BsD, group, 1))


def wrong_names(trainer, num_micro_batches=1):
    errors = on_ranks(trainer, as_trainer, num_micro_batches=num_micro_batches).errors
    return {name for name, error in errors.items() if error > 1e-9} - {"after AdamW"}


def test_a_gather_whose_backward_does_not_sum_leaves_matrices_wrong():
    wrong = wrong_names(JoinsInPlaceOfGathering)
    assert "embed.weight" in wrong and "loss" not in wrong


def test_without_the_sum_ranks_hold_different_models_that_learn_alike():
    differing, losses = {}, {}
    for trainer in (WithoutSum, TensorSequenceParallel):
        (losses[trainer], mine), (_, other) = (one.result for one in on_ranks(trainer, as_learner, 2, steps=6))
        differing[trainer] = {name for name in mine if not torch.equal(mine[name], other[name])}
    assert differing == {WithoutSum: {name for name in mine if "norm" in name}, TensorSequenceParallel: set()}
    wrong, right = losses.values()
    assert wrong[0] == right[0] and abs(wrong[-1] - right[-1]) < 0.01
