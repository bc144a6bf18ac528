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
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part
from course_lib.memory.backward import Arrived, Gradients, Stage
from course_lib.memory.flats import Flat, Named, different_terms_over_tp, schedule_of

Stages = dict[int, tuple[Stage, Gradients]]  # those of one rank, by their numbers
_STEADY = 2  # times as many micro-batches as stages: a rank holds no more with more of them


class Instant(NamedTuple):
    """A backward of one stage, or a part of it, and the micro-batches that are there beside its own.

    saved     by stage, those that wait for their backward; `waiting` those whose gradients of weights wait
    done      stages whose gradients are there, because a backward has gone through; `begun` its first part
    """

    op: str
    stage: int
    saved: Counter
    waiting: Counter
    begun: frozenset[int]
    done: frozenset[int]


def instants(layout: Layout, pp_rank: int) -> tuple[Instant, ...]:
    """The different instants of a rank's step, in the order of its schedule; of like ones the fullest.

    More than two micro-batches for each stage change nothing, unless all forwards come first.
    """
    few = _STEADY * layout.num_stages if layout.schedule != "afab" else layout.micro_batches
    return _cached_instants(layout.schedule, layout.pp, min(layout.micro_batches, few), layout.v, pp_rank)


@lru_cache(maxsize=4096)
def _cached_instants(schedule: str, pp: int, micro_batches: int, v: int, pp_rank: int) -> tuple[Instant, ...]:
    saved, waiting, begun, done, found = Counter(), Counter(), set(), set(), {}
    for op, _, stage in schedule_of(schedule, pp, micro_batches, v).instructions[pp_rank]:
        saved[stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[op]
        waiting[stage] -= op == "W"
        if op != "F":
            now = Instant(op, stage, +saved, +waiting, frozenset(begun - done), frozenset(done))
            like = found.setdefault((op, stage, now.begun, now.done), [])
            if not any(now.saved <= one.saved and now.waiting <= one.waiting for one in like):
                like.append(now)
            (begun if op == "I" else done).add(stage)
        waiting[stage] += op == "I"
    return tuple(one for like in found.values() for one in like)


def moments(layout: Layout, pp_rank: int, stages: Stages, message: int) -> Iterator:
    """Yield each moment of a rank's step that can be its fullest: a name, and bytes beside parameters and optimizer.

    message   bytes of what goes from stage to stage: one is received ahead, and one sent has not surely arrived
    """
    messages = 2 * len(stages) if layout.pp > 1 and layout.micro_batches > 1 else 0
    for now in instants(layout, pp_rank):
        held = Counter(temporary=messages * message)
        for one, (stage, gradients) in stages.items():
            saved, waiting = now.saved[one], now.waiting[one]
            held["activations"] += saved * stage.activations + waiting * stage.waiting
            held["logits"] += saved * stage.logits
            if one in now.done:
                held["gradients"] += gradients.held
            elif one in now.begun:
                held["gradients"] += gradients.at_once
        for name, own in backward_moments(now, *stages[now.stage]):
            yield f"{now.op} of stage {now.stage}: {name}", held + Counter(own)


def backward_moments(now: Instant, stage: Stage, gradients: Gradients) -> Iterator:
    """Yield what each moment of one micro-batch's backward, or of a part of it, holds."""
    is_first = now.stage not in now.done  # it makes gradients, which later ones find
    if now.op == "W":  # of weights, from inputs and gradients that waited
        made = is_first * (gradients.held - gradients.at_once)
        work = gradients.largest
        yield "first product", {"activations": stage.waiting, "temporary": work}
        yield "last product", {"gradients": made, "temporary": work}
        return
    for one in stage.moments:
        unit, is_all = one.where
        at = gradients.at.get(unit, Arrived())
        made = at.there if now.op == "B" else at.at_once
        yield (
            one.name,
            {
                "activations": one.activations,
                "logits": one.logits,
                "gradients": is_first * (now.stage not in now.begun) * made[is_all],
                "temporary": one.work + at.leaving[is_all],
                "gathered": at.whole,
            },
        )


def moved_bytes(layout: Layout, pp_rank: int, stages: Stages) -> int:
    """Activations that wait off the device at once."""
    return max(
        sum((now.saved[one] + (one == now.stage)) * stage.moved for one, (stage, _) in stages.items())
        for now in instants(layout, pp_rank)
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
        if summed := [kind for kind in kinds if kind in of_kind]:
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
