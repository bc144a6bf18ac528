"""The smallest expert parallelism: planted bugs differ from one process."""

import sys

import cloudpickle
import pytest
import torch
from harness import sampled

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_experts, as_trainer, gradient_lengths
from course_lib.launch import RankError
from course_lib.minimal.experts import ExpertParallel, ExpertParallelMoE, NaiveExpertParallelMoE

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(RankError, match="8 experts do not divide by 3 ranks; change ep"):
        on_ranks(ExpertParallelMoE, as_experts, 3)


# ------------------------------------------------------------------------------------ planted bugs
class NotSorted(ExpertParallelMoE):
    def run(self, x_TD, expert_Tk, weight_Tk):
        return super().run(x_TD, expert_Tk.flip(1), weight_Tk)


def test_a_plain_all_to_all_loses_the_gradients_of_experts_without_an_error():
    errors = on_ranks(NaiveExpertParallelMoE, as_experts).errors
    assert errors["y_TD"] < 1e-12 and errors["experts"] == 1 and errors["tokens"] > 0.1 and errors["router"] < 1e-12


def test_weights_of_another_slot_are_found():
    assert on_ranks(NotSorted, as_experts).errors["y_TD"] > 1e-3


class SumsExperts(ExpertParallel):
    """Adds gradients of different experts."""

    def sum_gradients(self):
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.group)


class LeavesTheRest(ExpertParallel):
    def sum_gradients(self):
        pass


class OwnMeans(ExpertParallel):
    """Averages the rest as data parallelism does, and leaves experts with the sum of N means."""

    def sum_gradients(self):
        super().sum_gradients()
        for name, param in self.model.named_parameters():
            if ".experts." in name:
                param.grad *= self.group.size()


class LosesGradients(ExpertParallel):
    layer = NaiveExpertParallelMoE

    def sum_gradients(self):
        for param in self.model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        super().sum_gradients()


@pytest.mark.parametrize("wrong", sampled([SumsExperts, LeavesTheRest, OwnMeans, LosesGradients], 2))
def test_a_planted_bug_differs_from_one_process(wrong):
    assert on_ranks(wrong, as_trainer, 2).difference > 1e-6


@pytest.mark.exhaustive
def test_lengths_of_gradients_say_what_is_wrong():
    right, own_means, summed = (
        gradient_lengths(on_ranks(trainer, as_trainer)[0]) for trainer in (ExpertParallel, OwnMeans, SumsExperts)
    )
    assert all(found == pytest.approx((1, 1)) for found in right.values())
    assert own_means["experts"] == pytest.approx((4, 1)) and own_means["router"] == pytest.approx((1, 1))
    assert summed["experts"][1] < 0.9 and summed["the rest"] == pytest.approx((1, 1))
