"""One stage on one rank, as numbers of bytes: what a micro-batch saves, what its backward makes besides, its gradients.

A layer's backward begins with all that the layer saved, frees it from the last operator to the first, and makes
gradients of as many numbers. Its fullest moment is one of few: the gradient of the MLP's product, which SiLU and up
need with it; of the attention core; of a norm, which computes in FP32. Each is a difference to what the layer saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.activations import (
    FP32,
    MASK,
    Part,
    Terms,
    first_terms,
    has_experts,
    last_terms,
    layer_terms,
    rope_bytes,
    waiting_terms,
)
from course_lib.memory.flats import Flat, Named, layers_of
from course_lib.memory.states import LoRA, Recipe
from course_lib.memory.zero import wire_grad_bytes

NORM_TENSORS = 4  # in FP32, that RMSNorm's backward has at once; LayerNorm's is one kernel


class End(NamedTuple):
    """A moment of the last stage's end: its work space, and what was saved and is free by then."""

    name: str
    work: int
    freed: int = 0
    freed_logits: int = 0
    behind_loss: bool = True
    behind_head: bool = False
    adds_up: bool = False  # when the head's gradient is put where it is kept or sent from


class LayerMoment(NamedTuple):
    """A moment of a layer's backward: what it adds to all that the layer saved, and its work space."""

    activations: int
    temporary: int
    experts: bool = False  # whether gradients of experts are on their way


@dataclass(frozen=True)
class Stage:
    """Bytes of one micro-batch on one stage.

    start, layers, end   saved by the embedding, with RoPE's tables and targets; by all layers; by final norm and head
    first, last          saved by that layer; `again_` what recomputation makes besides
    moments_             of its backward
    waiting              between the two parts of a split backward; `waiting_end` of that the head's, `waiting_first`
    stream               a gradient of the residual stream
    """

    start: int
    layers: int
    end: int
    logits: int
    first: int
    last: int
    again_first: int
    again_last: int
    moments_first: tuple[LayerMoment, ...]
    moments_last: tuple[LayerMoment, ...]
    waiting: int
    waiting_end: int
    waiting_first: int
    stream: int
    ends: tuple[End, ...]
    loss_forward: int
    moved: int = 0  # off the device, of all that is saved

    @property
    def activations(self) -> int:
        """What one micro-batch saves, logits aside."""
        return self.start + self.layers + self.end


@lru_cache(maxsize=2048)
def stage_of(part: Part, stage: int, split: bool) -> Stage:
    """The sums of one stage; `split`: its gradients of weights may wait."""
    counts = layers_of(part.config, part.layout)
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    is_last, again = stage == len(counts) - 1, part.layout.recompute == "full" or part.run.operators
    end, logits = last_terms(part) if is_last else ({}, 0)
    sorts = _sorts(part, layers)
    saved = {layer: _sum(layer_terms(part, layer)) for layer in sorts}
    whole = {layer: _made_again(part, layer) - saved[layer] if again else 0 for layer in sorts}
    last = layers[-1] if layers[-1] in sorts else layers[0]
    waits = {layer: split * sum(waiting_terms(part, layer)) for layer in sorts}
    of_head = split * is_last * part.rows * (part.config.d_model + part.local.vocab_size) * part.e
    to_the_end = end.pop("targets", 0) if part.layout.tp == 1 else 0  # the micro-batch has them until it is done
    found = Stage(
        start=rope_bytes(part) + (sum(first_terms(part).values()) if stage == 0 else 0) + to_the_end,
        layers=sum(count * saved[layer] for layer, count in sorts.items()),
        end=sum(end.values()),
        logits=logits,
        first=saved[layers[0]],
        last=saved[last],
        again_first=whole[layers[0]],
        again_last=whole[last],
        moments_first=layer_moments(part, layers[0], split),
        moments_last=layer_moments(part, last, split),
        waiting=sum(count * waits[layer] for layer, count in sorts.items()) + of_head,
        waiting_end=of_head,
        waiting_first=waits[layers[0]],
        stream=part.own_rows * part.config.d_model * part.r,
        ends=tuple(_ends(part, end, logits)) if is_last else (),
        loss_forward=logits // part.fp32 * (part.e + (part.fp32 if part.e < part.fp32 else 0)),
    )
    return _offloaded(part, found, layers, to_the_end) if part.run.offload.activations != "device" else found


