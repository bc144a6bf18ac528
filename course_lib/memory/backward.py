"""One stage on one rank, as numbers of bytes: what a micro-batch saves, what its backward makes besides, its gradients.

A layer's backward begins with all that the layer saved, frees it from the last operator to the first, and makes
gradients of as many numbers. Its fullest moment is one of few: the gradient of the MLP's product, which SiLU and up
need with it; of the attention core; of a norm, which computes in FP32. Each is a difference to what the layer saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    last_terms,
    layer_terms,
    rope_bytes,
    waiting_terms,
)
from course_lib.memory.flats import Flat, Named, layers_of
from course_lib.memory.states import LoRA, Recipe
from course_lib.memory.zero import wire_grad_bytes

_NORM_TENSORS = 4  # in FP32, that RMSNorm's backward has at once; LayerNorm's is one kernel


class Moment(NamedTuple):
    """A moment of a backward: bytes beside all that the micro-batch saved, and its work space.

    activations, logits   saved so much more then, or less: what is free already is negative
    experts               whether gradients of experts are on their way
    waiting               after the first part of a split backward: what gradients of weights need by then
    """

    name: str
    activations: int
    logits: int
    work: int
    experts: bool = False
    waiting: int = 0


@dataclass(frozen=True)
class Stage:
    """Bytes of one micro-batch on one stage.

    activations, logits   saved from its forward to its backward pass
    waiting               between the two parts of a split backward: what gradients of weights need
    moments               of its backward
    loss                  work space of the loss's forward
    moved                 off the device, of all that is saved
    """

    activations: int
    logits: int
    waiting: int
    moments: tuple[Moment, ...]
    loss: int
    moved: int = 0

    @property
    def total(self) -> int:
        """What is there when backward starts."""
        return self.activations + self.logits


@lru_cache(maxsize=2048)
def stage_of(part: Part, stage: int, split: bool) -> Stage:
    """The sums of one stage; `split`: its gradients of weights may wait."""
    counts = layers_of(part.config, part.layout)
    layers = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    is_last, away = stage == len(counts) - 1, part.run.offload.activations != "device"
    terms, logits = last_terms(part) if is_last else ({}, 0)
    to_the_end = terms.pop("targets", 0) if part.layout.tp == 1 else 0  # the micro-batch has them until it is done
    sorts, whole = _sorts(part, layers), part.layout.recompute == "full" or part.run.operators
    first, last = layers[0], layers[-1] if layers[-1] in sorts else layers[0]
    saved = {layer: _sum(layer_terms(part, layer)) for layer in sorts}
    again = {layer: whole * (_made_again(part, layer) - saved[layer]) for layer in sorts}
    waits = {layer: split * sum(waiting_terms(part, layer)) for layer in sorts}
    of_head = split * is_last * part.rows * (part.config.d_model + part.local.vocab_size) * part.e
    waiting = sum(count * waits[layer] for layer, count in sorts.items()) + of_head
    ends = _ends(part, terms.get("input of the head", 0), logits, of_head) if is_last else []
    start = rope_bytes(part) + (sum(first_terms(part).values()) if stage == 0 else 0)
    end, all_layers = sum(terms.values()), sum(count * saved[layer] for layer, count in sorts.items())
    moved = (start + all_layers + end + logits) * away
    inside = {layer: _layer_moments(part, layer, split) for layer in {first, last}}
    loss = logits // part.fp32 * (part.e + part.fp32 * (part.e < part.fp32))
    if away:  # backward has what comes back for one operator
        ends = [one._replace(activations=logits * (one.name == "loss"), logits=0) for one in ends]
        inside = dict.fromkeys(inside, _come_back(part, any(part.config.has_experts(layer) for layer in layers)))
        start = all_layers = end = logits = 0
        saved = again = dict.fromkeys(sorts, 0)

    def of_layer(name: str, layer: int, freed: int, waits: int) -> list[Moment]:
        more = again[layer] - freed - end
        changes = {"name": name, "logits": -logits, "waiting": waits}
        return [one._replace(activations=more + one.activations, **changes) for one in inside[layer]]

    stream = part.own_rows * part.config.d_model * part.r
    moments = (
        *ends,
        *of_layer("last layer", last, 0, of_head),
        *of_layer("first layer", first, all_layers - saved[first], waiting - waits[first]),
        Moment("embedding", -all_layers - end, -logits, stream, True, waiting),
    )
    return Stage(start + to_the_end + all_layers + end, logits, waiting, moments, loss, moved)


def _come_back(part: Part, experts: bool) -> tuple[Moment, ...]:
    """The moments of a layer whose saved tensors wait off the device."""
    D, e, two, terms = part.config.d_model, part.e, part.config.family == "llama", layer_terms(part, 0, "none")[0]
    numel, rows = part.rows * part.local.d_ff * e, part.routed * part.local.moe.top_k * D * e if experts else 0
    sizes = [(numel * (1 + two), numel * (2 + two)), (terms["core"] + terms["input of o"], _core_work(part))]
    sizes += [(rows, 3 * rows)] * experts
    return tuple(Moment("", back, 0, part.own_rows * D * part.r + work) for back, work in sizes)


def _sorts(part: Part, layers: range) -> dict[int, int]:
    """Layers that save the same: one of them, and how many; the first and the last of a stage are among them."""
    sort = {layer: (part.config.has_experts(layer), part.run.lora is not None and layer == 0) for layer in layers}
    found = {sort[layer]: layer for layer in layers}
    found[sort[layers[0]]] = layers[0]
    if sort[layers[-1]] != sort[layers[0]]:
        found[sort[layers[-1]]] = layers[-1]
    counts = Counter(sort.values())
    return {layer: counts[one] for one, layer in found.items()}


def _made_again(part: Part, layer: int) -> int:
    """What a layer has saved when it has run a second time; a router's routing then is there twice, but smaller."""
    terms, moe = _sum(layer_terms(part, layer, "none")), part.local.moe
    if not part.config.has_experts(layer):
        return terms
    twice = layer_terms(part, layer)[0].get("routing", 0) - part.routed * moe.top_k * (FP32 + MASK)
    return terms + twice - (part.routed * moe.num_experts * part.fp32 if moe.score == "sigmoid" else 0)


