"""What stands between the last backward and the next step: sums of gradients, clipping, the update's work space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from course_lib.memory.activations import FP32, Part
from course_lib.memory.flats import Flat, Named, different_terms_over_tp


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