def _offloaded(part: Part, stage: Stage, layers: range, stays: int) -> Stage:
    """What backward has of saved tensors that wait off the device: those of one operator, come back."""
    numel, core = part.rows * part.local.d_ff * part.e, sum(_attention_of_core(part))
    two = part.config.family == "llama"
    moments = [
        LayerMoment(numel * (1 + two), stage.stream + numel * (2 + two)),
        LayerMoment(core, stage.stream + _core_work(part)),
    ]
    if any(has_experts(part, layer) for layer in layers):
        rows = part.routed * part.local.moe.top_k * part.config.d_model * part.e
        moments.append(LayerMoment(rows, stage.stream + 3 * rows))
    ends = tuple(end._replace(freed=-stage.logits * (not end.behind_loss), freed_logits=0) for end in stage.ends)
    return replace(
        stage,
        start=stays,
        layers=0,
        end=0,
        logits=0,
        first=0,
        last=0,
        again_first=0,
        again_last=0,
        moments_first=tuple(moments),
        moments_last=tuple(moments),
        ends=ends,
        moved=stage.activations + stage.logits - stays,
    )


def _attention_of_core(part: Part) -> tuple[int, int]:
    first, _ = layer_terms(part, 0, "none")
    return first["core"], first["input of o"]


def _sorts(part: Part, layers: range) -> dict[int, int]:
    """Layers that save the same: one of them, and how many; the first and the last of a stage are among them."""
    sort = {layer: (has_experts(part, layer), part.run.lora is not None and layer == 0) for layer in layers}
    found = {sort[layer]: layer for layer in layers}
    found[sort[layers[0]]] = layers[0]
    if sort[layers[-1]] != sort[layers[0]]:
        found[sort[layers[-1]]] = layers[-1]
    counts = Counter(sort.values())
    return {layer: counts[one] for one, layer in found.items()}


def _made_again(part: Part, layer: int) -> int:
    """What a layer has saved when it has run a second time; a router's routing then is there twice, but smaller."""
    terms, moe = _sum(layer_terms(part, layer, "none")), part.local.moe
    if not has_experts(part, layer):
        return terms
    twice = layer_terms(part, layer)[0].get("routing", 0) - part.routed * moe.top_k * (FP32 + MASK)
    return terms + twice - (part.routed * moe.num_experts * part.fp32 if moe.score == "sigmoid" else 0)


def _sum(terms: tuple[Terms, Terms]) -> int:
    return sum(sum(half.values()) for half in terms)


# ---- work space


@lru_cache(maxsize=4096)
def layer_moments(part: Part, layer: int, split: bool) -> tuple[LayerMoment, ...]:
    """The fullest moment of a layer's backward; and those at which experts' gradients, or a core again, are there."""
    selective = part.layout.recompute == "selective"
    first, second = layer_terms(part, layer, "selective" if selective else "none")
    D, e, rows = part.config.d_model, part.e, part.rows
    stream, gathered = part.own_rows * D * part.r, rows * D * e if part.layout.sequence_parallel else 0
    freed = split * waiting_terms(part, layer)[1] - sum(second.values())  # once the second half's backward is through
    again = 0
    if selective:
        whole = layer_terms(part, layer, "none")[0]
        again = sum(whole.values()) - sum(first.values())
        if part.run.attention == "standard":  # what is made again is beside its inputs; what o read is free
            again = whole["core"] - first["input of o"]
        elif part.layout.cp == 1 and part.local.head_dim < part.local.value_dim:  # queries and keys, filled up
            again += 2 * rows * part.local.num_heads * part.local.head_dim * e - first["input of o"]
    core = LayerMoment(freed + again - first.get("dropout masks", 0), stream + _core_work(part))
    found = [core, LayerMoment(freed + second.get("residual", 0), stream * 2 + part.own_rows * D * _norm_bytes(part))]
    if not has_experts(part, layer):
        works, late = [gathered + work for work in _mlp_work(part, part.local.d_ff, split)], ()
    else:
        works, work = _expert_work(part, second, split, gathered)
        late = (LayerMoment(0, stream + work, True),)
    found += [LayerMoment(0, stream + work) for work in works]
    most = max(found, key=sum)
    return (*dict.fromkeys((LayerMoment(0, stream), most, core if again else most)), *late)


