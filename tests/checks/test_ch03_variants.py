"""The graders of chapter 03 accept right answers that are arranged otherwise, three of each."""

import itertools
import sys
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.autograd import Variable

from course_lib.checks import ch03
from course_lib.comm import all_reduce, all_reduce_
from course_lib.minimal.data import DataParallel, OverlappedDP
from course_lib.training import loss_of

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ the size of a batch
def accumulation_with_divmod(batch_tokens, seq_len, micro_batch_size, dp_size):
    count, rest = divmod(batch_tokens, seq_len * micro_batch_size * dp_size)
    if rest:
        raise ValueError(f"{rest} tokens are left over; choose another batch")
    return count


def accumulation_factor_by_factor(batch_tokens, seq_len, micro_batch_size, dp_size):
    for factor in (dp_size, micro_batch_size, seq_len):
        if batch_tokens % factor != 0:
            raise ValueError(f"{batch_tokens} does not divide by {factor}; change one of the two")
        batch_tokens //= factor
    return batch_tokens


def accumulation_by_multiplying_back(batch_tokens, seq_len, micro_batch_size, dp_size):
    count = round(batch_tokens / (dp_size * micro_batch_size * seq_len))
    if count * seq_len * micro_batch_size * dp_size == batch_tokens:
        return count
    raise ValueError("the batch is no multiple of what all ranks take at once; change one of the four")


# ------------------------------------------------------------------------------------ unequal numbers of tokens
def tokens_in_one_message(grad_P, num_tokens, group):
    weighted_P = torch.cat([grad_P * num_tokens, grad_P.new_tensor([float(num_tokens)])])
    total_P = all_reduce(weighted_P, group)
    return total_P[:-1] / total_P[-1]


def tokens_divided_last(grad_P, num_tokens, group):
    sum_P, count = grad_P.mul(num_tokens), torch.tensor(num_tokens)
    works = [dist.all_reduce(x, group=group, async_op=True) for x in (sum_P, count)]
    for work in works:
        work.wait()
    return sum_P / count


def tokens_in_two_phases(grad_P, num_tokens, group):
    """A reduce-scatter, the division of my piece, an all-gather."""
    piece_p = grad_P.new_empty(len(grad_P) // group.size())
    dist.reduce_scatter_tensor(piece_p, grad_P * num_tokens, group=group)
    piece_p /= all_reduce(torch.tensor([float(num_tokens)], dtype=grad_P.dtype), group)
    mean_P = torch.empty_like(grad_P)
    dist.all_gather_into_tensor(mean_P, piece_p, group=group)
    return mean_P


# ------------------------------------------------------------------------------------ clipping
def clip_one_flat_tensor(grads, max_norm, group):
    mean_P = all_reduce(torch.cat([grad.flatten() for grad in grads]), group, op="mean")
    mean_P = mean_P * min(1.0, max_norm / mean_P.norm().item())
    pieces = mean_P.split([grad.numel() for grad in grads])
    return [piece.view(grad.shape) for piece, grad in zip(pieces, grads, strict=True)]


def clip_with_torch(grads, max_norm, group):
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = all_reduce(grad, group) / group.size()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    return [param.grad for param in params]


def clip_by_norms_of_tensors(grads, max_norm, group):
    for grad in grads:
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    return grads if norm <= max_norm else [max_norm * grad / norm for grad in grads]


# ------------------------------------------------------------------------------------ buckets
def buckets_by_sums(sizes_bytes, bucket_bytes, first_bucket_bytes):
    """Closes where the running sum has reached the next goal."""
    order = range(len(sizes_bytes) - 1, -1, -1)
    plan, goal = [[]], first_bucket_bytes
    for index, total in zip(order, itertools.accumulate(sizes_bytes[index] for index in order), strict=True):
        plan[-1].append(index)
        if total >= goal:
            plan.append([])
            goal = total + bucket_bytes
    return [bucket for bucket in plan if bucket]


def buckets_from_a_stack(sizes_bytes, bucket_bytes, first_bucket_bytes):
    numbers, plan = list(range(len(sizes_bytes))), []
    while numbers:
        room, bucket = (bucket_bytes if plan else first_bucket_bytes), []
        while numbers and room > 0:
            bucket.append(numbers.pop())
            room -= sizes_bytes[bucket[-1]]
        plan.append(bucket)
    return plan


def buckets_recursively(sizes_bytes, bucket_bytes, first_bucket_bytes):
    for count in range(1, len(sizes_bytes) + 1):
        if sum(sizes_bytes[-count:]) >= first_bucket_bytes or count == len(sizes_bytes):
            bucket = list(range(len(sizes_bytes)))[::-1][:count]
            return [bucket, *buckets_recursively(sizes_bytes[:-count], bucket_bytes, bucket_bytes)]
    return []


# ------------------------------------------------------------------------------------ overlap
def overlap_divides_last(model, group):
    in_flight = {}

    def start(param):
        in_flight[param] = dist.all_reduce(param.grad, group=group, async_op=True)

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(start)

    def finish():
        while in_flight:
            param, work = in_flight.popitem()
            work.wait()
            param.grad.div_(group.size())

    return finish


def overlap_on_copies(model, group):
    """What travels is a copy, which becomes the gradient."""
    copies = []

    def start(param):
        copy = param.grad / group.size()
        copies.append((param, copy, all_reduce_(copy, group, async_op=True)))

    for param in filter(lambda param: param.requires_grad, model.parameters()):
        param.register_post_accumulate_grad_hook(start)

    def finish():
        for param, copy, work in copies:
            work.wait()
            param.grad = copy
        copies.clear()

    return finish


class Overlap:
    """An object whose call is `finish`; it waits for futures."""

    def __init__(self, model, group):
        self.group, self.futures = group, []
        for _, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.start)

    def start(self, param):
        with torch.no_grad():
            param.grad.mul_(1 / self.group.size())
        self.futures.append(dist.all_reduce(param.grad, group=self.group, async_op=True).get_future())

    def __call__(self):
        torch.futures.wait_all(self.futures)
        self.futures = []


