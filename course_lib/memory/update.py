"""What stands between the last backward and the next step: sums of gradients, clipping, the update's work space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from course_lib.memory.activations import FP32, Part
from course_lib.memory.flats import Flat, Named, different_terms_over_tp


def after_backward(part: Part, tensors: Sequence[Named], flats: Sequence[Flat]) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each moment besides states: of all gradients of some kinds, or a tensor at a time."""
    layout, recipe = part.layout, part.recipe
    e = recipe.grad_bytes if recipe.grad_bytes != 6 else FP32
    pieces = [(one.kind, one.numel) for one in tensors]
    if layout.zero_stage:
        pieces = [(flat.kind, flat.padded // flat.ranks) for flat in flats]
    of_kind = Counter()
    for kind, size in pieces:
        of_kind[kind] += size
    for kinds in (different_terms_over_tp(layout), ("kv",), ("tied",)):
        summed = [kind for kind in kinds if kind in of_kind]
        if summed:
            yield f"sum of gradients: {', '.join(summed)}", e * sum(of_kind[kind] for kind in summed)
    if layout.dp_replicate > 1:  # shards' gradients, of experts and of all others, over the replicas
        experts = of_kind["experts"]
        yield "sum over replicas", e * max(experts, sum(of_kind.values()) - experts)
    largest = max((size for _, size in pieces), default=0)
    copies = (e < FP32) + (layout.world_size > 1)  # in FP32, and squares; one process asks torch for its norms
    if copies:
        yield "clipping", FP32 * largest * copies
    yield "update", _update_bytes(part, [size for _, size in pieces], largest)


def _update_bytes(part: Part, sizes: list[int], largest: int) -> int:
    """AdamW's work space: an FP32 root of its largest tensor, and what it is made from in FP32."""
    run, recipe = part.run, part.recipe
    if run.optimizer != "adamw" or run.offload.optimizer != "device":
        return 0
    if part.engine.update_bytes is not None:
        return part.engine.update_bytes * sum(sizes)
    if part.layout.zero_stage or recipe.master_bytes:  # the course's own, a tensor at a time
        return FP32 * largest * (2 if recipe.grad_bytes < FP32 else 1)
    one_by_one = max(before + 2 * size for before, size in pairwise([0, *sizes]))  # the last root is still there
    return recipe.param_bytes * {"fused": 0, "foreach": sum(sizes), "for-loop": one_by_one}[run.implementation]