def _mlp_work(part: Part, width: int, split: bool) -> list[int]:
    """Gradients of the product, SiLU and up, of which the product itself is free; or of the product and a matrix."""
    numel, D, e = part.rows * width, part.config.d_model, part.e
    matrix = 0 if part.run.lora is not None or split else width * D * e
    return [((2 if part.config.family == "llama" else 1) + split) * numel * e, numel * e + matrix]


def _expert_work(part: Part, second: Terms, split: bool, gathered: int) -> tuple[list[int], int]:
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
        works += [gathered + work for work in _mlp_work(part, moe.num_shared_experts * moe.d_expert, split)]
    return works, entered + (rows + tokens) * token - shared - second["places of rows"]


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
    return NORM_TENSORS * max(FP32, part.r) if part.config.family == "llama" else part.r


def _ends(part: Part, end: Terms, logits: int) -> list[End]:
    """The loss, the head's backward, the final norm's."""
    D, V, rows, own, e, facts = (
        part.config.d_model, part.local.vocab_size, part.rows, part.own_rows, part.e, part.engine,
    )  # fmt: skip
    norm = End(
        "final norm", own * D * (part.r + _norm_bytes(part)), end.get("input of the head", 0), logits, behind_head=True
    )
    if part.config.family == "xlmr":
        return [norm]
    tp, numel = part.layout.tp > 1, rows * V // part.run.loss_chunks
    if e == part.fp32:  # no copy in a wider dtype
        loss = numel * e * (1 if tp else 2)
    else:
        loss = int(numel * ((facts.tp_loss_bytes if tp else facts.loss_bytes) - FP32))
    matrix = 0 if part.run.lora is not None else V * D * e
    widened = matrix // e * FP32 if part.casts else 0
    stream, read = rows * D * e, end["input of the head"]
    return [
        End("loss", loss, behind_loss=False),
        End("head", numel * e + stream + matrix, 0, logits),
        End("head's gradient", stream + matrix + widened, read, logits, adds_up=True),
        norm,
    ]


# ---- gradients, and parameters that are whole


@dataclass(frozen=True)
class Gradients:
    """Bytes of one stage's gradients, and of what ZeRO puts together.

    held       once a backward has gone through: whole, or this rank's shards
    norms      of that, once the first part of a split backward has
    at_        of that, in a first backward at that moment: a bucket is there from its first gradient on
    embed      the embedding's as it comes, before it is added or sent; `tied` the head's that waits for it
    largest    of one matrix
    leaving_   ZeRO-2 and 3: whole gradients on their way, at that moment; `experts_` those of experts
    whole_     ZeRO-3: whole parameters at that moment
    """

    held: int
    norms: int
    at_end: int
    at_last: int
    at_first: int
    at_start: int
    embed: int
    tied: int
    largest: int
    leaving_end: int = 0
    leaving_last: int = 0
    leaving_first: int = 0
    leaving_embed: int = 0
    experts_last: int = 0
    experts_first: int = 0
    whole_end: int = 0
    whole_last: int = 0
    whole_first: int = 0
    whole_embed: int = 0


Units = tuple[str, str, list[str]]  # the first layer's, the last one's, all of a stage


