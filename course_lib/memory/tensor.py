"""Tensor and sequence parallelism's arithmetic: what each of t ranks holds of the model, and keeps for backward.

One idea carries it: a rank of tensor parallelism runs a narrower model. Query heads N / t, key/value heads K / t (at
least one), feed-forward F / t, vocabulary V / t; the width D of the residual stream stays, and with it norms and the
biases of row-parallel matrices. So every formula of this folder works on `narrow(config, tp)` as it is.

                                       TP         TP + SP           TP + SP, gathered again in backward
    block input, norms, dropout masks  D          D / t             D / t
    inputs of q, k, v and of the MLP   D          D                 D / t
    q, k, v, core, input of o          / t        / t               / t
    MLP's inside                       F / t      F / t             F / t
    logits                             V / t      V / t             V / t
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from course_lib.config import ModelConfig, require_dense
from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.memory.activations import Activations, own_activations
from course_lib.memory.states import parameter_shapes

_WHOLE = (
    "positions", "token_type", "attention.o.bias", "mlp.down.bias", "attention.q_down", "attention.kv_down",
)  # fmt: skip
_MINE = 1 + 8  # bytes a token: a bool, and an int64 place in this rank's part of the vocabulary


def narrow(config: ModelConfig, tp: int, tp_rank: int = 0) -> ModelConfig:
    """The model that one rank of tensor parallelism runs.

    Where d_ff or the vocabulary does not divide, the last ranks are narrower still; rank 0 is always a widest one.

    Raises   ValueError if heads do not divide, or a rank would be left without a row
    """
    require_dense(config, "narrow", latent=True)
    check_heads(config.num_heads, config.num_kv_heads, tp)
    if not 0 <= tp_rank < tp:
        raise ValueError(f"tp_rank is {tp_rank}, required: 0 to {tp - 1}")
    return replace(
        config,
        name=config.name if tp == 1 else f"{config.name}, rank {tp_rank} of tp {tp}",
        num_heads=config.num_heads // tp,
        num_kv_heads=max(config.num_kv_heads // tp, 1),
        d_ff=piece_sizes(config.d_ff, tp)[tp_rank],
        vocab_size=piece_sizes(config.vocab_size, tp)[tp_rank],
    )


def whole_parameters(config: ModelConfig) -> int:
    """Count the parameters that every rank has whole: norms, positions, biases of rows, what makes latent vectors."""
    shapes = parameter_shapes(config)
    return sum(prod(shape) * copies for name, (shape, copies) in shapes.items() if "norm" in name or name in _WHOLE)


def tensor_parallel_activations(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    regather: bool = False,
    attention: str = "fused",
    recompute: str = "none",
    precision: str = "fp32",
    device: str = "cpu",
    tp_rank: int = 0,
) -> Activations:
    """Predict what one rank keeps for the backward pass of one micro-batch.

    A vocabulary in pieces costs 9 bytes a token twice, in the embedding and in the loss: whether a token is mine, and
    where among mine.

    regather   save a column-parallel matrix's input as this rank's share of the sequence, and gather it in backward
    Raises     ValueError if heads do not divide, or regather comes without sequence_parallel
    """
    if regather and not sequence_parallel:
        raise ValueError("regather gathers shards of the sequence again; it needs sequence_parallel=True")
    share = piece_sizes(seq_len, tp)[tp_rank] / seq_len if sequence_parallel else 1.0
    local = narrow(config, tp, tp_rank)
    kept = own_activations(local, batch_size, seq_len, attention, recompute, precision, device, share, regather)
    return with_cut_vocabulary(kept, batch_size * seq_len, tp)


def with_cut_vocabulary(kept: Activations, num_tokens: int, tp: int) -> Activations:
    """And what a vocabulary in pieces costs, twice."""
    if tp == 1:
        return kept
    mine_bytes = num_tokens * _MINE
    turn = kept.last_block_s_turn and kept.last_block_s_turn + mine_bytes
    return replace(kept, tokens=kept.tokens + mine_bytes, logits=kept.logits + mine_bytes, last_block_s_turn=turn)
