"""Pipeline parallelism's memory: how many micro-batches' activations a rank keeps at once.

Parameters are divided by stage, activations hardly: rank 0 of 1F1B has started pp micro-batches before the first comes
back, each in L / pp layers, and pp times L / pp is L.

    schedule                    rank i keeps, in micro-batches of its own layers     rank 0, in layers of the model
    naive                       1                                                    L / pp
    all-forward-all-backward    m                                                    m / pp  L
    1F1B                        min(m, pp - i)                                       L          if m >= pp
    interleaved, v a rank       more, as more are started ahead                      (1 + (pp - 1) / (pp v)) L

A rank's memory follows from its own list of instructions alone, without a clock: F keeps, B frees, in their order. So
every schedule is counted by the same walk, `peak_held`.

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2;
         Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from course_lib.config import ModelConfig
from course_lib.layout.partition import piece_sizes, stage_config
from course_lib.memory.activations import PRECISIONS, Activations
from course_lib.memory.context import filled_up_bytes, output_twice_bytes, tokens_of_rank
from course_lib.memory.moe import moe_activations, narrow_experts
from course_lib.memory.states import recipe_of
from course_lib.memory.tensor import tensor_parallel_activations, with_cut_vocabulary
from course_lib.schedules.instructions import Instruction, Schedule

_TOKEN_ID = 8


# ------------------------------------------------------------------------------------ activations
def boundary_bytes(
    config: ModelConfig, batch_size: int, seq_len: int, itemsize: int = 2, cp: int = 1, tp: int = 1, tp_rank: int = 0
) -> int:
    """What crosses from stage to stage for each micro-batch, and as a gradient back: B S D numbers.

    tp       divides it where sequence parallelism cuts the residual stream; without, every tp rank sends all of it
    """
    return batch_size * piece_sizes(tokens_of_rank(seq_len, cp), tp)[tp_rank] * config.d_model * itemsize


@dataclass(frozen=True)
class StageActivations:
    """Bytes that one micro-batch keeps on one stage, from its forward to its backward pass."""

    kept: int
    turn: int  # on top of that while its backward runs: what recomputation makes anew
    logits: int  # of `kept`, what the loss keeps: the last stage alone
    waiting: int  # between the two parts of a split backward: what the gradients of weights need


def stage_activations(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    layers: Sequence[int],
    stage: int,
    attention: str = "fused",
    recompute: str = "none",
    precision: str = "bf16-master",
    device: str = "cuda",
    tp: int = 1,
    sequence_parallel: bool = False,
    cp: int = 1,
    output_kept: bool = True,
    method: str = "ring",
    load: float = 1.0,
    regather: bool = False,
) -> StageActivations:
    """Predict what one micro-batch keeps on one stage.

    output_kept   whether a stage's output stays until the gradient comes: one B S D more than the same layers in one
                  piece. PyTorch's stages keep it, for backward is called on it. parallel/pipeline.py keeps it until it
                  has certainly come: with 1F1B the gradient says so, at the first rank's peak all are there; with
                  all-forward-all-backward, or if several stages share a rank, most are gone by then (Megatron: all)
    method        of context parallelism
    load          rows that reach this rank's experts over a fair share
    regather      as in `tensor.tensor_parallel_activations`
    """
    tokens = tokens_of_rank(seq_len, cp)
    first, last = stage == 0, stage == len(layers) - 1
    cut = replace(stage_config(config, layers, stage), vocab_size=config.vocab_size if last else tp)
    whole = _rank_activations(
        cut, batch_size, tokens, tp, sequence_parallel, regather, attention, recompute, precision, device, load
    )
    share = tp if sequence_parallel else 1
    width = batch_size * tokens * config.d_model // share
    mask = width if config.dropout else 0
    ids, targets, tables = _token_parts(whole, config, batch_size * tokens, tp)
    turn = whole.peak_bytes - whole.start_of_backward_bytes
    kept = whole.blocks + whole.casts + (tables if first or config.family == "llama" else 0)
    kept += (ids + mask if first else 0) + (targets + whole.ends - mask + whole.logits if last else 0)
    if output_kept and not last:
        kept += width * PRECISIONS[precision].residual_bytes
    if cp > 1:
        dense = replace(cut, moe=None)
        kept += output_twice_bytes(dense, batch_size, tokens, recipe_of(precision), recompute, method, tp)
        if method != "ulysses" and attention == "fused" and recompute != "selective":
            zeros = filled_up_bytes(dense, batch_size, tokens, PRECISIONS[precision].matmul_bytes, tp)
            kept -= zeros * dense.num_layers if recompute == "none" else 0
            turn -= zeros if recompute == "full" else 0
    waiting = round(batch_size * tokens * _waiting_numbers(narrow_experts(cut, tp), last, load))
    return StageActivations(
        kept=kept,
        turn=max(0, turn),
        logits=whole.logits if last else 0,
        waiting=waiting * PRECISIONS[precision].matmul_bytes,
    )


def _rank_activations(
    cut: ModelConfig, batch_size, tokens, tp, sequence_parallel, regather, attention, recompute, precision, device, load
) -> Activations:
    """What one rank of a whole model keeps, with experts or without."""
    if cut.moe is None:
        return tensor_parallel_activations(
            cut, batch_size, tokens, tp, sequence_parallel, regather, attention, recompute, precision, device
        )
    rows, share = (load * cut.moe.top_k if cut.moe else None), 1 / tp if sequence_parallel else 1.0
    local = narrow_experts(cut, tp)
    kept = moe_activations(local, batch_size, tokens, attention, recompute, precision, device, rows, share, regather)
    return with_cut_vocabulary(kept, batch_size * tokens, tp)


def _token_parts(whole: Activations, config: ModelConfig, num_tokens: int, tp: int) -> tuple[int, int, int]:
    """Bytes of token ids (and where they are in a cut vocabulary), of targets, and of RoPE's tables or positions."""
    targets = 0 if config.family == "xlmr" else _TOKEN_ID * num_tokens
    mine = 9 * num_tokens if tp > 1 else 0
    ids = _TOKEN_ID * num_tokens + mine
    return ids, targets, whole.tokens - ids - targets


