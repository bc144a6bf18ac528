"""The smallest expert parallelism equals one process and the engine: gradients and bytes; planted bugs do not."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import sampled, worlds

from course_lib import comm
from course_lib.launch import RankError, launch
from course_lib.layout.experts import ExpertLayout
from course_lib.measure import ByteMeter
from course_lib.minimal import compare, compare_with_one_process, sent_bytes
from course_lib.minimal.compare_experts import (
    MOE_CONFIG,
    TOKENS,
    compare_experts,
    experts_gradient_errors,
    gradient_lengths,
    sent_by_experts,
    train_on_ranks,
)
from course_lib.minimal.experts import (
    ExpertParallel,
    ExpertParallelMoE,
    GatheringMoE,
    NaiveExpertParallelMoE,
    TensorParallelExperts,
    by_expert,
)
from course_lib.model import build
from course_lib.parallel import expert as engine_of
from course_lib.traffic.routing import moe_traffic

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path
E, D = MOE_CONFIG.moe.num_experts, MOE_CONFIG.d_model


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(1, 1), *worlds((2, 3))])
def test_parameters_after_sgd_and_adamw_are_those_of_one_process(world_size, num_micro_batches):
    assert compare_with_one_process(ExpertParallel, world_size, num_micro_batches) < 1e-10


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_layer_equals_one_process_forward_and_backward(world_size):
    assert compare_experts(ExpertParallelMoE, world_size).error < 1e-12
    errors = experts_gradient_errors(ExpertParallelMoE, world_size)
    assert errors.keys() == {"tokens", "router", "experts"} and max(errors.values()) < 1e-12


@pytest.mark.parametrize("layer", [GatheringMoE, TensorParallelExperts])
def test_the_other_ways_give_the_same_output_for_more_bytes(layer):
    run, exchanged = compare_experts(layer), compare_experts(ExpertParallelMoE)
    assert run.error < 1e-12
    assert run.rows_sent == pytest.approx(2 * 3 + 3 * 2 * 2 / D)  # and k numbers of experts and weights
    assert run.rows_sent > 1.9 * exchanged.rows_sent


@pytest.mark.parametrize("favourites", [(), (0, 1)])
def test_bytes_are_those_of_the_formula(favourites):
    run = sent_by_experts(ExpertParallelMoE, 4, favourites)
    traffic = moe_traffic(run.expert_Tk, ExpertLayout(E, 4), D, itemsize=8)
    assert run.sent_bytes == [traffic.sent_bytes(rank) for rank in range(4)]
    assert sum(map(sum, run.rows)) == 4 * TOKENS * 2
    assert not favourites or [row[0] for row in run.rows] == [TOKENS * 2] * 4


def step_of_both(num_micro_batches):
    """A step of the smallest program and of the engine: gradients and bytes sent of each."""
    group, found = dist.group.WORLD, []
    parts = compare.micro_batches_of_rank(0, num_micro_batches)
    made = ExpertParallel(build(MOE_CONFIG, dtype=torch.float64), compare.sgd, group)
    engine = engine_of.build(build(MOE_CONFIG, dtype=torch.float64), group)
    for model, step in ((made.model, made.backward), (engine.module, partial(engine_of.accumulate_gradients, engine))):
        with ByteMeter() as meter:
            step(parts)
        found.append(({name: param.grad for name, param in model.named_parameters()}, meter.calls, meter.sent_bytes))
    return found


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(2, 1), (4, 3)])
def test_gradients_and_rows_are_those_of_the_engine(world_size, num_micro_batches):
    for (got, calls, sent), (expected, engine_calls, engine_sent) in launch(
        step_of_both, world_size, num_micro_batches
    ):
        assert got.keys() == expected.keys()
        assert max((got[name] - expected[name]).abs().max().item() for name in expected) < 1e-12
        assert calls["all_to_all"] == engine_calls["all_to_all"] == num_micro_batches * 2 * (1 + 4)
        counted = 16 * (world_size - 1)  # the engine also counts the tokens of all ranks
        loss = 2 * (world_size - 1) / world_size * 8  # and returns the mean loss
        assert 0 <= engine_sent - sent <= counted + loss + 8 * world_size


@pytest.mark.exhaustive
def test_bytes_of_a_step_do_not_depend_on_micro_batches_but_for_the_counts():
    one, three = (sent_bytes(ExpertParallel, 4, m) for m in (1, 3))
    assert three - one == 2 * 2 * 8 * (E // 4) * 3  # two more micro-batches, two layers, counts of 8 bytes


def test_rows_are_sorted_by_expert_and_keep_the_order_of_sources():
    order_R = by_expert(torch.tensor([[2, 1], [1, 3]]))
    arrived = ["0a", "0a", "0b", "1a", "1b", "1b", "1b"]
    assert [arrived[place] for place in order_R] == ["0a", "0a", "1a", "0b", "1b", "1b", "1b"]


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(RankError, match="8 experts do not divide by 3 ranks; change ep"):
        compare_experts(ExpertParallelMoE, 3)


# ------------------------------------------------------------------------------------ planted bugs
class NotSorted(ExpertParallelMoE):
    def run(self, x_TD, expert_Tk, weight_Tk):
        return super().run(x_TD, expert_Tk.flip(1), weight_Tk)


def test_a_plain_all_to_all_loses_the_gradients_of_experts_without_an_error():
    assert compare_experts(NaiveExpertParallelMoE).error < 1e-12
    errors = experts_gradient_errors(NaiveExpertParallelMoE)
    assert errors["experts"] == 1 and errors["tokens"] > 0.1 and errors["router"] < 1e-12


def test_weights_of_another_slot_are_found():
    assert compare_experts(NotSorted).error > 1e-3


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
    assert compare_with_one_process(wrong, 2) > 1e-6


@pytest.mark.exhaustive
def test_lengths_of_gradients_say_what_is_wrong():
    assert all(found == pytest.approx((1, 1)) for found in gradient_lengths(ExpertParallel).values())
    own_means, summed = gradient_lengths(OwnMeans), gradient_lengths(SumsExperts)
    assert own_means["experts"] == pytest.approx((4, 1)) and own_means["router"] == pytest.approx((1, 1))
    assert summed["experts"][1] < 0.9 and summed["the rest"] == pytest.approx((1, 1))
    with pytest.raises(RankError, match="parameters have no gradient"):
        gradient_lengths(Naive)


class Naive(ExpertParallel):
    layer = NaiveExpertParallelMoE


@pytest.mark.exhaustive
def test_a_model_whose_experts_get_no_gradient_still_learns():
    for trainer in (ExpertParallel, Naive):
        losses = train_on_ranks(trainer, steps=8)
        assert losses[-1] < losses[0] - 0.3
