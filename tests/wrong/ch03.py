"""Wrong answers to the exercises of chapter 03, each with what its grader must say about it."""

import torch
import torch.distributed as dist

from course_lib.checks.ch03 import (
    check_accumulate,
    check_accumulation,
    check_average_and_clip,
    check_average_by_tokens,
    check_buckets,
    check_ddp,
    check_overlap,
)
from course_lib.comm import all_gather, all_reduce
from course_lib.minimal.data import (
    BUCKET_SIZE,
    Bucket,
    BucketedDP,
    DataParallel,
    OverlappedDP,
    assign_buckets,
    when_all_arrived,
)
from course_lib.training import loss_of


# ------------------------------------------------------------------------------------ 1. the batch in tokens
def rounded_down(batch_tokens, seq_len, micro_batch_size, dp_size):
    return batch_tokens // (seq_len * micro_batch_size * dp_size)


def refuses_without_a_word(batch_tokens, seq_len, micro_batch_size, dp_size):
    if batch_tokens % (seq_len * micro_batch_size * dp_size):
        raise ValueError
    return batch_tokens // (seq_len * micro_batch_size * dp_size)


def _whole(numerator, denominator):
    if numerator % denominator:
        raise ValueError("does not divide")
    return numerator // denominator


def batch_in_sequences(batch_tokens, seq_len, micro_batch_size, dp_size):
    return _whole(batch_tokens, micro_batch_size * dp_size)


def ranks_forgotten(batch_tokens, seq_len, micro_batch_size, dp_size):
    return _whole(batch_tokens, seq_len * micro_batch_size)


def micro_batch_forgotten(batch_tokens, seq_len, micro_batch_size, dp_size):
    return _whole(batch_tokens, seq_len * dp_size)


def a_float(batch_tokens, seq_len, micro_batch_size, dp_size):
    return batch_tokens / (seq_len * micro_batch_size * dp_size)


# ------------------------------------------------------------------------------------ 2. unequal numbers of tokens
def mean_of_ranks(grad_P, num_tokens, group):
    return all_reduce(grad_P, group, op="mean")


def sum_of_ranks(grad_P, num_tokens, group):
    return all_reduce(grad_P, group)


def never_divided(grad_P, num_tokens, group):
    return all_reduce(grad_P * num_tokens, group)


def divided_by_ranks(grad_P, num_tokens, group):
    return all_reduce(grad_P * num_tokens, group, op="mean")


def own_gradient(grad_P, num_tokens, group):
    return grad_P.clone()


def gathers_all(grad_P, num_tokens, group):
    everything = all_gather(torch.cat([grad_P * num_tokens, grad_P.new_tensor([float(num_tokens)])]), group)
    total = all_gather(everything, group).view(-1, len(grad_P) + 1)[: group.size()].sum(0)
    return total[:-1] / total[-1]


# ------------------------------------------------------------------------------------ 3. clipping
def _scaled(grads, norm, max_norm):
    return [grad * min(1.0, max_norm / float(norm)) for grad in grads]


def _norm(grads):
    return torch.cat([grad.flatten() for grad in grads]).norm()


def _averaged(grads, group):
    return [all_reduce(grad, group, op="mean") for grad in grads]


def clips_before_averaging(grads, max_norm, group):
    return _averaged(_scaled(grads, _norm(grads), max_norm), group)


def sums_the_norm_over_ranks(grads, max_norm, group):
    averaged = _averaged(grads, group)
    return _scaled(averaged, all_reduce(_norm(averaged) ** 2, group).sqrt(), max_norm)


def each_tensor_on_its_own(grads, max_norm, group):
    return [_scaled([grad], grad.norm(), max_norm)[0] for grad in _averaged(grads, group)]


def also_lengthens(grads, max_norm, group):
    averaged = _averaged(grads, group)
    return [grad * (max_norm / _norm(averaged)) for grad in averaged]


def never_clips(grads, max_norm, group):
    return _averaged(grads, group)


def clips_the_sum(grads, max_norm, group):
    summed = [all_reduce(grad, group) for grad in grads]
    return _scaled(summed, _norm(summed), max_norm)


# ------------------------------------------------------------------------------------ 4. buckets
def _fill(order, sizes_bytes, bucket_bytes, first_bucket_bytes, keep_rest=True):
    buckets, filling = [], []
    for index in order:
        filling.append(index)
        if sum(sizes_bytes[member] for member in filling) >= (bucket_bytes if buckets else first_bucket_bytes):
            buckets.append(filling)
            filling = []
    return buckets + [filling] if filling and keep_rest else buckets


