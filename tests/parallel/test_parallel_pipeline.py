"""Pipeline parallelism from scratch: any schedule equals one process, and runs, sends and keeps what it says."""

import dataclasses
import functools
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import distance, one_process

from course_lib import model, schedules
from course_lib.checks.ch08.nccl_order import recorded_calls, replay
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.parallel import channels, executor, pipeline, stages, weight_gradients
from course_lib.parallel import engine as engines
from course_lib.schedules import Costs, simulate
from course_lib.schedules.messages import steps_of_rank

LLAMA = ModelConfig("llama", 5, d_model=8, num_heads=2, num_kv_heads=1, d_ff=13, vocab_size=19, max_seq_len=16)
GPT = dataclasses.replace(LLAMA, name="gpt", family="gpt", num_kv_heads=2)
TIED = dataclasses.replace(LLAMA, tied=True)
NAMES = list(schedules.SCHEDULES)
SHAPES = [(2, 7), (1, 7), (3, 5), (2, 4)]  # of micro-batches, in turns
D, V = 8, 19


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    m: int
    config: ModelConfig = LLAMA
    recompute: str = "none"
    frozen: tuple[str, ...] = ()
    layers_of_stage: tuple[int, ...] | None = None
    ahead: int = 1

    @property
    def v(self):
        return 2 if self.name == "interleaved" else 1

    def schedule(self, pp):
        return schedules.make(self.name, pp, self.m, self.v)


def possible(name, pp, m):
    return not (name == "interleaved" and m % pp) and not (name == "dualpipe_v" and m < 2 * pp)


def cases(pp):
    """Every schedule with every m from 1 to 8; models, recomputation and layers take turns.

    5 layers on 2 ranks, 9 on 4: two stages a rank are uneven by themselves.
    """
    made, num_layers = [], 2 * pp + 1
    for turn, name in enumerate(NAMES):
        for m in range(1, 9):
            if possible(name, pp, m):
                config = (TIED, LLAMA, GPT, dataclasses.replace(GPT, tied=True))[m % 4]
                config = dataclasses.replace(config, num_layers=num_layers)
                case = Case(name, m, config, recompute=("none", "full", "selective")[(turn + m) % 3], ahead=m % 3)
                num_stages = case.schedule(pp).num_stages
                uneven = (*[1] * (num_stages - 1), num_layers - num_stages + 1)
                made.append(dataclasses.replace(case, layers_of_stage=uneven if m % 2 else None))
    frozen = Case(
        "zb_h1",
        4,
        dataclasses.replace(GPT, num_layers=num_layers),
        frozen=("embed.weight", "positions.weight", "attention.q.weight", "mlp.up.bias"),
    )
    return [*made, frozen]


def built(case):
    """The same on every rank: weights, biases that are not zero, frozen parameters."""
    whole = model.build(case.config, 1, torch.float64, recompute=case.recompute)
    generator = torch.Generator().manual_seed(2)
    for name, param in whole.named_parameters():
        if name.endswith("bias"):
            param.data.normal_(generator=generator)
        param.requires_grad_(not (case.frozen and name.endswith(case.frozen)))
    return whole


@functools.cache
def names_of(config):
    return [name for name, _ in model.build(config, device="meta").named_parameters()]


def micro_batches(m, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (2, *shapes[i % len(shapes)]), generator=generator).unbind(0) for i in range(m)]


def distance_here(engine, loss, expected_loss, expected):
    """The same, of what this rank has."""
    mine = {name: p.grad for name, p in pipeline.named_parameters(engine).items() if p.grad is not None}
    apart = {name: (mine[name] - expected[name]).abs().max().item() for name in mine}
    return apart | {"loss": abs(loss - expected_loss).item()}


class Shared:
    """What many cases in one launch need only once: channels between all ranks, models, one process's gradients."""

    def __init__(self):
        size = dist.get_world_size()
        self.group = dist.group.WORLD
        self.channels = channels.connect(self.group, [(a, b) for a in range(size) for b in range(size) if a != b])
        self.models, self.references = {}, {}

    def model(self, case):
        key = case.config, case.recompute, case.frozen
        if key not in self.models:
            self.models[key] = built(case)
        self.models[key].zero_grad()
        return self.models[key]

    def build(self, case, trace=None):
        choices = dict(layers_of_stage=case.layers_of_stage, ahead=case.ahead, num_micro_batches=case.m)
        engine = pipeline.build(self.model(case), self.group, case.name, case.v, channels=self.channels, **choices)
        engine.trace = trace
        return engine

    def reference(self, case):
        key = (case.config, case.m, case.frozen)
        if key not in self.references:
            self.references[key] = one_process(built(case), micro_batches(case.m))
        return self.references[key]


def measure(case, shared):
    trace = []
    engine = shared.build(case, trace)
    batches = micro_batches(case.m)
    loss = engines.accumulate_gradients(engine, batches)
    return {
        "apart": max(distance_here(engine, loss, *shared.reference(case)).values()),
        "names": {name for name, p in pipeline.named_parameters(engine).items() if p.grad is not None},
        "executed": [span.name for span in trace],
        "in turn": all(a.stop_s <= b.start_s for a, b in pairwise(trace)),
        "peaks": (engine.peak_live, engine.peak_waiting),
    }


