"""Activation memory as the papers count it: 2-byte numbers, a GPT block with dropout and an MLP of width 4 h.

Symbols: s sequence, b micro-batch, h hidden size, a heads. activations.py counts what this course's own models keep.
"""

from __future__ import annotations

from course_lib.config import ModelConfig, Recompute, require_dense
from course_lib.validate import Size, checked

KORTHIKANTI_TERMS = {  # bytes a token and hidden feature (the score terms: a token and score), Korthikanti section 4.1
    "input of q, k, v": 2, "q and k": 4, "v": 2, "input of o": 2, "attention dropout mask": 1, "input of up": 2,
    "input of GELU": 8, "input of down": 8, "MLP dropout mask": 1, "inputs of both LayerNorms": 4,
}  # fmt: skip
KORTHIKANTI_SCORE_TERMS = {"softmax output": 2, "softmax dropout mask": 1, "softmax dropout output": 2}


@checked
def korthikanti_layer_bytes(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    recompute: Recompute = "none",
    tp: Size = 1,
    sequence_parallel: bool = False,
) -> float:
    """Predict the activation bytes of one layer: s b h (34 + 5 a s / h), and its parallel and recomputed forms.

    recompute   "selective" drops 5 a s / h, as FlashAttention does; "full" leaves the layer's input, 2 s b h for any tp
    Bytes       tp divides 24 of the 34 and the scores; sequence parallelism the remaining 10 (LayerNorms, dropout)
    Source      Korthikanti et al. 2022 (arXiv:2205.05198), table 2
    """
    require_dense(config, "korthikanti_layer_bytes")
    sbh = seq_len * batch_size * config.d_model
    if recompute == "full":
        return 2 * sbh
    scores = 0 if recompute == "selective" else 5 * config.num_heads * seq_len / config.d_model
    replicated = 10 / tp if sequence_parallel else 10
    return sbh * (replicated + 24 / tp + scores / tp)


@checked
def korthikanti_bytes(
    config: ModelConfig, batch_size: Size, seq_len: Size, recompute: Recompute = "none", working_set: bool = False
) -> float:
    """Predict the activation bytes of all layers and the embedding's dropout mask (s b h), as the playbook draws them.

    working_set   adds, for full recomputation, the one layer that is recomputed at a time
    Source        Korthikanti et al. 2022, section 4.3; Ultra-Scale Playbook, "Memory for activations"
    """
    layers = config.num_layers * korthikanti_layer_bytes(config, batch_size, seq_len, recompute)
    again = korthikanti_layer_bytes(config, batch_size, seq_len) if working_set and recompute == "full" else 0
    return layers + seq_len * batch_size * config.d_model + again


@checked
def selective_flops_share(config: ModelConfig, seq_len: Size) -> float:
    """Predict the extra compute of selective recomputation as the paper does: (1 + s / 3 h) / (1 + s / 6 h) - 1.

    Source   Korthikanti et al. 2022 (arXiv:2205.05198), appendix A; a forward of the core alone is a third of that
    """
    scores = seq_len / (6 * config.d_model)
    return scores / (1 + scores)