def first_parameter_first(sizes_bytes, bucket_bytes, first_bucket_bytes):
    return _fill(range(len(sizes_bytes)), sizes_bytes, bucket_bytes, first_bucket_bytes)


def all_alike(sizes_bytes, bucket_bytes, first_bucket_bytes):
    return _fill(reversed(range(len(sizes_bytes))), sizes_bytes, bucket_bytes, bucket_bytes)


def all_small(sizes_bytes, bucket_bytes, first_bucket_bytes):
    return _fill(reversed(range(len(sizes_bytes))), sizes_bytes, first_bucket_bytes, first_bucket_bytes)


def rest_forgotten(sizes_bytes, bucket_bytes, first_bucket_bytes):
    return _fill(reversed(range(len(sizes_bytes))), sizes_bytes, bucket_bytes, first_bucket_bytes, keep_rest=False)


def never_over_its_size(sizes_bytes, bucket_bytes, first_bucket_bytes):
    buckets = [[]]
    for index in reversed(range(len(sizes_bytes))):
        limit = bucket_bytes if len(buckets) > 1 else first_bucket_bytes
        if buckets[-1] and sum(sizes_bytes[member] for member in buckets[-1]) + sizes_bytes[index] > limit:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


# ------------------------------------------------------------------------------------ 5. hooks
def _hooked(params, group, divide=True, async_op=True, wait=True):
    works = []

    def start(param):
        if divide:
            param.grad /= group.size()
        work = dist.all_reduce(param.grad, group=group, async_op=async_op)
        works.append(work)

    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(start)

    def finish():
        for work in works:
            if wait and async_op:
                work.wait()
        works.clear()

    return finish


def divides_under_way(model, group):
    """A race: the division meets the sum on its way."""
    works = []

    def start(param):
        works.append(dist.all_reduce(param.grad, group=group, async_op=True))
        param.grad /= group.size()

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(start)

    def finish():
        for work in works:
            work.wait()
        works.clear()

    return finish


def keeps_the_handles(model, group):
    works = []

    def start(param):
        param.grad /= group.size()
        works.append(dist.all_reduce(param.grad, group=group, async_op=True))

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(start)

    def finish():
        for work in works:
            work.wait()

    return finish


def sums(model, group):
    return _hooked(model.parameters(), group, divide=False)


def holds_backward_up(model, group):
    return _hooked(model.parameters(), group, async_op=False)


def never_waits(model, group):
    return _hooked(model.parameters(), group, wait=False)


def tied_parameter_twice(model, group):
    return _hooked([param for _, param in model.named_parameters(remove_duplicate=False)], group)


def weights_only(model, group):
    return _hooked([param for name, param in model.named_parameters() if "weight" in name], group)


def after_backward(model, group):
    def finish():
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= group.size()
                dist.all_reduce(param.grad, group=group)

    return finish


def returns_no_finish(model, group):
    _hooked(model.parameters(), group)


# ------------------------------------------------------------------------------------ 6. accumulation
def averages_each_time(engine, parts, loss_of):
    rows = sum(len(y) for _, y in parts)
    for x, y in parts:
        (loss_of(engine, x, y) * len(y) / rows).backward()


def _once(engine, parts, loss_of, weights):
    *first, last = [(x, y, weight) for (x, y), weight in zip(parts, weights, strict=True)]
    with engine.no_sync():
        for x, y, weight in first:
            (loss_of(engine, x, y) * weight).backward()
    (loss_of(engine, last[0], last[1]) * last[2]).backward()


def _shares(parts):
    rows = sum(len(y) for _, y in parts)
    return [len(y) / rows for _, y in parts]


def never_averages(engine, parts, loss_of):
    with engine.no_sync():
        for (x, y), weight in zip(parts, _shares(parts), strict=True):
            (loss_of(engine, x, y) * weight).backward()


def mean_of_means(engine, parts, loss_of):
    _once(engine, parts, loss_of, [1 / len(parts)] * len(parts))


def means_added_up(engine, parts, loss_of):
    _once(engine, parts, loss_of, [1.0] * len(parts))


def ranks_divided_twice(engine, parts, loss_of):
    _once(engine, parts, loss_of, [share / dist.get_world_size() for share in _shares(parts)])


