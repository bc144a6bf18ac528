"""The peak of a rank's step is the fullest of a few moments, and each of them is a sum.

    loss                        all that micro-batches in flight saved; logits in FP32, and their gradients
    backward of a layer         less what is free of this micro-batch; this layer made again; gradients inside it
    end of a backward           one micro-batch less; the gradients of all parameters
    update                      no activations; all gradients; FP32 copies of a tensor

What one micro-batch saves is in activations.py; the schedule's list says how many are in flight. A layer's backward
begins with all that the layer saved, and frees it from the last operator to the first. It is fullest in the MLP or
where the experts' gradients are there, in the second norm, which computes in FP32, or in attention's core.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import NamedTuple

from course_lib.layout import Layout
from course_lib.memory.activations import FP32, Part, Terms, end_bytes, layer_terms, of_matrices, start_bytes
from course_lib.memory.flats import Flat, Named, layers_of, most_in_flight
from course_lib.memory.states import wire_grad_bytes
from course_lib.run import Recipe, recipe_of
from course_lib.schedules.builders import row_of_rank
from course_lib.schedules.instructions import Instruction


class Held(NamedTuple):
    """Bytes that a rank holds at a moment beside parameters and optimizer."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0
    temporary: int = 0
    gathered: int = 0

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(*map(add, self, other))


class Moment(NamedTuple):
    """A moment of one micro-batch's backward on a stage, in bytes.

    unit, after   the last tensor of a unit whose gradient is there; "" as the unit begins
    activations   what is not free yet of what was saved, what was made again, what waits for gradients of weights
    work          gradients inside the unit, and what operators need
    copied        that tensor's gradient, as autograd made it, while it is copied or added
    """

    name: str
    unit: str
    after: str
    activations: int
    work: int
    copied: int = 0
    logits: int = 0


@dataclass(frozen=True)
class Stage:
    """Bytes of one micro-batch on one stage: activations and logits are saved from its forward to its backward pass.

    waiting   between the two parts of a split backward: what gradients of weights need
    moments   of its backward; `forward` of its forward pass, where that can be the fullest: experts
    moved     off the device, of all that is saved
    """

    activations: int
    logits: int
    waiting: int
    moments: tuple[Moment, ...]
    moved: int = 0
    forward: tuple[Moment, ...] = ()

    @property
    def total(self) -> int:
        """What is there when backward starts."""
        return self.activations + self.logits


@dataclass(frozen=True)
class Gradients:
    """Bytes of one stage's gradients, and of what ZeRO puts together.

    held     once a backward has gone through: whole, or this rank's shards; `product` the largest matrix's
    copied   whether autograd's own gradients are copied: to buffers
    whole    ZeRO-3: whole parameters of a unit and of the next, by unit
    times    by unit and tensor, when its gradient comes: minus its place; of "" when backward comes to the unit
    changes  the times at which bytes change; `sums` the bytes before the first of these, and from each on
    """

    held: int
    product: int
    copied: bool
    whole: dict[str, int]
    times: dict[tuple[str, str], int]
    changes: list[int]
    sums: list[tuple[int, int, int]]

    def after(self, unit: str, tensor: str) -> tuple[int, int, int]:
        """The gradients once a tensor's has come; of a tensor that the unit does not have, as the unit begins.

        Those of a first backward; of the first part of a split one; whole ones on their way, with ZeRO-2 and 3, and a
        tied head's, which waits for the embedding's.
        """
        time = self.times.get((unit, tensor), self.times.get((unit, ""), -inf))
        return self.sums[bisect_right(self.changes, time)]


Stages = dict[int, tuple[Stage, Gradients]]  # those of one rank, by their numbers


def order_of(layout: Layout, pp_rank: int) -> tuple[tuple[Instruction, ...], int]:
    """What a rank computes, in order, with few micro-batches; and how many more of them are in flight all the time.

    More than three micro-batches for each rank change nothing, unless all forwards come first: then all wait.
    """
    few = min(layout.micro_batches, 3 * layout.pp)
    order = row_of_rank(layout.schedule, layout.pp, few, layout.v, pp_rank)
    return order, (layout.micro_batches - few) * (layout.schedule == "afab")