def _waiting_numbers(local: ModelConfig, last: bool, load: float = 1.0) -> float:
    """Inputs of the stage's matrices, and the gradients of their outputs: numbers a token. Shared inputs count once."""
    D, heads = local.d_model, local.num_heads * local.head_dim
    ups = 2 if local.family == "llama" else 1
    attention = D + heads + 2 * local.num_kv_heads * local.head_dim + heads + D
    if mla := local.mla:
        latents = 2 * (mla.q_rank + mla.kv_rank) + mla.rope_dim
        attention = D + latents + heads + local.num_heads * (mla.nope_dim + 2 * mla.value_dim) + D

    def mlp(width: int) -> int:
        return D + ups * width + width + D

    head = D + local.vocab_size if last and local.family != "xlmr" else 0
    routed = 0.0
    if moe := local.moe:
        shared = moe.num_shared_experts * moe.d_expert
        routed = D + moe.num_experts + load * moe.top_k * mlp(moe.d_expert) + (mlp(shared) if shared else 0)
    dense_layers = local.num_layers - local.num_moe_layers if local.moe else local.num_layers
    return local.num_layers * attention + dense_layers * mlp(local.d_ff) + local.num_moe_layers * routed + head


# ------------------------------------------------------------------------------------ what a rank holds
def peak_held(
    instructions: Sequence[Instruction],
    kept: Sequence[float],
    turn: Sequence[float] | None = None,
    waiting: Sequence[float] | None = None,
    gradients: float = 0,
) -> float:
    """The most that one rank holds, walking through its instructions: F keeps kept[stage], B or I frees it.

    turn       on top while a stage's backward runs; waiting: kept from I to W
    gradients  of the weights: there when the first B, or W, is done
    """
    held = peak = 0
    born = False
    for step in instructions:
        later = waiting[step.stage] if waiting else 0
        if step.op == "F":
            held += kept[step.stage]
        if step.op in "BI":
            peak = max(peak, held + (turn[step.stage] if turn else 0))
        held += {"F": 0, "B": -kept[step.stage], "I": later - kept[step.stage], "W": -later}[step.op]
        if step.op in "BW" and not born:
            held, born = held + gradients, True
        peak = max(peak, held)
    return peak


def live_layers(schedule: Schedule, layers: Sequence[int]) -> list[int]:
    """For each rank the layers whose activations it keeps at once, one micro-batch each: compare with num_layers."""
    return [peak_held(row, layers) for row in schedule.instructions]
