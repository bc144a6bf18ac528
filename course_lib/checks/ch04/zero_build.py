"""Graders of chapter 04, exercises 4 and 6: trainers, judged by what the lesson measures."""

from functools import cache

import torch
import torch.distributed as dist

from course_lib.checks.core import CheckFailed, fail, grader, run_ranks
from course_lib.checks.trainers import expect_right, expect_sent
from course_lib.comm import all_reduce
from course_lib.compare import trials
from course_lib.compare.record import on_ranks
from course_lib.measure import ByteMeter
from course_lib.memory.states import count_parameters
from course_lib.memory.zero import layer_units
from course_lib.minimal.data import DataParallel, when_all_arrived
from course_lib.minimal.zero import FlatParameter, Zero1, Zero2, Zero3, free, gather, gather_use_free, units_of
from course_lib.model import build

NUM_PARAMS = count_parameters(trials.CONFIG)
MOST_MESSAGES = -(-NUM_PARAMS // 60_000)  # buckets of single parameters; of whole units there is one fewer
ITEMSIZE = 2  # bfloat16, in which as_trainer counts
SIGNS_OF_FREED_MEMORY = {
    "killed by SIGSEGV": "your code read or wrote memory that it had given back; is your shard a view of the buffer "
    "that you empty? Clone it",
    "out of bounds for storage of size 0": "a unit was used after it was freed: gather it before its forward, and "
    "again before its backward",
}


class Buckets(Zero1):
    """ZeRO-2 whose buckets may end inside a unit; a wrong answer changes what they hold, or when they are sent."""

    sends_in_backward = True

    def __init__(self, model, make_optimizer, group):
        self.model, self.flats = model, [FlatParameter(bucket, group) for bucket in self.buckets(model)]
        self.optimizer = make_optimizer([flat.shard_p for flat in self.flats])
        if self.sends_in_backward:
            for flat in self.flats:
                when_all_arrived(flat.params, flat.reduce_scatter)

    def buckets(self, model):
        buckets = [[]]
        for param in reversed(list(model.parameters())):
            if sum(param.numel() for param in buckets[-1]) >= 60_000:
                buckets.append([])
            buckets[-1].append(param)
        return buckets

    update = Zero2.update


class BucketsAfterBackward(Buckets):
    """Nothing is sent before the update."""

    sends_in_backward, update = False, Zero1.update


class OneBucket(Buckets):
    """All gradients in one message, when backward is over."""

    def buckets(self, model):
        return [list(model.parameters())]


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


@grader(
    right=Buckets,
    wrong={
        "full gradients were still there": BucketsAfterBackward,
        "put parameters together": Zero2,
        "backward sent one reduce-scatter": OneBucket,
        "gradients must add up over the micro-batches": LastMicroBatchOnly,
        "take the mean over ranks": SumsOverRanks,
    },
)
def check_zero2_buckets(answer, rng):
    """ZeRO-2 whose reduce-scatters carry buckets: right, few messages, and sent while backward runs."""
    world_size = rng.choice([2, 4])
    runs = expect_right(answer, world_size)
    calls, gradients = run_ranks(_messages, world_size, answer)[0]
    scatters = calls.get("reduce_scatter", 0)
    if scatters > MOST_MESSAGES:
        fail(
            f"backward sent {scatters} reduce-scatters, and {MOST_MESSAGES} are enough: put parameters together until "
            "a bucket has 60,000 elements"
        )
    if scatters == 1:
        fail(
            "backward sent one reduce-scatter, so all full gradients were alive at its end; close a bucket once it has "
            "60,000 parameters"
        )
    if gradients > 0.05 * NUM_PARAMS * ITEMSIZE:
        fail(
            f"when backward was over, {gradients:,} bytes of full gradients were still there; reduce-scatter a bucket "
            "as soon as its gradients are complete, and drop them"
        )
    expect_sent(runs[3], 3, 4, _phase_bytes(world_size))


def _messages(trainer: type) -> tuple[dict[str, int], int]:
    """The collectives of one backward, and the bytes of full gradients after it."""
    made = trainer(build(trials.CONFIG, dtype=torch.bfloat16), trials.master_adamw, dist.group.WORLD)
    parts = trials.micro_batches_of_rank(0, 1)
    with ByteMeter() as meter:
        made.backward(parts)
    return meter.calls, sum(param.grad.nbytes for param in made.model.parameters() if param.grad is not None)


class ByModuleHooks(Zero3):
    """PyTorch's own backward hooks of modules."""

    def __init__(self, model, make_optimizer, group):
        Zero2.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            unit.register_forward_hook(lambda *_, flat=flat: free(flat))
            unit.register_full_backward_pre_hook(lambda *_, flat=flat: gather(flat))
            when_all_arrived(flat.params, lambda flat=flat: free(flat))


class NeverFrees(Zero3):
    """Units stay full from forward to the end of backward: no phase more, the memory of stage 2."""

    def __init__(self, model, make_optimizer, group):
        Zero1.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            self.hook(unit, flat)

    def hook(self, unit, flat):
        when_all_arrived(flat.params, lambda: (flat.reduce_scatter(), free(flat)))


class FreesAfterForwardAlone(NeverFrees):
    """After backward all units are full again; no peak shows it, since a step peaks before."""

    def hook(self, unit, flat):
        unit.register_forward_hook(lambda unit, x, y: (free(flat), regather(y, flat))[0])
        when_all_arrived(flat.params, flat.reduce_scatter)


class NeverGathersForBackward(NeverFrees):
    """Forward is right, and backward meets emptied weights."""

    def hook(self, unit, flat):
        unit.register_forward_hook(lambda *_: free(flat))
        when_all_arrived(flat.params, flat.reduce_scatter)


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


@grader(
    right=ByModuleHooks,
    wrong={
        "free a unit after its forward": NeverFrees,
        "free a unit after its backward": FreesAfterForwardAlone,
        "gather it before its forward, and again before its backward": NeverGathersForBackward,
        "is your shard a view of the buffer that you empty?": ShardIsAView,
        "phases are": AllReducesFirst,
        "take the mean over ranks": Sums,
        "bytes of optimizer": DataParallel,
        "bytes of parameters": Zero2,
    },
)
def check_zero3(answer, rng):
    """ZeRO-3 from an empty cell: right, at most 3 phases, states in shards, one or two units full at a time."""
    world_size = rng.choice([2, 4])
    try:
        runs = expect_right(answer, world_size)
    except CheckFailed as failure:
        why = next((why for sign, why in SIGNS_OF_FREED_MEMORY.items() if sign in str(failure)), None)
        if why is None:
            raise
        fail(f"{why}\n{failure}")
    held, peak = runs[1][0].held, runs[1][0].timeline.peak_bytes
    enough, left_by_ours = _bytes_of_ours(world_size)
    for kind, per_parameter in (("optimizer", 12), ("gradients", 2), ("parameters", 2)):
        shard = per_parameter * NUM_PARAMS / world_size
        if held[kind] > 1.1 * shard:
            fail(
                f"at the end of backward a rank holds {held[kind]:,} bytes of {kind}, and its shard is "
                f"{shard:,.0f} bytes"
            )
    if peak > enough + 2 * ITEMSIZE * max(layer_units(trials.CONFIG)):
        fail(
            f"at its peak a rank holds {peak:,} bytes, and {enough:,} are enough: free a unit after its forward, "
            "and after its backward"
        )
    left = sum(held.values()) - left_by_ours
    if left > ITEMSIZE * max(layer_units(trials.CONFIG)):
        fail(
            f"when backward is over, {left:,} bytes more than the shards are alive: free a unit after its backward "
            "too, once its gradients are reduced"
        )
    for num_micro_batches, run in runs.items():
        expect_sent(run, num_micro_batches, 3 * num_micro_batches, _phase_bytes(world_size))


@cache
def _bytes_of_ours(world_size: int) -> tuple[int, int]:
    """What the lesson's trainer holds at its peak and after backward: the same at every check."""
    ours = on_ranks(Zero3, trials.as_trainer, world_size)[0]
    return ours.timeline.peak_bytes, sum(ours.held.values())


def _phase_bytes(world_size: int) -> int:
    return ITEMSIZE * NUM_PARAMS * (world_size - 1) // world_size
