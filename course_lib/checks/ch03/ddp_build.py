"""Table of chapter 03, exercise 7: DDP from an empty cell, judged by what the lesson measures.

What is seen first is what makes later numbers those of a race: other weights, messages under way that are not waited
for, buckets that are written meanwhile.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks import Cost, Exercise, but, numbers
from course_lib.checks.ch03.dp_hooks import WRITTEN, accumulate, in_flight, watched_works
from course_lib.checks.trainers import DROP, wrong_means
from course_lib.compare import trials
from course_lib.measure import ByteMeter
from course_lib.minimal.data import (
    BUCKET_SIZE,
    Bucket,
    BucketedDP,
    DataParallel,
    OverlappedDP,
    assign_buckets,
    when_all_arrived,
)
from course_lib.model import build
from course_lib.training import loss_of

MOST_MESSAGES = 8  # buckets of 60,000 parameters are 4; a reduce-scatter and an all-gather count as two
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter", "all_gather")
LR = 0.1
SGD = partial(torch.optim.SGD, lr=LR, momentum=0.9)  # what a step took away shows its gradient; the state must be kept


# ------------------------------------------------------------------------------------ what is seen
def _watch(trainer):
    """Each value is that with 1 micro-batch and that with 3."""
    of_one, of_three = (_two_steps(trainer, count) for count in (1, 3))
    begins_equal = of_one.pop("begins with rank 0's weights")
    return {
        "begins with rank 0's weights": begins_equal,
        "3 micro-batches take more messages than 1": of_three["messages"].value > of_one["messages"].value,
    } | {what: [value, of_three[what]] for what, value in of_one.items()}


def _two_steps(trainer, num_micro_batches):
    """Messages are those of the second step: in the first, some make their buckets."""
    made = trainer(build(trials.CONFIG, seed=dist.get_rank(), dtype=torch.float64), SGD, dist.group.WORLD)
    first = build(trials.CONFIG, seed=0, dtype=torch.float64).state_dict()
    begins_equal = all(torch.equal(param, first[name]) for name, param in made.full_parameters().items())
    gradients = []
    for step in (0, 1):
        before = {name: param.detach().clone() for name, param in made.full_parameters().items()}
        with ByteMeter() as meter:
            messages = _of_a_step(made, trials.micro_batches_of_rank(step, num_micro_batches))
        after = {name: param.detach() for name, param in made.full_parameters().items()}
        gradients.append({name: _projected(before[name] - after[name]) / LR for name in before})
    return {
        "begins with rank 0's weights": begins_equal,
        **messages,
        "the gradient that the first step used": gradients[0],
        "the gradient that the second step used": gradients[1],
        "bytes sent": Cost(meter.sent_bytes, 0.01 * meter.sent_bytes),
    }


def _projected(x: Tensor) -> float:
    """One number of a tensor in which each element has a weight of its own."""
    return float((x * numbers(0, *x.shape)).sum())


def _of_a_step(made, micro_batches) -> dict:
    """Collectives of one step: until backward was over, in all, blocking, never waited for, written under way."""
    flights = [0]
    with watched_works(*COLLECTIVES, then=lambda works: flights.append(in_flight(works))) as works:
        made.backward(micro_batches)
        during, after_backward = len(works), in_flight(works)
        made.update()
        never_waited = in_flight(works)
    blocking = any(work.blocks for work in works)
    sums = [work.elements for work in works if "reduce" in work.name]
    return {
        "a collective of torch.distributed was called": bool(works),
        "messages": Cost(len(works), MOST_MESSAGES - len(works)),
        "messages never waited for": never_waited,
        "a bucket was written under way": any(work.written for work in works),
        "a message had started when backward was over": during > 0,
        "one message carried everything": len(works) == 1,
        "backward waited for every message": blocking or (max(flights) <= 1 and not after_backward),
        "a small message was not the last": any(elements < BUCKET_SIZE for elements in sums[:-1]),
    }


# ------------------------------------------------------------------------------------ right and wrong trainers
class DDP(OverlappedDP):
    """As in the lesson, and every rank begins with rank 0's weights; wrong ones have other buckets or steps."""

    bucket_size, in_order = BUCKET_SIZE, list

    def __init__(self, model, make_optimizer, group):
        DataParallel.__init__(self, model, make_optimizer, group)
        params = self.in_order(model.parameters())
        self.buckets = [Bucket(of_one, group) for of_one in assign_buckets(params, self.bucket_size)]
        for bucket in self.buckets:
            when_all_arrived(bucket.params, lambda bucket=bucket: self.send(bucket))
        for param in params:
            dist.broadcast(param.data, src=0, group=group)

    def send(self, bucket):
        """Start the all-reduce in the last micro-batch."""
        if self.is_last:
            self.start(bucket)

    start = staticmethod(Bucket.start)


