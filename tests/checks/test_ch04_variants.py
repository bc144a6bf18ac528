"""The graders of chapter 04 accept right answers that are arranged otherwise, three of each."""

import math
import sys

import cloudpickle
import pytest
import torch
from harness import sampled

from course_lib.checks import ch04
from course_lib.comm import all_gather, all_reduce
from course_lib.minimal.data import when_all_arrived
from course_lib.minimal.zero import FlatParameter, Zero1, Zero2, Zero3, free, gather, units_of

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ bytes held
def held_by_table(num_params, stage, dp_size):
    shard = -(-num_params // dp_size)
    full = shard * dp_size if stage else num_params
    rows = ((full, full, full), (full, full, shard), (full, shard, shard), (shard, shard, shard))
    return tuple(size * length for size, length in zip((2, 2, 12), rows[stage], strict=True))


def held_in_steps(num_params, stage, dp_size):
    sizes = [2, 2, 12]
    padded = num_params + (-num_params % dp_size if stage else 0)
    held = [size * padded for size in sizes]
    for index in range(3 - stage, 3):
        held[index] //= dp_size
    return tuple(held)


def held_by_divmod(num_params, stage, dp_size):
    quotient, rest = divmod(num_params, dp_size)
    shard = quotient + (rest > 0)
    full = num_params if stage < 1 else shard * dp_size
    return 2 * [full, shard][stage > 2], 2 * [full, shard][stage > 1], 12 * [full, shard][stage > 0]


# ------------------------------------------------------------------------------------ bytes sent
def sent_by_phase(num_params, stage, dp_size, micro_batches):
    phase = num_params // dp_size * (dp_size - 1)
    of_stage = [8, 6, 4 * micro_batches + 2, 8 * micro_batches]
    return phase * of_stage[stage]


def sent_in_a_loop(num_params, stage, dp_size, micro_batches):
    shard, sent = num_params // dp_size, 0
    for _ in range(micro_batches if stage >= 2 else 1):
        sent += {0: 8, 1: 4, 2: 4, 3: 2 + 2 + 4}[stage]
    sent += 2 if stage in (1, 2) else 0
    return sent * shard * (dp_size - 1)


def sent_by_cases(num_params, stage, dp_size, micro_batches):
    ring = num_params - num_params // dp_size
    if stage < 2:
        return ring * (8 - 2 * stage)
    return ring * (4 * micro_batches + (2 if stage == 2 else 4 * micro_batches))


# ------------------------------------------------------------------------------------ clipping
def clip_by_gathered_squares(grad_p, max_norm, group):
    squares = all_gather(grad_p.square().sum().view(1), group)
    norm = squares.sum().sqrt()
    return grad_p if norm <= max_norm else grad_p * (max_norm / norm)


def clip_with_norms(grad_p, max_norm, group):
    norm = math.sqrt(all_reduce(grad_p.norm() ** 2, group).item())
    return grad_p / max(1.0, norm / max_norm)


def clip_with_torch(grad_p, max_norm, group):
    total = all_reduce(torch.dot(grad_p, grad_p), group) ** 0.5
    return grad_p.clone().mul_(torch.minimum(max_norm / total, torch.ones_like(total)))


# ------------------------------------------------------------------------------------ gather, use, free
def keeps_the_last_unit(units, x):
    last = len(units) - 1
    units[0].start_gather()
    for index, unit in enumerate(units):
        unit.wait()
        if index < last:
            units[index + 1].start_gather()
        x = unit.forward(x)
        if index < last:
            unit.free()
    grad = torch.ones_like(x)
    for index in range(last, -1, -1):
        units[index].wait()
        if index:
            units[index - 1].start_gather()
        grad = units[index].backward(grad)
        units[index].reduce()
        units[index].free()
    return x


def reduces_after_the_free(units, x):
    turns = [(unit, "forward") for unit in units] + [(unit, "backward") for unit in reversed(units)]
    grad = None
    units[0].start_gather()
    for index, (unit, phase) in enumerate(turns):
        unit.wait()
        if index + 1 < len(turns) and turns[index + 1][0] is not unit:
            turns[index + 1][0].start_gather()
        if phase == "forward":
            x = unit.forward(x)
        else:
            grad = unit.backward(torch.ones_like(x) if grad is None else grad)
        if index + 1 == len(turns) or turns[index + 1][0] is not unit:
            unit.free()
        if phase == "backward":
            unit.reduce()
    return x


def gathers_before_it_waits(units, x):
    def turn(index, step, compute, value):
        if 0 <= index + step < len(units):
            units[index + step].start_gather()
        units[index].wait()
        return getattr(units[index], compute)(value)

    units[0].start_gather()
    for index in range(len(units)):
        x = turn(index, 1, "forward", x)
        units[index].free()
    units[-1].start_gather()
    grad = torch.ones_like(x)
    for index in reversed(range(len(units))):
        grad = turn(index, -1, "backward", grad)
        units[index].reduce()
        units[index].free()
    return x


# ------------------------------------------------------------------------------------ ZeRO-2 with buckets
class Buckets(Zero1):
    """What the variants share; each says which parameters travel together."""

    def __init__(self, model, make_optimizer, group):
        self.model = model
        self.flats = [FlatParameter(params, group) for params in self.groups(model)]
        for flat in self.flats:
            when_all_arrived(flat.params, flat.reduce_scatter)
        self.optimizer = make_optimizer([flat.shard_p for flat in self.flats])

    update = Zero2.update


class TwoBuckets(Buckets):
    def groups(self, model):
        units = units_of(model)
        return [[p for unit in half for p in unit.parameters()] for half in (units[:3], units[3:])]


class BucketsInForwardOrder(Buckets):
    def groups(self, model):
        found = [[]]
        for unit in units_of(model):
            if sum(p.numel() for p in found[-1]) >= 60_000:
                found.append([])
            found[-1] += unit.parameters()
        return found


class BucketsOfTensors(Buckets):
    """A bucket may end inside a unit."""

    def groups(self, model):
        found = [[]]
        for param in reversed(list(model.parameters())):
            if sum(p.numel() for p in found[-1]) >= 60_000:
                found.append([])
            found[-1].append(param)
        return found


# ------------------------------------------------------------------------------------ ZeRO-3
class HeadStaysFull(Zero3):
    """The head is not freed between its forward and its backward: it sends less."""

    def __init__(self, model, make_optimizer, group):
        Zero2.__init__(self, model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()
            free(flat)
            unit.register_forward_pre_hook(lambda *_, flat=flat: gather(flat))
            if unit is not model.head:
                unit.register_forward_hook(lambda unit, inputs, output, flat=flat: self.after(output, flat))
            when_all_arrived(flat.params, lambda flat=flat: free(flat))

    def after(self, output, flat):
        free(flat)
        output.register_hook(lambda grad: gather(flat))


class EmbeddingNotGatheredAgain(HeadStaysFull):
    """Nor does the backward of an embedding need its weights: only the shape."""

    def after(self, output, flat):
        free(flat)
        if flat is not self.flats[0]:
            output.register_hook(lambda grad: gather(flat))


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


RIGHT = {
    "check_held_bytes": (held_by_table, held_in_steps, held_by_divmod),
    "check_sent_bytes": (sent_by_phase, sent_in_a_loop, sent_by_cases),
    "check_clip_shards": (clip_by_gathered_squares, clip_with_norms, clip_with_torch),
    "check_gather_use_free": (keeps_the_last_unit, reduces_after_the_free, gathers_before_it_waits),
    "check_zero2_buckets": (TwoBuckets, BucketsInForwardOrder, BucketsOfTensors),
    "check_zero3": (HeadStaysFull, EmbeddingNotGatheredAgain, ByModuleHooks),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 6)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch04, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out
