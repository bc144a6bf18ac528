"""The peak of a rank's step is the fullest of a few moments, and each of them is a sum.

    loss                        all that micro-batches in flight saved; logits in FP32, and their gradients
    backward of a layer         less what is free of this micro-batch; this layer made again; gradients inside it
    end of a backward           one micro-batch less; the gradients of all parameters
    update                      no activations; all gradients; FP32 copies of a tensor

Parameters and optimizer are there all the time; ZeRO-3 puts two whole units together besides. In flight are the
micro-batches whose backward has not gone through a stage: the schedule's list says how many. What one of them saves is
in activations.py, what a backward makes besides in backward.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part
from course_lib.memory.backward import Gradients, Stage
from course_lib.memory.flats import different_terms_over_tp, schedule_of
from course_lib.memory.states import recipe_of
from course_lib.memory.zero import wire_grad_bytes
from course_lib.schedules.messages import steps_of_rank

Stages = dict[int, tuple[Stage, Gradients]]  # those of one rank, by their numbers
_STEADY = 2  # times as many micro-batches as stages: a rank holds no more with more of them


class Instant(NamedTuple):
    """A forward or backward of one stage, or a part of it, and the micro-batches that are there beside its own.

    saved     by stage, those that wait for their backward; `waiting` those whose gradients of weights wait
    done      stages whose gradients are there, because a backward has gone through; `begun` its first part
    messages  received ahead, sent and perhaps not arrived, and the gradient that has come for this backward
    """

    op: str
    stage: int
    saved: Counter
    waiting: Counter
    begun: frozenset[int]
    done: frozenset[int]
    messages: int

    def holds_no_more_than(self, other: Instant) -> bool:
        """Whether less, or as much, is there beside its own micro-batch: a message is less than what one saved."""
        totals = [one.saved.total() + one.waiting.total() + one.messages for one in (self, other)]
        return self.saved <= other.saved and self.waiting <= other.waiting and totals[0] <= totals[1]


def instants(layout: Layout, pp_rank: int) -> tuple[Instant, ...]:
    """The different instants of a rank's step, in the order of its schedule; of like ones the fullest.

    More than two micro-batches for each stage change nothing, unless all forwards come first.
    """
    few = _STEADY * layout.num_stages if layout.schedule != "afab" else layout.micro_batches
    return _cached_instants(layout.schedule, layout.pp, min(layout.micro_batches, few), layout.v, pp_rank)


@lru_cache(maxsize=4096)
def _cached_instants(schedule: str, pp: int, micro_batches: int, v: int, pp_rank: int) -> tuple[Instant, ...]:
    saved, waiting, begun, done, found = Counter(), Counter(), set(), set(), {}
    posted, on_the_way = set(), set()
    for step in steps_of_rank(schedule_of(schedule, pp, micro_batches, v), pp_rank):
        op, _, stage = step.instruction
        posted |= {message for message, _ in step.post}
        posted.discard(step.needs)
        on_the_way -= {*step.arrived}
        saved[stage] -= op in "BI"
        waiting[stage] -= op == "W"
        messages = len(posted) + len(on_the_way) + (op in "BI" and step.needs is not None)
        now = Instant(op, stage, +saved, +waiting, frozenset(begun - done), frozenset(done), messages)
        like = found.setdefault((op, stage, now.begun, now.done), [])
        if not any(now.holds_no_more_than(one) for one in like):
            like[:] = [*(one for one in like if not one.holds_no_more_than(now)), now]
        saved[stage] += op == "F"
        waiting[stage] += op == "I"
        if op != "F":
            (begun if op == "I" else done).add(stage)
        if step.gives is not None:
            (posted if step.dst is None else on_the_way).add(step.gives)
    return tuple(one for like in found.values() for one in like)


class Held(NamedTuple):
    """Bytes that a rank holds at a moment beside parameters and optimizer."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0
    temporary: int = 0
    gathered: int = 0

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(*map(add, self, other))


