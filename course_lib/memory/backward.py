"""What a backward pass holds besides what forward saved, layer by layer, and which gradients have come by then.

A layer's backward begins with all that the layer saved, and frees it from the last operator to the first. It is
fullest in the MLP, or where the experts' gradients are there; in the second norm, which computes in FP32; or in
attention's core. peak.py adds these moments up over a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part, first_terms, last_terms, layer_terms, of_matrices
from course_lib.memory.flats import Flat, Named, layers_of, placed_by
from course_lib.memory.states import Recipe
from course_lib.memory.zero import wire_grad_bytes


class Moment(NamedTuple):
    """A moment of one micro-batch's backward on a stage, in bytes.

    where         (unit, whether its gradients are there already: else only that of the last matrix of this half)
    activations   what is not free yet of what was saved, what was made again, what waits for gradients of weights
    work          gradients inside the unit, and what operators need
    """

    name: str
    where: tuple[str, bool]
    activations: int
    logits: int
    work: int


@dataclass(frozen=True)
class Stage:
    """Bytes of one micro-batch on one stage.

    activations, logits   saved from its forward to its backward pass
    waiting               between the two parts of a split backward: what gradients of weights need
    moments               of its backward
    moved                 off the device, of all that is saved
    """

    activations: int
    logits: int
    waiting: int
    moments: tuple[Moment, ...]
    moved: int = 0

    @property
    def total(self) -> int:
        """What is there when backward starts."""
        return self.activations + self.logits


@lru_cache(maxsize=2048)
def stage_of(part: Part, stage: int) -> Stage:
    """The sums of one stage, layer by layer."""
    config, layout = part.run.config, part.run.layout
    counts = layers_of(config, layout)
    layers, is_last = range(sum(counts[:stage]), sum(counts[: stage + 1])), stage == len(counts) - 1
    end, logits = last_terms(part) if is_last else ({}, 0)
    targets = end.pop("targets", 0) if layout.tp == 1 else 0  # the micro-batch has them until it is done
    first = first_terms(part)
    start = _total(first) if stage == 0 else first["RoPE's tables"]
    sorts = {layer: config.has_experts(layer) for layer in layers}
    like = {sort: layer for layer, sort in sorts.items()}
    saved = {sort: sum(_total(half) for half in layer_terms(part, layer)) for sort, layer in like.items()}
    inside = {sort: _layer_moments(part, layer) for sort, layer in like.items()}
    waits = {sort: part.split * sum(size for _, size in of_matrices(part, layer)) for sort, layer in like.items()}
    kept = start + sum(saved[sort] for sort in sorts.values())
    waits_head = part.split and is_last and not part.head_in_forward
    waiting = waits_head * part.rows * (config.d_model + part.local.vocab_size) * part.e
    total = kept + _total(end)
    moments = _end_moments(part, total, end, logits) if is_last else []
    for layer in reversed(layers):
        sort = sorts[layer]
        kept -= saved[sort]
        # activations fall from layer to layer and gradients grow: between like layers none is the fullest
        is_between = all(sorts.get(layer + step) == sort for step in (-2, -1, 1, 2))
        for one in () if is_between else inside[sort]:
            unit = f"blocks.{layer}{one.where[0]}", one.where[1]
            moments.append(
                one._replace(where=unit, activations=one.activations + waiting + (0 if part.is_away else kept))
            )
        waiting += waits[sort]
    stream = part.own_rows * config.d_model * part.r
    moments.append(Moment("embedding", ("embed", True), waiting + (0 if part.is_away else start), 0, stream))
    moments = tuple(one._replace(activations=one.activations + targets) for one in moments)
    if part.is_away:
        return Stage(targets, 0, waiting, moments, total + logits)
    return Stage(targets + total, logits, waiting, moments)


def _total(terms: dict[str, int]) -> int:
    return sum(terms.values())


# ---- work space


def _layer_moments(part: Part, layer: int) -> list[Moment]:
    """The moments of a layer's backward, and the activations of this layer that are there then."""
    config, layout, rows, e = part.local, part.run.layout, part.rows, part.e
    whole, has_experts = layer_terms(part, layer, "none"), config.has_experts(layer)
    first, second = whole if layout.recompute == "full" or part.run.operators else layer_terms(part, layer)
    saved, stream = _total(first) + _total(second), part.own_rows * config.d_model * part.r
    gathered = rows * config.d_model * e if layout.sequence_parallel else 0
    left = _total(first) + part.split * of_matrices(part, layer)[1][1]  # once the MLP's backward is through
    again = _total(whole[0]) - _total(first)
    if again and part.run.attention == "standard":  # beside its inputs; what o read is free
        again = whole[0]["core"] - first["input of o"]
    in_mlp, in_norm, in_core = saved, left + second.get("residual", 0), left + again - first.get("dropout masks", 0)
    if part.is_away:  # what comes back for one operator: a product's factors
        in_mlp, in_norm = second["experts" if has_experts else "MLP"] // 2, second["residual"]
        in_core = first["core"] + first["input of o"]
    if has_experts:  # a shared expert runs behind the others, so its backward is through
        moe, token = config.moe, config.d_model * e
        tokens, own, shared = part.routed * token, part.own_rows * token, second.get("shared experts", 0)
        sent, entered = moe.top_k * tokens, 0 if layout.folded else gathered
        moved = (layout.ep > 1) * (sent if layout.expert_method == "plain" else tokens * min(moe.top_k, layout.ep))
        forward = sent + 3 * moved + (2 + (e < FP32)) * tokens - own  # rows as they go and come
        if layout.recompute != "full":  # in the forward pass no gradient has come
            forward -= own + entered + part.split * forward
        work = entered - shared + max(3 * sent + tokens, forward)
    else:  # gradients of the product, SiLU and up, of which the product itself is free; or of the product and a matrix
        product, tensors = rows * config.d_ff * e, (2 if config.family == "llama" else 1) + part.split
        matrix = 0 if part.run.lora is not None or part.split else config.d_ff * config.d_model * e
        work = gathered + max(tensors * product, product + matrix)
    return [
        Moment("MLP", (":mlp", False), in_mlp, 0, stream + work),
        Moment("second norm", (":mlp", True), in_norm, 0, 2 * stream + _norm_work(part)),
        Moment("attention", (":attention", False), in_core, 0, stream + _core_work(part)),
    ]


