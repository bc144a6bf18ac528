"""What a backward pass holds besides what forward saved, layer by layer, and which gradients have come by then.

A layer's backward begins with all that the layer saved, and frees it from the last operator to the first. It is
fullest in the MLP, or where the experts' gradients are there; in the second norm, which computes in FP32; or in
attention's core. peak.py adds these moments up over a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.activations import (
    FP32,
    MASK,
    Part,
    Terms,
    first_terms,
    last_terms,
    layer_terms,
    rope_bytes,
    waiting_terms,
)
from course_lib.memory.flats import Flat, Named, layers_of, placed_by
from course_lib.memory.states import LoRA, Recipe
from course_lib.memory.zero import wire_grad_bytes

_NORM_TENSORS = 4  # in FP32, that RMSNorm's backward has at once; LayerNorm's is one kernel


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
def stage_of(part: Part, stage: int, split: bool) -> Stage:
    """The sums of one stage, layer by layer; `split`: its gradients of weights may wait."""
    counts = layers_of(part.config, part.layout)
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    is_last, away = stage == len(counts) - 1, part.run.offload.activations != "device"
    end, logits = last_terms(part) if is_last else ({}, 0)
    here = rope_bytes(part) + (sum(first_terms(part).values()) if stage == 0 else 0)
    to_the_end = end.pop("targets", 0) if part.layout.tp == 1 else 0  # the micro-batch has them until it is done
    sort = {layer: (part.config.has_experts(layer), part.run.lora is not None and layer == 0) for layer in layers}
    like = {of: layer for layer, of in sort.items()}
    saved_by = {of: _sum(layer_terms(part, layer)) for of, layer in like.items()}
    inside = {of: _layer_moments(part, layer, split) for of, layer in like.items()}
    waits = {of: split * sum(waiting_terms(part, layer)) for of, layer in like.items()}
    saved = here + sum(saved_by[sort[layer]] for layer in layers)  # in front of the end
    of_head = split * is_last * part.rows * (part.config.d_model + part.local.vocab_size) * part.e
    ends = _end_moments(part, saved, end, logits, of_head) if is_last else []
    moments = [one._replace(activations=one.activations + to_the_end) for one in ends]
    kept, waiting = saved, of_head
    for layer in reversed(layers):
        kept -= saved_by[sort[layer]]
        if _may_be_fullest(layer, layers, sort):
            for one in inside[sort[layer]]:
                unit = f"blocks.{layer}{one.where[0]}"
                activations = one.activations + waiting + (0 if away else kept)
                moments.append(one._replace(where=(unit, one.where[1]), activations=to_the_end + activations))
        waiting += waits[sort[layer]]
    stream = part.own_rows * part.config.d_model * part.r
    moments.append(Moment("embedding", ("embed", True), to_the_end + waiting + (0 if away else here), 0, stream))
    total = saved + sum(end.values())
    if away:
        return Stage(to_the_end, 0, waiting, tuple(moments), total + logits)
    return Stage(to_the_end + total, logits, waiting, tuple(moments))


def _may_be_fullest(layer: int, layers: range, sort: dict) -> bool:
    """Activations fall from layer to layer and gradients grow, so between two like layers none is the fullest."""
    near = [sort.get(layer + step) == sort[layer] for step in (-2, -1, 1, 2)]
    return not all(near)


def _sum(terms: tuple[Terms, Terms]) -> int:
    return sum(sum(half.values()) for half in terms)


# ---- work space


@lru_cache(maxsize=4096)
def _layer_moments(part: Part, layer: int, split: bool) -> tuple[Moment, ...]:
    """The moments of a layer's backward, and the activations of this layer that are there then."""
    recompute, experts = part.layout.recompute, part.config.has_experts(layer)
    whole = layer_terms(part, layer, "none")
    first, second = whole if recompute == "full" or part.run.operators else layer_terms(part, layer)
    D, rows, stream = part.config.d_model, part.rows, part.own_rows * part.config.d_model * part.r
    gathered = rows * D * part.e if part.layout.sequence_parallel else 0
    saved = _sum((first, second))
    if recompute == "full" and experts:  # a router's routing is there twice, but smaller
        moe = part.local.moe
        scores = part.routed * moe.num_experts * part.fp32 if moe.score == "sigmoid" else 0
        saved += layer_terms(part, layer)[0]["routing"] - part.routed * moe.top_k * (FP32 + MASK) - scores
    left = saved - sum(second.values()) + split * waiting_terms(part, layer)[1]  # once the MLP's backward is through
    again = _sum(whole) - saved if recompute == "selective" else 0
    if again and part.run.attention == "standard":  # beside its inputs; what o read is free
        again = whole[0]["core"] - first["input of o"]
    elif again and part.layout.cp == 1 and part.local.head_dim < part.local.value_dim:  # queries and keys, filled up
        again += 2 * rows * part.local.num_heads * part.local.head_dim * part.e - first["input of o"]
    core = left + again - first.get("dropout masks", 0)
    norm = left + second.get("residual", 0)
    works = (
        _expert_work(part, second, split, gathered) if experts else [gathered + _mlp_work(part, part.local.d_ff, split)]
    )
    in_mlp = saved
    if part.run.offload.activations != "device":  # what comes back for one operator: a product's factors
        in_mlp, norm = second["experts" if experts else "MLP"] // 2, second["residual"]
        core = first["core"] + first["input of o"]
    found = [
        Moment("MLP", (":mlp", False), in_mlp, 0, stream + works[0]),
        Moment("second norm", (":mlp", True), norm, 0, 2 * stream + part.own_rows * D * _norm_bytes(part)),
        Moment("attention", (":attention", False), core, 0, stream + _core_work(part)),
    ]
    return (*found, *(Moment("experts", (":mlp", True), in_mlp, 0, stream + late) for late in works[1:]))


