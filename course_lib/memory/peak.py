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
    parts: dict[tuple[str, int, bool], list[Moment]] = {}
    for now in instants(layout, pp_rank):
        stage, gradients = stages[now.stage]
        first = now.stage not in now.done and (now.op in "FW" or now.stage not in now.begun)
        if (now.op, now.stage, first) not in parts:
            of_op = {"F": forward_moments, "W": weights_moments}.get(now.op, backward_moments)
            parts[now.op, now.stage, first] = list(of_op(stage, gradients, first, now.op == "I"))
        activations = sum(count * stages[one][0].activations for one, count in now.in_flight)
        activations += sum(count * stages[one][0].waiting for one, count in now.waiting)
        there = (
            activations,
            sum(count * stages[one][0].logits for one, count in now.in_flight),
            sum(stages[one][1].held for one in now.done) + sum(stages[one][1].norms for one in now.begun),
            message * now.messages,
            0,
        )
        for name, change in parts[now.op, now.stage, first]:
            held = {kind: size + change.get(kind, 0) for kind, size in zip(CHANGES, there, strict=True)}
            yield f"{now.op} of stage {now.stage}: {name}", held


def backward_moments(stage: Stage, gradients: Gradients, first: bool, split: bool) -> Iterator[Moment]:
    """What each moment of a backward adds: the loss and what follows it, the last layer, the first, and its end.

    first   whether it makes the stage's gradients, which later ones find
    split   whether those of weights wait; so do inputs and gradients of products
    """
    makes, tied = first and not split, 0 if split else gradients.tied
    for end in stage.ends:
        change = {
            "activations": -end.freed + split * stage.waiting_end * end.behind_head,
            "logits": -end.freed_logits,
            "gradients": gradients.at_end if makes and (end.behind_head or end.adds_up) else 0,
            "temporary": end.work + tied * end.behind_head + gradients.leaving_end * end.adds_up,
            "gathered": gradients.whole_end * end.behind_loss,
        }
        yield end.name, change
    for moment in stage.moments_last:
        change = {
            "activations": stage.again_last - stage.end + split * stage.waiting_end + moment.activations,
            "logits": -stage.logits,
            "gradients": gradients.at_last if makes else 0,
            "temporary": moment.temporary + gradients.leaving_last + gradients.experts_last * moment.experts + tied,
            "gathered": gradients.whole_last,
        }
        yield "last layer", change
    waiting = split * (stage.waiting - stage.waiting_first)
    for moment in stage.moments_first:
        change = {
            "activations": stage.again_first + stage.first - stage.layers - stage.end + waiting + moment.activations,
            "logits": -stage.logits,
            "gradients": gradients.at_first if makes else 0,
            "temporary": moment.temporary + gradients.leaving_first + gradients.experts_first * moment.experts + tied,
            "gathered": gradients.whole_first,
        }
        yield "first layer", change
    change = {
        "activations": -stage.layers - stage.end + split * stage.waiting,
        "logits": -stage.logits,
        "gradients": (gradients.norms if split else gradients.at_start) if first else 0,
        "temporary": stage.stream + gradients.leaving_embed + gradients.embed + 2 * tied,
        "gathered": gradients.whole_embed,
    }
    yield "embedding", change


def forward_moments(stage: Stage, gradients: Gradients, first: bool, split: bool) -> Iterator[Moment]:
    """The end of a forward: messages wait; of the last stage logits, and as many in FP32, beside log-probabilities."""
    yield "loss" if stage.ends else "forward", {"temporary": stage.loss_forward}


def weights_moments(stage: Stage, gradients: Gradients, first: bool, split: bool) -> Iterator[Moment]:
    """The second part of a split backward: gradients of weights, from inputs and gradients that waited."""
    yield "first product", {"temporary": gradients.largest, "activations": 0, "gradients": 0}
    yield (
        "last product",
        {
            "activations": -stage.waiting,
            "gradients": gradients.held - gradients.norms if first else 0,
            "temporary": gradients.largest,
        },
    )


def moved_bytes(layout: Layout, pp_rank: int, stages: dict[int, tuple[Stage, Gradients]]) -> int:
    """Activations that wait off the device at once."""
    return max(
        sum(count * stages[stage][0].moved for stage, count in now.in_flight) for now in instants(layout, pp_rank)
    )