def one_backward_for_all(engine, parts, loss_of):
    weighted = zip(parts, _shares(parts), strict=True)
    sum(loss_of(engine, x, y) * share for (x, y), share in weighted).backward()


def one_backward_for_all_but_the_last(engine, parts, loss_of):
    *before, (x, y) = parts
    *shares, last_share = _shares(parts)
    with engine.no_sync():
        sum(loss_of(engine, *part) * share for part, share in zip(before, shares, strict=True)).backward()
    (loss_of(engine, x, y) * last_share).backward()


def last_one_only(engine, parts, loss_of):
    x, y = parts[-1]
    (loss_of(engine, x, y) * _shares(parts)[-1]).backward()


# ------------------------------------------------------------------------------------ 7. DDP from an empty cell
class BeginsUnequal(OverlappedDP):
    """Right in all but the broadcast."""


class Broadcasts(OverlappedDP):
    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for param in model.parameters():
            dist.broadcast(param.data, src=0, group=group)


class Sums(Broadcasts):
    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat_P *= bucket.group.size()
        super().finish()


class SendsAfterBackward(Broadcasts):
    backward = BucketedDP.backward
    update = BucketedDP.update
    is_last = False


class MessagePerTensor(Broadcasts):
    def __init__(self, model, make_optimizer, group):
        DataParallel.__init__(self, model, make_optimizer, group)
        self.works = []
        for param in model.parameters():
            dist.broadcast(param.data, src=0, group=group)
            param.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, param):
        if self.is_last:
            param.grad /= self.group.size()
            self.works.append(dist.all_reduce(param.grad, group=self.group, async_op=True))

    def update(self):
        for work in self.works:
            work.wait()
        self.works.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()


class OneMessage(Broadcasts):
    """Everything in the bucket that is complete last."""

    def send(self, bucket):
        if self.is_last and bucket is self.buckets[-1]:
            flat_P = torch.cat([bucket.flat_P for bucket in self.buckets]) / self.group.size()
            self.work = dist.all_reduce(flat_P, group=self.group, async_op=True)
            self.flat_P = flat_P

    def finish(self):
        self.work.wait()
        pieces = self.flat_P.split([len(bucket.flat_P) for bucket in self.buckets])
        for bucket, piece in zip(self.buckets, pieces, strict=True):
            bucket.flat_P.copy_(piece)
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()


class WaitsInTheHook(Broadcasts):
    def send(self, bucket):
        if self.is_last:
            bucket.start()
            bucket.work.wait()


class SendsEveryMicroBatch(Broadcasts):
    """A race: the next micro-batch adds to buckets that are under way."""

    def send(self, bucket):
        bucket.start()


class FillsFromTheFirst(Broadcasts):
    """Buckets in the order of the model: the small rest has the last parameters and is sent first."""

    def __init__(self, model, make_optimizer, group):
        DataParallel.__init__(self, model, make_optimizer, group)
        groups = assign_buckets(list(model.parameters())[::-1], BUCKET_SIZE)
        self.buckets = [Bucket(params, group) for params in groups]
        for bucket in self.buckets:
            when_all_arrived(bucket.params, lambda bucket=bucket: self.send(bucket))
        for param in model.parameters():
            dist.broadcast(param.data, src=0, group=group)


class DividesUnderWay(Broadcasts):
    def send(self, bucket):
        if self.is_last:
            bucket.start()
            bucket.flat_P += 0


class NeverWaits(Broadcasts):
    """Waits by time: right, and a race all the same."""

    def finish(self):
        dist.barrier(self.group)
        while not all(bucket.work.is_completed() for bucket in self.buckets):
            pass
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()


class SendsTheFirstMicroBatch(Broadcasts):
    """What later micro-batches add stays on each rank."""

    def backward(self, micro_batches):
        for index, (x_BS, y_BS) in enumerate(micro_batches):
            self.is_last = index == 0
            (loss_of(self.model, x_BS, y_BS) / len(micro_batches)).backward()
            if index == 0:
                for bucket in self.buckets:
                    bucket.work.wait()


class NeverDropsGradients(Broadcasts):
    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
        self.optimizer.step()


class DropsTheViews(Broadcasts):
    """The buckets send the first step's gradients again, and the optimizer reads others."""

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()


