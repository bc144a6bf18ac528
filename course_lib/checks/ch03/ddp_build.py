"""Table of chapter 03, exercise 7: DDP from an empty cell, judged by what the lesson measures.

What is seen first is what makes later numbers those of a race: other weights, messages under way that are not waited
for, buckets that are written meanwhile.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ch03.dp_hooks import WRITTEN, WatchedWork
from course_lib.checks.table import Exercise
from course_lib.checks.trainers import DROP, wrong_means
from course_lib.checks.watch import Cost
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
    more = {"3 micro-batches take more messages than 1": of_three["messages"].value > of_one["messages"].value}
    return (
        {"begins with rank 0's weights": of_one.pop("begins with rank 0's weights")}
        | more
        | {what: [value, of_three[what]] for what, value in of_one.items()}
    )


def _two_steps(trainer, num_micro_batches):
    """Messages are those of the second step: in the first, some make their buckets."""
    model = build(trials.CONFIG, seed=dist.get_rank(), dtype=torch.float64)
    made = trainer(model, SGD, dist.group.WORLD)
    first = dict(build(trials.CONFIG, seed=0, dtype=torch.float64).named_parameters())
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
    return float((x * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)).sum())


def _of_a_step(made, micro_batches) -> dict:
    """Collectives of one step: until backward was over, in all, blocking, never waited for, written under way."""
    works, sums, blocking, most_in_flight = [], [], 0, 0

    def watching(original: Callable, is_sum: bool) -> Callable:
        def watched(*args, **kwargs):
            nonlocal blocking, most_in_flight
            work = original(*args, **kwargs)
            blocking += work is None
            given = (*args, *kwargs.values())
            tensors = [x if isinstance(x, list) else [x] for x in given if isinstance(x, Tensor | list)]
            works.append(WatchedWork(work, tensors[0][0]) if work is not None else None)
            if is_sum:  # the input of a reduce-scatter is longer than its output
                sums.append(max(sum(x.numel() for x in of_one) for of_one in tensors))
            most_in_flight = max(most_in_flight, _in_flight(works))
            return works[-1]

        return watched

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, original in originals.items():
        setattr(dist, name, watching(original, "reduce" in name))
    try:
        made.backward(micro_batches)
        during, after_backward = len(works), _in_flight(works)
        made.update()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    never_waited = _in_flight(works)
    for work in filter(None, works):
        work.wait()
    return {
        "a collective of torch.distributed was called": bool(works),
        "messages": Cost(len(works), MOST_MESSAGES - len(works)),
        "messages never waited for": never_waited,
        "a bucket was written under way": any(work is not None and work.written for work in works),
        "a message had started when backward was over": during > 0,
        "one message carried everything": len(works) == 1,
        "backward waited for every message": bool(blocking or (most_in_flight <= 1 and not after_backward)),
        "a small message was not the last": any(elements < BUCKET_SIZE for elements in sums[:-1]),
    }


def _in_flight(works: list) -> int:
    return sum(work is not None and not work.waited for work in works)


# ------------------------------------------------------------------------------------ right and wrong trainers
class DDP(OverlappedDP):
    """As in the lesson, and every rank begins with rank 0's weights; wrong ones have other buckets or steps."""

    bucket_size, in_order = BUCKET_SIZE, list

    def __init__(self, model, make_optimizer, group):
        DataParallel.__init__(self, model, make_optimizer, group)
        self.make_optimizer = make_optimizer
        params = self.in_order(model.parameters())
        self.buckets = [Bucket(of_one, group) for of_one in assign_buckets(params, self.bucket_size)]
        for bucket in self.buckets:
            when_all_arrived(bucket.params, lambda bucket=bucket: self.send(bucket))
        for param in params:
            dist.broadcast(param.data, src=0, group=group)

    def waited(self):
        """Wait for all buckets, and make the step."""
        for bucket in self.buckets:
            bucket.work.wait()
        self.optimizer.step()

    def emptied(self):
        """Fill the buckets with zeros."""
        for bucket in self.buckets:
            bucket.flat_P.zero_()


