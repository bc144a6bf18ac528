"""Activation memory as the papers count it: 2-byte numbers, a GPT block with dropout and an MLP of width 4 h.

Symbols: s sequence, b micro-batch, h hidden size, a heads, L layers, v vocabulary, t tensor-parallel size.
`activations.py` counts what this course's own models keep; these are for reading papers and for other people's models.
"""

from __future__ import annotations

from course_lib.config import ModelConfig, Recompute, require_dense
from course_lib.validate import Size, checked

KORTHIKANTI_TERMS = {  # bytes a token and hidden feature (the score terms: a token and score), Korthikanti section 4.1
    "input of q, k, v": 2,
    "q and k": 4,
    "v": 2,
    "input of o": 2,
    "attention dropout mask": 1,
    "input of up": 2,
    "input of GELU": 8,
    "input of down": 8,
    "MLP dropout mask": 1,
    "inputs of both LayerNorms": 4,
}
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

    recompute   "none"; "selective": the attention core runs again, which drops 5 a s / h (FlashAttention drops the
                same: one saving, not two); "full": the layer's input alone, 2 s b h for any tp, as table 2 has it
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

    `working_set` adds, for full recomputation, the one layer that is recomputed at a time: without it nothing can run.

    Source   Korthikanti et al. 2022, section 4.3; Ultra-Scale Playbook, "Memory for activations"
    """
    layer = korthikanti_layer_bytes(config, batch_size, seq_len, recompute)
    mask = seq_len * batch_size * config.d_model
    again = korthikanti_layer_bytes(config, batch_size, seq_len) if working_set and recompute == "full" else 0
    return config.num_layers * layer + mask + again


def korthikanti_output_bytes(config: ModelConfig, batch_size: Size, seq_len: Size) -> float:
    """Predict what the end of the model keeps: 4 s b h (1 + v / h), the final norm, the head's input and FP32 logits.

    Source   Korthikanti et al. 2022, section 4.3; Megatron-LM theoretical_memory_usage.py
    """
    return 4 * seq_len * batch_size * (config.d_model + config.vocab_size)


def megatron_activation_bytes(config: ModelConfig, batch_size: Size, seq_len: Size) -> float:
    """Predict activations as Megatron-Core's estimator does on one GPU, with the scores recomputed: any MLP width.

    Bytes    s b h (18 + 4 d_ff / h) a layer, 8 s b ids and targets, s b h embedding dropout, 4 s b h (1 + v / h) output
    Source   NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py
    """
    require_dense(config, "megatron_activation_bytes")
    layers, h = config.num_layers * (18 * config.d_model + 4 * config.d_ff), config.d_model
    return seq_len * batch_size * (layers + 8 + h) + korthikanti_output_bytes(config, batch_size, seq_len)


@checked
def selective_flops_share(config: ModelConfig, seq_len: Size) -> float:
    """Predict the extra compute of selective recomputation as the paper does: (1 + s / 3 h) / (1 + s / 6 h) - 1.

    The vocabulary is left out. The paper adds 12 b s^2 h a layer, which is forward and backward of the core; running
    its forward once more is a third of that.

    Source   Korthikanti et al. 2022 (arXiv:2205.05198), appendix A
    """
    scores = seq_len / (6 * config.d_model)
    return scores / (1 + scores)
