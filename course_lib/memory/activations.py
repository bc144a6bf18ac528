"""Activation memory of one block of this course's dense models, as a closed formula: what autograd saves of each token.

Elements that one block saves per token (D, F, N, K, H, S as everywhere):

                                               Llama                      GPT and the encoder
    block input, saved by the first norm       D, 1 statistic             D, 2 statistics
    norm's output, input of q, k and v         D                          D
    q, k, v                                    (N + 2 K) H                3 N H
    QK-norm's inputs                           (N + K) H, N + K statist.  none
    fused core: log-sum-exp, in FP32           N                          N
    standard core: scores after softmax        N S, k and v N H each      N S, with dropout 2 N S and a mask
    core's output, input of o                  N H                        N H
    dropout masks, one byte each               none                       2 D
    residual, saved by the second norm         D, 1 statistic             D, 2 statistics
    norm's output, input of the MLP            D                          D
    MLP                                        4 F: gate, up, silu, down  2 F: before and after GELU

The peak of a step, recomputation, layouts, experts and latent attention are not sums: the ledger has them (budget.py).
"""

from __future__ import annotations

from course_lib.config import ModelConfig, require_dense
from course_lib.memory.states import Recipe, recipe_of

_FP32, _MASK = 4, 1  # bytes of a float32, of a bool


def block_terms(
    config: ModelConfig, seq_len: int, attention: str = "fused", precision: Recipe | str = "fp32"
) -> dict[str, float]:
    """List what one block saves for each token, in bytes, by name; without recomputation.

    The residual is in the dtype of the parameters. Autocast casts the inputs of each matmul to another one.

    Raises   ValueError if attention or precision is unknown, or the model has experts or latent attention
    """
    require_dense(config, "block_terms")
    recipe = recipe_of(precision)
    check_attention(attention)
    D, F, llama = config.d_model, config.d_ff, config.family == "llama"
    e, r = recipe.compute_bytes, recipe.param_bytes
    statistics = _FP32 if llama else 2 * r  # 1/rms in FP32; LayerNorm's two, on a CPU in the dtype of its weight
    copies = (3, 2 if llama else 1) if e != r else (1, 1)  # autocast casts the shared input once for each matmul
    return {
        "block input": D * r,
        "first norm's statistics": statistics,
        "input of q, k, v": copies[0] * D * e,
        "QK-norm": (config.num_heads + config.num_kv_heads) * (config.head_dim * e + _FP32) if config.qk_norm else 0,
        "core": _core_bytes(config, seq_len, attention, e),
        "input of o": config.num_heads * config.head_dim * e,
        "dropout masks": 2 * D * _MASK if config.dropout else 0,
        "residual": D * r,
        "second norm's statistics": statistics,
        "input of the MLP": copies[1] * D * e,
        "MLP": (4 if llama else 2) * F * e,
    }


def _core_bytes(config: ModelConfig, seq_len: int, attention: str, e: int) -> int:
    """q, k, v and the log-sum-exp; or k and v repeated for N heads, and the scores, which grow with S."""
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    if attention == "fused":
        return (N + 2 * K) * H * e + N * _FP32
    dropped = e + _MASK if config.dropout else 0  # the scores after dropout, and its mask
    return 3 * N * H * e + N * seq_len * (e + dropped)


def logits_bytes(config: ModelConfig, batch_size: int, seq_len: int) -> int:
    """Predict what the loss saves: log-probabilities in FP32, 4 s b V bytes, whatever the logits' dtype.

    An encoder has no vocabulary head, hence none. Losses elsewhere save 2 bytes per element (all in BF16) to 6 (the
    BF16 logits as well).
    """
    return 0 if config.family == "xlmr" else batch_size * seq_len * config.vocab_size * _FP32


def check_attention(attention: str) -> None:
    """Raises ValueError unless the models know this kind of attention."""
    if attention not in ("fused", "standard"):
        raise ValueError(f"attention is {attention!r}; choose from fused, standard")
