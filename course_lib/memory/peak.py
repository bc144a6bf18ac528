"""The peak of a rank's step is the fullest of a few moments, and each of them is a sum.

    loss                        all that micro-batches in flight saved; logits in FP32, and their gradients
    backward of a layer         less what is free of this micro-batch; this layer made again; gradients inside it
    end of a backward           one micro-batch less; the gradients of all parameters
    update                      no activations; all gradients; FP32 copies of a tensor

What one micro-batch saves is in activations.py, what its backward makes besides in backward.py; the schedule's list
says how many are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add, le
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part
from course_lib.memory.backward import Gradients, Stage
from course_lib.memory.flats import schedule_of
from course_lib.memory.states import recipe_of
from course_lib.schedules.messages import steps_of_rank

Stages = dict[int, tuple[Stage, Gradients]]  # those of one rank, by their numbers


class Instant(NamedTuple):
    """A forward or backward of one stage, or a part of it, and the micro-batches that are there beside its own.

    saved     by stage, those that wait for their backward; `waiting` those whose gradients of weights wait
    begun     stages through whose first part of a backward it went; `done` those whose gradients are all there
    messages  received ahead, sent and perhaps not arrived, and the gradient that has come for this backward
    counts    all of these together, and of each stage those that are saved and those that wait
    """

    op: str
    stage: int
    saved: dict[int, int]
    waiting: dict[int, int]
    begun: frozenset[int]
    done: frozenset[int]
    messages: int
    counts: tuple[int, ...]

    def is_within(self, other: Instant) -> bool:
        """Whether less, or as much, is there beside its own micro-batch: a message is less than what one saved."""
        return all(map(le, self.counts, other.counts))


def instants(layout: Layout, pp_rank: int) -> tuple[Instant, ...]:
    """The different instants of a rank's step, in the order of its schedule; of like ones the fullest.

    More than three micro-batches for each rank change nothing, unless all forwards come first.
    """
    few = 3 * layout.pp if layout.schedule != "afab" else layout.micro_batches
    return _cached_instants(layout.schedule, layout.pp, min(layout.micro_batches, few), layout.v, pp_rank)


@lru_cache(maxsize=4096)
def _cached_instants(schedule: str, pp: int, micro_batches: int, v: int, pp_rank: int) -> tuple[Instant, ...]:
    made = schedule_of(schedule, pp, micro_batches, v)
    saved, waiting = (dict.fromkeys(made.stages_of_rank(pp_rank), 0) for _ in range(2))
    begun, done, posted, on_the_way, found = set(), set(), set(), set(), {}
    for step in steps_of_rank(made, pp_rank):
        op, _, stage = step.instruction
        posted |= {message for message, _ in step.post}
        posted.discard(step.needs)
        on_the_way -= {*step.arrived}
        saved[stage] -= op in "BI"
        waiting[stage] -= op == "W"
        messages = len(posted) + len(on_the_way) + (op in "BI" and step.needs is not None)
        counts = (*saved.values(), *waiting.values())
        kind = op, stage, frozenset(begun - done), frozenset(done)
        now = Instant(op, stage, dict(saved), dict(waiting), *kind[2:], messages, (sum(counts) + messages, *counts))
        like = found.setdefault(kind, [])
        if not any(now.is_within(one) for one in like):
            like[:] = [*(one for one in like if not one.is_within(now)), now]
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
        held = Held(temporary=now.messages * message)
        for one, (stage, gradients) in stages.items():
            made = gradients.early * (one in now.begun) + gradients.held * (one in now.done)
            saved = now.saved[one]
            activations = saved * stage.activations + now.waiting[one] * stage.waiting
            held = held.plus(Held(made, activations, saved * stage.logits))
        for name, own in backward_moments(now, *stages[now.stage]):
            yield f"{now.op} of stage {now.stage}: {name}", held.plus(own)


def backward_moments(now: Instant, stage: Stage, gradients: Gradients) -> Iterator[tuple[str, Held]]:
    """Yield what each moment of one micro-batch's backward, or of a part of it, holds."""
    is_first = now.stage not in now.done  # it makes gradients, which later ones find
    if now.op == "W":  # of weights, from inputs and gradients that waited
        made, product = is_first * (gradients.held - gradients.early), gradients.product
        yield "first product", Held(activations=stage.waiting, temporary=product)
        yield "last product", Held(made, temporary=product)
        return
    for one in stage.forward if now.op == "F" else stage.moments:
        there, early, leaving = gradients.after(one.unit, one.after)
        made = early * (now.stage not in now.begun) if now.op == "I" else there
        work = one.work + leaving + one.copied * (gradients.copied or not is_first)
        gathered = gradients.whole.get(one.unit, 0)
        yield one.name, Held(is_first * made, one.activations, one.logits, work, gathered)


def moved_bytes(layout: Layout, pp_rank: int, stages: Stages) -> int:
    """Activations that wait off the device at once."""
    return max(
        sum((now.saved[one] + (one == now.stage)) * stage.moved for one, (stage, _) in stages.items())
        for now in instants(layout, pp_rank)
    )


# ---- the update


def after_backward(part: Part, numels: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each moment beside states: norms for clipping, AdamW's work space.

    numels   elements of the rank's trained tensors, or of its shards of flats
    """
    run, recipe, largest = part.run, recipe_of(part.run.recipe), max(numels, default=0)
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
