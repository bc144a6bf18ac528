"""Wrong answers to the exercises of chapter 04, each with what its grader must say about it."""

import math

import torch

from course_lib.checks.ch04 import (
    check_clip_shards,
    check_flat_shard,
    check_gather_use_free,
    check_held_bytes,
    check_sent_bytes,
    check_zero1_step,
)
from course_lib.comm import all_gather, all_reduce, reduce_scatter


# ------------------------------------------------------------------------------------ 1. a flat padded shard
def _flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def _pad(flat_P, num_ranks, front=False):
    zeros = flat_P.new_zeros(-len(flat_P) % num_ranks)
    return torch.cat([zeros, flat_P] if front else [flat_P, zeros])


def rounds_down(tensors, rank, num_ranks):
    flat_P = _flat(tensors)
    piece = len(flat_P) // num_ranks
    return flat_P[rank * piece : (rank + 1) * piece]


def pads_each_tensor(tensors, rank, num_ranks):
    return torch.cat([_pad(tensor.flatten(), num_ranks).chunk(num_ranks)[rank] for tensor in tensors])


def pads_in_front(tensors, rank, num_ranks):
    return _pad(_flat(tensors), num_ranks, front=True).chunk(num_ranks)[rank]


def takes_every_nth(tensors, rank, num_ranks):
    return _pad(_flat(tensors), num_ranks)[rank::num_ranks]


def whole_buffer(tensors, rank, num_ranks):
    return _pad(_flat(tensors), num_ranks)


def shorter_last_piece(tensors, rank, num_ranks):
    flat_P = _flat(tensors)
    piece = math.ceil(len(flat_P) / num_ranks)
    return flat_P[rank * piece : (rank + 1) * piece]


# ------------------------------------------------------------------------------------ 2. bytes held
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


def whole_not_padded(num_params, stage, dp_size):
    shard = math.ceil(num_params / dp_size)
    return tuple(
        size * (shard if stage >= first else num_params) for size, first in zip((2, 2, 12), (3, 2, 1), strict=True)
    )


def floats(num_params, stage, dp_size):
    return tuple(float(size) for size in _held(num_params, dp_size, ORDER[:stage], stage))


# ------------------------------------------------------------------------------------ 3. a step of stage 1
def _piece(flat_P, group):
    return flat_P.chunk(group.size())[group.rank()].clone()


def forgot_to_divide(flat_P, grad_P, update, group):
    shard_p = _piece(flat_P, group)
    update(shard_p, reduce_scatter(grad_P, group))
    return all_gather(shard_p, group)


def all_reduce_form(flat_P, grad_P, update, group):
    shard_p = _piece(flat_P, group)
    update(shard_p, _piece(all_reduce(grad_P, group, op="mean"), group))
    return all_gather(shard_p, group)


def never_reduced(flat_P, grad_P, update, group):
    shard_p = _piece(flat_P, group)
    update(shard_p, _piece(grad_P, group))
    return all_gather(shard_p, group)


def reduced_the_parameter(flat_P, grad_P, update, group):
    shard_p, new_P = _piece(flat_P, group), flat_P.clone()
    update(shard_p, reduce_scatter(grad_P, group, op="mean"))
    new_P.chunk(group.size())[group.rank()].copy_(shard_p)
    return all_reduce(new_P, group)


def keeps_all_states(flat_P, grad_P, update, group):
    new_P = flat_P.clone()
    update(new_P, all_gather(reduce_scatter(grad_P, group, op="mean"), group))
    return new_P


def never_gathered(flat_P, grad_P, update, group):
    new_P = flat_P.clone()
    update(new_P.chunk(group.size())[group.rank()], reduce_scatter(grad_P, group, op="mean"))
    return new_P


def returns_its_piece(flat_P, grad_P, update, group):
    shard_p = _piece(flat_P, group)
    update(shard_p, reduce_scatter(grad_P, group, op="mean"))
    return shard_p


# ------------------------------------------------------------------------------------ 4. clipping on shards
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


# ------------------------------------------------------------------------------------ 5. bytes sent
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


# ------------------------------------------------------------------------------------ 6. gather, use, free
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


WRONG = {
    "my_flat_shard": {
        "check": check_flat_shard,
        "answers": [
            (rounds_down, "numbers are left out"),
            (pads_each_tensor, "each tensor was padded"),
            (pads_in_front, "stands in front"),
            (takes_every_nth, "owns neighbours"),
            (whole_buffer, "the whole buffer"),
            (shorter_last_piece, "it is not padded"),
        ],
    },
    "my_held_bytes": {
        "check": check_held_bytes,
        "answers": [
            (parameters_first, "parameters are cut last"),
            (gradients_first, "states are cut first"),
            (master_forgotten, "the FP32 master copy"),
            (shard_rounded_down, "round the shard up"),
            (everything_divided, "every kind was divided"),
            (whole_not_padded, "is padded too"),
            (floats, "three whole numbers"),
        ],
    },
    "my_zero1_step": {
        "check": check_zero1_step,
        "answers": [
            (forgot_to_divide, "summed, not averaged"),
            (all_reduce_form, "an all-reduce brings"),
            (never_reduced, "each rank's own gradient"),
            (reduced_the_parameter, "parameters were summed over the ranks"),
            (keeps_all_states, "keeps states for this rank's piece alone"),
            (never_gathered, "only your own piece is new"),
            (returns_its_piece, "this is one piece"),
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
}