def _sum(terms: tuple[Terms, Terms]) -> int:
    return sum(sum(half.values()) for half in terms)


# ---- work space


@lru_cache(maxsize=4096)
def _layer_moments(part: Part, layer: int, split: bool) -> tuple[Moment, ...]:
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
    core = Moment("", freed + again - first.get("dropout masks", 0), 0, stream + _core_work(part))
    norm = Moment("", freed + second.get("residual", 0), 0, stream * 2 + part.own_rows * D * _norm_bytes(part))
    if not part.config.has_experts(layer):
        works, late = [gathered + work for work in _mlp_work(part, part.local.d_ff, split)], ()
    else:
        works, work = _expert_work(part, second, split, gathered)
        late = (Moment("", 0, 0, stream + work, True),)
    found = [core, norm, *(Moment("", 0, 0, stream + work) for work in works)]
    most = max(found, key=lambda one: one.activations + one.work)
    return (*dict.fromkeys((Moment("", 0, 0, stream), most, core if again else most)), *late)


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
    return _NORM_TENSORS * max(FP32, part.r) if part.config.family == "llama" else part.r


def _ends(part: Part, read: int, logits: int, waiting: int) -> list[Moment]:
    """The loss, the head's backward, the final norm's; of what the head reads, and of what waits of it."""
    D, V, rows, e, engine = part.config.d_model, part.local.vocab_size, part.rows, part.e, part.engine
    stream, of_norm = rows * D * e, part.own_rows * D * (part.r + _norm_bytes(part))
    norm = Moment("final norm", -read, -logits, of_norm, waiting=waiting)
    if part.config.family == "xlmr":
        return [norm]
    tp, numel = part.layout.tp > 1, rows * V // part.run.loss_chunks
    if e == part.fp32:  # no copy in a wider dtype
        loss = numel * e * (1 if tp else 2)
    else:
        loss = int(numel * ((engine.tp_loss_bytes if tp else engine.loss_bytes) - FP32))
    matrix = 0 if part.run.lora is not None else V * D * e
    widened = matrix // e * FP32 if part.casts else 0
    return [
        Moment("loss", 0, 0, loss),
        Moment("head", 0, -logits, numel * e + stream + matrix),
        Moment("head's gradient", -read, -logits, stream + matrix + widened),
        norm,
    ]


