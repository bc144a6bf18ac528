"""The smallest TP + SP: planted bugs are found in the parameters that they concern."""

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import CONFIG, as_learner, as_trainer
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal.sequence import TensorSequenceParallel, gather_in, norms_of, scatter_sum, sum_norm_gradients
from course_lib.minimal.tensor import TensorParallel
from course_lib.model import build

pytestmark = pytest.mark.launches


def test_tokens_that_do_not_divide_are_refused_before_anything_is_sent():
    def inside():
        with ByteMeter() as meter, pytest.raises(ValueError, match="into 2 equal pieces"):
            scatter_sum(torch.zeros(2, 3, 4), dist.group.WORLD)
        return meter.sent_bytes

    assert list(launch(inside, 2)) == [0, 0]


# ------------------------------------------------------------------------------------ planted bugs
class WithoutSum(TensorParallel):
    enter, leave = staticmethod(gather_in), staticmethod(scatter_sum)


class SumsInEachMicroBatch(WithoutSum):
    def backward(self, micro_batches):
        for x_BS, y_BS in micro_batches:
            (self.loss(x_BS, y_BS) / len(micro_batches)).backward()
            sum_norm_gradients(self.model, self.group)


class Averages(TensorSequenceParallel):
    def backward(self, micro_batches):
        super().backward(micro_batches)
        for param in norms_of(self.model):
            param.grad /= self.group.size()


class JoinsInPlaceOfGathering(TensorSequenceParallel):
    """The backward of `join` keeps my slice of the gradient without a sum."""

    enter = staticmethod(lambda x_BsD, group: comm.join(x_BsD, group, 1))


def wrong_names(trainer, num_micro_batches=1):
    errors = on_ranks(trainer, as_trainer, num_micro_batches=num_micro_batches).errors
    return {name for name, error in errors.items() if error > 1e-9} - {"after AdamW"}


@pytest.mark.exhaustive
def test_without_the_sum_the_loss_is_right_and_the_norms_alone_are_wrong():
    norms = {name for name, _ in build(CONFIG).named_parameters() if "norm" in name}
    assert wrong_names(WithoutSum) == norms and len(norms) == 2 * CONFIG.num_layers + 1
    assert wrong_names(TensorSequenceParallel) == set() == wrong_names(TensorParallel)
    assert wrong_names(Averages) == norms


@pytest.mark.exhaustive
def test_a_sum_in_each_micro_batch_counts_the_first_ones_again():
    assert wrong_names(SumsInEachMicroBatch) == set()
    assert all("norm" in name for name in wrong_names(SumsInEachMicroBatch, 2))
    assert wrong_names(SumsInEachMicroBatch, 2) and not wrong_names(TensorSequenceParallel, 2)


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
