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
from itertools import accumulate, pairwise
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part, Terms, first_terms, last_terms, layer_terms, of_matrices
from course_lib.memory.flats import Flat, Named, layers_of, placed_by
from course_lib.memory.states import Recipe
from course_lib.memory.zero import wire_grad_bytes


class Moment(NamedTuple):
    """A moment of one micro-batch's backward on a stage, in bytes.

    where         (unit, of a block with its half; the last matrix of it whose gradient there is, "" for none)
    activations   what is not free yet of what was saved, what was made again, what waits for gradients of weights
    work          gradients inside the unit, and what operators need
    copied        that matrix's gradient, as autograd made it, while it is copied or added
    """

    name: str
    where: tuple[str, str]
    activations: int
    logits: int
    work: int
    copied: int = 0


@dataclass(frozen=True)
class Stage:
    """Bytes of one micro-batch on one stage.

    activations, logits   saved from its forward to its backward pass
    waits                 between the two parts of a split backward: what gradients of weights need, by unit
    moments               of its backward
    moved                 off the device, of all that is saved
    forward               of its forward pass, where that can be the fullest: experts
    """

    activations: int
    logits: int
    waits: dict[str, int]
    moments: tuple[Moment, ...]
    moved: int = 0
    forward: Moment | None = None

    @property
    def waiting(self) -> int:
        """All that waits for gradients of weights."""
        return sum(self.waits.values())

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
    waits = {sort: [part.split * size for _, size in of_matrices(part, layer)] for sort, layer in like.items()}
    kept = start + sum(saved[sort] for sort in sorts.values())
    waits_head = part.split and is_last and not part.head_in_forward
    waiting = waits_head * part.rows * (config.d_model + part.local.vocab_size) * part.e
    of_units = {"end": waiting}
    total = kept + _total(end)
    moments = _end_moments(part, total, end, logits) if is_last else []
    forward = []
    for layer in reversed(layers):
        sort = sorts[layer]
        if sort and layout.recompute != "full":
            second = layer_terms(part, layer)[1]
            there = targets + kept - second.get("shared experts", 0)
            forward.append(Moment("experts, forward", ("", ""), there, 0, _forward_of_experts(part)))
        kept -= saved[sort]
        # activations fall from layer to layer and gradients grow: between like layers none is the fullest
        is_between = all(sorts.get(layer + step) == sort for step in (-2, -1, 1, 2))
        for one in () if is_between else inside[sort]:
            unit = f"blocks.{layer}{one.where[0]}", one.where[1]
            moments.append(
                one._replace(where=unit, activations=one.activations + waiting + (0 if part.is_away else kept))
            )
        waiting += sum(waits[sort])
        of_units |= dict(zip((f"blocks.{layer}:mlp", f"blocks.{layer}:attention"), reversed(waits[sort]), strict=True))
    stream, kept = part.own_rows * config.d_model * part.r, waiting + (0 if part.is_away else start)
    if stage == 0:
        embed = config.d_model * part.local.vocab_size * part.r * (part.run.lora is None)
        is_tied = config.tied and config.family != "xlmr" and len(counts) == 1 and not part.split
        sums = 1 + is_tied * (layout.tp == 1)  # with a tied head's, which waits for it: the sum may be a third tensor
        moments.append(Moment("embedding", ("embed", "positions"), kept, 0, stream + embed * sums))
        moments.append(Moment("embedding's gradient", ("embed", "*"), kept, 0, stream, embed))
    moments = tuple(one._replace(activations=one.activations + targets) for one in moments)
    if part.is_away:
        return Stage(targets, 0, of_units, moments, total + logits)
    fullest = max(forward, key=lambda one: one.activations + one.work, default=None)
    return Stage(targets + total, logits, of_units, moments, 0, fullest)


def _total(terms: dict[str, int]) -> int:
    return sum(terms.values())


# ---- work space


