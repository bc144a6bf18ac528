"""The smallest ZeRO equals one process and the engine: gradients, parameters, bytes sent; a planted bug does not."""

import pytest
import torch
import torch.distributed as dist
from harness import sampled, worlds

from course_lib import comm
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.memory.budget import budget_of_rank
from course_lib.memory.states import count_parameters
from course_lib.memory.zero import zero_bytes_per_parameter
from course_lib.minimal import compare, compare_with_one_process, held_bytes, memory_of_a_step, sent_bytes
from course_lib.minimal.compare import CONFIG, SEQ_LEN
from course_lib.minimal.data import DataParallel
from course_lib.minimal.zero import FlatParameter, Zero1, Zero2, Zero3
from course_lib.model import build
from course_lib.parallel import zero
from course_lib.run import Run

pytestmark = pytest.mark.launches

TRAINERS = (DataParallel, Zero1, Zero2, Zero3)
STAGES = {Zero1: 1, Zero2: 2, Zero3: 3}
PSI = count_parameters(preset("toy"))


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((2, 3)))
@pytest.mark.parametrize("trainer", TRAINERS)
def test_parameters_after_sgd_and_adamw_are_those_of_one_process(trainer, world_size, num_micro_batches):
    assert compare_with_one_process(trainer, world_size, num_micro_batches) < 1e-10


def full_gradients(made) -> dict:
    """The mean gradient of every parameter, from the shards of all ranks."""
    found = {}
    names = {param: name for name, param in made.model.named_parameters()}
    for flat in made.flats:
        grad_P, start = comm.all_gather(flat.shard_p.grad, flat.group), 0
        for param in flat.params:
            found[names[param]] = grad_P[start : start + param.numel()].view_as(param)
            start += param.numel()
    return found


def step_of_both(trainer, num_micro_batches):
    """A step of the minimal trainer and of the engine: gradients, parameters and bytes sent of each."""
    group, parts = dist.group.WORLD, compare.micro_batches_of_rank(0, num_micro_batches)
    made = trainer(build(compare.CONFIG, dtype=torch.float64), compare.adamw, group)
    kept = {}
    made.optimizer.register_step_pre_hook(lambda *_: kept.update(full_gradients(made)))
    with ByteMeter() as meter:
        made.backward(parts)
        made.update()
    own_gather = 8 * PSI * (group.size() - 1) // group.size()  # full_gradients, in the hook
    engine = zero.build(build(compare.CONFIG, dtype=torch.float64), group, STAGES[trainer])
    optimizer = compare.adamw([flat.shard_p for flat in engine.flats])
    with ByteMeter() as engine_meter:
        engine.run(parts)
        engine.finish()
        optimizer.step()
        engine.share_update()
    grads, params = zero.full_gradients(engine), zero.full_parameters(engine)
    return (kept, made.full_parameters(), meter.sent_bytes - own_gather), (grads, params, engine_meter.sent_bytes)


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((4, 1)))
@pytest.mark.parametrize("trainer", sampled([*STAGES], 1))
def test_gradients_parameters_and_bytes_are_those_of_the_engine(trainer, world_size, num_micro_batches):
    for minimal, engine in launch(step_of_both, world_size, trainer, num_micro_batches):
        assert minimal[2] == engine[2] > 0
        for got, expected in zip(minimal[:2], engine[:2], strict=True):
            assert got.keys() == expected.keys()
            assert max((got[name] - expected[name]).abs().max().item() for name in expected) < 1e-12


@pytest.mark.parametrize(("trainer", "phases"), sampled([(DataParallel, 2), (Zero1, 2), (Zero2, 4), (Zero3, 9)], 1))
def test_three_micro_batches_send_what_the_formula_says(trainer, phases):
    assert sent_bytes(trainer, 4, 3) == phases * 2 * PSI * 3 // 4