# ---- gradients, and parameters that are whole


class Arrived(NamedTuple):
    """Bytes of gradients, and of whole parameters, at a moment of a backward.

    there     of a first backward, in which a bucket is there from its first gradient on
    leaving   whole gradients on their way, with ZeRO-2 and 3; `experts` those of experts
    whole     ZeRO-3: whole parameters
    tied      a tied head's gradient, which waits for the embedding's
    """

    there: int = 0
    leaving: int = 0
    experts: int = 0
    whole: int = 0
    tied: int = 0


@dataclass(frozen=True)
class Gradients:
    """Bytes of one stage's gradients, and of what ZeRO puts together.

    held      once a backward has gone through: whole, or this rank's shards
    norms     of that, once the first part of a split backward has
    largest   of one matrix
    at        at each moment of a backward
    """

    held: int
    norms: int
    largest: int
    at: dict[str, Arrived]


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
    embed = raw * max((one.numel for one in tensors if one.name == "embed"), default=0)
    tied = embed if of.config.tied and of.num_stages == 1 and of.config.family != "xlmr" and of.lora is None else 0
    sent = {one.name for flat in in_flats for one in flat.tensors}
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
        groups += [((one,), raw * one.numel) for one in tensors if one.name not in sent]
    there, at_once = [0] * 5, 0
    for group, size in groups:
        there[(max if zero > 1 else min)(arrival(one) for one in group)] += size  # shards come when a bucket is sent
        at_once += size * any(_is_at_once(one.name) for one in group)
    *there, held = accumulate(there if zero < 2 else [0, 0, sum(there[:3]), *there[3:]])
    leaving = [Arrived()] * 4  # at the end, in the last layer, in the first, at the embedding
    if zero == 2:
        leaving = _by_buckets(flats, wire)
    if zero == 3:
        leaving = _by_units(flats, wire, raw, (first, last, units[::-1]), tied)
    end, in_last, in_first, start = (one._replace(there=size) for one, size in zip(leaving, there, strict=True))
    at = {
        "loss": Arrived(),
        "head": Arrived(whole=end.whole),
        "head's gradient": end,
        "final norm": end._replace(leaving=0, tied=tied),
        "last layer": in_last._replace(tied=tied),
        "first layer": in_first._replace(tied=tied),
        "embedding": start._replace(leaving=start.leaving + embed * ("embed" in sent), tied=2 * tied),
    }
    return Gradients(held, at_once, raw * max((one.numel for one in tensors), default=0), at)


def _by_buckets(flats: Sequence[Flat], wire: int) -> list[Arrived]:
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
    ends = {name: sum(sizes[flat] for flat in of[name]) for name in of}
    ends["embed"] += slow + (sizes[fast[-2]] if len(fast) > 1 else 0)
    layer = Arrived(leaving=pairs[False] + slow, experts=max(0, pairs[True] - pairs[False]))
    return [Arrived(leaving=ends["head"]), layer, layer, Arrived(leaving=ends["embed"])]


def _by_units(
    flats: Sequence[Flat], wire: int, raw: int, units: tuple[str, str, list[str]], tied: int
) -> list[Arrived]:
    """ZeRO-3: a unit's gradients are made while those of the unit behind it are sent; it and the next are whole."""
    first, last, order = units
    full, shard, experts, found = Counter(), Counter(), Counter(), []
    for flat in flats:
        full[flat.unit] += flat.padded
        shard[flat.unit] += flat.padded // flat.ranks
        experts[flat.unit] += flat.padded * (flat.kind == "experts")
    behind, ahead = dict(zip(order[1:], order, strict=False)), dict(pairwise(order))
    for unit in ("end", last, first, "embed" if "embed" in order else first):
        before, after = behind.get(unit), ahead.get(unit)
        leaving = full[unit] - experts[unit] + full[before] + shard[before]
        whole = full[unit] + full[after] + full["embed"] * (tied > 0 and "embed" not in (unit, after))
        found.append(Arrived(leaving=wire * leaving, experts=wire * experts[unit], whole=raw * whole))
    return found