def most_saved(layout: Layout, pp_rank: int, sizes: Mapping[int, int]) -> int:
    """The most that micro-batches in flight save on a rank at once: so many bytes of each, by stage."""
    order, more = order_of(layout, pp_rank)
    return most_in_flight(order, sizes) + more * sum(sizes.values())


def instants(layout: Layout, pp_rank: int, stages: Stages) -> Iterator[tuple[tuple, tuple[int, int, int]]]:
    """Yield of each instruction of a rank, in order, what micro-batches in flight beside its own hold.

    ((op, stage, whether it makes the stage's gradients), bytes of (gradients, activations, logits))
    """
    order, more = order_of(layout, pp_rank)
    activations = more * sum(stage.activations for stage, _ in stages.values())
    logits = more * sum(stage.logits for stage, _ in stages.values())
    gradients, done = 0, set()  # stages whose gradients are all there
    for op, _, one in order:
        stage, of_stage = stages[one]
        if op in "BI":
            activations -= stage.activations
            logits -= stage.logits
        elif op == "W":
            activations -= stage.waiting
        yield (op, one, one not in done), (gradients, activations, logits)
        if op == "F":
            activations += stage.activations
            logits += stage.logits
        elif op == "I":
            activations += stage.waiting
        if op in "BW" and one not in done:
            gradients += of_stage.held
            done.add(one)


def moments(layout: Layout, pp_rank: int, stages: Stages, message: int) -> Iterator[tuple[str, Held]]:
    """Yield each moment of a rank's step that can be its fullest, by name.

    message   bytes of what goes from stage to stage: one is on its way
    """
    fullest: dict[tuple[str, int, bool], tuple[int, int, int]] = {}  # of like instants
    for like, held in instants(layout, pp_rank, stages):
        if like not in fullest or sum(held) > sum(fullest[like]):
            fullest[like] = held
    for (op, one, is_first), held in fullest.items():
        others = Held(*held, temporary=message * (layout.pp > 1))
        for name, own in backward_moments(op, is_first, *stages[one]):
            yield f"{op} of stage {one}: {name}", own.plus(others)


def backward_moments(op: str, is_first: bool, stage: Stage, gradients: Gradients) -> Iterator[tuple[str, Held]]:
    """Yield what each moment of one micro-batch's backward, or of a part of it, holds.

    is_first   it makes the gradients, which later ones find
    """
    if op == "W":  # of weights, from inputs and gradients that waited
        yield "first product", Held(activations=stage.waiting, temporary=gradients.product)
        yield "last product", Held(is_first * gradients.held, temporary=gradients.product)
        return
    for one in stage.forward if op == "F" else stage.moments:
        there, early, leaving = gradients.after(one.unit, one.after)
        made = is_first * (early if op == "I" else there)
        work = one.work + leaving + one.copied * (gradients.copied or not is_first)
        gathered = gradients.whole.get(one.unit, 0)
        yield one.name, Held(made, one.activations, one.logits, work, gathered)