def _is_at_once(name: str) -> bool:
    """Whether a split backward makes this gradient in its first part: it is of no product."""
    return "norm" in name or name in ("embed", "positions", "token_type") or name.endswith("moe.router")


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
    """Of the tensors of one stage that are trained, and their flats."""
    recipe, raw, wire, zero = of.recipe, of.recipe.param_bytes, wire_grad_bytes(of.recipe), of.zero_stage
    always = zero == 0 and of.data_size == 1 and recipe.grad_bytes > raw  # FP32 buffers, which are there before
    in_flats = flats if zero else [flat for flat in flats if flat.ranks > 1]
    units = list(dict.fromkeys(one.unit for one in tensors))
    first = units[min(1, len(units) - 1) if "embed" in units else 0]
    last = units[-2 if "end" in units and len(units) > 1 else -1]
    tied_here = of.config.tied and of.num_stages == 1 and of.config.family != "xlmr"
    embed = max((one.numel for one in tensors if one.name == "embed"), default=0)
    common = {
        "embed": raw * embed,
        "tied": raw * embed if tied_here and of.lora is None else 0,
        "largest": raw * max((one.numel for one in tensors), default=0),
    }

    late = {first, units[min(units.index(first) + 1, len(units) - 1)] if zero == 3 else first}

    def arrival(one: Named) -> int:
        """0 at the end, 1 behind the last layer's product, 2 in between, 3 in the first layer, 4 at the embedding."""
        if one.unit in ("end", "embed"):
            return 4 * (one.unit == "embed")
        if one.name.endswith(("mlp.down", "shared.down")):
            return 1 if one.unit == last else 2
        return 3 if one.unit in late else 2

    groups = [(flat.tensors, wire * flat.padded // (flat.ranks if zero > 1 else 1)) for flat in in_flats]
    if not zero and not always:
        sent = {one.name for flat in in_flats for one in flat.tensors}
        groups += [((one,), raw * one.numel) for one in tensors if one.name not in sent]
    there, at_once = [0] * 5, 0
    for group, size in groups:
        there[(max if zero > 1 else min)(arrival(one) for one in group)] += size  # shards come when a bucket is sent
        at_once += size * any(_is_at_once(one.name) for one in group)
    at_end, at_last, at_first, at_start, held = accumulate(there if zero < 2 else [0, 0, sum(there[:3]), *there[3:]])
    if embed and not any(one.name == "embed" for flat in in_flats for one in flat.tensors):
        common["embed"] = 0 if always or not zero else common["embed"]
    held = held, at_once, at_end, at_last, at_first, at_start
    if zero < 2:
        return Gradients(*held, **common)
    if zero == 2:
        return _by_buckets(held, common, flats, wire)
    return _by_units(raw, held, common, flats, wire, (first, last, units))


def _by_buckets(held: tuple[int, ...], common: dict[str, int], flats: Sequence[Flat], wire: int) -> Gradients:
    """ZeRO-2: a bucket fills while the one before it is sent; that of norms is full at the end."""
    sizes = {flat: wire * flat.padded for flat in flats}
    slow = sum(size for flat, size in sizes.items() if flat.kind in ("norms", "head_norms"))
    fast = [flat for flat in flats if flat.kind not in ("norms", "head_norms")]
    of = {name: [flat for flat in fast if any(one.name == name for one in flat.tensors)] for name in ("embed", "head")}
    inner = [flat for flat in fast if flat not in of["embed"] + of["head"]] or fast
    pairs = {True: 0, False: 0}  # with experts, without
    for one, other in pairwise(inner if len(inner) > 1 else inner * 2):
        experts = "experts" in (one.kind, other.kind)
        pairs[experts] = max(pairs[experts], sizes[one] + sizes[other] * (other is not one))
    dense = pairs[False] + slow
    experts = max(0, pairs[True] - pairs[False])
    return Gradients(
        *held,
        **common,
        leaving_end=sum(sizes[flat] for flat in of["head"]),
        leaving_last=dense,
        leaving_first=dense,
        leaving_embed=sum(sizes[flat] for flat in of["embed"]) + slow + (sizes[fast[-2]] if len(fast) > 1 else 0),
        experts_last=experts,
        experts_first=experts,
    )


def _by_units(
    raw: int,
    held: tuple[int, ...],
    common: dict[str, int],
    flats: Sequence[Flat],
    wire: int,
    units: tuple[str, str, list[str]],
) -> Gradients:
    """ZeRO-3: a unit's gradients are made while those of the unit behind it are sent; it and the next are whole."""
    first, last, order = units[0], units[1], units[2][::-1]
    full, shard, experts = Counter(), Counter(), Counter()
    for flat in flats:
        full[flat.unit] += flat.padded
        shard[flat.unit] += flat.padded // flat.ranks
        experts[flat.unit] += flat.padded * (flat.kind == "experts")
    tied = full["embed"] if common["tied"] else 0
    behind = dict(zip(order, [None, *order], strict=False))
    ahead = dict(zip(order, [*order[1:], None], strict=True))

    def leaving(unit: str) -> int:
        before = behind[unit]
        return wire * (full[unit] - experts[unit] + (full[before] + shard[before] if before else 0))

    def together(unit: str, other: str | None) -> int:
        return raw * (full[unit] + full[other] + tied * ("embed" not in (unit, other)))

    start = "embed" if "embed" in order else first
    return Gradients(
        *held,
        **common,
        leaving_end=wire * full["end"],
        leaving_last=leaving(last),
        leaving_first=leaving(first),
        leaving_embed=leaving(start) + wire * experts[start],
        experts_last=wire * experts[last],
        experts_first=wire * experts[first],
        whole_end=together("end", ahead.get("end")),
        whole_last=together(last, ahead[last]),
        whole_first=together(first, ahead[first]),
        whole_embed=together(start, None),
    )