def measure_all(given):
    shared = Shared()
    return [measure(case, shared) for case in given]


@pytest.fixture(scope="module", params=[2, 4])
def measured(request):
    given = cases(request.param)
    return given, launch(measure_all, request.param, given)


@pytest.mark.exhaustive
def test_every_schedule_equals_one_process_for_one_to_eight_micro_batches(measured):
    given, ranks = measured
    assert len(given) == {2: 6 * 8 + 4 + 5, 4: 6 * 8 + 2 + 1}[len(ranks)] + 1
    for rank in ranks:
        for case, of_case in zip(given, rank, strict=True):
            assert of_case["apart"] < 1e-12, (case, of_case["apart"])
    for case, *of_ranks in zip(given, *ranks, strict=True):
        together = set().union(*(of_rank["names"] for of_rank in of_ranks))
        assert together == {name for name in names_of(case.config) if not (case.frozen and name.endswith(case.frozen))}


@pytest.mark.exhaustive
def test_what_is_executed_is_the_schedule_instruction_by_instruction(measured):
    given, ranks = measured
    for r, rank in enumerate(ranks):
        for case, of_case in zip(given, rank, strict=True):
            assert of_case["executed"] == [str(one) for one in case.schedule(len(ranks)).instructions[r]], case
            assert of_case["in turn"]


@pytest.mark.exhaustive
def test_as_many_micro_batches_are_kept_as_the_simulator_says(measured):
    given, ranks = measured
    for case, *of_ranks in zip(given, *ranks, strict=True):
        simulation = simulate(case.schedule(len(ranks)), Costs())
        waiting = [max((count for _, count in row), default=0) for row in simulation.waiting]
        assert [of_rank["peaks"] for of_rank in of_ranks] == list(zip(simulation.peak_live, waiting, strict=True)), case


# --- wrong engines: each must be found out


RIGHT = executor.StageRunner.token_losses
BUGS = {  # owner, name, wrong version
    "drops weight gradients": (weight_gradients.WeightGradientStore, "run", lambda queue: None),
    "sums no tied gradient": (pipeline, "sum_tied", lambda engine: None),
    "takes micro-batches as equal": (
        executor.StageRunner, "token_losses", lambda work, x, y_BS: RIGHT(work, x, y_BS) * (9.0 / y_BS.numel())
    ),
}  # fmt: skip
PLANTED = [Case("1f1b", 4, TIED), Case("zbv", 4, TIED), Case("zb_h1", 4, TIED)]


def planted():
    shared, found = Shared(), {}
    for bug, wrong in BUGS.items():
        for case in PLANTED:
            with patch.object(*wrong):
                engine = shared.build(case)
                loss = engines.accumulate_gradients(engine, micro_batches(case.m))
            apart = distance(engines.full_gradients(engine), loss, *shared.reference(case))
            found[bug, case.name] = {name for name, far in apart.items() if far > 1e-6}
    return found


@pytest.mark.exhaustive
def test_planted_bugs_are_found_where_they_are():
    for found in launch(planted, 2):
        for case in PLANTED:
            assert "loss" in found["takes micro-batches as equal", case.name]
        assert found["sums no tied gradient", "1f1b"] == {"embed.weight"}
        assert not found["sums no tied gradient", "zbv"]  # one rank has both ends: one tensor, no bug
        assert found["drops weight gradients", "zbv"] == found["drops weight gradients", "zb_h1"] == {"names"}
        assert not found["drops weight gradients", "1f1b"]  # nothing waits there


# --- errors


def backwards_too_early(m):
    return schedules.from_lists([["F0", "B0"], ["B0", "F0"]])


def three_ranks(m):
    return schedules.naive(3, m)


def moves_its_stages(m):
    made = schedules.one_f_one_b(2, m)
    return made if m == 4 else schedules.from_lists([["F0@1", "B0@1"], ["F0@0", "B0@0"]], rank_of_stage=(1, 0))


def two_layers(**changes):
    return model.build(dataclasses.replace(LLAMA, num_layers=2, **changes))


REFUSED = [
    (dict(schedule="interleaved", v=2), 4, "num_stages (4) must not exceed num_layers (2)"),
    (dict(schedule="dualpipe_v"), 4, "num_stages (4) must not exceed num_layers (2)"),
    (dict(layers_of_stage=[2]), 4, "layers_of_stage is [2]; it must be one number of at least 1 for each of 2 stages"),
    (dict(layers_of_stage=[2, 0]), 4, "layers_of_stage is [2, 0]"),
    (dict(layers_of_stage=[2, 1]), 4, "layers_of_stage is [2, 1]"),
    (dict(schedule="2f2b"), 4, "name is '2f2b'"),
    (dict(schedule=backwards_too_early, num_micro_batches=1), 1, "schedule 'handmade' cannot be run"),
    (dict(schedule=three_ranks), 4, "schedule 'naive' is for 3 ranks and 4 micro-batches, but there are 2 and 4"),
    (dict(schedule=lambda m: [["F0"]]), 4, "schedule gave a list"),
    (dict(schedule=moves_its_stages), 1, "the schedule of 1 micro-batches puts stages on ranks (1, 0)"),
    (dict(channels={}), 4, "channels lack the pairs [(0, 1), (1, 0)]"),
    (dict(ahead=-1), 4, "ahead is -1"),
    (dict(), 0, "there are no micro-batches"),
    (dict(group=None), 4, "build got None as its group"),
]


