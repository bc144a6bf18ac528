"""What a rank runs: a narrower model over tp, fewer tokens over cp.

A rank of tensor parallelism has heads N / t and K / t (at least one), MLP and experts F / t, vocabulary V / t; the
width D of the residual stream stays. So every formula of this folder works on `narrow(config, tp)` as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.layout.sequence_sharding import check_context
from course_lib.memory.states import parameter_shapes


@lru_cache(maxsize=256)
def narrow(config: ModelConfig, tp: int, tp_rank: int = 0) -> ModelConfig:
    """The model that one rank of tensor parallelism runs; where d_ff or V does not divide, the last are narrower.

    Raises   ValueError if heads do not divide, or a rank would be left without a row
    """
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
        moe=config.moe and replace(config.moe, d_expert=piece_sizes(config.moe.d_expert, tp)[tp_rank]),
    )


def whole_parameters(config: ModelConfig) -> int:
    """Count the parameters that every rank has whole: norms, positions, biases of rows, what makes latent vectors."""
    return sum(prod(shape) * n for name, (shape, n) in parameter_shapes(config).items() if is_replicated(name))


def is_replicated(name: str) -> bool:
    """Whether every rank of tp has all of a parameter: norms, biases after a sum, and what is too narrow to cut."""
    return "norm" in name or name.endswith(("o.bias", "down.bias", "_down", "positions", "token_type", "router"))


def tokens_of_rank(seq_len: int, cp: int, sequence_sharding: str = "contiguous") -> int:
    """Tokens of one sequence that a rank has, S / cp; ValueError as `sequence_sharding.check_context`."""
    check_context(seq_len, cp, sequence_sharding)
    return seq_len // cp


def for_length(config: ModelConfig, seq_len: int) -> ModelConfig:
    """The same model, allowed to read that many tokens: RoPE has no table that ends, its memory is the same."""
    return config if seq_len <= config.max_seq_len else replace(config, max_seq_len=seq_len)


def kv_block_bytes(config: ModelConfig, batch_size: int, seq_len: int, cp: int, itemsize: int = 2, tp: int = 1) -> int:
    """Count keys and values of one rank's tokens in one layer: 2 B s K H numbers; latent attention's B s K (H + W)."""
    local = narrow(config, tp)
    return batch_size * tokens_of_rank(seq_len, cp) * local.num_kv_heads * (local.head_dim + local.value_dim) * itemsize


def boundary_bytes(
    config: ModelConfig, batch_size: int, seq_len: int, itemsize: int = 2, cp: int = 1, tp: int = 1, tp_rank: int = 0
) -> int:
    """What crosses from stage to stage for each micro-batch, and back: B S D numbers, cut by sequence parallelism."""
    return batch_size * piece_sizes(tokens_of_rank(seq_len, cp), tp)[tp_rank] * config.d_model * itemsize
