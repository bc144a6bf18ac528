"""The attention core, softmax(q k^T) v, in two ways that give the same numbers and hold different memory.

Both take the query heads and the (fewer) key/value heads: q_BNSH, k_BKSH, v_BKSH -> out_BNSH, and query head n reads
key/value head n // (N / K). What each keeps for the backward pass, in elements of one layer:

    fused       q, k, v, out, and one float32 number a row (log-sum-exp, B N S)          linear in S
    standard    q, k and v repeated to N heads, the scores after softmax (B N S S)       quadratic in S
                with dropout also its mask (B N S S, one byte each) and its output (B N S S)

Latent attention (latent.py) has values of another length than keys. Flash kernels want one length: there the fused way
fills the shorter up with zeros, and keeps them so, its output too.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.validate import Share, Size, checked


@checked
def fused_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, causal: bool = True, dropout: Share = 0.0
) -> Tensor:
    """Attention in one kernel that never writes the score matrix down (FlashAttention, where the device has it).

    On a CPU PyTorch's flash kernel has no dropout: with dropout above 0 it falls back to one that stores the scores.
    Source   Dao et al. 2022 (arXiv:2205.14135)
    """
    grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    key_dim, value_dim = k_BKSH.shape[-1], v_BKSH.shape[-1]
    if key_dim != value_dim:
        q_BNSH, k_BKSH, v_BKSH = (filled_up(x, max(key_dim, value_dim)) for x in (q_BNSH, k_BKSH, v_BKSH))
    out_BNSH = F.scaled_dot_product_attention(
        q_BNSH, k_BKSH, v_BKSH, dropout_p=dropout, is_causal=causal, enable_gqa=grouped, scale=1 / math.sqrt(key_dim)
    )
    return out_BNSH[..., :value_dim] if key_dim != value_dim else out_BNSH


def filled_up(x: Tensor, width: Size) -> Tensor:
    """x with zeros behind it, up to that width."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


@checked
def standard_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, causal: bool = True, dropout: Share = 0.0
) -> Tensor:
    """Attention written out. The score matrix exists, and the backward pass keeps it.

    The softmax stays in the dtype of its input (its kernel adds up in float32 all the same); an upcast written out here
    would keep a second copy of the scores, in four bytes.
    """
    group_size = q_BNSH.shape[1] // k_BKSH.shape[1]
    k_BNSH, v_BNSH = k_BKSH, v_BKSH
    if group_size > 1:
        k_BNSH, v_BNSH = k_BKSH.repeat_interleave(group_size, dim=1), v_BKSH.repeat_interleave(group_size, dim=1)
    scores_BNSS = q_BNSH @ k_BNSH.transpose(-2, -1) * (1.0 / math.sqrt(q_BNSH.shape[-1]))
    if causal:
        seq_len, like = q_BNSH.shape[-2], {"dtype": scores_BNSS.dtype, "device": scores_BNSS.device}
        future_SS = torch.full((seq_len, seq_len), -math.inf, **like).triu(1)
        scores_BNSS = scores_BNSS + future_SS  # adding saves nothing for backward; masked_fill would save its mask
    weights_BNSS = drop(torch.softmax(scores_BNSS, dim=-1), dropout)
    return weights_BNSS @ v_BNSH


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """RoPE: turns the pair (x[i], x[i + H/2]) by its position's angle. Only the tables are kept for backward."""
    first, second = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH


@checked
def drop(x: Tensor, probability: Share) -> Tensor:
    """Dropout that keeps one byte an element (a bool mask) for backward, on every device.

    `F.dropout` does so on a GPU; on a CPU it keeps a mask as wide as the data.
    """
    return torch.native_dropout(x, probability, train=True)[0] if probability > 0.0 else x


def project(x_BSD: Tensor, layers: Iterable[nn.Module]) -> tuple[Tensor, ...]:
    """The product of one input with each layer: queries, keys and values, or gate and up."""
    return tuple(layer(x_BSD) for layer in layers)


CORES = {"fused": fused_attention, "standard": standard_attention}
RECOMPUTE = ("none", "selective", "full")


@checked
def check_choices(attention: Literal[tuple(CORES)], recompute: Literal[RECOMPUTE]) -> None:
    """Refuse words that the models do not know."""
