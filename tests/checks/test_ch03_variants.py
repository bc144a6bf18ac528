"""The grader of DDP from an empty cell accepts right answers that are arranged otherwise."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.autograd import Variable

from course_lib.checks import ch03
from course_lib.minimal.data import DataParallel, OverlappedDP
from course_lib.training import loss_of

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


class LikeTheLesson(OverlappedDP):
    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for param in model.parameters():
            dist.broadcast(param.data, src=0, group=group)


class CopiesIntoBuckets(DataParallel):
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
        if not self.syncing:
            return
        self.filling.append(param)
        if sum(member.numel() for member in self.filling) >= 60_000 or param is self.first:
            flat_P = torch.cat([member.grad.flatten() for member in self.filling])
            self.sent.append((self.filling, flat_P, dist.all_reduce(flat_P, group=self.group, async_op=True)))
            self.filling = []

    def backward(self, micro_batches):
        for x_BS, y_BS in micro_batches[:-1]:
            (loss_of(self.model, x_BS, y_BS) / len(micro_batches)).backward()
        self.syncing = True
        (loss_of(self.model, *micro_batches[-1]) / len(micro_batches)).backward()
        self.syncing = False

    def update(self):
        for members, flat_P, work in self.sent:
            work.wait()
            pieces = flat_P.split([member.numel() for member in members])
            for member, piece in zip(members, pieces, strict=True):
                member.grad = piece.view(member.shape) / self.group.size()
        self.sent.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


class WaitsAtTheEndOfBackward(LikeTheLesson):
    """As PyTorch's DDP: backward itself waits, in a callback of the autograd engine."""

    def send(self, bucket):
        if self.is_last:
            bucket.start()
            if bucket is self.buckets[-1]:
                Variable._execution_engine.queue_callback(self.wait)

    def wait(self):
        for bucket in self.buckets:
            bucket.work.wait()

    def finish(self):
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()


class ScattersThenGathers(LikeTheLesson):
    """An all-reduce in its two phases; the second is started in update."""

    def send(self, bucket):
        if self.is_last:
            size = self.group.size()
            bucket.padded_P = torch.nn.functional.pad(bucket.flat_P / size, (0, -len(bucket.flat_P) % size))
            bucket.mean_p = bucket.padded_P.new_empty(len(bucket.padded_P) // size)
            bucket.work = dist.reduce_scatter_tensor(bucket.mean_p, bucket.padded_P, group=self.group, async_op=True)

    def update(self):
        for bucket in self.buckets:
            bucket.work.wait()
            work = dist.all_gather_into_tensor(bucket.padded_P, bucket.mean_p, group=self.group, async_op=True)
            work.wait()
            bucket.flat_P.copy_(bucket.padded_P[: len(bucket.flat_P)])
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()


@pytest.mark.exhaustive
@pytest.mark.parametrize("answer", [LikeTheLesson, CopiesIntoBuckets, WaitsAtTheEndOfBackward, ScattersThenGathers])
def test_a_right_answer_that_is_arranged_otherwise_passes(answer, capsys):
    ch03.check_ddp(answer)
    assert "check_ddp: passed" in capsys.readouterr().out