def _norm_work(part: Part) -> int:
    """Four tensors in FP32 that RMSNorm's backward has at once; LayerNorm's is one kernel."""
    size = 4 * max(FP32, part.r) if part.local.family == "llama" else part.r
    return part.own_rows * part.local.d_model * size


def _core_work(part: Part) -> int:
    """Gradients of q, k, v and of the output; of scores, or of keys and values that go from rank to rank."""
    c, rows, e, layout = part.local, part.rows, part.e, part.run.layout
    N, H, W = c.num_heads, c.head_dim, c.value_dim
    queries, pairs, out = rows * N * H * e, rows * c.num_kv_heads * (H + W) * e, rows * N * W * e
    if part.run.attention == "standard":
        return 2 * rows * N * part.run.seq_len * max(part.softmax, e) + out
    filled = rows * N * max(H, W) * e if H != W else 0  # values as long as keys
    if layout.cp == 1:
        return (4 * filled or queries + pairs) + out
    if layout.cp_method == "ulysses":
        return 2 * (queries + pairs + out)
    wider = part.fp32 // e  # sums over blocks of keys are in FP32
    blocks = layout.cp * (1 + wider) + wider + 1 if layout.cp_method == "all_gather" else 3 * wider + 3
    return out + queries * (wider + (wider > 1)) + 3 * filled + pairs * blocks


def _end_moments(part: Part, total: int, end: dict[str, int], logits: int) -> list[Moment]:
    """The loss, the head's backward, and the final norm's."""
    rows, e, engine, D, V = part.rows, part.e, part.engine, part.local.d_model, part.local.vocab_size
    here = 0 if part.is_away else total
    left = here - end.get("input of the head", 0)
    of_norm = Moment("final norm", ("end", True), left, 0, part.own_rows * D * part.r + _norm_work(part))
    if part.local.family == "xlmr":
        return [of_norm]
    numel, tp = rows * V // part.run.loss_chunks, part.run.layout.tp > 1
    if part.head_in_forward:  # a chunk's logits, or the product that is added to the sum, beside them; then a cast
        chunk = max(numel * (part.fp32 + (e < FP32) * e), (numel + V * D) * e * (e < FP32))
        return [
            Moment("loss", ("", False), here, logits, chunk + rows * D * e),
            Moment("head", ("head", False), here, logits, V * D * e * (e < FP32)),
            Moment("head's gradient", ("end", True), here, 0, V * D * e),
            of_norm,
        ]
    loss = numel * e * (1 if tp else 2)
    if e < FP32:  # beside a copy in FP32
        loss = int(numel * ((engine.tp_loss_bytes if tp else engine.loss_bytes) - FP32))
    head = rows * D * e + (0 if part.run.lora is not None else V * D * e)
    return [
        Moment("loss", ("", False), here, logits, loss),
        Moment("head", ("head", False), here, 0, numel * e + head),
        Moment("head's gradient", ("end", True), left, 0, head + V * D * FP32 * (e != part.r)),
        of_norm,
    ]


# ---- gradients, and parameters that are whole


class Arrived(NamedTuple):
    """Bytes of gradients and of whole parameters in a half of a unit: with its first gradient, and with all of them.

    there     of a first backward, in which a bucket is there from its first gradient on, a shard once it is sent
    at_once   of the first part of a split backward
    leaving   with ZeRO-2 and 3 whole gradients on their way; experts' come last
    whole     ZeRO-3: whole parameters, of this unit and of the next
    """

    there: tuple[int, int] = (0, 0)
    at_once: tuple[int, int] = (0, 0)
    leaving: tuple[int, int] = (0, 0)
    whole: int = 0


