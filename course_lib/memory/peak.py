"""The peak of a rank's step is the fullest of four moments, and each of them is a sum.

    loss                           all that micro-batches in flight saved; logits in FP32, and their gradients
    backward of the last layer     the same without logits; this layer made again; gradients inside it
    backward of the first layer    one micro-batch less, but for one layer; gradients of all other layers
    update                         no activations; all gradients; FP32 copies of a tensor

Parameters and optimizer are there all the time; ZeRO-3 puts two whole units together besides. In flight are the
micro-batches whose backward has not gone through a stage: the schedule's list says how many. What one of them saves is
in activations.py, what a backward makes besides in backward.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from course_lib.layout import Layout
from course_lib.memory.backward import Gradients, Stage
from course_lib.memory.flats import steps_of

STEADY = 2  # times as many micro-batches as stages: a rank holds no more with more of them


@dataclass(frozen=True)
class Instant:
    """A backward of one stage, or a forward, and what is there then.

    in_flight   (stage, micro-batches) that wait for their backward, this one included
    waiting     (stage, micro-batches) whose gradients of weights wait
    begun       stages through which the first part of a split backward has gone
    done        stages whose gradients are there, because a backward has gone through
    messages    between stages: come early, or not surely arrived
    """

    op: str
    stage: int
    in_flight: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...]
    begun: frozenset[int]
    done: frozenset[int]
    messages: int


def instants(layout: Layout, pp_rank: int) -> tuple[Instant, ...]:
    """The different instants of a rank's step, in the order of its schedule; of like ones the fullest.

    More than two micro-batches for each stage change nothing, unless all forwards come first.
    """
    few = STEADY * layout.num_stages if layout.schedule != "afab" else layout.micro_batches
    return _instants(layout.schedule, layout.pp, min(layout.micro_batches, few), layout.v, pp_rank)


@lru_cache(maxsize=4096)
def _instants(schedule: str, pp: int, micro_batches: int, v: int, pp_rank: int) -> tuple[Instant, ...]:
    in_flight, waiting, begun, done = Counter(), Counter(), set(), set()
    inbox, outbox, found = set(), set(), {}
    for step in steps_of(schedule, pp, micro_batches, v, pp_rank):
        op, _, stage = step.instruction
        inbox |= {message for message, _ in step.post}
        inbox.discard(step.needs)
        outbox -= set(step.arrived)
        in_flight[stage] += op == "F"
        like = op, stage, frozenset(begun - done), frozenset(done)
        there = tuple(sorted((+in_flight).items())), tuple(sorted((+waiting).items())), len(inbox) + len(outbox)
        found.setdefault(like, {})[there] = None
        if op in "BI":
            in_flight[stage] -= 1
        if op in "IW":
            waiting[stage] += 1 if op == "I" else -1
        if op != "F":
            (begun if op == "I" else done).add(stage)
        if step.gives is not None:
            (inbox if step.dst is None else outbox).add(step.gives)
    return tuple(
        Instant(op, stage, *there[:2], begun, done, there[2])
        for (op, stage, begun, done), all_of in found.items()
        for there in _fullest(list(all_of))
    )


def _fullest(rows: list) -> list:
    """Those that no other exceeds in everything."""

    def below(one, other) -> bool:
        more = [dict(of) for of in other[:2]]
        fewer = all(more[place].get(stage, 0) >= count for place in (0, 1) for stage, count in one[place])
        return one != other and fewer and one[2] <= other[2]

    return [one for one in rows if not any(below(one, other) for other in rows)]


Moment = tuple[str, dict[str, int]]  # a name, and bytes by kind beside parameters and optimizer
CHANGES = ("activations", "logits", "gradients", "temporary", "gathered")


def moments(layout: Layout, pp_rank: int, stages: dict[int, tuple[Stage, Gradients]], message: int) -> Iterator[Moment]:
    """Every moment of a rank's backwards that can be the largest.

    message   bytes of what goes from stage to stage
    """
    for now in instants(layout, pp_rank):
        stage, gradients = stages[now.stage]
        first = now.stage not in now.done and (now.op in "FW" or now.stage not in now.begun)
        activations = sum(count * stages[one][0].activations for one, count in now.in_flight)
        activations += sum(count * stages[one][0].waiting for one, count in now.waiting)
        there = (
            activations,
            sum(count * stages[one][0].logits for one, count in now.in_flight),
            sum(stages[one][1].held for one in now.done) + sum(stages[one][1].norms for one in now.begun),
            message * now.messages,
            0,
        )
        for name, *changes in _changes(now.op, stage, gradients, first):
            held = (size + change for size, change in zip(there, changes, strict=True))
            yield f"{now.op} of stage {now.stage}: {name}", dict(zip(CHANGES, held, strict=True))


def _changes(op: str, stage: Stage, gradients: Gradients, first: bool) -> Iterator[tuple]:
    """What each moment of a forward, or of a part of a backward, changes: its name, and bytes of each of CHANGES.

    first   whether it makes the stage's gradients, which later ones find
    """
    if op == "F":  # messages wait; of the last stage logits, and as many in FP32, beside log-probabilities
        yield "loss" if stage.loss else "forward", 0, 0, 0, stage.loss, 0
    elif op == "W":  # gradients of weights, from inputs and gradients that waited
        yield "first product", 0, 0, 0, gradients.largest, 0
        yield "last product", -stage.waiting, 0, first * (gradients.held - gradients.norms), gradients.largest, 0
    else:
        yield from backward_moments(stage, gradients, first, op == "I")


def backward_moments(stage: Stage, gradients: Gradients, first: bool, split: bool) -> Iterator[tuple]:
    """What each moment of a backward adds: the loss and what follows it, the last layer, the first, and its end.

    split   whether gradients of weights wait; so do inputs and gradients of products
    """
    for one in stage.moments:
        at = gradients.at[one.name]
        there = at.there if not split else gradients.norms if one.name == "embedding" else 0
        work = one.work + at.leaving + at.experts * one.experts + at.tied * (not split)
        yield one.name, one.activations + split * one.waiting, one.logits, first * there, work, at.whole


def moved_bytes(layout: Layout, pp_rank: int, stages: dict[int, tuple[Stage, Gradients]]) -> int:
    """Activations that wait off the device at once."""
    return max(
        sum(count * stages[stage][0].moved for stage, count in now.in_flight) for now in instants(layout, pp_rank)
    )
