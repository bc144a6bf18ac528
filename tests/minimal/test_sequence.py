"""The smallest TP + SP: planted bugs are found in the parameters that they concern."""

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal import compare
from course_lib.minimal.compare_cut_model import (
    different_copies,
    gradient_errors,
    train_on_ranks,
)
from course_lib.minimal.sequence import (
    TensorSequenceParallel,
    gather_in,
    norms_of,
    scatter_sum,
    sum_norm_gradients,
)
from course_lib.minimal.tensor import TensorParallel
from course_lib.model import build

pytestmark = pytest.mark.launches

L, D, N = (getattr(compare.CONFIG, name) for name in ("num_layers", "d_model", "num_heads"))


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
    errors = gradient_errors(trainer, 4, num_micro_batches)
    return {name for name, error in errors.items() if error > 1e-9}


@pytest.mark.exhaustive
def test_without_the_sum_the_loss_is_right_and_the_norms_alone_are_wrong():
    norms = {name for name, _ in build(compare.CONFIG).named_parameters() if "norm" in name}
    assert wrong_names(WithoutSum) == norms and len(norms) == 2 * L + 1
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
    losses, models = train_on_ranks(WithoutSum, 6, 2)
    right_losses, right_models = train_on_ranks(TensorSequenceParallel, 6, 2)
    assert (different_copies(models), different_copies(right_models)) == (2, 1)
    assert losses[0] == right_losses[0] and abs(losses[-1] - right_losses[-1]) < 0.01
    differing = {name for name in models[0] if not torch.equal(models[0][name], models[1][name])}
    assert differing == {name for name in models[0] if "norm" in name}