def _mlp_work(part: Part, width: int, split: bool) -> int:
    """Gradients of the product, SiLU and up, of which the product itself is free; or of the product and a matrix."""
    numel, D, e = part.rows * width, part.config.d_model, part.e
    matrix = 0 if part.run.lora is not None or split else width * D * e
    return max(((2 if part.config.family == "llama" else 1) + split) * numel * e, numel * e + matrix)


def _expert_work(part: Part, second: Terms, split: bool, gathered: int) -> tuple[int, int]:
    """Gradients of rows, or rows as they go and come when forward runs; and later, when the experts' outputs are free.

    A shared expert runs behind the others: its backward is the first. Folded, it alone gathers tokens.
    """
    moe, layout, token, tokens = part.local.moe, part.layout, part.config.d_model * part.e, part.routed
    rows, shared, entered = tokens * moe.top_k, second.get("moe.shared", 0), 0 if part.layout.folded else gathered
    works = [(3 * rows + tokens) * token - shared]
    if layout.recompute == "full" or not split:
        moved = rows if layout.expert_method == "plain" else tokens * min(moe.top_k, layout.ep)
        ways = rows + 3 * moved if layout.ep > 1 else rows
        others = 3 if part.e < FP32 else 2  # zeros, sums; and the input, unless the router saves it as it is
        works.append((ways + others * tokens - part.own_rows) * token - shared)
        if layout.recompute != "full":  # in the forward pass no gradient has come
            works[-1] -= part.own_rows * token + entered
    works = [entered + work for work in works]
    if moe.num_shared_experts:
        works.append(gathered + _mlp_work(part, moe.num_shared_experts * moe.d_expert, split))
    return max(works), entered + (rows + tokens) * token - shared - second["places of rows"]