def refusals():
    messages, many = [], model.build(LLAMA)
    with ByteMeter() as meter, patch.object(dist, "new_group", lambda *_, **__: pytest.fail("a group was made")):
        for choices, m, _ in REFUSED:
            ready = {"group": dist.group.WORLD, "channels": {(0, 1): None, (1, 0): None}} | choices
            with pytest.raises(ValueError) as error:
                engines.accumulate_gradients(pipeline.build(two_layers(), **ready), micro_batches(m))
            messages.append(str(error.value))
        for name, m in (("dualpipe_v", 3), ("interleaved", 3)):
            engine = pipeline.build(many, dist.group.WORLD, name, 2, channels={(0, 1): None, (1, 0): None})
            with pytest.raises(ValueError, match="micro"):
                engines.accumulate_gradients(engine, micro_batches(m))
    return messages, meter.calls


def test_what_cannot_be_is_refused_before_anything_is_sent():
    for messages, calls in launch(refusals, 2):
        for message, (_, _, start) in zip(messages, REFUSED, strict=True):
            assert message.startswith(start), message
        assert calls == {}
    with pytest.raises(ValueError, match="family is 'xlmr'"):
        stages.check_stages(dataclasses.replace(LLAMA, family="xlmr", num_kv_heads=2), 2)


# --- the calls of the engine, in NCCL's order


def recorded_steps(given):
    """The calls that start messages on this rank, with a channel for each direction and with one for both."""
    shared, recorded = Shared(), []
    of_both = {pair: shared.group for pair in shared.channels}
    for case in given:
        engine = shared.build(case)
        with recorded_calls() as separate:
            engine.run(micro_batches(case.m))
        engine.channels = of_both
        with recorded_calls() as together, to_a_group_of_all():
            engine.run(micro_batches(case.m))
        recorded.append((separate, together))
    return recorded


@contextmanager
def to_a_group_of_all():
    """Both ends of a pair find each other in a group of two ranks, whatever their direction."""
    other = 1 - dist.get_rank()
    start = {"send": dist.isend, "receive": dist.irecv}
    with (
        patch.object(executor, "send", lambda x, group: start["send"](x, other, group)),
        patch.object(executor, "receive", lambda x, group: start["receive"](x, other, group)),
    ):
        yield


def test_no_schedule_waits_for_ever_in_the_order_of_nccl_and_one_channel_for_both_directions_would():
    given = [Case(name, 4, dataclasses.replace(LLAMA, num_layers=4)) for name in NAMES]
    hung = set()
    for case, *of_ranks in zip(given, *launch(recorded_steps, 2, given), strict=True):
        separate, together = zip(*of_ranks, strict=True)
        rounds, stuck = replay(separate)
        assert rounds > 1 and not stuck, (case.name, stuck)
        if replay(together)[1]:
            hung.add(case.name)
    assert "1f1b" in hung


# --- the plan of messages, without ranks


def deliver_as_late_as_possible(made, ahead):
    """Runs all plans; a message arrives only when somebody waits for it. Returns who still waits at the end."""
    plans = [steps_of_rank(made, rank, ahead) for rank in range(made.pp)]
    place = [0] * made.pp
    sent, posted, delivered = {}, {}, set()
    progress = True
    while progress:
        progress = False
        for rank in reversed(range(made.pp)):
            while place[rank] < len(plans[rank]):
                step = plans[rank][place[rank]]
                for message, src in step.post:
                    if message not in posted.setdefault((src, rank), []):
                        posted[src, rank].append(message)
                src = None if step.needs is None else made.rank_of_stage[
                    step.instruction.stage + (-1 if step.instruction.op == "F" else 1)
                ]  # fmt: skip
                if src not in (None, rank):
                    queue = sent.get((src, rank), [])
                    if step.needs not in queue:
                        break
                    number = queue.index(step.needs)
                    assert posted[src, rank][: number + 1] == queue[: number + 1]  # first in, first out
                    delivered.update(queue[: number + 1])
                assert set(step.arrived) <= delivered  # waiting for these sends is no waiting
                if step.dst is not None:
                    sent.setdefault((rank, step.dst), []).append(step.gives)
                place[rank] += 1
                progress = True
    return [rank for rank in range(made.pp) if place[rank] < len(plans[rank])]


def test_nobody_waits_for_ever_however_late_messages_come():
    for pp in (2, 3, 4):
        for name in NAMES:
            for m in range(1, 9):
                if possible(name, pp, m):
                    for ahead in (0, 1, 3):
                        made = Case(name, m).schedule(pp)
                        assert deliver_as_late_as_possible(made, ahead) == [], (name, pp, m)