@lru_cache(maxsize=2048)
def stage_of(part: Part, stage: int) -> Stage:
    """The sums of one stage, layer by layer."""
    config, layout, counts = part.run.config, part.run.layout, layers_of(part.run.config, part.run.layout)
    layers, is_last = range(sum(counts[:stage]), sum(counts[: stage + 1])), stage == len(counts) - 1
    sorts = {layer: config.has_experts(layer) for layer in layers}
    like = {*sorts.values()}
    saved = {sort: sum(sum(half.values()) for half in layer_terms(part, sort)) for sort in like}
    waits = {sort: part.split * sum(size for _, size in of_matrices(part, sort)) for sort in like}
    inside = {sort: _layer_moments(part, sort) for sort in like if part.in_layers}
    start, (end, of_head, targets, logits) = start_bytes(part, stage), end_bytes(part) if is_last else (0, 0, 0, 0)
    kept = start + sum(saved[sort] for sort in sorts.values())
    total, waiting, here = kept + end, is_last * of_head, not part.is_away
    moments, forward = _end_moments(part, here * total, logits) if is_last else [], ()
    if sorts.get(layers[-1]) and layout.recompute != "full":
        there = targets + kept - layer_terms(part, True)[1].get("shared experts", 0)
        forward = (Moment("experts, forward", "", "", there, _forward_of_experts(part)),)
    for layer in reversed(layers):
        kept -= saved[sorts[layer]]
        # activations fall from layer to layer and gradients grow: between like layers none is the fullest
        if any(sorts.get(layer + step) != sorts[layer] for step in (-1, 1)):
            beside = waiting + here * kept
            of_layer = inside.get(sorts[layer], ())
            moments += [one._replace(unit=f"blocks.{layer}", activations=one.activations + beside) for one in of_layer]
        waiting += waits[sorts[layer]]
    if stage == 0:
        beside, stream = waiting + here * start, part.stream
        embed = config.d_model * part.local.vocab_size * part.r * (part.run.lora is None)
        if config.tied and config.family != "xlmr" and is_last and not part.split:  # the sum may be a third tensor
            moments.append(Moment("embedding", "embed", "positions", beside, stream + embed * (1 + (layout.tp == 1))))
        else:
            moments.append(Moment("embedding", "embed", "embed", beside, stream, embed))
    moments = tuple(one._replace(activations=one.activations + targets) for one in moments)
    if part.is_away:
        return Stage(targets, 0, waiting, moments, total + logits)
    return Stage(targets + total, logits, waiting, moments, 0, forward)


@lru_cache(maxsize=4096)
def _layer_moments(part: Part, has_experts: bool) -> list[Moment]:
    """The moments of a layer's backward, and the activations of this layer that are there then."""
    c, run, stream = part.local, part.run, part.stream
    whole = layer_terms(part, has_experts, "none")
    first, second = whole if run.layout.recompute == "full" or run.operators else layer_terms(part, has_experts)
    before = sum(first.values())
    left = before + part.split * of_matrices(part, has_experts)[1][1]  # once the MLP's backward is through
    again = sum(whole[0].values()) - before
    if again and run.attention == "standard":  # beside its inputs; what o read is free
        again = whole[0]["core"] - first["input of o"]
    in_mlp, in_norm = before + sum(second.values()), left + second["residual"]
    in_core, free = left + again - first["dropout masks"], 0
    if part.is_away:  # what comes back for one operator: a product's factors
        in_mlp = second["experts" if has_experts else "MLP"] // 2
        in_norm, in_core = second["residual"], first["core"] + first["input of o"]
    elif run.attention == "standard":  # values are free once they were multiplied by scores
        free = part.rows * c.num_heads * c.value_dim * part.e + first["input of o"] * (not (again or part.split))
    return [
        *(_expert_moments if has_experts else _mlp_moments)(part, in_mlp, second),
        Moment("second norm", "", "mlp.norm", in_norm, 2 * stream + _norm_work(part)),
        Moment("attention", "", "attention.o", in_core, stream + _core_work(part) - free),
    ]


def _mlp_moments(part: Part, saved: int, terms: Terms) -> list[Moment]:
    """Gradients of an MLP's product, SiLU and up; then gate's and up's products, whose input is gathered again."""
    c, layout, rows, is_here = part.local, part.run.layout, part.rows, not part.is_away
    inputs, dx, product = 1 + (c.family == "llama"), rows * c.d_model * part.e, rows * c.d_ff * part.e
    # over tp both are one operator; a batch of sequences is copied when it is gathered
    again = (1 + (layout.micro_batch > 1)) * dx * (part.entered < rows) + part.stream * layout.sequence_parallel
    matrix = c.d_ff * c.d_model * part.e * (not part.split and part.run.lora is None)
    products = max(dx, inputs * matrix) if layout.tp > 1 else matrix
    free, later = is_here * rows * c.d_ff * part.saves("down"), saved - is_here * terms["MLP"]
    return [
        Moment("MLP", "", "mlp.down", saved, part.stream + (inputs + 1) * product - free),
        Moment("MLP's input", "", "mlp.down", later, part.stream + inputs * product + again + dx + products),
    ]