def _layer_moments(part: Part, layer: int) -> list[Moment]:
    """The moments of a layer's backward, and the activations of this layer that are there then."""
    config, layout, rows, e = part.local, part.run.layout, part.rows, part.e
    if not part.in_layers:
        return []
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
    if has_experts:
        forward = gathered + _forward_of_experts(part) if layout.recompute == "full" else 0  # made again
        backward = config.moe.top_k * 3 + (config.moe.num_shared_experts > 0)  # a shared expert's is through
        work = max(backward * part.routed * config.d_model * e, forward) - second.get("shared experts", 0)
        if part.split and config.moe.num_shared_experts:  # its products wait: gradients of outputs, down's input
            work += gathered + 3 * rows * config.moe.num_shared_experts * config.moe.d_expert * e
        of_mlp = [Moment("experts", (":mlp", "shared"), in_mlp, 0, stream + work)]
    else:
        of_mlp = _mlp_moments(part, in_mlp, second, stream, gathered)
    waits = part.split and not gathered  # down's gradient is the residual's
    o = 0 if part.split or part.run.lora is not None else config.num_heads * config.value_dim * config.d_model
    out = rows * config.num_heads * config.value_dim * e
    of_input, in_scores = [], in_core
    if part.run.attention == "standard" and not part.is_away:  # values are free once they were multiplied by scores
        in_scores -= out + (0 if again or part.split else first["input of o"])
    if config.mla is None and not part.is_away:
        widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        left_of_core = left - first["core"] - first["input of o"]
        of_input = [
            Moment("attention's input", (":attention", "o"), left_of_core, 0, stream + _input_work(part, widths))
        ]
    return [
        *of_mlp,
        Moment("second norm", (":mlp", "*"), in_norm, 0, (2 - waits) * stream + _norm_work(part)),
        Moment("output of attention", (":attention", ""), in_core, 0, stream + gathered + out + o * e),
        Moment("o's gradient", (":attention", "o"), in_core, 0, stream + out, o * part.r),
        Moment("attention", (":attention", "o"), in_scores, 0, stream + _core_work(part)),
        *of_input,
    ]


def _input_work(part: Part, widths: Sequence[int]) -> int:
    """What backward of matrices with one input needs: gradients of outputs and input, the input gathered again, theirs.

    Over tp they are one operator. Sequences of several in a batch are copied when they are gathered or scattered.
    """
    layout, D, e = part.run.layout, part.local.d_model, part.e
    of_input, copies = part.rows * D * e, 1 + (layout.micro_batch > 1)
    again = copies * of_input * (part.entered < part.rows) + part.own_rows * D * e * layout.sequence_parallel
    matrices = (sum(widths) if layout.tp > 1 else max(widths)) * D * e
    trains = not part.split and part.run.lora is None
    is_summed = layout.tp > 1 and (len(widths) > 1 or (layout.sequence_parallel and copies > 1))
    return part.rows * sum(widths) * e + again + of_input + max(of_input * is_summed, matrices * trains)


def _forward_of_experts(part: Part) -> int:
    """What experts need besides what they save: rows as they go, come and return, their weighted sum."""
    config, layout = part.local, part.run.layout
    tokens = part.routed * config.d_model * part.e
    sent = config.moe.top_k * tokens
    entered = tokens * (part.e < FP32 and not config.moe.num_shared_experts)  # what router and shared experts read
    entered += part.own_rows * config.d_model * part.e * (layout.sequence_parallel and not layout.folded)
    if layout.ep == 1:
        return entered + sent + 2 * tokens
    if layout.expert_method == "plain":
        return entered + 4 * sent + 2 * tokens
    return entered + max(sent, 2 * tokens) + 3 * tokens * min(config.moe.top_k, layout.ep)


