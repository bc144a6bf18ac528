"""Activation memory of this course's own models: every tensor that autograd keeps, term by term.

What one block keeps of each token, in numbers (D, F, N, K, H, S as everywhere):

                                               Llama                      GPT and the encoder
    block input, kept by the first norm        D, 1 statistic             D, 2 statistics
    norm's output, input of q, k and v         D                          D
    q, k, v                                    (N + 2 K) H                3 N H
    fused core: log-sum-exp, in FP32           N                          N
    standard core: scores after softmax        N S, k and v N H each      N S, with dropout 2 N S and a mask
    core's output, input of o                  N H                        N H
    dropout masks, one byte each               none                       2 D
    residual, kept by the second norm          D, 1 statistic             D, 2 statistics
    norm's output, input of the MLP            D                          D
    MLP                                        4 F: gate, up, silu, down  2 F: before and after GELU

Latent attention (model/latent.py) keeps latents before and after their norms besides, and whole heads: N H of
queries and of keys, N W of values. Where values and keys differ in length, the fused core fills all up to M, the
longer: it keeps 3 N M, and N M of output beside the N W that o takes.

With recomputation a block keeps its input ("full"), or the core its inputs ("selective"), and one block at a time is
whole again in the backward pass. The peak is the larger of two moments: the start of backward, the last block's turn.

A rank of tensor parallelism keeps what a narrower model keeps: N, K, F and V divided, D not (`tensor.py`). Sequence
parallelism divides the rest: of SEQUENCE_REGIONS a rank holds its share of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from course_lib.config import ModelConfig, require_dense
from course_lib.memory.states import RECIPES, parameter_shapes

_FP32, _TOKEN_ID, _MASK = 4, 8, 1  # bytes of a float32, of an int64 token, of a bool


SEQUENCE_REGIONS = (  # outside attention and MLP: what sequence parallelism splits along the sequence
    "block input",
    "first norm's statistics",
    "dropout masks",
    "residual",
    "second norm's statistics",
    "input of latent vectors",
    "latent vectors",
)
# whole sequences, unless backward gathers them again
GATHERED_INPUTS = ("input of q, k, v", "input of latent heads", "input of the MLP")


@dataclass(frozen=True)
class Precision:
    """Bytes of a forward pass's numbers. Autocast leaves the residual in FP32 and casts the inputs of each matmul."""

    name: str
    residual_bytes: int
    matmul_bytes: int

    @property
    def casts(self) -> bool:
        """Whether matmuls run on copies in another dtype."""
        return self.residual_bytes != self.matmul_bytes


PRECISIONS = {  # the names of RECIPES: a recipe says in which precision the forward pass runs
    name: Precision("autocast", 4, 2)
    if name == "autocast"
    else Precision(name, recipe.compute_bytes, recipe.compute_bytes)
    for name, recipe in RECIPES.items()
}


@dataclass(frozen=True)
class Activations:
    """Bytes kept for the backward pass, by place, for one micro-batch; `peak_bytes` is the largest moment."""

    tokens: int  # token ids, targets, RoPE tables, position ids
    blocks: int  # all blocks together, as the forward pass leaves them
    ends: int  # embedding dropout, final norm, input of the head
    casts: int  # autocast's BF16 copies of weights
    logits: int  # what the loss keeps: log-probabilities of the whole vocabulary
    last_block_s_turn: int  # all that is alive when the last block is whole again; 0 without recomputation

    @property
    def start_of_backward_bytes(self) -> int:
        """What the forward pass leaves behind."""
        return self.tokens + self.blocks + self.ends + self.casts + self.logits

    @property
    def peak_bytes(self) -> int:
        """The larger of the two moments."""
        return max(self.start_of_backward_bytes, self.last_block_s_turn)


def block_terms(
    config: ModelConfig, seq_len: int, attention: str = "fused", precision: str = "fp32", device: str = "cpu"
) -> dict[str, float]:
    """List what one block keeps for each token, in bytes, by name; without recomputation.

    Raises   ValueError if attention or precision is unknown, or the model has experts (`moe.py` has their terms), or
             latent attention under autocast, whose casts are not counted
    """
    require_dense(config, "block_terms", latent=True)
    p = _precision(precision)
    check_attention(attention)
    D, F, llama = config.d_model, config.d_ff, config.family == "llama"
    nh = config.num_heads * (config.mla.value_dim if config.mla else config.head_dim)
    e, r = p.matmul_bytes, p.residual_bytes
    statistics = _statistics_bytes(config, p)
    copies = (3, 2 if llama else 1) if p.casts else (1, 1)  # autocast casts the shared input once for each matmul
    masks = D * _MASK if config.dropout else 0
    return {
        "block input": D * r,
        "first norm's statistics": statistics,
        **_attention_inputs(config, copies[0], p),
        "core": sum(core_terms(config, seq_len, attention, precision, device).values()),
        "input of o": nh * e,
        "dropout masks": 2 * masks,
        "residual": D * r,
        "second norm's statistics": statistics,
        "input of the MLP": copies[1] * D * e,
        "MLP": (4 if llama else 2) * F * e,
    }