def _core_work(part: Part) -> int:
    """Gradients of q, k, v and of the output; of scores, or of keys and values that go from rank to rank."""
    c, rows, e, layout = part.local, part.rows, part.e, part.layout
    N, K, H, W = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim
    queries, pairs, out, wide = rows * N * H, rows * K * (H + W), rows * N * W, max(e, FP32)
    if part.run.attention == "standard":
        scores = rows * N * (part.run.seq_len // layout.cp)
        softmax = part.recipe.param_bytes if part.run.device == "cuda" else e
        return 2 * scores * max(softmax, e) + out * e
    filled = 3 * rows * N * max(H, W) * e if H != W else 0
    if layout.cp == 1:
        return ((4 * rows * N * max(H, W) if H != W else queries + pairs) + out) * e
    if layout.cp_method == "ulysses":
        return 2 * (queries + pairs + out) * e
    once = out * e + queries * (wide + e * (wide != e)) + filled
    if layout.cp_method == "all_gather":
        return once + pairs * (layout.cp * (e + wide) + wide + e)
    return once + pairs * (3 * wide + 3 * e)


def _norm_bytes(part: Part) -> int:
    return _NORM_TENSORS * max(FP32, part.r) if part.config.family == "llama" else part.r


def _end_moments(part: Part, saved: int, end: Terms, logits: int, waiting: int) -> list[Moment]:
    """The loss, the head's backward, and the final norm's."""
    D, V, rows, e, engine = part.config.d_model, part.local.vocab_size, part.rows, part.e, part.engine
    here = 0 if part.run.offload.activations != "device" else saved + sum(end.values())
    of_norm = Moment(
        "final norm",
        ("end", True),
        here - end.get("input of the head", 0) + waiting,
        0,
        part.own_rows * D * (part.r + _norm_bytes(part)),
    )
    if part.config.family == "xlmr":
        return [of_norm]
    tp, numel = part.layout.tp > 1, rows * V // part.run.loss_chunks
    if e == part.fp32:  # no copy in a wider dtype
        loss = numel * e * (1 if tp else 2)
    else:
        loss = int(numel * ((engine.tp_loss_bytes if tp else engine.loss_bytes) - FP32))
    matrix = 0 if part.run.lora is not None else V * D * e
    head = rows * D * e + matrix
    return [
        Moment("loss", ("", False), here, logits, loss),
        Moment("head", ("head", False), here, 0, numel * e + head),
        Moment(
            "head's gradient",
            ("end", True),
            here - end.get("input of the head", 0),
            0,
            head + matrix // e * FP32 * part.casts,
        ),
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


class Trained(NamedTuple):
    """What a rank's gradients depend on: one of many runs that differ in tokens, schedule steps and recomputation."""

    config: ModelConfig
    recipe: Recipe
    lora: LoRA | None
    cut: Layout
    zero_stage: int
    ranks: tuple[int, int]  # over which ZeRO shards all that is not an expert, and experts
    data_size: int
    num_stages: int


def gradients_of(of: Trained, tensors: Sequence[Named], flats: Sequence[Flat]) -> Gradients:
    """Follow the gradients of one stage's trained tensors through a backward pass: the last tensor's comes first."""
    raw, wire, zero = of.recipe.param_bytes, wire_grad_bytes(of.recipe), of.zero_stage
    halves: dict[str, list[Named]] = {}
    for one in reversed(tensors):
        halves.setdefault(_half_of(one), []).append(one)
    order = [one for half in halves.values() for one in sorted(half, key=lambda one: one.kind == "experts")]
    time = {one.name: index for index, one in enumerate(order)}
    in_flats = [flat for flat in flats if zero or flat.ranks > 1]
    sent = {one.name for flat in in_flats for one in flat.tensors}
    there, at_once, leaving = ([0] * (len(order) + 1) for _ in range(3))
    groups = [(flat.tensors, wire * flat.padded // (flat.ranks if zero > 1 else 1)) for flat in in_flats]
    if zero or of.data_size > 1 or of.recipe.grad_bytes <= raw:  # else FP32 buffers are there before
        groups += [((one,), raw * one.numel) for one in order if one.name not in sent]
    sent_at = _sent_at(in_flats, order, time, zero) if zero > 1 else ()
    for index, (group, size) in enumerate(groups):
        early = [time[one.name] for one in group if _is_at_once(one.name)]
        at_once[min(early, default=-1)] += size * bool(early)
        first = min(time[one.name] for one in group)
        start, end = sent_at[index] if zero > 1 else (first, first)
        there[end] += size
        if zero > 1:  # the whole buffer, and this rank's piece of the sum until both are freed
            leaving[first] += wire * in_flats[index].padded
            leaving[start] += size
            leaving[end] -= wire * in_flats[index].padded + size
    there, at_once, leaving = ([*accumulate(sizes)] for sizes in (there, at_once, leaving))
    apart = _apart(of, raw, wire, tensors, in_flats, time)
    whole = _whole(flats, raw, apart["tied"]) if zero == 3 else {}
    at, begin = {"": Arrived(), "head": Arrived(whole=whole.get("end", 0))}, 0
    for key, half in halves.items():
        last = begin + len(half) - 1
        others = max(begin, last - sum(one.kind == "experts" for one in half))
        most = (max(leaving[begin : end + 1]) + apart[key if key == "embed" else "tied"] for end in (others, last))
        pairs = ((sizes[begin], sizes[last]) for sizes in (there, at_once))
        at[key] = Arrived(*pairs, tuple(most), whole.get(half[0].unit, 0))
        begin = last + 1
    largest = raw * max((one.numel for one in tensors if not _is_at_once(one.name)), default=0)
    return Gradients(there[-1], at_once[-1], largest, at)


def _apart(of: Trained, raw: int, wire: int, tensors: Sequence[Named], flats: Sequence[Flat], time: dict) -> dict:
    """Bytes of gradients that are not in their place yet: the head's, which a tied embedding waits for, and its own.

    Then they are added: in a flat without tp the head's is a view, so the sum is a third tensor.
    """
    numel = next((one.numel for one in tensors if one.name == "embed"), 0)
    flat = next((flat for flat in flats if any(one.name == "embed" for one in flat.tensors)), None)
    is_tied = of.config.tied and of.num_stages == 1 and of.config.family != "xlmr" and of.lora is None
    tied = is_tied and not placed_by(of.cut).splits_backward
    own = raw * numel * (bool(flat) + tied * (1 + (of.cut.tp == 1 and bool(flat))))
    if of.zero_stage > 1 and flat and time["embed"] == min(time[one.name] for one in flat.tensors):
        own = max(raw * numel, own - wire * flat.padded)  # the flat comes with it
    return {"tied": raw * numel * tied, "embed": own}


def _half_of(one: Named) -> str:
    """Of a block attention or what follows it; before and behind the blocks all together."""
    if not one.unit.startswith("blocks"):
        return one.unit
    return one.unit + (":attention" if ".attention." in one.name else ":mlp")


def _is_at_once(name: str) -> bool:
    """Whether a split backward makes this gradient in its first part: it is of no product."""
    return "norm" in name or name in ("embed", "positions", "token_type") or name.endswith("moe.router")


def _sent_at(flats: Sequence[Flat], order: Sequence[Named], time: dict[str, int], zero: int) -> list[tuple[int, int]]:
    """When each flat is sent, and when its buffer is free: as gradients have come.

    ZeRO-2 sends buckets in one order, and frees one when the next is sent; ZeRO-3 a unit when backward has left it,
    and frees it a unit later.
    """
    end = len(order)
    if zero == 2:
        starts = [*accumulate((max(time[one.name] for one in flat.tensors) for flat in flats), max)]
        return [*zip(starts, (*(start + 1 for start in starts[1:]), end), strict=True)]
    enters = {one.unit: time[one.name] for one in reversed(order)}
    after = [*sorted(enters.values()), end, end]
    index = {unit: after.index(start) for unit, start in enters.items()}
    return [(after[index[flat.unit] + 1], after[index[flat.unit] + 2]) for flat in flats]


def _whole(flats: Sequence[Flat], raw: int, tied: int) -> dict[str, int]:
    """ZeRO-3: bytes of a unit and of the one in front of it, by unit; a tied embedding is whole all the time."""
    full: dict[str, int] = {}
    for flat in flats:
        full[flat.unit] = full.get(flat.unit, 0) + flat.padded
    units = [*full]
    pairs = {
        unit: {unit, units[max(0, index - 1)]} | ({"embed"} if tied else set()) for index, unit in enumerate(units)
    }
    return {unit: raw * sum(full[one] for one in pair) for unit, pair in pairs.items()}