@pytest.mark.parametrize(("stage", "trainer"), sampled([*enumerate(TRAINERS)], 2))
def test_bytes_held_at_the_end_of_backward_are_the_papers(stage, trainer):
    held = held_bytes(trainer, 4)
    expected = {1: (2, 2, 3), 2: (2, 0.5, 3), 3: (0.5, 0.5, 3)}.get(stage, (2, 2, 12))
    assert [size / PSI for size in held.values()] == list(expected)
    if stage != 1:  # its gradients are still full then: they are reduce-scattered in update()
        assert sum(held.values()) == PSI * zero_bytes_per_parameter(stage, 4)


def test_stage_3_never_has_more_than_one_unit_gathered():
    timeline = memory_of_a_step(Zero3)
    assert max(timeline.bytes_by_kind["gathered"]) == 2 * 49_280  # a block, in bfloat16
    assert timeline.bytes_by_kind["gathered"][-1] == 0


@pytest.mark.parametrize("m", [1, 4])
def test_stages_1_and_2_have_the_same_peak_with_one_micro_batch_alone(m):
    one, two = (memory_of_a_step(trainer, num_micro_batches=m) for trainer in (Zero1, Zero2))
    assert one.peak_by_kind["gradients"] == (2 * PSI if m > 1 else 0)
    assert one.peak_bytes - two.peak_bytes == (2 * PSI * 3 // 4 if m > 1 else 0)
    sizes = [Layout(dp=4, zero_stage=stage, micro_batch=3, micro_batches=m) for stage in (1, 2)]
    budgets = [budget_of_rank(Run(CONFIG, size, SEQ_LEN), 0) for size in sizes]
    if m == 1:
        assert budgets[0].peak_bytes == pytest.approx(budgets[1].peak_bytes, rel=0.02)
    else:  # the gradients at the peak are those of the run, of which stage 2 keeps a shard
        assert [budget.at_peak["gradients"] for budget in budgets] == [2 * PSI, 2 * PSI // 4]


# ------------------------------------------------------------------------------------ planted bugs
class SumsGradients(Zero1):
    def update(self):
        for flat in self.flats:
            flat.reduce_scatter()
            flat.shard_p.grad *= flat.group.size()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


class NeverGathers(Zero2):
    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class KeepsOldGradients(Zero3):
    def update(self):
        self.optimizer.step()


class AllReduceForm(Zero1):
    """Right, but it sends half as much again."""

    def update(self):
        for flat in self.flats:
            for param in flat.params:
                param.grad = comm.all_reduce(param.grad, flat.group) / flat.group.size()
            flat.reduce_scatter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


@pytest.mark.parametrize("wrong", [SumsGradients, NeverGathers, KeepsOldGradients])
def test_a_planted_bug_differs_from_one_process(wrong):
    assert compare_with_one_process(wrong, 2) > 1e-6


@pytest.mark.exhaustive
def test_a_form_that_sends_more_is_counted():
    assert sent_bytes(AllReduceForm, 2) == 2 * sent_bytes(Zero1, 2)
    assert compare_with_one_process(AllReduceForm, 2) < 1e-10


def test_a_trainer_that_leaves_a_parameter_out_is_told_which():
    class Forgets(DataParallel):
        def full_parameters(self):
            return {name: p for name, p in super().full_parameters().items() if name != "norm.weight"}

    with pytest.raises(Exception, match=r"lacks or adds \['norm.weight'\]"):
        compare_with_one_process(Forgets, 2)


def test_flat_parameter_moves_the_model_into_its_buffer():
    def inside():
        layer = torch.nn.Linear(3, 2)
        before = layer.weight.detach().clone()
        flat = FlatParameter(layer.parameters(), dist.group.WORLD)
        same = torch.equal(layer.weight, before)
        flat.flat_P.fill_(7)
        return same, layer.bias.tolist(), len(flat.shard_p)

    assert list(launch(inside, 3)) == [(True, [7, 7], 3)] * 3