class NeverDividesTheLoss(Broadcasts):
    def backward(self, micro_batches):
        for index, (x_BS, y_BS) in enumerate(micro_batches, 1):
            self.is_last = index == len(micro_batches)
            loss_of(self.model, x_BS, y_BS).backward()


class AveragesNothing(Broadcasts):
    def send(self, bucket):
        pass

    def finish(self):
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.flat_P.zero_()


class PyTorchs(DataParallel):
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
    "my_accumulation": {
        "check": check_accumulation,
        "answers": [
            (rounded_down, "does not come out whole"),
            (refuses_without_a_word, "the ValueError has no text"),
            (batch_in_sequences, "the batch is counted in tokens"),
            (ranks_forgotten, "all dp ranks work at the same time"),
            (micro_batch_forgotten, "each micro-batch has micro_batch_size sequences"),
            (a_float, "return a whole number (int)"),
        ],
    },
    "my_average": {
        "check": check_average_by_tokens,
        "answers": [
            (mean_of_ranks, "every rank counted alike"),
            (sum_of_ranks, "gradients were summed"),
            (never_divided, "but never divided"),
            (divided_by_ranks, "divide by the number of tokens"),
            (own_gradient, "nothing was exchanged"),
            (gathers_all, "one all-reduce of the weighted gradient"),
        ],
    },
    "my_average_and_clip": {
        "check": check_average_and_clip,
        "answers": [
            (clips_before_averaging, "clipped before averaging"),
            (sums_the_norm_over_ranks, "the squares were summed over the ranks"),
            (each_tensor_on_its_own, "each tensor was clipped on its own"),
            (also_lengthens, "was made longer"),
            (never_clips, "averaged, but not clipped"),
            (clips_the_sum, "summed, not averaged"),
        ],
    },
    "my_buckets": {
        "check": check_buckets,
        "answers": [
            (first_parameter_first, "backward completes the last one first"),
            (all_alike, "as large as the others"),
            (all_small, "that is for the first alone"),
            (rest_forgotten, "its gradients would not be averaged"),
            (never_over_its_size, "closes before it would pass its size"),
        ],
    },
    "my_overlap": {
        "check": check_overlap,
        "answers": [
            (sums, "summed, not averaged"),
            (holds_backward_up, "start it with async_op=True"),
            (never_waits, "never waited for"),
            (tied_parameter_twice, "two names and one gradient"),
            (weights_only, "some were left out"),
            (after_backward, "when backward was over, no all-reduce had started"),
            (returns_no_finish, "must return finish"),
            (divides_under_way, "divide before the start, or after the wait"),
            (keeps_the_handles, "waited for 3 all-reduces of the step before once more"),
        ],
    },
    "my_accumulate": {
        "check": check_accumulate,
        "answers": [
            (averages_each_time, "belong in no_sync()"),
            (never_averages, "must run outside no_sync()"),
            (mean_of_means, "every micro-batch counted alike"),
            (means_added_up, "weigh each by its share"),
            (ranks_divided_twice, "DDP has done that"),
            (last_one_only, "only the last micro-batch is in it"),
            (one_backward_for_all, "2 before it still kept what they saved"),
            (one_backward_for_all_but_the_last, "1 before it still kept what they saved"),
        ],
    },
    "MyDDP": {
        "check": check_ddp,
        "answers": [
            (BeginsUnequal, "broadcast rank 0's"),
            (Sums, "take the mean over ranks: divide by their number"),
            (SendsTheFirstMicroBatch, "this rank's own gradient of the later ones; average when the last"),
            (NeverDropsGradients, "the new gradient plus that of the first step; drop gradients"),
            (DropsTheViews, "its second step used this rank's own gradient, not averaged"),
            (NeverDividesTheLoss, "the sum over the 3 micro-batches; take the mean"),
            (AveragesNothing, "its first step used this rank's own gradient; take the mean over ranks"),
            (SendsAfterBackward, "start a bucket in the hook"),
            (MessagePerTensor, "fill buckets of 60,000"),
            (OneMessage, "one message carried everything"),
            (WaitsInTheHook, "backward waited for every message"),
            (SendsEveryMicroBatch, "send only in the last micro-batch"),
            (NeverWaits, "were never waited for"),
            (PyTorchs, "write the buckets yourself"),
            (FillsFromTheFirst, "fill buckets from the last parameter to the first"),
            (DividesUnderWay, "a bucket was written between the start"),
        ],
    },
}
