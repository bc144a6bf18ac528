"""The smallest TP + SP equals one process and the engine: gradients, bytes, what is kept; a planted bug does not."""

import pytest
import torch
import torch.distributed as dist
from harness import worlds

from course_lib import comm
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.minimal import compare, compare_with_one_process, sent_bytes
from course_lib.minimal.compare import calls_of_a_step
from course_lib.minimal.compare_cut_model import (
    different_copies,
    gradient_errors,
    kept_by_a_block,
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
from course_lib.parallel import sequence

pytestmark = pytest.mark.launches

L, D, N = (getattr(compare.CONFIG, name) for name in ("num_layers", "d_model", "num_heads"))


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((2, 3)))
def test_parameters_after_sgd_and_adamw_are_those_of_one_process(world_size, num_micro_batches):
    assert compare_with_one_process(TensorSequenceParallel, world_size, num_micro_batches) < 1e-10


def step_of_both(num_micro_batches):
    """Gradients, bytes and calls of the minimal trainer and of the engine, for the same micro-batches."""
    group = dist.group.WORLD
    parts = compare.micro_batches_of_rank(0, num_micro_batches, trainer=TensorSequenceParallel)
    made = TensorSequenceParallel(build(compare.CONFIG, dtype=torch.float64), compare.adamw, group)
    with ByteMeter() as meter:
        made.backward(parts)
    engine = sequence.build(build(compare.CONFIG, dtype=torch.float64), group)
    with ByteMeter() as engine_meter:
        sequence.accumulate_gradients(engine, parts)
    grads = {name: param.grad for name, param in made.model.named_parameters()}
    expected = {name.removeprefix("module."): param.grad for name, param in engine.named_parameters()}
    return (grads, meter.by_collective, meter.calls), (expected, engine_meter.by_collective, engine_meter.calls)


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((4, 1)))
def test_gradients_bytes_and_calls_are_those_of_the_engine(world_size, num_micro_batches):
    for (grads, sent, calls), (expected, engine_sent, engine_calls) in launch(
        step_of_both, world_size, num_micro_batches
    ):
        assert sent == engine_sent and calls == engine_calls
        assert grads.keys() == expected.keys()
        assert max((grads[name] - expected[name]).abs().max().item() for name in expected) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 4])
def test_it_sends_the_bytes_of_tensor_parallelism_and_the_norms_gradients(world_size):
    more = sent_bytes(TensorSequenceParallel, world_size) - sent_bytes(TensorParallel, world_size)
    assert more == 2 * 2 * (2 * L + 1) * D * (world_size - 1) // world_size


@pytest.mark.exhaustive
def test_each_large_all_reduce_becomes_a_reduce_scatter_and_an_all_gather():
    phases = 4 * L + 2
    assert calls_of_a_step(TensorParallel) == {"all_reduce": phases + 3}
    assert calls_of_a_step(TensorSequenceParallel) == {"reduce_scatter": phases, "all_gather": phases, "all_reduce": 4}


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_block_keeps_what_the_formula_says(t):
    """8 bytes of residual stream and columns' input, 30 between column and row; statistics of norms and attention."""
    norms, heads = 2 * 4 / D, N * 4 / D
    assert kept_by_a_block(TensorParallel, t) == 8 + norms + (30 + heads) / t
    assert kept_by_a_block(TensorSequenceParallel, t) == 4 + (4 + norms + 30 + heads) / t
    assert kept_by_a_block() == 38 + norms + heads


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
