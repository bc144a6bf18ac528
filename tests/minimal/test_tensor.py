"""The smallest tensor parallelism equals one process and the engine: gradients, bytes, memory; planted bugs do not."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import sampled, worlds

from course_lib import comm
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.memory.activations import block_terms
from course_lib.memory.ranks import narrow
from course_lib.memory.states import count_parameters
from course_lib.minimal import (
    compare,
    compare_with_one_process,
    held_bytes,
    memory_of_a_step,
    sent_bytes,
    sent_messages,
)
from course_lib.minimal import tensor as minimal
from course_lib.minimal.tensor import TensorParallel, copy_in, sum_out, vocab_parallel_cross_entropy
from course_lib.model import build
from course_lib.parallel import tensor as engine_of

pytestmark = pytest.mark.launches
CONFIG = compare.CONFIG


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(1, 1), *worlds((2, 3))])
def test_parameters_after_sgd_and_adamw_are_those_of_one_process(world_size, num_micro_batches):
    assert compare_with_one_process(TensorParallel, world_size, num_micro_batches) < 1e-10


def step_of_both(num_micro_batches):
    """A step of the smallest program and of the engine: gradients and bytes sent of each."""
    group, found = dist.group.WORLD, []
    parts = compare.micro_batches_of_rank(0, num_micro_batches, trainer=TensorParallel)
    made = TensorParallel(build(CONFIG, dtype=torch.float64), compare.sgd, group)
    engine = engine_of.build(build(CONFIG, dtype=torch.float64), group)
    for model, step in ((made.model, made.backward), (engine.module, engine.run)):
        with ByteMeter() as meter:
            step(parts)
        grads = {name: param.grad for name, param in model.named_parameters()}
        found.append((grads, meter.sent_bytes, meter.calls))
    return found


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((4, 1)))
def test_gradients_and_bytes_are_those_of_the_engine(world_size, num_micro_batches):
    for (got, sent, calls), (expected, engine_sent, engine_calls) in launch(
        step_of_both, world_size, num_micro_batches
    ):
        assert sent == engine_sent > 0 and calls == engine_calls
        assert got.keys() == expected.keys()
        assert max((got[name] - expected[name]).abs().max().item() for name in expected) < 1e-12


@pytest.mark.exhaustive
def test_a_rank_holds_the_parameters_of_the_narrow_model():
    for world_size in (2, 4):
        num_params = count_parameters(narrow(CONFIG, world_size))
        assert held_bytes(TensorParallel, world_size) == {
            "parameters": 2 * num_params,
            "gradients": 2 * num_params,
            "optimizer": 12 * num_params,
        }


@pytest.mark.exhaustive
def test_three_micro_batches_send_the_same_bytes_in_three_times_the_messages():
    assert sent_bytes(TensorParallel, 2, 3) == sent_bytes(TensorParallel, 2, 1)
    assert sent_messages(TensorParallel, 2, 1) == 4 * CONFIG.num_layers + 5
    assert sent_messages(TensorParallel, 2, 3) == 3 * (4 * CONFIG.num_layers + 5)


def test_activations_fall_by_less_than_the_number_of_ranks():
    one, four = (max(memory_of_a_step(TensorParallel, tp).bytes_by_kind["activations"]) for tp in (1, 4))
    assert 2 < one / four < 3


def test_a_layer_of_the_lesson_saves_39_bytes_per_token_and_feature_of_which_8_are_replicated():
    one, four = (sum(block_terms(narrow(CONFIG, tp), 32, precision="bf16").values()) / CONFIG.d_model for tp in (1, 4))
    assert round(one) == 39 and round((4 * four - one) / 3) == 8


# ------------------------------------------------------------------------------------ planted bugs
class WithoutF(TensorParallel):
    enter = staticmethod(lambda x, group: x)


class SumsTwice(TensorParallel):
    """The backward of g sums what every rank already has in full."""

    leave = staticmethod(lambda x_partial, group: copy_in(sum_out(x_partial, group), group))


class Averages(TensorParallel):
    leave = staticmethod(lambda x_partial, group: sum_out(x_partial, group) / group.size())


class SumsNorms(TensorParallel):
    """As sequence parallelism needs it, and tensor parallelism does not."""

    def update(self):
        for name, param in self.model.named_parameters():
            if "norm" in name:
                param.grad = comm.all_reduce(param.grad, self.group)
        super().update()


class OwnMaximum(TensorParallel):
    def loss(self, x_BS, y_BS):
        logits_BSv = self.model(x_BS)
        own_BS1 = logits_BSv.detach().amax(-1, keepdim=True)
        return vocab_parallel_cross_entropy(logits_BSv - own_BS1, y_BS, self.group).mean()


@pytest.mark.parametrize("wrong", sampled([WithoutF, SumsTwice, Averages, SumsNorms, OwnMaximum], 2))
def test_a_planted_bug_differs_from_one_process(wrong):
    assert compare_with_one_process(wrong, 2) > 1e-6


def test_a_step_shows_which_parameters_are_wrong():
    right, summed = (compare.differences_after_a_step(trainer, 2) for trainer in (TensorParallel, SumsNorms))
    assert max(right.values()) < 1e-10 and list(right) == [name for name, _ in build(CONFIG).named_parameters()]
    assert {name for name, difference in summed.items() if difference > 1e-6} == {n for n in summed if "norm" in n}


def f_before_each_column(model, group):
    """Right, but it sends more: q, k and v each have their own f, and so have gate and up."""
    minimal.tensor_parallel(model, group, enter=lambda x, group: x)
    for layer in model.modules():
        if isinstance(layer, minimal.ColumnParallelLinear):
            minimal.put_before(layer, copy_in, group)
    return model


class FBeforeEachColumn(TensorParallel):
    def __init__(self, model, make_optimizer, group):
        self.full_shapes = {name: param.shape for name, param in model.named_parameters()}
        self.model, self.group = f_before_each_column(model, group), group
        self.optimizer = make_optimizer(self.model.parameters())


@pytest.mark.exhaustive
def test_an_f_before_each_column_is_right_and_sends_more():
    assert compare_with_one_process(FBeforeEachColumn, 2) < 1e-10
    assert sent_messages(FBeforeEachColumn, 2) == sent_messages(TensorParallel, 2) + 3 * CONFIG.num_layers


def test_heads_that_do_not_divide_and_a_tied_head_are_refused_in_a_sentence():
    def refuse(config):
        try:
            minimal.tensor_parallel(build(config), dist.group.WORLD)
        except ValueError as error:
            return str(error)

    assert "4 key/value heads do not divide by tp; change tp" in launch(refuse, 3, CONFIG)[0]
    assert "tied=False" in launch(refuse, 2, replace(CONFIG, tied=True))[0]
    assert "255 does not divide by 2 ranks" in launch(refuse, 2, replace(CONFIG, vocab_size=255))[0]
