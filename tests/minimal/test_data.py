"""The smallest data parallelism equals one process and the engine: gradients, bytes, messages."""

import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE, sampled, worlds

from course_lib.launch import launch
from course_lib.measure import ByteMeter
from course_lib.memory.states import count_parameters
from course_lib.minimal import (
    compare,
    compare_with_one_process,
    sent_bytes,
    sent_messages,
    started_in_backward,
    trace_of_a_step,
)
from course_lib.minimal.data import (
    BUCKET_SIZE,
    BucketedDP,
    DataParallel,
    OverlappedDP,
    assign_buckets,
    when_all_arrived,
)
from course_lib.model import build
from course_lib.parallel import data as engines
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens

pytestmark = pytest.mark.launches

TRAINERS = {
    DataParallel: engines.NaiveDP,
    BucketedDP: lambda model, group: engines.BucketedDP(model, group, 8 * BUCKET_SIZE),
    OverlappedDP: lambda model, group: engines.BucketedDP(model, group, 8 * BUCKET_SIZE),
}
PSI = count_parameters(compare.CONFIG)


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((2, 3)))
@pytest.mark.parametrize("trainer", TRAINERS)
def test_parameters_after_sgd_and_adamw_are_those_of_one_process(trainer, world_size, num_micro_batches):
    assert compare_with_one_process(trainer, world_size, num_micro_batches) < 1e-10


def step_of_both(trainer, num_micro_batches):
    """The gradients and the bytes sent of one step, by the minimal trainer and by the engine."""
    group, parts = dist.group.WORLD, compare.micro_batches_of_rank(0, num_micro_batches)
    made = trainer(build(compare.CONFIG, dtype=torch.float64), compare.adamw, group)
    grads = {}
    named = dict(made.model.named_parameters())
    made.optimizer.register_step_pre_hook(lambda *_: grads.update({n: p.grad.clone() for n, p in named.items()}))
    with ByteMeter() as meter:
        made.backward(parts)
        made.update()
    engine = TRAINERS[trainer](build(compare.CONFIG, dtype=torch.float64), group)
    with ByteMeter() as engine_meter:
        engine.run(parts)
        engine.finish()
    return grads, meter.sent_bytes, engines.full_gradients(engine), engine_meter.sent_bytes


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [*worlds((4, 1)), pytest.param(3, 2, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_gradients_and_bytes_are_those_of_the_engine(trainer, world_size, num_micro_batches):
    ranks = launch(step_of_both, world_size, trainer, num_micro_batches)
    for grads, _, expected, _ in ranks:
        assert grads.keys() == expected.keys()
        assert max((grads[name] - expected[name]).abs().max().item() for name in expected) < 1e-12
    assert sum(sent for _, sent, _, _ in ranks) == sum(sent for *_, sent in ranks) == 2 * (world_size - 1) * 8 * PSI


@pytest.mark.parametrize(
    ("trainer", "messages"),
    [
        pytest.param(DataParallel, 39, marks=EXHAUSTIVE),
        pytest.param(BucketedDP, 4, marks=EXHAUSTIVE),
        (OverlappedDP, 4),
    ],
)
def test_buckets_send_fewer_messages_and_the_same_bytes_however_many_micro_batches(trainer, messages):
    for num_micro_batches in (1, 3):
        assert sent_messages(trainer, 4, num_micro_batches) == messages
        assert sent_bytes(trainer, 4, num_micro_batches) == 2 * 2 * PSI * 3 // 4


@pytest.mark.parametrize(
    ("trainer", "during"),
    [
        pytest.param(DataParallel, (0, 39), marks=EXHAUSTIVE),
        pytest.param(BucketedDP, (0, 4), marks=EXHAUSTIVE),
        (OverlappedDP, (3, 4)),
    ],
)
def test_only_hooks_start_all_reduces_while_backward_computes_and_not_that_of_the_last_bucket(trainer, during):
    assert started_in_backward(trace_of_a_step(trainer)) == during


def test_gradient_squares_are_those_of_one_rank_and_of_the_mean():
    (small, big), *_ = compare.gradient_squares(2, sequences=3, world_size=2)
    model, squares = build(compare.CONFIG), []
    for rows in (slice(0, 3), slice(3, 6), slice(0, 6)):
        x_BS, y_BS = batch(tokens(), 0, 6, compare.SEQ_LEN)
        model.zero_grad()
        loss_of(model, x_BS[rows], y_BS[rows]).backward()
        squares.append(sum(param.grad.square().sum().item() for param in model.parameters()))
    assert small == pytest.approx((squares[0] + squares[1]) / 2, rel=1e-4)
    assert big == pytest.approx(squares[2], rel=1e-4)


def test_a_trace_goes_from_forward_to_the_optimizer_which_waits_for_all_buckets():
    spans = {span.name: span for span in trace_of_a_step(OverlappedDP)}
    assert spans["forward"].start_s == 0 and spans["forward"].stop_s == spans["backward"].start_s
    last = max(span.stop_s for span in spans.values() if span.lane != "compute")
    assert spans["backward"].stop_s <= spans["optimizer"].start_s and last <= spans["optimizer"].start_s


def test_buckets_are_filled_from_the_last_parameter_and_close_when_they_are_full():
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (10, 60, 30, 35, 20)]
    assert [[len(member) for member in bucket] for bucket in assign_buckets(params, 50)] == [[20, 35], [30, 60], [10]]


# ------------------------------------------------------------------------------------ planted bugs
class ForgetsTheMean(OverlappedDP):
    """Undoes the division by the number of ranks."""

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat_P *= bucket.group.size()
        super().finish()


class KeepsOldGradients(BucketedDP):
    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
        self.optimizer.step()


class SendsAfterTheFirst(OverlappedDP):
    """The all-reduce of the first micro-batch: later ones are added on each rank alone."""

    def send(self, bucket):
        if not hasattr(bucket, "work"):
            bucket.start()


class DropsTheLastBucket(BucketedDP):
    def update(self):
        for bucket in self.buckets[:-1]:
            bucket.start()
        self.buckets[-1].work = self.buckets[0].work
        self.finish()


@pytest.mark.parametrize(
    "wrong", sampled([ForgetsTheMean, KeepsOldGradients, SendsAfterTheFirst, DropsTheLastBucket], 2)
)
def test_a_planted_bug_differs_from_one_process(wrong):
    assert compare_with_one_process(wrong, 2, 3) > 1e-6


class AveragesEveryTime(DataParallel):
    """Right, but it sends once for each micro-batch."""

    def backward(self, micro_batches):
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        for micro_batch in micro_batches:
            before = [param.grad for param in self.model.parameters()]
            self.model.zero_grad()
            super().backward([micro_batch])
            for param, old in zip(self.model.parameters(), before, strict=True):
                dist.all_reduce(param.grad)
                param.grad = old + param.grad / self.group.size() / len(micro_batches)


@pytest.mark.exhaustive
def test_a_form_that_sends_more_is_counted():
    assert compare_with_one_process(AveragesEveryTime, 2, 3) < 1e-10
    assert sent_bytes(AveragesEveryTime, 2, 3) == 4 * sent_bytes(DataParallel, 2, 3)


def test_the_action_runs_once_for_each_backward_after_the_last_gradient():
    layer, seen = torch.nn.Linear(2, 2), []
    params = list(layer.parameters())
    when_all_arrived(params, lambda: seen.append([p.grad is not None for p in params]))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [[True, True]] * 2
