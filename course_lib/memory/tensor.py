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
from course_lib.memory.states import parameter_shapes

_REPLICATED = ("positions", "token_type", "moe.router")


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
    return sum(prod(shape) * n for name, (shape, n) in parameter_shapes(config).items() if is_replicated(name))


def is_replicated(name: str) -> bool:
    """Whether every rank of tp has all of a parameter: norms, biases after a sum, and what is too narrow to cut."""
    return "norm" in name or name.endswith(("o.bias", "down.bias", "q_down", "kv_down")) or name in _REPLICATED
