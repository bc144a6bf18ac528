"""Context parallelism's memory: a rank has S / cp tokens of each sequence, in every layer and from end to end.

What a rank holds, of what one GPU alone would hold:

                                          TP = t     TP + SP    CP = c
    residual stream, norms, dropout       1          1 / t      1 / c
    inputs of q, k, v and of the MLP      1          1          1 / c
    inside of attention and MLP           1 / t      1 / t      1 / c
    logits                                1 / t      1 / t      1 / c
    parameters, gradients, optimizer      1 / t      1 / t      1

Sequence parallelism splits tokens only where tensor parallelism computes nothing; context parallelism splits them
everywhere, and so never the parameters. What it adds is what attention has of other ranks' keys and values, for as long
as one layer computes: `exchange_bytes`.
"""

from __future__ import annotations

from dataclasses import replace

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_method
from course_lib.layout.sequence_sharding import check_context
from course_lib.memory.tensor import narrow
from course_lib.validate import Size, checked


@checked
def check_exchange(attention: str, cp: Size, method: str) -> None:
    """Raises ValueError for an unknown method, or for scores that are to be kept where blocks are merged."""
    check_method(method)
    if cp > 1 and attention != "fused":
        raise ValueError(
            f"attention is {attention!r}, but cp is {cp}: blocks that arrive one by one are merged, no score matrix is "
            "kept; choose fused"
        )


@checked
def tokens_of_rank(seq_len: Size, cp: Size, sequence_sharding: str = "contiguous") -> int:
    """Tokens of one sequence that a rank has: S / cp.

    Raises   ValueError as `sequence_sharding.check_context`
    """
    check_context(seq_len, cp, sequence_sharding)
    return seq_len // cp


@checked
def for_length(config: ModelConfig, seq_len: Size) -> ModelConfig:
    """The same model, allowed to read that many tokens: RoPE has no table that ends, its memory is the same."""
    return config if seq_len <= config.max_seq_len else replace(config, max_seq_len=seq_len)


@checked
def kv_block_bytes(
    config: ModelConfig, batch_size: Size, seq_len: Size, cp: Size, itemsize: Size = 2, tp: Size = 1
) -> int:
    """Count keys and values of one rank's tokens in one layer: 2 B s K H numbers; latent attention's B s K (H + W).

    Of grouped queries the K heads travel.
    """
    local = narrow(config, tp)
    numbers = local.num_kv_heads * (local.head_dim + local.value_dim)
    return batch_size * tokens_of_rank(seq_len, cp) * numbers * itemsize


@checked
def exchange_bytes(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    cp: Size,
    method: str = "ring",
    backward: bool = False,
    itemsize: Size = 2,
    grad_itemsize: int | None = None,
) -> int:
    """Keys and values (and backward their gradients) of other ranks that one layer has at once, for a moment.

    ring         two blocks: the one computed with and the next one, arriving; backward two of gradients too
    all_gather   everybody's: cp blocks, whatever cp is; backward their gradients too
    ulysses      none of other heads: q, k, v and out once more, in the order in which they are sent

    grad_itemsize   bytes of a number of the travelling gradients, itemsize if not given
    Raises          ValueError if the method is unknown, or seq_len does not divide
    """
    check_method(method)
    if cp == 1:
        return 0
    block = kv_block_bytes(config, batch_size, seq_len, cp, itemsize)
    grads = block // itemsize * (grad_itemsize or itemsize) if backward else 0
    if method == "ulysses":
        numbers = (config.num_heads + config.num_kv_heads) * (config.head_dim + config.value_dim)
        return batch_size * tokens_of_rank(seq_len, cp) * numbers * itemsize
    blocks = min(2, cp - 1) if method == "ring" else cp
    return blocks * (block + grads)
