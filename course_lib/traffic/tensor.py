"""What tensor and sequence parallelism send: sums of activations, and of gradients of which each rank has a part.

    TP   a layer: two all-reduces forward, two backward; the embedding one forward, the head's input one backward
    SP   each all-reduce becomes a reduce-scatter and, where the sequence is needed in full again, an all-gather: the
         same bytes in twice the calls. With `regather` backward gathers each saved input once more.

The loss sums three numbers per token in FP32: the largest logit, the sum of exponentials, the target's logit.
Full recomputation repeats a layer's forward up to the last tensor that backward needs: without dropout after the MLP
its last sum is left out.
Experts are one MLP in this: their outputs are summed together, after combine, and their inputs are not gathered again.
Without SP shared experts have sums of their own, and the gradients of the k chosen weights of each token are summed.
Folded, experts are whole and get this rank's tokens: shared experts alone are an MLP in this.
Latent attention's columns take two latent vectors and the key's part with position, each in a call of its own, in place
of x: with SP these are gathered, and x is not.

Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2
"""

from collections.abc import Sequence

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.partition import kv_replication, piece_sizes
from course_lib.memory.flats import Flat, different_terms_over_tp
from course_lib.memory.states import wire_grad_bytes
from course_lib.run import Run, recipe_of
from course_lib.traffic.collectives import Call
from course_lib.traffic.data import held

Sums = list[tuple[str, str, int, int]]  # place, collective, elements per token, how often


def tensor_calls(run: Run, part: ModelConfig, ends: tuple[bool, bool]) -> list[Call]:
    """List what one micro-batch makes a rank send over tp, forward and backward, of a stage's part of the model.

    ends   whether the stage is the first, the last
    """
    layout, itemsize = run.layout, recipe_of(run.recipe).compute_bytes
    if layout.tp == 1:
        return []
    sequence = run.seq_len // layout.cp
    rows = piece_sizes(sequence, layout.tp)[0] * layout.tp if layout.sequence_parallel else sequence  # padded
    sums = (_sharded if layout.sequence_parallel else _replicated)(part, layout, ends)
    width_bytes, sum_bytes = layout.micro_batch * rows * itemsize, max(itemsize, 4)
    calls = [Call(place, name, width * width_bytes, layout.tp, itemsize, count) for place, name, width, count in sums]
    per_token = layout.micro_batch * sequence * sum_bytes
    if part.moe and not layout.sequence_parallel:
        weights = per_token * part.moe.top_k
        calls.append(Call("weights of experts", "all_reduce", weights, layout.tp, sum_bytes, part.num_moe_layers))
    if ends[1]:
        calls.append(Call("loss", "all_reduce", per_token, layout.tp, sum_bytes, 3))
    return [call for call in calls if call.count]


def _replicated(part: ModelConfig, layout: Layout, ends: tuple[bool, bool]) -> Sums:
    """TP: the hidden states are replicated, so each partial sum is an all-reduce."""
    D, layers = part.d_model, part.num_layers
    shared = part.num_moe_layers if part.moe and part.moe.num_shared_experts else 0
    sums = [
        ("embedding", "all_reduce", D, int(ends[0])),
        ("layers forward", "all_reduce", D, 2 * layers + shared),
        *_of_columns("layers backward", "all_reduce", part, layers, layers + shared),
        ("head", "all_reduce", D, int(ends[1])),
    ]
    if layout.recompute == "full":
        sums.append(("recomputation", "all_reduce", D, layers + layers * (part.dropout > 0) + shared))
    return sums


def _sharded(part: ModelConfig, layout: Layout, ends: tuple[bool, bool]) -> Sums:
    """SP: the hidden states are sequence-sharded, so each all-reduce is a reduce-scatter and an all-gather."""
    D, layers, (first, last) = part.d_model, part.num_layers, map(int, ends)
    mlps, kept = layers, part.num_moe_layers  # experts keep their rows
    if layout.folded and part.moe:
        mlps, kept = (layers, 0) if part.moe.num_shared_experts else (layers - kept, 0)
    again = (layers, mlps - kept) if layout.regather else (0, 0)
    sums = [
        ("embedding", "reduce_scatter", D, first),
        ("embedding", "all_gather", D, first),
        *_of_columns("layers forward", "all_gather", part, layers, mlps),
        ("layers forward", "reduce_scatter", D, layers + mlps),
        *_of_columns("layers backward", "all_gather", part, again[0], layers + mlps + again[1], with_positions=False),
        *_of_columns("layers backward", "reduce_scatter", part, layers, mlps),
        ("head", "all_gather", D, (2 if layout.regather else 1) * last),
        ("head", "reduce_scatter", D, last),
    ]
    if layout.recompute == "full":
        sums += _of_columns("recomputation", "all_gather", part, layers, mlps)
        sums.append(("recomputation", "reduce_scatter", D, layers + layers * (part.dropout > 0)))
    return sums


def _of_columns(
    place: str, collective: str, part: ModelConfig, attentions: int, mlps: int, with_positions: bool = True
) -> Sums:
    """Collectives of what column-parallel linears take, of so many attentions and MLPs.

    with_positions   also the key's part with position, which is added and not multiplied: nothing keeps it
    """
    mla, counts = part.mla, {part.d_model: mlps}
    widths = [mla.q_rank, mla.kv_rank, *[mla.rope_dim] * with_positions] if mla else [part.d_model]
    for width in widths:
        counts[width] = counts.get(width, 0) + attentions
    return [(place, collective, width, count) for width, count in counts.items()]


def partial_gradient_calls(run: Run, flats: Sequence[Flat]) -> list[Call]:
    """List the sums of weight gradients of which each tp rank has a part, once a step.

    Sequence parallelism: replicated parameters (norms, biases of row-parallel linears, learned positions) saw this
    rank's tokens only. QK-norm: its replicated weights saw this rank's heads only. More ranks than key/value heads:
    each copy of a head saw this rank's query heads only.
    """
    layout, itemsize, calls = run.layout, wire_grad_bytes(recipe_of(run.recipe)), []
    if numel := sum(held(flats, kind, layout) for kind in different_terms_over_tp(layout)):
        calls.append(Call("gradients of whole parameters", "all_reduce", numel * itemsize, layout.tp, itemsize))
    if numel := held(flats, "kv", layout):
        copies = kv_replication(run.config, layout.tp)
        calls.append(Call("key/value gradients", "all_reduce", numel * itemsize, copies, itemsize))
    return calls