# ------------------------------------------------------------------------------------ accumulation under DDP
def accumulate_in_one_loop(engine, parts, loss_of):
    rows = sum(len(y) for _, y in parts)
    for index, (x, y) in enumerate(parts):
        with engine.no_sync() if index + 1 < len(parts) else nullcontext():
            (loss_of(engine, x, y) * len(y) / rows).backward()


def accumulate_first_part_last(engine, parts, loss_of):
    """The order of the parts is free."""
    first, *others = parts
    with engine.no_sync():
        for x, y in others:
            (loss_of(engine, x, y) * len(y)).backward()
    (loss_of(engine, *first) * len(first[1])).backward()
    for param in engine.parameters():
        param.grad /= sum(len(y) for _, y in parts)


def accumulate_by_the_switch(engine, parts, loss_of):
    """What no_sync() sets, set by hand; losses are collected, and their graphs are gone."""
    share, losses = 1 / sum(len(y) for _, y in parts), []
    for index, (x, y) in enumerate(parts, 1):
        engine.require_backward_grad_sync = index == len(parts)
        losses.append(loss_of(engine, x, y) * (len(y) * share))
        losses[-1].backward()


# ------------------------------------------------------------------------------------ DDP from an empty cell
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


RIGHT = {
    "check_accumulation": (
        accumulation_with_divmod,
        accumulation_factor_by_factor,
        accumulation_by_multiplying_back,
    ),
    "check_average_by_tokens": (tokens_in_one_message, tokens_divided_last, tokens_in_two_phases),
    "check_average_and_clip": (clip_one_flat_tensor, clip_with_torch, clip_by_norms_of_tensors),
    "check_buckets": (buckets_by_sums, buckets_from_a_stack, buckets_recursively),
    "check_overlap": (overlap_divides_last, overlap_on_copies, Overlap),
    "check_accumulate": (
        accumulate_in_one_loop,
        accumulate_first_part_last,
        accumulate_by_the_switch,
    ),
    "check_ddp": (LikeTheLesson, CopiesIntoBuckets, WaitsAtTheEndOfBackward, ScattersThenGathers),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), [(check, answer) for check, answers in RIGHT.items() for answer in answers]
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch03, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out