def core_terms(
    config: ModelConfig, seq_len: int, attention: str = "fused", precision: str = "fp32", device: str = "cpu"
) -> dict[str, float]:
    """List what the attention core keeps for each token, in bytes, by name; the standard core's scores grow with S.

    The standard core keeps k and v repeated to N heads. Autocast on a GPU computes the softmax in FP32, so that it is
    kept besides its BF16 copy; on a CPU it stays in BF16.
    """
    p = _precision(precision)
    if config.mla:
        return _latent_core_terms(config, seq_len, attention, p)
    N, K, H, e = config.num_heads, config.num_kv_heads, config.head_dim, p.matmul_bytes
    if attention == "fused":
        return {"q": N * H * e, "k": K * H * e, "v": K * H * e, "log-sum-exp": N * _FP32}
    softmax_bytes = p.residual_bytes if device == "cuda" else e
    terms = {"q": N * H * e, "k": N * H * e, "v": N * H * e, "scores after softmax": N * seq_len * softmax_bytes}
    if config.dropout:
        terms["scores' dropout mask"] = N * seq_len * _MASK
    if config.dropout or softmax_bytes != e:
        terms["scores after dropout or cast"] = N * seq_len * e
    return terms


def _attention_inputs(config: ModelConfig, copies: int, p: Precision) -> dict[str, int]:
    """The input that q, k and v share; of latent attention it makes the latent vectors, and these make the heads.

    Latent vectors are kept before and after their norms, with the norms' statistics; kv_down's output as one tensor.
    """
    D, e = config.d_model, p.matmul_bytes
    if config.mla is None:
        return {"input of q, k, v": copies * D * e}
    if p.casts:
        raise ValueError(f"precision is {p.name!r}; with latent attention choose one without casts, such as bf16")
    mla = config.mla
    return {
        "input of latent vectors": D * e,
        "latent vectors": (mla.q_rank + mla.kv_rank + mla.rope_dim) * e + 2 * _statistics_bytes(config, p),
        "input of latent heads": (mla.q_rank + mla.kv_rank) * e,
    }


def _latent_core_terms(config: ModelConfig, seq_len: int, attention: str, p: Precision) -> dict[str, float]:
    N, e, H, W = config.num_heads, p.matmul_bytes, config.head_dim, config.mla.value_dim
    if attention == "standard":
        return {"q": N * H * e, "k": N * H * e, "v": N * W * e, "scores after softmax": N * seq_len * e}
    M = max(H, W)
    terms = {"q": N * M * e, "k": N * M * e, "v": N * M * e, "log-sum-exp": N * _FP32}
    return terms if H == W else terms | {"output, filled up": N * M * e}


def own_activations(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    attention: str = "fused",
    recompute: str = "none",
    precision: str = "fp32",
    device: str = "cpu",
    sequence_share: float = 1.0,
    regather: bool = False,
) -> Activations:
    """Predict what this course's model keeps for the backward pass of one micro-batch, with the course's loss.

    Fused attention means a flash kernel. A CPU has none with dropout: there PyTorch falls back to storing scores.
    `sequence_share` is the part of each sequence that this rank holds outside attention and MLP; with `regather` also
    of their inputs (`tensor.tensor_parallel_activations` knows both).

    Raises   ValueError if attention, recompute or precision is unknown, or a size is below 1
    """
    p = _precision(precision)
    _check(batch_size, seq_len, recompute)
    tokens_in_batch = batch_size * seq_len
    terms = _shared_out(block_terms(config, seq_len, attention, precision, device), sequence_share, regather)
    kept = {"none": sum(terms.values()), "full": terms["block input"]}
    kept["selective"] = kept["none"] - terms["core"] + _core_inputs_bytes(config, p)
    tokens = _token_bytes(config, batch_size, seq_len, p)
    blocks = round(config.num_layers * kept[recompute] * tokens_in_batch)
    turn = {
        "none": 0,
        "full": sum(terms.values()) - terms["block input"],
        "selective": terms["core"] + _fused_output(config, attention, p) - _done_before_core(terms),
    }
    block_casts = _block_cast_bytes(config) // config.num_layers if p.casts else 0
    keeps_casts = p.casts and recompute != "full"
    casts = (_block_cast_bytes(config) if keeps_casts else 0) + (_head_cast_bytes(config) if p.casts else 0)
    embedding_mask = config.d_model * _MASK * sequence_share if config.dropout else 0
    during = tokens + blocks + round((turn[recompute] + embedding_mask) * tokens_in_batch)
    during += block_casts if recompute == "full" else casts
    return Activations(
        tokens=tokens,
        blocks=blocks,
        ends=round(tokens_in_batch * _ends_bytes(config, p, sequence_share, regather)),
        casts=casts,
        logits=logits_bytes(config, batch_size, seq_len),
        last_block_s_turn=during if recompute != "none" else 0,
    )


