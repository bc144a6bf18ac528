"""FLOPs of training: a token's, a step's, and those of one stage of a pipeline.

A weight that a token is multiplied with costs 2 FLOPs forward and 4 backward. Attention's scores have no weights and
are counted beside them.
"""

from collections.abc import Sequence

from course_lib.config import ModelConfig, Recompute, require_dense
from course_lib.layout.partition import check_layers, stage_config
from course_lib.validate import Bytes, Index, Size, checked


def attention_parameters(config: ModelConfig) -> int:
    """Count the weights of one layer's q, k, v and o, or of the narrow matrices of latent attention."""
    D, N, K, H = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    if (mla := config.mla) is None:
        return D * H * 2 * (N + K)
    queries = mla.q_rank * (D + N * (mla.nope_dim + mla.rope_dim))
    keys_and_values = D * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * N * (mla.nope_dim + mla.value_dim)
    return queries + keys_and_values + N * mla.value_dim * D


def mlp_parameters(config: ModelConfig) -> int:
    """Count the weights of one dense feed-forward layer: three matrices in Llama, else two."""
    return (3 if config.family == "llama" else 2) * config.d_model * config.d_ff


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Count the weights of one layer's matrix multiplications; raises ValueError for experts, whose layers differ."""
    require_dense(config, "layer_matmul_parameters")
    return attention_parameters(config) + mlp_parameters(config)


def head_parameters(config: ModelConfig) -> int:
    """Count the weights of the head; an encoder has none."""
    return 0 if config.family == "xlmr" else config.vocab_size * config.d_model


@checked
def matmul_parameters(config: ModelConfig) -> int:
    """Count the weights that multiply a token, of experts router, chosen and shared; the embedding is a look-up."""
    moe, routed = config.moe, 0
    if moe is not None:
        width = (moe.top_k + moe.num_shared_experts) * moe.d_expert
        routed = 3 * config.d_model * width + moe.num_experts * config.d_model
    dense = (config.num_layers - config.num_moe_layers) * mlp_parameters(config)
    attention = config.num_layers * attention_parameters(config)
    return attention + dense + config.num_moe_layers * routed + head_parameters(config)


def attention_flops_per_token(config: ModelConfig, seq_len: Size, causal: bool = False) -> int:
    """Count forward FLOPs of scores and of their product with the values: 4 L h s per token; half of it if causal.

    With latent attention, whose heads are complete again in training, keys are longer than values.
    """
    score_dim = config.mla.nope_dim + config.mla.rope_dim if config.mla else config.head_dim
    flops = 2 * config.num_layers * config.num_heads * (score_dim + config.value_dim) * seq_len
    return flops // 2 if causal else flops


@checked
def forward_flops_per_token(config: ModelConfig, seq_len: Size, causal: bool = False) -> int:
    """Count 2 N + 4 L h s, where N counts the weights that a token is multiplied with.

    Most published MFU figures do not halve the attention of a causal model; that is the default here.
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 5.1; Kaplan et al. 2020 (arXiv:2001.08361)
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, seq_len, causal)


@checked
def flops_per_token(config: ModelConfig, seq_len: Size, causal: bool = False) -> int:
    """Count model FLOPs of forward and backward, three times the forward: 6 N + 12 L h s. No recomputation."""
    return 3 * forward_flops_per_token(config, seq_len, causal)


@checked
def step_flops(
    config: ModelConfig,
    num_tokens: Bytes,
    seq_len: Size,
    recompute: Recompute = "none",
    causal: bool = False,
    operators: bool = False,
) -> int:
    """Count the FLOPs that the hardware does in one step; with recompute="none" they are the model FLOPs.

    "full" repeats the forward of every layer (not of the head), "selective" that of the attention scores; `operators`
    the products of `repeated_share`.
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), sections 5 and 6.3
    """
    again = {"none": 0, "selective": attention_flops_per_token(config, seq_len, causal)}
    again["full"] = forward_flops_per_token(config, seq_len, causal) - 2 * head_parameters(config)
    linear = 2 * (matmul_parameters(config) - head_parameters(config)) if operators else 0
    of_operators = round(num_tokens * linear * repeated_share(config))
    return num_tokens * (flops_per_token(config, seq_len, causal) + again[recompute]) + of_operators


def repeated_share(config: ModelConfig) -> float:
    """Return the share of a layer's forward products that recomputation of operators repeats: k, o and up."""
    D, K, N, H = config.d_model, config.num_kv_heads, config.num_heads, config.head_dim
    repeated = D * H * (K + N) + mlp_parameters(config) / 3
    return repeated / (attention_parameters(config) + mlp_parameters(config))


@checked
def stage_flops(
    config: ModelConfig, batch_size: Size, seq_len: Size, layers: Sequence[int], stage: Index, causal: bool = False
) -> tuple[int, int, int]:
    """Count FLOPs of one micro-batch on one stage: forward F, and backward's I and W.

    I makes the gradient of the input, W those of the weights. A matrix costs the same in all three; attention's scores
    cost twice the forward in I and nothing in W. The head is on the last stage.

    Raises   ValueError unless `layers` are those of the model
    Source   Qi et al. 2024 (arXiv:2401.10241), table 1: F 24 h + 4 s, I 24 h + 8 s, W 24 h, each times s b h
    """
    check_layers(config, layers)
    tokens, part = batch_size * seq_len, stage_config(config, layers, stage)
    matrices = matmul_parameters(part) - (head_parameters(config) if stage < len(layers) - 1 else 0)
    scores = attention_flops_per_token(part, seq_len, causal)
    return tokens * (2 * matrices + scores), tokens * (2 * matrices + 2 * scores), tokens * 2 * matrices
