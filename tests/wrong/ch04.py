"""Wrong answers to the exercises of chapter 04, each with what its grader must say about it."""

import math

import torch

from course_lib.checks.ch04 import (
    check_clip_shards,
    check_gather_use_free,
    check_held_bytes,
    check_sent_bytes,
    check_zero2_buckets,
    check_zero3,
)
from course_lib.comm import all_gather, all_reduce
from course_lib.minimal.data import DataParallel, when_all_arrived
from course_lib.minimal.zero import FlatParameter, Zero1, Zero2, Zero3, free, gather, gather_use_free, units_of


# ------------------------------------------------------------------------------------ 1. bytes held
def _held(num_params, dp_size, cut, stage, optimizer_bytes=12, shard=None):
    shard = shard or math.ceil(num_params / dp_size)
    whole = math.ceil(num_params / dp_size) * dp_size if stage else num_params
    sizes = {"parameters": 2, "gradients": 2, "optimizer": optimizer_bytes}
    return tuple(size * (shard if kind in cut else whole) for kind, size in sizes.items())


ORDER = ("optimizer", "gradients", "parameters")


def parameters_first(num_params, stage, dp_size):
    return _held(num_params, dp_size, ("parameters", *ORDER)[:stage], stage)


def gradients_first(num_params, stage, dp_size):
    return _held(num_params, dp_size, ("gradients", "optimizer", "parameters")[:stage], stage)


def master_forgotten(num_params, stage, dp_size):
    return _held(num_params, dp_size, ORDER[:stage], stage, optimizer_bytes=8)