class _SendsCopies(DDP):
    """Right: what travels is a copy, which is copied back."""

    @staticmethod
    def start(bucket):
        bucket.copy_P = bucket.flat_P / bucket.group.size()
        bucket.work = dist.all_reduce(bucket.copy_P, group=bucket.group, async_op=True)

    def wait(self):
        super().wait()
        for bucket in self.buckets:
            bucket.flat_P.copy_(bucket.copy_P)


def _wait_by_time(trainer):
    """Right, and a race all the same."""
    dist.barrier(trainer.group)
    while not all(bucket.work.is_completed() for bucket in trainer.buckets):
        pass


class _SendsTheFirstMicroBatch(DDP):
    """What later micro-batches add stays on each rank, or is dropped."""

    keeps = True

    def backward(self, micro_batches):
        for index, (x_BS, y_BS) in enumerate(micro_batches if self.keeps else micro_batches[:1]):
            self.is_last = index == 0
            (loss_of(self.model, x_BS, y_BS) / len(micro_batches)).backward()
            if index == 0:
                for bucket in self.buckets:
                    bucket.work.wait()


class _PyTorchs(DataParallel):
    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model)

    def backward(self, micro_batches):
        accumulate(self.ddp, micro_batches, loss_of, lambda part, parts: 1 / len(parts))

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


WRONG = {
    "a rank begins with other weights than rank 0; broadcast rank 0's in __init__": OverlappedDP,
    "no collective of torch.distributed was called; write the buckets yourself, without PyTorch's DDP": _PyTorchs,
    "send only in the last micro-batch; a later backward adds to a bucket, and must not while it is being sent": {
        "send": lambda self, bucket: bucket.start()
    },
    f"{MOST_MESSAGES} messages are enough: fill buckets of 60,000 parameters": {"bucket_size": 1},
    "messages were never waited for; the update may read too early": {"wait": _wait_by_time},
    f"a bucket {WRITTEN}": {"start": staticmethod(lambda bucket: (bucket.start(), bucket.flat_P.add_(0)))},
    "no message had started when backward was over; start a bucket in the hook that completes it": {
        "backward": BucketedDP.backward,
        "update": BucketedDP.update,
        "is_last": False,
    },
    "one message carried everything, so nothing overlapped; close a bucket at 60,000 parameters": {
        "bucket_size": 10**9
    },
    "backward waited for every message; start with async_op=True, and wait in update": {
        "start": staticmethod(lambda bucket: (bucket.start(), bucket.work.wait()))
    },
    "a small message was not the last one; fill buckets from the last parameter to the first, so that the rest, "
    "below 60,000 elements, is ready last": {"in_order": staticmethod(lambda params: list(params)[::-1])},
    **wrong_means(DDP),
    "its first step used this rank's own gradient; take the mean over ranks": {
        "send": lambda self, bucket: dist.all_reduce(bucket.flat_P.clone(), group=self.group, async_op=True).wait(),
        "wait": lambda self: None,
    },
    "the mean over ranks of the first micro-batch, and this rank's own gradient of the later ones; average when "
    "the last micro-batch is in": _SendsTheFirstMicroBatch,
    "the mean over ranks of the first micro-batch alone; average when the last micro-batch is in": but(
        _SendsTheFirstMicroBatch, keeps=False
    ),
    f"its second step used the new gradient plus that of the first step; {DROP}": {
        "step": lambda self: self.optimizer.step()
    },
    "its second step used this rank's own gradient, not averaged; the optimizer must read what is sent, and "
    "zero_grad() replaces a .grad that is a view of a bucket by None": {
        "step": lambda self: (self.optimizer.step(), self.optimizer.zero_grad())
    },
    "the first step is right, the second not; build the optimizer once, for every parameter": {
        "step": lambda self: (DDP.step(self), setattr(self, "optimizer", SGD(self.model.parameters())))
    },
}
SAYS = {
    "begins with rank 0's weights": "broadcast rank 0's in __init__",
    "3 micro-batches take more messages than 1": "send only in the last micro-batch",
    "messages": "fill buckets of 60,000 parameters",
    "messages never waited for": "the update may read too early",
    "the gradient that the first step used": (
        "is every gradient complete before update, and every parameter new after it?"
    ),
    "the gradient that the second step used": DROP,
    "bytes sent": "an all-reduce of all gradients, once a step, is enough",
}
check_ddp = Exercise(
    DDP,
    lambda rng: [(rng.choice([2, 4]),)],
    WRONG,
    _watch,
    SAYS,
    right=_SendsCopies,
    ranks=True,
    seconds=30.0,
)
