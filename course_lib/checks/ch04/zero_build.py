"""Tables of chapter 04, exercises 4 and 6: trainers, judged by what the lesson measures."""

import torch
import torch.distributed as dist

from course_lib.checks import Cost, Exercise, Stops, but
from course_lib.checks.trainers import DROP, STEP, counted, inputs, scaled, sent_in_a_step, trained, wrong_means
from course_lib.comm import all_reduce
from course_lib.compare import trials
from course_lib.measure import ByteMeter
from course_lib.memory.flats import layer_units
from course_lib.minimal.data import BUCKET_SIZE, DataParallel, assign_buckets, when_all_arrived
from course_lib.minimal.zero import FlatParameter, Zero1, Zero2, Zero3, free, gather, units_of
from course_lib.model import build
from course_lib.tensors import count_parameters

_NUM_PARAMS, KINDS = count_parameters(trials.CONFIG), ("optimizer", "gradients", "parameters")
MOST_MESSAGES = -(-_NUM_PARAMS // 60_000)  # buckets of single parameters; of whole units there is one fewer
_UNIT_BYTES = 2 * max(layer_units(trials.CONFIG))  # in bfloat16
SAYS = {
    STEP.format("one step of SGD", "1 micro-batch"): (
        "is every gradient complete before update, and every parameter new after it?"
    ),
    STEP.format("two steps of AdamW", "1 micro-batch"): f"build the optimizer once, for every parameter, and {DROP}",
    STEP.format("one step of SGD", "3 micro-batches"): "take the mean over micro-batches, of all of them",
}


def _wrong_steps(trainer: type) -> dict[str, type]:
    keeps = scaled(trainer, lambda ranks, parts: 1, drops=False)
    return wrong_means(trainer) | {f"its second step used the new gradient plus that of the first step; {DROP}": keeps}


# ------------------------------------------------------------------------------------ 4. ZeRO-2 in buckets
class Buckets(Zero1):
    """ZeRO-2 whose buckets may end inside a unit; a wrong answer changes what they hold, or when they are sent."""

    bucket_size, sends_in_backward = BUCKET_SIZE, True

    def __init__(self, model, make_optimizer, group):
        buckets = assign_buckets(model.parameters(), self.bucket_size)
        self.model, self.flats = model, [FlatParameter(bucket, group) for bucket in buckets]
        self.optimizer = make_optimizer([flat.shard_p for flat in self.flats])
        if self.sends_in_backward:
            for flat in self.flats:
                when_all_arrived(flat.params, flat.reduce_scatter)

    update = Zero2.update


def _watch_buckets(answer, num_micro_batches):
    seen = trained(answer, num_micro_batches)
    if num_micro_batches > 1:
        return seen | {"bytes sent": sent_in_a_step(answer, num_micro_batches)}
    made = answer(build(trials.CONFIG, dtype=torch.bfloat16), trials.master_adamw, dist.group.WORLD)
    with ByteMeter() as meter:
        made.backward(trials.micro_batches_of_rank(0, 1))
    scatters = meter.calls.get("reduce_scatter", 0)
    left = sum(param.grad.nbytes for param in made.model.parameters() if param.grad is not None)
    return seen | {
        "reduce-scatters of backward": Cost(scatters, MOST_MESSAGES - scatters),
        "backward sent one reduce-scatter": scatters == 1,
        "bytes of full gradients when backward is over": Cost(left, 0.1 * _NUM_PARAMS - left),
    }


_TOGETHER = "put parameters together until a bucket has 60,000 elements"
EARLY = "reduce-scatter a bucket as soon as its gradients are complete, and drop them"
WRONG_BUCKETS = _wrong_steps(Zero2) | {
    _TOGETHER: Zero2,
    "backward sent one reduce-scatter, so all full gradients were alive at its end; close a bucket once it has 60,000 "
    "parameters": but(Buckets, bucket_size=10**9),
    f"full gradients were still there when backward was over; {EARLY}": but(
        Buckets, sends_in_backward=False, update=Zero1.update
    ),
}
_SAYS_BUCKETS = SAYS | {
    "reduce-scatters of backward": _TOGETHER,
    "bytes of full gradients when backward is over": EARLY,
    "bytes sent": "4 phases for 3 micro-batches: a reduce-scatter of each, and one all-gather",
}
check_zero2_buckets = Exercise(Buckets, inputs, WRONG_BUCKETS, _watch_buckets, _SAYS_BUCKETS, ranks=True, seconds=60.0)


# ------------------------------------------------------------------------------------ 6. ZeRO-3
class Hooked(Zero3):
    """ZeRO-3 as PyTorch's own backward hooks of modules can have it; a wrong answer frees or gathers less."""

    frees_after_forward = gathers_again = frees_after_backward = clones = True

    def __init__(self, model, make_optimizer, group):
        Zero1.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone() if self.clones else flat.shard_p.data
            free(flat)
            self.hook(unit, flat)

    def hook(self, unit, flat):
        unit.register_forward_pre_hook(lambda *_: gather(flat))
        if self.frees_after_forward:
            unit.register_forward_hook(lambda *_: free(flat))
        if self.frees_after_forward and self.gathers_again:
            unit.register_full_backward_pre_hook(lambda *_: gather(flat))
        when_all_arrived(flat.params, lambda: (flat.reduce_scatter(), self.frees_after_backward and free(flat)))


class AllReducesFirst(Zero3):
    """The full gradient on every rank, and then a shard of it."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for param in model.parameters():
            param.register_hook(lambda grad: all_reduce(grad.contiguous(), group, op="mean"))


def _watch_zero3(answer, num_micro_batches):
    seen = trained(answer, num_micro_batches)
    if num_micro_batches == 1:
        record = counted(answer)
        held = record.held
        for kind in KINDS:
            seen[f"bytes of {kind} at the end of backward"] = Cost(held[kind], 0.1 * held[kind])
        seen["bytes at the peak"] = Cost(record.timeline.peak_bytes, 2 * _UNIT_BYTES)
        seen["bytes when backward is over"] = Cost(sum(held.values()), _UNIT_BYTES)
    return seen | {"bytes sent": sent_in_a_step(answer, num_micro_batches)}


_WRONG_ZERO3 = _wrong_steps(Zero3) | {
    "every rank has all states of the optimizer; give it the shards alone": DataParallel,
    "every rank has all parameters; free a unit's buffer, and keep the shard": Zero2,
    "free a unit after its forward, and after its backward": but(Hooked, frees_after_forward=False),
    "free a unit after its backward too, once its gradients are reduced": but(Hooked, frees_after_backward=False),
    "3 phases are enough: two all-gathers and a reduce-scatter, which gives the shard of the mean": AllReducesFirst,
    "gather it before its forward, and again before its backward": Stops(but(Hooked, gathers_again=False)),
    "is your shard a view of the buffer that you empty?": Stops(but(Hooked, clones=False)),
}
_SAYS_ZERO3 = SAYS | {
    **{f"bytes of {kind} at the end of backward": "a rank keeps its shard alone" for kind in KINDS},
    "bytes at the peak": "free a unit after its forward, and after its backward",
    "bytes when backward is over": "free a unit after its backward too, once its gradients are reduced",
    "bytes sent": "3 phases for each micro-batch: two all-gathers and a reduce-scatter",
}
_FREED = {
    "killed by SIGSEGV": "your code read or wrote memory that it had given back; is your shard a view of the buffer "
    "that you empty? Clone it",
    "out of bounds for storage of size 0": "a unit was used after it was freed: gather it before its forward, and "
    "again before its backward",
}
check_zero3 = Exercise(
    Zero3,
    inputs,
    _WRONG_ZERO3,
    _watch_zero3,
    _SAYS_ZERO3,
    ranks=True,
    seconds=60.0,
    right=Hooked,
    errors=_FREED,
)