def _expert_moments(part: Part, saved: int, terms: Terms) -> list[Moment]:
    """Gradients of the rows that came and went, or the forward that is made again; a shared expert's are through."""
    c, layout, token = part.local, part.run.layout, part.local.d_model * part.e
    work = (c.moe.top_k * 3 + (c.moe.num_shared_experts > 0)) * part.routed * token
    if layout.recompute == "full":
        work = max(work, part.rows * token * layout.sequence_parallel + _forward_of_experts(part))
    work += part.stream - terms.get("shared experts", 0)
    return [Moment("experts", "", "moe.shared.gate", saved, work)]


def _forward_of_experts(part: Part) -> int:
    """What experts need besides what they save: rows as they go, come and return, their weighted sum."""
    layout, tokens, k = part.run.layout, part.routed * part.local.d_model * part.e, part.local.moe.top_k
    if layout.ep == 1:
        return (k + 2) * tokens
    if layout.expert_method == "plain":
        return (4 * k + 2) * tokens
    return (max(k, 2) + 3 * min(k, layout.ep)) * tokens


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
    if layout.cp == 1:
        return queries + pairs + out
    if layout.cp_method == "ulysses":
        return 2 * (queries + pairs + out)
    wider = part.fp32 // e  # sums over blocks of keys are in FP32: mine, one received, one sent
    ring = (3 + 2 * (layout.cp > 2)) * wider + 3  # with more than two ranks the next two as well
    blocks = layout.cp * (1 + wider) + wider + 1 if layout.cp_method == "all_gather" else ring
    return out + queries * wider + pairs * blocks


def _end_moments(part: Part, total: int, logits: int) -> list[Moment]:
    """The loss, the head's backward, and the final norm's."""
    rows, e, engine, D, V = part.rows, part.e, part.engine, part.local.d_model, part.local.vocab_size
    reads = part.local.family != "xlmr" and (part.run.lora is None or "head" in part.run.lora.targets)
    left = max(0, total - part.entered * D * e * reads)  # without the head's input
    of_norm = Moment("final norm", "end", "head", left, part.stream + _norm_work(part))
    if part.local.family == "xlmr":
        return [of_norm]
    numel, dx, tp = rows * V // part.run.loss_chunks, rows * D * e, part.run.layout.tp > 1
    weight = product = 0 if part.run.lora is not None or part.split else V * D
    loss, dlogits = numel * e * (1 if tp else 2), numel * e
    if part.head_in_forward:  # a chunk's logits, or the product that is added to the sum, beside them; then a cast
        loss = max(numel * (part.fp32 + (e < FP32) * e), (numel + V * D) * e * (e < FP32)) + dx
        dlogits, weight, product = logits, V * D, V * D * (e < FP32)
    elif e < FP32:  # beside a copy in FP32
        loss = int(numel * ((engine.tp_loss_bytes if tp else engine.loss_bytes) - FP32))
    return [
        Moment("loss", "", "", total, loss, logits=logits),
        Moment("head", "end", "", total, dlogits + dx + product * e),
        Moment("head's gradient", "end", "head", left, dx, weight * part.r),
        of_norm,
    ]


