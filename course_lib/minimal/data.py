"""Data parallelism without options: one message per parameter, then buckets, then overlap with backward.

A trainer has `backward(micro_batches)`, which leaves gradients, `update()`, which makes the step, and
`full_parameters()`. Ranks begin with equal parameters. The engine in parallel/data.py adds unused parameters, tied ones
in `no_sync`, another dtype for sums, and errors for what a user forgets.

Source   Li et al. 2020, PyTorch Distributed (arXiv:2006.15704)
"""

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.parallel.shards import views_into
from course_lib.training import loss_of

BUCKET_SIZE = 60_000  # elements; DDP's default is 25 MiB


class DataParallel:
    """Every rank holds the full model; each gradient is averaged over the ranks."""

    def __init__(self, model, make_optimizer, group):
        self.model, self.group = model, group
        self.optimizer = make_optimizer(model.parameters())

    def backward(self, micro_batches):
        """Accumulate the mean gradient of this rank's micro-batches."""
        for x_BS, y_BS in micro_batches:
            loss = loss_of(self.model, x_BS, y_BS) / len(micro_batches)
            loss.backward()

    def update(self):
        """Average the gradients over the ranks, then update every parameter."""
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.group, op="mean")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        """Return every parameter by its name."""
        return dict(self.model.named_parameters())


def assign_buckets(params, bucket_size):
    """Group parameters, last first; a bucket closes when it has `bucket_size`."""
    buckets = [[]]
    for param in reversed(list(params)):
        if sum(member.numel() for member in buckets[-1]) >= bucket_size:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


class Bucket:
    """The gradients of some parameters, end to end in one buffer, sent at once."""

    def __init__(self, params, group):
        self.params, self.group = params, group
        num_elements = sum(param.numel() for param in params)
        self.flat_P = params[0].new_zeros(num_elements)
        views = views_into(self.flat_P, params)
        for param, view in zip(params, views, strict=True):
            param.grad = view  # backward adds into the buffer

    def start(self):
        """Start to average over the ranks, and return at once."""
        self.flat_P /= self.group.size()
        self.work = dist.all_reduce(self.flat_P, group=self.group, async_op=True)


class BucketedDP(DataParallel):
    """One all-reduce per bucket, after backward."""

    max_norm = float("inf")  # of the gradient; a longer one is clipped

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        groups = assign_buckets(model.parameters(), BUCKET_SIZE)
        self.buckets = [Bucket(params, group) for params in groups]

    def update(self):
        """Average all buckets, then update every parameter."""
        for bucket in self.buckets:
            bucket.start()
        self.finish()

    def finish(self):
        """Wait, clip, step: what comes between the last all-reduce and the next step."""
        self.wait()
        self.clip()
        self.step()

    def wait(self):
        """Wait for the averages of all buckets."""
        for bucket in self.buckets:
            bucket.work.wait()

    def clip(self):
        """Shorten the mean gradient to `max_norm`; all ranks have the same norm."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def step(self):
        """Update every parameter, and empty the buckets."""
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()  # .grad stays a view of the bucket


def when_all_arrived(params, action):
    """Call `action` whenever backward has completed the gradients of all `params`."""
    missing = set(params)

    def gradient_is_complete(param):
        missing.remove(param)
        if not missing:
            missing.update(params)  # ready for the next micro-batch
            action()

    for param in params:
        param.register_post_accumulate_grad_hook(gradient_is_complete)


class OverlappedDP(BucketedDP):
    """A bucket is averaged as soon as it is complete, while backward goes on."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for bucket in self.buckets:  # `bucket=bucket`: this one, not the loop's last
            when_all_arrived(bucket.params, lambda bucket=bucket: self.send(bucket))

    def send(self, bucket):
        """Start the all-reduce in the last micro-batch; before it, only accumulate."""
        if self.is_last:
            bucket.start()

    def backward(self, micro_batches):
        """Accumulate the mean gradient; average it during the last backward."""
        for index, (x_BS, y_BS) in enumerate(micro_batches, 1):
            self.is_last = index == len(micro_batches)
            loss = loss_of(self.model, x_BS, y_BS) / len(micro_batches)
            loss.backward()

    def update(self):
        """Wait for the buckets, then update every parameter."""
        self.finish()