def activation_bytes(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    attention: str = "fused",
    recompute: str = "none",
    precision: str = "fp32",
    device: str = "cpu",
) -> int:
    """Predict the most activation bytes of a step, what the loss keeps included (see `own_activations`)."""
    return own_activations(config, batch_size, seq_len, attention, recompute, precision, device).peak_bytes


def logits_bytes(config: ModelConfig, batch_size: int, seq_len: int) -> int:
    """Predict what the loss keeps for backward: log-probabilities in FP32, 4 s b V bytes, whatever the logits' dtype.

    An encoder has no vocabulary head, hence none. Losses elsewhere keep 2 bytes a number (all in BF16) to 6 (the BF16
    logits as well).
    """
    return 0 if config.family == "xlmr" else batch_size * seq_len * config.vocab_size * _FP32


def _shared_out(terms: dict[str, float], sequence_share: float, regather: bool) -> dict[str, float]:
    """The terms of a rank that holds a share of the tokens where sequence parallelism splits them."""
    split = SEQUENCE_REGIONS + (GATHERED_INPUTS if regather else ())
    return {name: size * sequence_share if name in split else size for name, size in terms.items()}


def _core_inputs_bytes(config: ModelConfig, p: Precision) -> float:
    """What a checkpointed core keeps. RoPE's tables are of the residual's dtype, and so are the q and k they turn."""
    if config.mla:
        return config.num_heads * (2 * config.head_dim + config.mla.value_dim) * p.matmul_bytes
    rotated = p.residual_bytes if config.family == "llama" else p.matmul_bytes
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    return (N + K) * H * rotated + K * H * p.matmul_bytes


def _fused_output(config: ModelConfig, attention: str, p: Precision) -> float:
    """A fused core run again makes its output anew, but q, k, v are the checkpoint's: add one, take off the other."""
    if config.mla:
        return _latent_output(config, attention, p)
    if attention == "standard":
        return 0
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    shared = (K if p.casts and config.family == "llama" else N + 2 * K) * H * p.matmul_bytes
    return N * H * p.matmul_bytes - shared


def _latent_output(config: ModelConfig, attention: str, p: Precision) -> float:
    """The same of latent attention: an output filled up is among the core's terms, and what was filled up is new."""
    N, H, W, e = config.num_heads, config.head_dim, config.mla.value_dim, p.matmul_bytes
    if attention == "standard":
        return 0
    return -N * (W if W > H else 2 * H) * e


def _done_before_core(terms: dict[str, float]) -> float:
    """What backward has freed of the last block when it arrives at its attention core."""
    freed = ("residual", "second norm's statistics", "input of the MLP", "MLP", "input of o", "dropout masks")
    return sum(terms[name] for name in freed)


def _statistics_bytes(config: ModelConfig, p: Precision) -> int:
    """RMSNorm keeps 1/rms in FP32; LayerNorm mean and 1/deviation, on a CPU in the dtype of its weight."""
    return _FP32 if config.family == "llama" else 2 * p.residual_bytes


def _token_bytes(config: ModelConfig, batch_size: int, seq_len: int, p: Precision) -> int:
    """Token ids, targets, and once for all rows RoPE's tables or position ids."""
    targets = 0 if config.family == "xlmr" else _TOKEN_ID
    once = 2 * config.rope_dim * p.residual_bytes if config.family == "llama" else _TOKEN_ID
    return seq_len * (batch_size * (_TOKEN_ID + targets) + once)


def _ends_bytes(config: ModelConfig, p: Precision, sequence_share: float = 1.0, regather: bool = False) -> float:
    """The final norm's input and statistics, the head's input; behind an embedding with dropout, its mask."""
    mask = config.d_model * _MASK if config.dropout else 0
    head_input = config.d_model * p.matmul_bytes * (sequence_share if regather else 1.0)
    return (config.d_model * p.residual_bytes + _statistics_bytes(config, p) + mask) * sequence_share + head_input


def _block_cast_bytes(config: ModelConfig) -> int:
    """BF16 copies of the blocks' matrices and their biases, but not of norms."""
    shapes = parameter_shapes(config).items()
    return 2 * sum(
        prod(shape) * copies
        for name, (shape, copies) in shapes
        if name.startswith(("attention.", "mlp.")) and "norm" not in name
    )


def _head_cast_bytes(config: ModelConfig) -> int:
    return 0 if config.family == "xlmr" else 2 * config.vocab_size * config.d_model


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}; choose from {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def check_attention(attention: str) -> None:
    """Raises ValueError unless the models know this kind of attention."""
    if attention not in ("fused", "standard"):
        raise ValueError(f"attention is {attention!r}; choose from fused, standard")


def _check(batch_size: int, seq_len: int, recompute: str) -> None:
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute is {recompute!r}; choose from none, selective, full")
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name} is {value}, required: 1 or more")