@dataclass(frozen=True)
class Gradients:
    """Bytes of one stage's gradients, and of what ZeRO puts together.

    held      once a backward has gone through: whole, or this rank's shards
    at_once   of that, once the first part of a split backward has
    largest   of one matrix
    at        by unit, of blocks by half
    """

    held: int
    at_once: int
    largest: int
    at: dict[str, Arrived]


def gradients_of(
    layout: Layout, recipe: Recipe, tensors: Sequence[Named], flats: Sequence[Flat], is_tied: bool
) -> Gradients:
    """Follow the gradients of one stage's trained tensors through a backward pass: the last tensor's comes first.

    is_tied   whether the head's gradient waits for the embedding's
    """
    raw, wire, zero = recipe.param_bytes, wire_grad_bytes(recipe), layout.zero_stage
    halves: dict[str, list[Named]] = {}
    for one in reversed(tensors):
        half = ":attention" if ".attention." in one.name else ":mlp"
        halves.setdefault(one.unit + half * one.unit.startswith("blocks"), []).append(one)
    order = [one for half in halves.values() for one in sorted(half, key=lambda one: one.kind == "experts")]
    time = {one.name: index for index, one in enumerate(order)}
    left = {one.unit: index for index, one in enumerate(order)}  # when backward has gone through a unit
    shared = [flat for flat in flats if zero or flat.ranks > 1]
    groups = [(flat.tensors, wire * flat.padded) for flat in shared]
    if zero or layout.data_size > 1 or recipe.grad_bytes <= raw:  # else FP32 buffers are there before
        alone = time.keys() - {one.name for flat in shared for one in flat.tensors}
        groups += [((one,), raw * one.numel) for one in order if one.name in alone]
    # a split backward makes gradients that are of no product in its first part
    of_no_product = {name for name in time if _is_of_no_product(name)} if placed_by(layout).splits_backward else set()
    there, at_once, leaving = ([0] * (len(order) + 1) for _ in range(3))
    ends = accumulate((max(time[one.name] for one in flat.tensors) for flat in shared), max)
    full = [left[flat.unit] for flat in shared] if zero == 3 else [*ends]
    after = sorted({*full, len(order) - 1})  # when units are full, or buckets, which are sent in one order
    following = dict(zip(after, [*after[1:], after[-1]], strict=True))
    for index, (group, size) in enumerate(groups):
        begun, kept = min(time[one.name] for one in group), size
        if zero > 1:  # a whole buffer, beside its shard of the sum, is free when the next one is full
            end, kept = full[index], size // shared[index].ranks
            free = following[end] + 1
            for when, change in ((begun, size), (end + (zero == 3), kept), (free, -size - kept)):
                leaving[when] += change
            begun = free
        there[begun] += kept
        early = [time[one.name] for one in group if one.name in of_no_product]
        at_once[min(early, default=-1)] += kept * bool(early)
    there, at_once, leaving = ([*accumulate(sizes)] for sizes in (there, at_once, leaving))
    embed, copied = next((raw * one.numel for one in tensors if one.name == "embed"), 0), bool(shared)
    tied = embed * is_tied
    # copied into a buffer; without tp the head's is in it, so that the sum is a third tensor. ZeRO-2 and 3 send one on
    # its way, but a weight that ZeRO-3 gathered once for both gets both
    is_sent = zero == 2 or (zero == 3 and layout.tp > 1)
    summed = embed * copied + tied * (1 + copied * (layout.tp == 1) - is_sent)
    whole = _whole(flats, raw, tied) if zero == 3 else {}
    at, begin = {"": Arrived(), "head": Arrived(whole=whole.get("end", 0))}, 0
    for key, half in halves.items():
        last = begin + len(half) - 1
        pairs = ((sizes[begin], sizes[last]) for sizes in (there, at_once))
        others = max(begin, last - sum(one.kind == "experts" for one in half))
        most = (max(leaving[begin : end + 1]) + (summed if key == "embed" else tied) for end in (others, last))
        at[key] = Arrived(*pairs, tuple(most), whole.get(half[0].unit, 0))
        begin = last + 1
    largest = raw * max((one.numel for one in tensors if one.name not in of_no_product), default=0)
    return Gradients(there[-1], at_once[-1], largest, at)


def _is_of_no_product(name: str) -> bool:
    return "norm" in name or name in ("embed", "positions", "token_type") or name.endswith("moe.router")


def _whole(flats: Sequence[Flat], raw: int, tied: int) -> dict[str, int]:
    """ZeRO-3: bytes of a unit and of the one in front of it, by unit; a tied embedding is whole all the time."""
    full = Counter()
    for flat in flats:
        full[flat.unit] += raw * flat.padded
    neighbours = zip(full, full.values(), [0, *full.values()], strict=False)
    stays = full["embed"] * bool(tied)
    return {unit: own + front + stays * (index > 1) for index, (unit, own, front) in enumerate(neighbours)}