def _mlp_moments(part: Part, saved: int, terms: Terms, stream: int, gathered: int) -> list[Moment]:
    """An MLP's backward: down's two products, gradients of the product, SiLU and up, then gate's and up's products."""
    config, rows, e, is_llama = part.local, part.rows, part.e, part.local.family == "llama"
    product, trains = rows * config.d_ff * e, not part.split and part.run.lora is None
    matrix, dx = trains * config.d_ff * config.d_model, rows * config.d_model * e
    inside = 0 if part.is_away else terms["MLP"]
    freed = 0 if part.split or part.is_away else rows * config.d_ff * part.saves("down")
    of_up = stream + _input_work(part, [config.d_ff] * (1 + is_llama))
    last = "gate" if is_llama else "up"
    tensors = 3 if is_llama else 2
    return [
        Moment("MLP's output", (":mlp", ""), saved, 0, stream + gathered + product + matrix * e),
        Moment("down's gradient", (":mlp", "down"), saved - freed, 0, stream + product, matrix * part.r),
        Moment("MLP", (":mlp", "down"), saved - freed, 0, stream + part.split * gathered + tensors * product),
        Moment("MLP's input", (":mlp", "down"), saved - inside, 0, of_up),
        Moment(f"{last}'s gradient", (":mlp", last), saved - inside, 0, stream + dx, matrix * part.r),
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
    in_ring = 3 * wider + 3 if layout.cp == 2 else 5 * wider + 3  # sums: mine, one received, one sent; and the next two
    blocks = layout.cp * (1 + wider) + wider + 1 if layout.cp_method == "all_gather" else in_ring
    return out + queries * (wider + (wider > 1)) + 3 * filled + pairs * blocks


def _end_moments(part: Part, total: int, end: dict[str, int], logits: int) -> list[Moment]:
    """The loss, the head's backward, and the final norm's."""
    rows, e, engine, D, V = part.rows, part.e, part.engine, part.local.d_model, part.local.vocab_size
    here = 0 if part.is_away else total
    left = here - end.get("input of the head", 0)
    of_norm = Moment("final norm", ("end", "head"), left, 0, part.own_rows * D * part.r + _norm_work(part))
    if part.local.family == "xlmr":
        return [of_norm]
    numel, tp = rows * V // part.run.loss_chunks, part.run.layout.tp > 1
    if part.head_in_forward:  # a chunk's logits, or the product that is added to the sum, beside them; then a cast
        chunk = max(numel * (part.fp32 + (e < FP32) * e), (numel + V * D) * e * (e < FP32))
        return [
            Moment("loss", ("", ""), here, logits, chunk + rows * D * e),
            Moment("head", ("end", ""), here, logits, V * D * e * (e < FP32)),
            Moment("head's gradient", ("end", "head"), here, 0, 0, V * D * e),
            of_norm,
        ]
    loss = numel * e * (1 if tp else 2)
    if e < FP32:  # beside a copy in FP32
        loss = int(numel * ((engine.tp_loss_bytes if tp else engine.loss_bytes) - FP32))
    dx, weight = rows * D * e, 0 if part.run.lora is not None or part.split else V * D
    cast = weight * (e + part.r) * (e != part.r)
    return [
        Moment("loss", ("", ""), here, logits, loss),
        Moment("head", ("end", ""), here, 0, numel * e + dx + weight * e),
        *([Moment("head's cast", ("end", ""), left, 0, dx + cast)] if cast else []),
        Moment("head's gradient", ("end", "head"), left, 0, dx, weight * part.r),
        of_norm,
    ]


# ---- gradients, and parameters that are whole


class Arrived(NamedTuple):
    """Bytes of gradients at a moment of a backward pass.

    there     of a first backward, in which a bucket is there from its first gradient on, a shard once it is sent
    at_once   of the first part of a split backward
    leaving   with ZeRO-2 and 3 whole gradients on their way; and a tied head's, which waits for the embedding's
    """

    there: int = 0
    at_once: int = 0
    leaving: int = 0


@dataclass(frozen=True)
class Gradients:
    """Bytes of one stage's gradients, and of what ZeRO puts together.

    held      once a backward has gone through: whole, or this rank's shards
    at_once   of that, once the first part of a split backward has
    at        by (unit, matrix): (while that gradient is copied, without its original; when it is done with)
    products  of a split backward's second part, by unit: (gradients while one is copied, its original) of each matrix
    whole     ZeRO-3: whole parameters of a unit and of the next, by unit
    """

    held: int
    at_once: int
    at: dict[tuple[str, str], tuple[Arrived, Arrived]]
    products: dict[str, list[tuple[int, int]]]
    whole: dict[str, int]

    def arrived(self, unit: str, matrix: str, is_copied: bool = False) -> Arrived:
        """The gradients at a moment; of a matrix that the unit does not have, as the unit begins."""
        return self.at.get((unit, matrix), self.at.get((unit, ""), (Arrived(),) * 2))[not is_copied]


def gradients_of(
    layout: Layout, recipe: Recipe, tensors: Sequence[Named], flats: Sequence[Flat], is_tied: bool
) -> Gradients:
    """Follow the gradients of one stage's trained tensors through a backward pass: the last tensor's comes first.

    Of each tensor there are two instants: while its gradient is copied, and when buckets that are full were sent.

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
    there, at_once, leaving, later = ([0] * (2 * len(order) + 2) for _ in range(4))
    ends = accumulate((max(time[one.name] for one in flat.tensors) for flat in shared), max)
    full = [left[flat.unit] for flat in shared] if zero == 3 else [*ends]
    after = sorted({*full, len(order)})  # when units are full, or buckets, which are sent in one order
    following = dict(pairwise(after))
    for index, (group, size) in enumerate(groups):
        is_alone, kept = index >= len(shared), size
        begun = 2 * min(time[one.name] for one in group) + is_alone  # what is not copied is its own original
        if zero > 1 and not is_alone:  # a whole buffer, beside its shard of the sum, is free when the next one is full
            end, kept = full[index], size // shared[index].ranks
            free = 2 * following[end] + 1
            for when, change in ((begun, size), (2 * end + 1, kept), (free, -size - kept)):
                leaving[when] += change
            begun = free
        there[begun] += kept
        early = [2 * time[one.name] + is_alone for one in group if one.name in of_no_product]
        at_once[min(early, default=-1)] += kept * bool(early)
        late = [2 * time[one.name] + is_alone for one in group if one.name not in of_no_product]
        later[min(late, default=-1)] += kept * (not early)
    there, at_once, leaving, later = ([*accumulate(sizes)] for sizes in (there, at_once, leaving, later))
    tied = is_tied * next((raw * one.numel for one in tensors if one.name == "embed"), 0)
    summed = 2 * time.get("embed", 0)  # when a tied head's gradient waits no more
    waits = [size + tied * (when < summed) for when, size in enumerate(leaving)]
    instants = [Arrived(*sizes) for sizes in zip(there, at_once, waits, strict=True)]
    at, index = {("end", ""): (Arrived(),) * 2}, 0
    for key, half in halves.items():
        before = instants[2 * index - 1] if index else Arrived(leaving=tied * (key != "end"))
        at[key, ""] = at[key, "shared"] = before, before
        for one in order[index : index + len(half)]:
            now = instants[2 * index], instants[2 * index + 1]
            matrix = one.name.removesuffix(".bias").rpartition(".")[2]
            at[key, "experts" if one.kind == "experts" else matrix] = at[key, "*"] = now
            if ".shared." in one.name:
                at[key, "shared"] = now
            index += 1
    products, made = {}, [at_once[-1] + size for size in later]
    for key, half in halves.items():
        names = [one for one in half if one.name not in of_no_product and "bias" not in one.name]
        products[key] = [(made[2 * time[one.name]], raw * one.numel) for one in names]
    return Gradients(there[-1], at_once[-1], at, products, _whole(flats, raw, tied) if zero == 3 else {})


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