class _CopiesIntoBuckets(DataParallel):
    """Gradients are tensors of their own; a bucket is made when it is sent, and copied back."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        flat_P = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.broadcast(flat_P, src=0, group=group)
        torch.nn.utils.vector_to_parameters(flat_P, model.parameters())
        self.filling, self.sent, self.syncing = [], [], False
        self.first = next(model.parameters())
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, param):
        """Send what is ready, once it is enough."""
        if not self.syncing:
            return
        self.filling.append(param)
        if sum(member.numel() for member in self.filling) >= BUCKET_SIZE or param is self.first:
            flat_P = torch.cat([member.grad.flatten() for member in self.filling])
            self.sent.append((self.filling, flat_P, dist.all_reduce(flat_P, group=self.group, async_op=True)))
            self.filling = []

    def backward(self, micro_batches):
        """Accumulate; send in the last micro-batch."""
        for index, part in enumerate(micro_batches, 1):
            self.syncing = index == len(micro_batches)
            (loss_of(self.model, *part) / len(micro_batches)).backward()

    def update(self):
        """Wait, copy back, and make the step."""
        for members, flat_P, work in self.sent:
            work.wait()
            pieces = flat_P.split([member.numel() for member in members])
            for member, piece in zip(members, pieces, strict=True):
                member.grad = piece.view(member.shape) / self.group.size()
        self.sent.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _SendsAfterBackward(DDP):
    backward = BucketedDP.backward
    update = BucketedDP.update
    is_last = False


class _MessagePerTensor(DDP):
    bucket_size = 1


class _OneMessage(DDP):
    bucket_size = 10**9


class _WaitsInTheHook(DDP):
    def send(self, bucket):
        if self.is_last:
            bucket.start()
            bucket.work.wait()


class _SendsEveryMicroBatch(DDP):
    """A race: the next micro-batch adds to buckets that are under way."""

    def send(self, bucket):
        bucket.start()


class _FillsFromTheFirst(DDP):
    """Buckets in the order of the model: the small rest has the last parameters and is sent first."""

    in_order = staticmethod(lambda params: list(params)[::-1])


class _DividesUnderWay(DDP):
    def send(self, bucket):
        if self.is_last:
            bucket.start()
            bucket.flat_P += 0


class _NeverWaits(DDP):
    """Waits by time: right, and a race all the same."""

    def finish(self):
        dist.barrier(self.group)
        while not all(bucket.work.is_completed() for bucket in self.buckets):
            pass
        self.optimizer.step()
        self.emptied()


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


class _NeverDropsGradients(DDP):
    finish = DDP.waited


class _DropsTheViews(DDP):
    """The buckets send the first step's gradients again, and the optimizer reads others."""

    def finish(self):
        self.waited()
        self.optimizer.zero_grad()


class _BuildsTheOptimizerAgain(DDP):
    def finish(self):
        super().finish()
        self.optimizer = self.make_optimizer(self.model.parameters())


class _AveragesNothing(DDP):
    def send(self, bucket):
        dist.all_reduce(bucket.flat_P.clone(), group=self.group, async_op=True).wait()

    def finish(self):
        self.optimizer.step()
        self.emptied()


class _PyTorchs(DataParallel):
    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.ddp = torch.nn.parallel.DistributedDataParallel(model)

    def backward(self, micro_batches):
        for index, (x_BS, y_BS) in enumerate(micro_batches, 1):
            self.ddp.require_backward_grad_sync = index == len(micro_batches)
            (loss_of(self.ddp, x_BS, y_BS) / len(micro_batches)).backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


WRONG = {
    "a rank begins with other weights than rank 0; broadcast rank 0's in __init__": OverlappedDP,
    "no collective of torch.distributed was called; write the buckets yourself, without PyTorch's DDP": _PyTorchs,
    "send only in the last micro-batch; a later backward adds to a bucket, and must not while it is being sent": (
        _SendsEveryMicroBatch
    ),
    f"{MOST_MESSAGES} messages are enough: fill buckets of 60,000 parameters": _MessagePerTensor,
    "messages were never waited for; the update may read too early": _NeverWaits,
    f"a bucket {WRITTEN}": _DividesUnderWay,
    "no message had started when backward was over; start a bucket in the hook that completes it": _SendsAfterBackward,
    "one message carried everything, so nothing overlapped; close a bucket at 60,000 parameters": _OneMessage,
    "backward waited for every message; start with async_op=True, and wait in update": _WaitsInTheHook,
    "a small message was not the last one; fill buckets from the last parameter to the first, so that the rest, "
    "below 60,000 elements, is ready last": _FillsFromTheFirst,
    **wrong_means(DDP),
    "its first step used this rank's own gradient; take the mean over ranks": _AveragesNothing,
    "the mean over ranks of the first micro-batch, and this rank's own gradient of the later ones; average when "
    "the last micro-batch is in": _SendsTheFirstMicroBatch,
    "the mean over ranks of the first micro-batch alone; average when the last micro-batch is in": type(
        "FirstAlone", (_SendsTheFirstMicroBatch,), {"keeps": False}
    ),
    f"its second step used the new gradient plus that of the first step; {DROP}": _NeverDropsGradients,
    "its second step used this rank's own gradient, not averaged; the optimizer must read what is sent, and "
    "zero_grad() replaces a .grad that is a view of a bucket by None": _DropsTheViews,
    "the first step is right, the second not; build the optimizer once, for every parameter": _BuildsTheOptimizerAgain,
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
    DDP, lambda rng: [(rng.choice([2, 4]),)], WRONG, _watch, SAYS, right=_CopiesIntoBuckets, ranks=True, seconds=30.0
)