def moments(layout: Layout, pp_rank: int, stages: Stages, message: int) -> Iterator[tuple[str, Held]]:
    """Yield each moment of a rank's step that can be its fullest, by name.

    message   bytes of what goes from stage to stage
    """
    for now in instants(layout, pp_rank):
        if now.op == "F" and not stages[now.stage][0].forward:
            continue
        held = Held(temporary=now.messages * message)
        for one, (stage, gradients) in stages.items():
            made = gradients.at_once if one in now.begun else 0
            made = gradients.held if one in now.done else made
            saved = now.saved[one]
            activations = saved * stage.activations + now.waiting[one] * stage.waiting
            held = held.plus(Held(made, activations, saved * stage.logits))
        for name, own in backward_moments(now, *stages[now.stage]):
            yield f"{now.op} of stage {now.stage}: {name}", held.plus(own)


def backward_moments(now: Instant, stage: Stage, gradients: Gradients) -> Iterator:
    """Yield what each moment of one micro-batch's backward, or of a part of it, holds."""
    if now.op == "F":
        one = stage.forward
        yield one.name, Held(activations=one.activations, logits=one.logits, temporary=one.work)
        return
    is_first = now.stage not in now.done  # it makes gradients, which later ones find
    if now.op == "W":  # of weights, from inputs and gradients that waited
        left, before = stage.waiting, gradients.at_once
        for unit, products in gradients.products.items():
            for there, original in products:
                yield f"product of {unit}", Held(is_first * (before - gradients.at_once), left, temporary=original)
                left, before = left - stage.waits.get(unit, 0) // len(products), there
                yield f"gradient of {unit}", Held(is_first * (there - gradients.at_once), left, temporary=original)
        return
    for one in stage.moments:
        unit, matrix = one.where
        at = gradients.arrived(unit, matrix, one.copied > 0)
        made = at.there if now.op == "B" else at.at_once
        held = Held(
            gradients=is_first * (now.stage not in now.begun) * made,
            activations=one.activations,
            logits=one.logits,
            temporary=one.work + one.copied + at.leaving,
            gathered=gradients.whole.get(unit.partition(":")[0], 0),
        )
        yield one.name, held


def moved_bytes(layout: Layout, pp_rank: int, stages: Stages) -> int:
    """Activations that wait off the device at once."""
    return max(
        sum((now.saved[one] + (one == now.stage)) * stage.moved for one, (stage, _) in stages.items())
        for now in instants(layout, pp_rank)
    )


# ---- the update


def after_backward(part: Part, sizes: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each moment beside states: sums beyond data's, norms for clipping, AdamW's work space.

    sizes   (kind, elements) of the rank's trained tensors, or of its shards of flats
    """
    run, layout, recipe = part.run, part.run.layout, recipe_of(part.run.recipe)
    numels = [numel for _, numel in sizes]
    largest = max(numels, default=0)
    together = [different_terms_over_tp(layout) if layout.tp > 1 else (), ("kv",), ("tied",)]  # as parallel/sums.py
    if layout.dp_replicate > 1:
        together += [("experts",), ("matrices", "norms", "head_norms", "kv", "tied")]
    yield "sums", wire_grad_bytes(recipe) * max(sum(n for kind, n in sizes if kind in kinds) for kinds in together)
    # in FP32, and squares; one process asks torch for its norms
    yield "clipping", FP32 * largest * ((recipe.grad_bytes < FP32) + (run.layout.world_size > 1))
    if run.optimizer != "adamw" or run.offload.optimizer != "device":
        yield "update", 0
    elif run.layout.zero_stage or recipe.master_bytes:  # the course's own: FP32 roots, and what they are made from
        yield "update", FP32 * largest * (2 if recipe.grad_bytes < FP32 else 1)
    else:  # torch's: of a loop a tensor twice, and the root of the one before it
        one_by_one = max((before + 2 * size for before, size in pairwise((0, *numels))), default=0)
        of_how = {"fused": 0, "foreach": sum(numels), "for-loop": one_by_one}
        yield "update", recipe.param_bytes * of_how[run.implementation]