def gradients_of(
    layout: Layout, recipe: Recipe, tensors: Sequence[Named], flats: Sequence[Flat], is_tied: bool, live: int = 0
) -> Gradients:
    """Follow the gradients of one stage's trained tensors through a backward pass: the last tensor's comes first.

    A bucket is there from its first gradient on, with ZeRO-2 and 3 until the next one is full; a shard once it is sent.

    is_tied   whether the head's gradient waits for the embedding's
    live      with ZeRO-3 no more parameters are whole at once, or those of one matrix; 0: a unit's and the next one's
    """
    raw, wire, zero = recipe.param_bytes, wire_grad_bytes(recipe), layout.zero_stage
    there, early, leaving = defaultdict(int), defaultdict(int), defaultdict(int)  # bytes that come or go, by time
    has_buffers = not zero and layout.data_size == 1 and recipe.grad_bytes > raw  # in FP32, there all the time
    if zero > 1:  # a whole bucket, then beside its shard of the sum; of equal ones all but the last are sent
        through = {one.unit: -one.place for one in reversed(tensors)}  # when backward has gone through a unit
        ends = accumulate((-flat.tensors[-1].place for flat in flats), max)  # sent in one order
        full = [through[flat.unit] for flat in flats] if zero == 3 else [*ends]
        following = dict(pairwise([*sorted({*full}), 1]))  # when the next bucket is full
        for flat, end in zip(flats, full, strict=True):
            size = wire * flat.padded // flat.count
            kept, sent = size // flat.ranks, following[end] + 1
            leaving[_before(flat.tensors[0]) + 1] += size
            leaving[end + 1] += kept
            leaving[sent] -= size + kept
            there[end] += kept * (flat.count - 1)
            there[sent] += kept
    for flat in flats if zero < 2 else ():
        groups = [(flat.tensors, wire * flat.padded)]
        if not zero and flat.ranks == 1:  # nobody to sum with
            groups = [((one,), raw * one.count * one.numel) for one in flat.tensors if not has_buffers]
        for group, size in groups:
            there[_before(group[0]) + 1] += size
            if layout.splits_backward:  # its first part makes gradients that are of no product
                no_product = (one for one in group if "norm" in one.name or one.name in ("embed", "positions"))
                early[next((-one.place for one in no_product), 1)] += size
    embed = next((raw * one.numel for one in tensors if one.name == "embed"), 0) * is_tied
    if embed:
        leaving[_before(tensors[-1]) + 1] += embed
        leaving[-tensors[0].place] -= embed
    times = {(one.unit, one.name): -one.place for one in tensors} | {(one.unit, ""): _before(one) for one in tensors}
    changes = sorted({*there, *early, *leaving})
    sums = (accumulate([sizes[time] for time in changes], initial=0) for sizes in (there, early, leaving))
    return Gradients(
        held=sum(there.values()),
        product=max((raw * one.numel for one in tensors if one.unit != "embed"), default=0),
        copied=has_buffers or any(zero or flat.ranks > 1 for flat in flats),
        whole=_gathered(raw, tensors, flats, embed > 0, live) if zero == 3 else {},
        times=times,
        changes=changes,
        sums=[*zip(*sums, strict=True)],
    )


def _before(one: Named) -> int:
    """The time before the gradient of a tensor, or of the last of equal ones, comes."""
    return -one.place - one.count


def _gathered(raw: int, tensors: Sequence[Named], flats: Sequence[Flat], is_tied: bool, live: int) -> dict[str, int]:
    whole = Counter()
    for flat in flats:
        whole[flat.unit] += raw * flat.padded
    with_next = {unit: size + front for (unit, size), front in zip(whole.items(), [0, *whole.values()], strict=False)}
    if is_tied:  # its embedding is whole all the time
        with_next |= {unit: size + whole["embed"] for unit, size in [*with_next.items()][2:]}
    most = raw * max(live, *(one.numel for one in tensors)) if live else inf
    return {unit: min(size, most) for unit, size in with_next.items()}


def after_backward(part: Part, numels: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each moment beside states: norms for clipping, AdamW's work space.

    numels   elements of the rank's trained tensors, or of its shards of flats, and how many of them are equal in a row
    """
    run, recipe = part.run, recipe_of(part.run.recipe)
    largest = max((numel for numel, _ in numels), default=0)
    # in FP32, and squares; one process asks torch for its norms
    yield "clipping", FP32 * largest * ((recipe.grad_bytes < FP32) + (run.layout.world_size > 1))
    if run.optimizer != "adamw" or run.offload.optimizer != "device":
        yield "update", 0
    elif run.layout.zero_stage or recipe.master_bytes:  # the course's own: FP32 roots, and what they are made from
        yield "update", FP32 * largest * (2 if recipe.grad_bytes < FP32 else 1)
    else:  # torch's: of a loop a tensor twice, and the root of the one before it
        of_two = [numel for numel, count in numels for _ in range(min(count, 2))]  # each beside the one before it
        one_by_one = max((before + 2 * size for before, size in pairwise((0, *of_two))), default=0)
        of_all = sum(numel * count for numel, count in numels)
        yield "update", recipe.param_bytes * {"fused": 0, "foreach": of_all, "for-loop": one_by_one}[run.implementation]
