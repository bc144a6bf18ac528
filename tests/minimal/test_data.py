"""The smallest data parallelism: planted bugs differ from one process, other forms send more."""

import pytest
import torch
import torch.distributed as dist
from harness import sampled

from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_trainer
from course_lib.minimal.data import BucketedDP, DataParallel, OverlappedDP, when_all_arrived

pytestmark = pytest.mark.launches


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
    assert on_ranks(wrong, as_trainer, 2, num_micro_batches=3).difference > 1e-6


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
    run, once = (on_ranks(one, as_trainer, 2, num_micro_batches=3) for one in (AveragesEveryTime, DataParallel))
    assert run.difference < 1e-10 and run.sent_bytes == [4 * sent for sent in once.sent_bytes]


def test_the_action_runs_once_for_each_backward_after_the_last_gradient():
    layer, seen = torch.nn.Linear(2, 2), []
    params = list(layer.parameters())
    when_all_arrived(params, lambda: seen.append([p.grad is not None for p in params]))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [[True, True]] * 2
