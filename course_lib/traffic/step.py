"""Which collectives a step of each technique calls, with their payloads.

    calls = zero_calls(units, stage=3, dp_size=8)
    sent_bytes(calls)            what course_lib.measure.meter counts on one rank, to the byte

Payloads are whole tensors, as everywhere: the gathered result of an all-gather, the input of a reduce-scatter. What one
rank sends to another is a "send"; the matching receive sends nothing and is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_method, check_ulysses, copies_of_kv, piece_sizes
from course_lib.memory.context import kv_block_bytes, tokens_of_rank
from course_lib.memory.moe import narrow_experts
from course_lib.memory.pipeline import boundary_bytes
from course_lib.memory.states import Recipe, count_parameters, recipe_of
from course_lib.memory.tensor import narrow, whole_parameters
from course_lib.memory.zero import padded, wire_grad_bytes
from course_lib.traffic.collectives import Call


# ------------------------------------------------------------------------------------ ZeRO
def zero_calls(
    units: Sequence[int],
    stage: int,
    dp_size: int,
    recipe: Recipe | str = "bf16-master",
    micro_batches: int = 1,
    all_reduce: bool = False,
) -> list[Call]:
    """The collectives of one step; units in numbers, padded here to a multiple of dp_size.

    In units of P (N - 1) / N numbers, with m micro-batches:

        stage 0    2          an all-reduce of gradients at the end
        stage 1    2          reduce-scatter at the end, all-gather of new parameters
        stage 2    m + 1      reduce-scatter after each micro-batch: no rank could keep the sum of whole gradients
        stage 3    3 m        parameters gathered for the forward and for the backward pass of each micro-batch

    all_reduce   stage 1 in its simpler form: whole gradients averaged on every rank, then the all-gather: 3
    Source       Rajbhandari et al. 2020 (arXiv:1910.02054), section 7
    """
    if all_reduce and stage != 1:
        raise ValueError(f"all_reduce is a form of stage 1, but stage is {stage}")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; choose from 0, 1, 2, 3")
    recipe = recipe_of(recipe)
    calls = []
    for unit in units:
        numel = padded(unit, dp_size) if stage else unit
        parameters, gradients = numel * recipe.param_bytes, numel * wire_grad_bytes(recipe)

        def call(place, collective, payload, count=1):
            item = wire_grad_bytes(recipe) if place == "gradients" else recipe.param_bytes
            calls.append(Call(place, collective, payload, dp_size, item, count))

        if stage == 0 or all_reduce:
            call("gradients", "all_reduce", gradients)
        if stage == 3:
            call("parameters", "all_gather", parameters, 2 * micro_batches)
        if stage in (1, 2, 3) and not all_reduce:
            call("gradients", "reduce_scatter", gradients, 1 if stage == 1 else micro_batches)
        if stage in (1, 2):
            call("parameters", "all_gather", parameters)
    return calls


# ------------------------------------------------------------------------------------ tensor and sequence parallelism
def tensor_parallel_calls(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    tp: int,
    sequence_parallel: bool = False,
    regather: bool = False,
    recompute: str = "none",
    itemsize: int = 2,
    micro_batches: int = 1,
    ends: tuple[bool, bool] = (True, True),
) -> list[Call]:
    """The collectives of one step over the tp group. Activations have B S D numbers of `itemsize` bytes.

    TP   a layer: two all-reduces forward, two backward; the embedding one forward, the head's input one backward
    SP   each all-reduce becomes a reduce-scatter and, where the sequence is needed whole again, an all-gather: the
         same bytes in twice the calls. With `regather` backward gathers each saved input once more.
    The loss sums per-token numbers: the largest logit, the sum of exponentials, the target's logit, in FP32.
    Full recomputation repeats a layer's forward up to the last tensor that backward needs: without dropout behind the
    MLP its last sum is left out.
    Experts are one MLP in this: their outputs are summed together, after combine, and what they read is not gathered
    again. Without SP shared experts have sums of their own, and the gradients of the k chosen weights of each token are
    summed too, in FP32.

    Latent attention's columns take two latent vectors and the key's part with position, each a call of its own, in
    place of x: with SP these are gathered, and x is not.

    ends     whether this rank has the embedding, and the head: a stage of a pipeline may have neither
    Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2
    """
    narrow_experts(config, tp)
    if tp == 1:
        return []
    layers, tokens = config.num_layers, batch_size * seq_len
    dense_layers = layers - config.num_moe_layers  # experts keep their rows, whoever sent them
    into_attention, kept_by_columns = _attention_widths(config)
    (first, last), loss_itemsize = ends, max(itemsize, 4)
    longest = piece_sizes(seq_len, tp)[0]  # an uneven sequence is padded in the message
    rows = longest * tp if sequence_parallel else seq_len
    payload = batch_size * rows * config.d_model * itemsize
    calls = []

    def call(place, collective, count, size=payload, item=itemsize, group=tp):
        calls.append(Call(place, collective, size, group, item, count * micro_batches))

    def call_of_columns(place, collective, attentions, mlps, widths=into_attention):
        times = {config.d_model: mlps}
        for width in widths:
            times[width] = times.get(width, 0) + attentions
        for width, count in times.items():
            call(place, collective, count, batch_size * rows * width * itemsize)

    again = layers if recompute == "full" else 0
    last_sums = again if config.dropout else 0  # a block runs again up to the last tensor that backward needs
    if sequence_parallel:
        call("embedding", "reduce_scatter", 1 * first)
        call("embedding", "all_gather", 1 * first)
        call_of_columns("layers forward", "all_gather", layers, layers)
        call("layers forward", "reduce_scatter", 2 * layers)
        attentions, mlps = (layers, dense_layers) if regather else (0, 0)
        call_of_columns("layers backward", "all_gather", attentions, 2 * layers + mlps, kept_by_columns)
        call_of_columns("layers backward", "reduce_scatter", layers, layers)
        call("head", "all_gather", (2 if regather else 1) * last)
        call("head", "reduce_scatter", 1 * last)
        if again:
            call_of_columns("recomputation", "all_gather", again, again)
            call("recomputation", "reduce_scatter", again + last_sums)
    else:
        shared = config.num_moe_layers if config.moe and config.moe.num_shared_experts else 0
        call("embedding", "all_reduce", 1 * first)
        call("layers forward", "all_reduce", 2 * layers + shared)
        call_of_columns("layers backward", "all_reduce", layers, layers + shared)
        if config.moe:
            weights = tokens * config.moe.top_k * loss_itemsize
            call("weights of experts", "all_reduce", config.num_moe_layers, weights, loss_itemsize)
        call("head", "all_reduce", 1 * last)
        if again:
            call("recomputation", "all_reduce", again + last_sums + shared)
    call("loss", "all_reduce", 3 * last, tokens * loss_itemsize, loss_itemsize)
    calls = [one for one in calls if one.count]
    if config.moe or ends != (True, True):
        return calls  # a part of a model: whose gradients are summed, and when, is for the whole of it
    return calls + gradient_sum_calls(config, tp, sequence_parallel, itemsize)


def _attention_widths(config: ModelConfig) -> tuple[list[int], list[int]]:
    """Numbers a token of what enters attention's columns, and of what of it these keep for their weights' gradients."""
    if config.mla is None:
        return [config.d_model], [config.d_model]
    latents = [config.mla.q_rank, config.mla.kv_rank]
    return [*latents, config.mla.rope_dim], latents


def gradient_sum_calls(config: ModelConfig, tp: int, sequence_parallel: bool, itemsize: int = 2) -> list[Call]:
    """Weight gradients of which each rank has a part, summed once a step.

    Sequence parallelism: whole parameters (norms, biases of rows, learned positions) saw this rank's tokens alone. More
    ranks than key/value heads: each copy of a head saw this rank's query heads alone.
    """
    calls = []
    if sequence_parallel:
        numel = whole_parameters(config)
        calls.append(Call("gradients of whole parameters", "all_reduce", numel * itemsize, tp, itemsize))
    replicas = copies_of_kv(config, tp)
    if replicas > 1:
        numel = 2 * config.num_layers * config.head_dim * config.d_model  # one head's k and v of each layer
        calls.append(Call("key/value gradients", "all_reduce", numel * itemsize, replicas, itemsize))
    return calls


# ------------------------------------------------------------------------------------ context parallelism
def attention_calls(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    cp: int,
    method: str = "ring",
    outer: int = 1,
    recompute: str = "none",
    itemsize: int = 2,
    sum_itemsize: int | None = None,
    tp: int = 1,
) -> list[Call]:
    """What the attention of one layer sends for one micro-batch over cp ranks. A block is 2 B K s H numbers.

    ring         (cp - 1) blocks forward and again backward, and (cp - 1) blocks of gradients
    all_gather   the same bytes in three calls: gathered forward and again backward, gradients reduce-scattered
    ulysses      four all-to-alls forward (q, k, v, out), four backward: 2 (N + K) B s H numbers each way, of which
                 each rank keeps a share of 1 / cp
    Where values are W long, a block has B K s (H + W) numbers, and Ulysses' each way (N + K) B s (H + W).
    both         method "ulysses" with outer > 1: Ulysses over cp / outer ranks, a ring over `outer` of them

    sum_itemsize   of the gradients that are summed on the way: FP32 for 16-bit numbers
    Raises         ValueError if the method is unknown, or tokens, heads or ranks do not divide
    Source         Liu et al. 2023 (arXiv:2310.01889); Llama Team 2024 (arXiv:2407.21783), section 3.3.2;
                   Jacobs et al. 2023 (arXiv:2309.14509)
    """
    check_method(method)
    if method != "ulysses" and outer > 1:
        raise ValueError(f"outer is {outer}, a ring around Ulysses, but method is {method!r}; choose ulysses")
    if outer < 1 or cp % outer:
        raise ValueError(f"outer ({outer}) must divide cp ({cp})")
    local, tokens = narrow(config, tp), tokens_of_rank(seq_len, cp)
    inner, ring = (cp // outer, outer) if method == "ulysses" else (1, cp)
    passes = [("attention forward", 1 if recompute == "none" else 2), ("attention backward", 1)]
    calls = []
    if inner > 1:
        check_ulysses(local.num_heads, local.num_kv_heads, inner)
        token_bytes = batch_size * tokens * itemsize
        (N, K), (H, W) = (local.num_heads, local.num_kv_heads), (local.head_dim, local.value_dim)
        for place, count in passes:
            outputs = count
            if recompute == "selective" and place == "attention forward":
                outputs -= 1  # a core that is run again ends before its outputs are sent
            of_each = ((N * H, count), (K * H, count), (K * W, count), (N * W, outputs))  # q, k, v, out
            calls += [Call(place, "all_to_all", size * token_bytes, inner, itemsize, times) for size, times in of_each]
    if ring > 1:
        block = kv_block_bytes(config, batch_size, seq_len, cp, itemsize, tp)
        summed_itemsize = sum_itemsize or max(itemsize, 4)
        summed = block // itemsize * summed_itemsize
        for place, count in passes:
            if method == "all_gather":
                calls.append(Call(place, "all_gather", cp * block, cp, itemsize, count))
            else:
                calls.append(Call(place, "all_to_all", block, ring, itemsize, (ring - 1) * count, to_one=True))
        if method == "all_gather":
            calls.append(Call("attention backward", "reduce_scatter", cp * summed, cp, summed_itemsize))
        else:
            calls.append(Call("attention backward", "all_to_all", summed, ring, summed_itemsize, ring - 1, to_one=True))
    return calls


def context_calls(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    cp: int,
    method: str = "ring",
    outer: int = 1,
    recompute: str = "none",
    itemsize: int = 2,
    micro_batches: int = 1,
    sum_itemsize: int | None = None,
    tp: int = 1,
) -> list[Call]:
    """The collectives of one step over the cp group: each layer's attention, and once all gradients, summed.

    The gradients' all-reduce is data parallelism's: every rank has the whole model and saw some of the tokens. The loss
    is summed as one number, of FP32 at least.
    Raises   ValueError as `attention_calls`
    """
    if cp == 1:
        return []
    layers = config.num_layers * micro_batches
    calls = [
        replace(call, count=call.count * layers)
        for call in attention_calls(
            config, batch_size, seq_len, cp, method, outer, recompute, itemsize, sum_itemsize, tp
        )
    ]
    calls.append(Call("gradients", "all_reduce", count_parameters(narrow(config, tp)) * itemsize, cp, itemsize))
    loss_itemsize = max(itemsize, 4)
    return [*calls, Call("loss", "all_reduce", loss_itemsize, cp, loss_itemsize)]


# ------------------------------------------------------------------------------------ pipeline parallelism
def pipeline_calls(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    rank_of_stage: Sequence[int],
    rank: int,
    num_micro_batches: int,
    itemsize: int = 2,
    cp: int = 1,
    tp: int = 1,
    tp_rank: int = 0,
) -> list[Call]:
    """What one rank of a pipeline sends in a step: activations to the next stage, gradients to the one before.

    Two stages that follow one another on the same rank send nothing. Of the schedule only v matters: with v stages a
    rank, v times the bytes or nearly. Ends of a tied model on two ranks sum the gradient of their weight, and the
    last stage tells its loss to all.
    tp     ranks of sequence parallelism: each sends its own tokens
    """
    mine = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
    payload = boundary_bytes(config, batch_size, seq_len, itemsize, cp, tp, tp_rank)
    down = sum(stage + 1 < len(rank_of_stage) and rank_of_stage[stage + 1] != rank for stage in mine)
    up = sum(stage > 0 and rank_of_stage[stage - 1] != rank for stage in mine)
    calls = [
        Call(place, "send", payload, 2, itemsize, count * num_micro_batches)
        for place, count in (("activations", down), ("gradients", up))
        if count
    ]
    ends = {rank_of_stage[0], rank_of_stage[-1]}
    if config.tied and len(ends) == 2 and rank in ends:
        tied_bytes = narrow(config, tp).vocab_size * config.d_model * itemsize
        calls.append(Call("tied weight", "all_reduce", tied_bytes, 2, itemsize))
    if (pp := len(set(rank_of_stage))) > 1:
        loss_itemsize = max(itemsize, 4)
        calls.append(Call("loss", "broadcast", loss_itemsize, pp, loss_itemsize, src=rank_of_stage[-1]))
    return calls