def shard_rounded_down(num_params, stage, dp_size):
    return _held(num_params, dp_size, ORDER[:stage], stage, shard=num_params // dp_size)


def everything_divided(num_params, stage, dp_size):
    return _held(num_params, dp_size, ORDER if stage else (), stage)


def nothing_sharded(num_params, stage, dp_size):
    return 2 * num_params, 2 * num_params, 12 * num_params


def whole_not_padded(num_params, stage, dp_size):
    shard = math.ceil(num_params / dp_size)
    return tuple(
        size * (shard if stage >= first else num_params) for size, first in zip((2, 2, 12), (3, 2, 1), strict=True)
    )


def floats(num_params, stage, dp_size):
    return tuple(float(size) for size in _held(num_params, dp_size, ORDER[:stage], stage))


# ------------------------------------------------------------------------------------ 3. clipping on shards
def _scaled(grad_p, norm, max_norm):
    return grad_p * min(1.0, max_norm / float(norm))


def own_norm(grad_p, max_norm, group):
    return _scaled(grad_p, grad_p.norm(), max_norm)


def norms_added(grad_p, max_norm, group):
    return _scaled(grad_p, all_reduce(grad_p.norm(), group), max_norm)


def squares_averaged(grad_p, max_norm, group):
    return _scaled(grad_p, all_reduce(grad_p.square().sum(), group, op="mean").sqrt(), max_norm)


def also_lengthens(grad_p, max_norm, group):
    return grad_p * (max_norm / all_reduce(grad_p.square().sum(), group).sqrt())


def never_clips(grad_p, max_norm, group):
    return grad_p.clone()


def root_forgotten(grad_p, max_norm, group):
    return _scaled(grad_p, all_reduce(grad_p.square().sum(), group), max_norm)


def gathers_the_gradient(grad_p, max_norm, group):
    return _scaled(grad_p, all_gather(grad_p, group).norm(), max_norm)


def changes_its_input(grad_p, max_norm, group):
    norm = all_reduce(grad_p.square().sum(), group).sqrt()
    return grad_p.mul_(min(1.0, max_norm / norm.item()))


# ------------------------------------------------------------------------------------ 2. bytes sent
def _sent(num_params, dp_size, gathers, scatters, grad_bytes=4):
    return (2 * gathers + grad_bytes * scatters) * (num_params // dp_size) * (dp_size - 1)


def _trips(stage, m):
    return {0: (0, 2), 1: (1, 1), 2: (1, m), 3: (2 * m, m)}[stage]


def gradients_in_2_bytes(num_params, stage, dp_size, micro_batches):
    return _sent(num_params, dp_size, *_trips(stage, micro_batches), grad_bytes=2)


def own_piece_sent(num_params, stage, dp_size, micro_batches):
    gathers, scatters = _trips(stage, micro_batches)
    return (2 * gathers + 4 * scatters) * num_params


def stage_1_all_reduces(num_params, stage, dp_size, micro_batches):
    return _sent(num_params, dp_size, *((1, 2) if stage == 1 else _trips(stage, micro_batches)))


def stage_1_reduces_each_time(num_params, stage, dp_size, micro_batches):
    return _sent(num_params, dp_size, *_trips(2 if stage == 1 else stage, micro_batches))


def stage_2_reduces_once(num_params, stage, dp_size, micro_batches):
    return _sent(num_params, dp_size, *_trips(1 if stage == 2 else stage, micro_batches))


def gathers_for_forward_alone(num_params, stage, dp_size, micro_batches):
    gathers, scatters = _trips(stage, micro_batches)
    return _sent(num_params, dp_size, micro_batches if stage == 3 else gathers, scatters)


def stage_3_once_a_step(num_params, stage, dp_size, micro_batches):
    return _sent(num_params, dp_size, *(_trips(3, 1) if stage == 3 else _trips(stage, micro_batches)))


# ------------------------------------------------------------------------------------ 5. gather, use, free
def _stage_3(units, x, free=True, gather_again=True, ahead=True, reduce=True, reverse=True, wait=True):
    """The right schedule, unless told otherwise."""

    def turn(unit, following, compute, value):
        if not ahead:
            unit.start_gather()
        if wait:
            unit.wait()
        if following is not None and ahead:
            following.start_gather()
        return compute(value)

    if ahead:
        units[0].start_gather()
    for unit, following in zip(units, [*units[1:], None], strict=True):
        x = turn(unit, following, unit.forward, x)
        if free:
            unit.free()
    grad, order = torch.ones_like(x), units[::-1] if reverse else units
    if not gather_again:
        for unit in order:
            grad = unit.backward(grad)
    if ahead and free:
        order[0].start_gather()
    for unit, following in zip(order, [*order[1:], None], strict=True):
        grad = turn(unit, following if free else None, unit.backward, grad)
        if reduce:
            unit.reduce()
        unit.free()
    return x


def gathers_after_use(units, x):
    for unit in units:
        x = unit.forward(x)
        unit.start_gather()
    return x


def never_frees(units, x):
    return _stage_3(units, x, free=False)


def not_gathered_for_backward(units, x):
    return _stage_3(units, x, gather_again=False)


def no_prefetch(units, x):
    return _stage_3(units, x, ahead=False)


def never_reduces(units, x):
    return _stage_3(units, x, reduce=False)


def never_waits(units, x):
    return _stage_3(units, x, wait=False)


def backward_in_forward_order(units, x):
    return _stage_3(units, x, reverse=False)


def left_whole_at_the_end(units, x):
    x = _stage_3(units, x)
    units[0].start_gather()
    units[0].wait()
    return x


# ------------------------------------------------------------------------------------ 4. ZeRO-2 with buckets
def buckets_of(model, least=60_000):
    buckets = [[]]
    for unit in reversed(units_of(model)):
        if sum(param.numel() for param in buckets[-1]) >= least:
            buckets.append([])
        buckets[-1] += unit.parameters()
    return buckets


class BucketsAfterBackward(Zero1):
    """Buckets, but nothing is sent before the update."""

    def __init__(self, model, make_optimizer, group):
        self.model = model
        self.flats = [FlatParameter(bucket, group) for bucket in buckets_of(model)]
        self.optimizer = make_optimizer([flat.shard_p for flat in self.flats])


class OneMessagePerUnit(Zero2):
    """The lesson's."""


class OneBucket(Zero2):
    """All gradients in one message, when backward is over."""

    def __init__(self, model, make_optimizer, group):
        self.model, self.flats = model, [FlatParameter(model.parameters(), group)]
        self.optimizer = make_optimizer([self.flats[0].shard_p])
        when_all_arrived(self.flats[0].params, self.flats[0].reduce_scatter)


class LastMicroBatchOnly(Zero2):
    def backward(self, micro_batches):
        super().backward(micro_batches)
        if len(micro_batches) > 1:
            for flat in self.flats:
                flat.shard_p.grad = None
            super().backward(micro_batches[-1:])


class SumsOverRanks(Zero2):
    def update(self):
        for flat in self.flats:
            flat.shard_p.grad *= flat.group.size()
        super().update()


# ------------------------------------------------------------------------------------ 6. build ZeRO-3
class NeverFrees(Zero3):
    """Units stay full from forward to the end of backward: no phase more, the memory of stage 2."""

    def __init__(self, model, make_optimizer, group):
        Zero1.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            when_all_arrived(flat.params, lambda flat=flat: (flat.reduce_scatter(), free(flat)))


class FreesAfterForwardAlone(Zero3):
    """After backward all units are full again; no peak shows it, since a step peaks before."""

    def __init__(self, model, make_optimizer, group):
        Zero1.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            unit.register_forward_hook(lambda unit, x, y, flat=flat: (free(flat), regather(y, flat))[0])
            when_all_arrived(flat.params, flat.reduce_scatter)


class NeverGathersForBackward(Zero3):
    """Forward is right, and backward meets emptied weights."""

    def __init__(self, model, make_optimizer, group):
        Zero2.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            unit.register_forward_hook(lambda *_, flat=flat: free(flat))


def regather(output, flat):
    output.register_hook(lambda grad: gather(flat))


class ShardIsAView(Zero3):
    """Without a clone the shard's memory is given back with the buffer: the optimizer writes to nothing."""

    def __init__(self, model, make_optimizer, group):
        Zero2.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            free(flat)
            gather_use_free(unit, flat)


class AllReducesFirst(Zero3):
    """The full gradient on every rank, and then a shard of it."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for param in model.parameters():
            param.register_hook(lambda grad: all_reduce(grad.contiguous(), group, op="mean"))


class Sums(Zero3):
    def update(self):
        for flat in self.flats:
            flat.shard_p.grad *= flat.group.size()
        super().update()


class OptimizerOfEverything(DataParallel):
    """Data parallelism: right, and nothing is sharded."""


class KeepsParameters(Zero2):
    """Stage 2: parameters stay full."""


WRONG = {
    "my_held_bytes": {
        "check": check_held_bytes,
        "answers": [
            (parameters_first, "parameters are cut last"),
            (gradients_first, "states are cut first"),
            (master_forgotten, "the FP32 master copy"),
            (shard_rounded_down, "round the shard up"),
            (everything_divided, "every kind was divided"),
            (whole_not_padded, "is padded too"),
            (nothing_sharded, "nothing was sharded"),
            (floats, "three whole numbers"),
        ],
    },
    "my_clip_shard": {
        "check": check_clip_shards,
        "answers": [
            (own_norm, "the norm of its own shard"),
            (norms_added, "norms were added"),
            (squares_averaged, "the mean of the squares"),
            (also_lengthens, "made longer"),
            (never_clips, "it was not clipped"),
            (root_forgotten, "the root is missing"),
            (gathers_the_gradient, "a single number is enough"),
            (changes_its_input, "changed its input"),
        ],
    },
    "my_sent_bytes": {
        "check": check_sent_bytes,
        "answers": [
            (gradients_in_2_bytes, "travel in 4 bytes"),
            (own_piece_sent, "keeps its own piece"),
            (stage_1_all_reduces, "the all-reduce form"),
            (stage_1_reduces_each_time, "reduces once a step"),
            (stage_2_reduces_once, "nobody keeps whole gradients"),
            (gathers_for_forward_alone, "gathered twice"),
            (stage_3_once_a_step, "every micro-batch gathers"),
        ],
    },
    "my_stage_3": {
        "check": check_gather_use_free,
        "answers": [
            (gathers_after_use, "runs forward with freed parameters"),
            (never_frees, "were whole at once"),
            (not_gathered_for_backward, "so gather it again"),
            (no_prefetch, "nothing is gathered ahead"),
            (never_reduces, "was never reduced"),
            (never_waits, "wait() for it first"),
            (backward_in_forward_order, "backward from the last to the first"),
            (left_whole_at_the_end, "are still whole"),
        ],
    },
    "MyZero2": {
        "check": check_zero2_buckets,
        "answers": [
            (BucketsAfterBackward, "full gradients were still there"),
            (OneMessagePerUnit, "put parameters together"),
            (OneBucket, "backward sent one reduce-scatter"),
            (LastMicroBatchOnly, "gradients must add up over the micro-batches"),
            (SumsOverRanks, "take the mean over ranks"),
        ],
    },
    "MyZero3": {
        "check": check_zero3,
        "answers": [
            (NeverFrees, "free a unit after its forward"),
            (FreesAfterForwardAlone, "free a unit after its backward"),
            (NeverGathersForBackward, "gather it before its forward, and again before its backward"),
            (ShardIsAView, "is your shard a view of the buffer that you empty?"),
            (AllReducesFirst, "phases are"),
            (Sums, "take the mean over ranks"),
            (OptimizerOfEverything, "bytes of optimizer"),
            (KeepsParameters, "bytes of parameters"),
        ],
    },
}
