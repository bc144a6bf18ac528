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
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part
from course_lib.memory.backward import Gradients, Stage
from course_lib.memory.flats import Flat, Named, different_terms_over_tp, steps_of

_STEADY = 2  # times as many micro-batches as stages: a rank holds no more with more of them
_CHANGES = ("activations", "logits", "gradients", "temporary", "gathered")


class Instant(NamedTuple):
    """A backward of one stage, or a forward, and what is there then.

    held    micro-batches, by what is held of them and stage: "saved" of those that wait for their backward, this one
            included; "waiting" of those whose gradients of weights wait; "messages" come early, or not surely arrived
    begun   stages through which the first part of a split backward has gone
    done    stages whose gradients are there, because a backward has gone through
    """

    op: str
    stage: int
    held: Counter
    begun: frozenset[int]
    done: frozenset[int]


def _instants(layout: Layout, pp_rank: int) -> tuple[Instant, ...]:
    """The different instants of a rank's step, in the order of its schedule; of like ones the fullest.

    More than two micro-batches for each stage change nothing, unless all forwards come first.
    """
    few = _STEADY * layout.num_stages if layout.schedule != "afab" else layout.micro_batches
    return _cached_instants(layout.schedule, layout.pp, min(layout.micro_batches, few), layout.v, pp_rank)


@lru_cache(maxsize=4096)
def _cached_instants(schedule: str, pp: int, micro_batches: int, v: int, pp_rank: int) -> tuple[Instant, ...]:
    held, begun, done = Counter(), set(), set()
    inbox, outbox, found = set(), set(), {}
    for step in steps_of(schedule, pp, micro_batches, v, pp_rank):
        op, _, stage = step.instruction
        inbox |= {message for message, _ in step.post}
        inbox.discard(step.needs)
        outbox -= set(step.arrived)
        held["saved", stage] += op == "F"
        held["messages", 0] = len(inbox) + len(outbox)
        like = found.setdefault((op, stage, frozenset(begun - done), frozenset(done)), [])
        if +held not in like:
            like.append(+held)
        held["saved", stage] -= op in "BI"
        held["waiting", stage] += {"I": 1, "W": -1}.get(op, 0)
        if op != "F":
            (begun if op == "I" else done).add(stage)
        if step.gives is not None:
            (inbox if step.dst is None else outbox).add(step.gives)
    return tuple(
        Instant(op, stage, one, begun, done)
        for (op, stage, begun, done), like in found.items()
        for one in like
        if not any(one < other for other in like)  # exceeded in everything
    )


def moments(
    layout: Layout, pp_rank: int, stages: dict[int, tuple[Stage, Gradients]], message: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Every moment of a rank's backwards that can be the largest: a name, and bytes beside parameters and optimizer.

    message   bytes of what goes from stage to stage
    """
    for now in _instants(layout, pp_rank):
        stage, gradients = stages[now.stage]
        first = now.stage not in now.done and (now.op in "FW" or now.stage not in now.begun)
        there = dict.fromkeys(_CHANGES, 0)
        there["temporary"] = message * now.held["messages", 0]
        for one, (of_stage, its_gradients) in stages.items():
            saved, waiting = now.held["saved", one], now.held["waiting", one]
            there["activations"] += saved * of_stage.activations + waiting * of_stage.waiting
            there["logits"] += saved * of_stage.logits
            there["gradients"] += its_gradients.held * (one in now.done) + its_gradients.norms * (one in now.begun)
        for name, *changes in _changes(now.op, stage, gradients, first):
            held = (size + change for size, change in zip(there.values(), changes, strict=True))
            yield f"{now.op} of stage {now.stage}: {name}", dict(zip(_CHANGES, held, strict=True))


def _changes(op: str, stage: Stage, gradients: Gradients, first: bool) -> Iterator[tuple]:
    """What each moment of a forward, or of a part of a backward, changes: its name, and bytes of each of _CHANGES.

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
        sum(now.held["saved", one] * stage.moved for one, (stage, _) in stages.items())
        for now in _instants(layout, pp_rank)
    )


# ---- the update


class Pieces(NamedTuple):
    """What a rank updates, in elements: its trained tensors, or its shards of flats.

    one_by_one   the most that AdamW's loop has at once: a tensor twice, and the root of the one before it
    """

    of_kind: dict[str, int]
    largest: int
    one_by_one: int

    @property
    def total(self) -> int:
        return sum(self.of_kind.values())


def pieces_of(zero_stage: int, tensors: Sequence[Named], flats: Sequence[Flat]) -> Pieces:
    """The pieces of a rank."""
    pieces = [(one.kind, one.numel) for one in tensors]
    if zero_stage:
        pieces = [(flat.kind, flat.padded // flat.ranks) for flat in flats]
    of_kind = Counter()
    for kind, size in pieces:
        of_kind[kind] += size
    sizes = [0, *(size for _, size in pieces)]
    return Pieces(of_kind, max(sizes), max((before + 2 * size for before, size in pairwise(sizes)), default=0))


def after_backward(part: Part, pieces: Pieces) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each moment besides states: of all gradients of some kinds, or a tensor at a time."""
    layout, recipe, of_kind = part.layout, part.recipe, pieces.of_kind
    e = recipe.grad_bytes if recipe.grad_bytes != 6 else FP32
    for kinds in (different_terms_over_tp(layout), ("kv",), ("tied",)):
        summed = [kind for kind in kinds if kind in of_kind]
        if summed:
            yield f"sum of gradients: {', '.join(summed)}", e * sum(of_kind[kind] for kind in summed)
    if layout.dp_replicate > 1:  # shards' gradients, of experts and of all others, over the replicas
        experts = of_kind.get("experts", 0)
        yield "sum over replicas", e * max(experts, pieces.total - experts)
    copies = (e < FP32) + (layout.world_size > 1)  # in FP32, and squares; one process asks torch for its norms
    if copies:
        yield "clipping", FP32 * pieces.largest * copies
    yield "update", _update_bytes(part, pieces)


def _update_bytes(part: Part, pieces: Pieces) -> int:
    """AdamW's work space: an FP32 root of its largest tensor, and what it is made from in FP32."""
    run, recipe = part.run, part.recipe
    if run.optimizer != "adamw" or run.offload.optimizer != "device":
        return 0
    if part.engine.update_bytes is not None:
        return part.engine.update_bytes * pieces.total
    if part.layout.zero_stage or recipe.master_bytes:  # the course's own, a tensor at a time
        return FP32 * pieces.largest * (2 if recipe.grad_bytes < FP32 else 1)
    sizes = {"fused": 0, "foreach": pieces.total, "for-loop": pieces.one_by_one}
    return recipe.param_bytes * sizes[run.implementation]
