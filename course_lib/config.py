"""What a model looks like, as numbers: `ModelConfig`, and presets with the exact shapes of published models.

And what every training run is given: `TrainSettings`.

Nothing here builds a tensor; `course_lib.model.build` does. The presets stand in models.toml.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from course_lib.validate import (
    Amount,
    Count,
    Positive,
    Seed,
    Size,
    check_fields,
    checked,
    number,
    one_of,
    read_toml,
    whole,
)

FAMILIES = ("llama", "gpt", "xlmr")
_NUM_BYTES = 256
Recompute = Literal["none", "selective", "full"]  # nothing, the attention core, each block
Layers = Annotated[int, partial(whole, most=10_000)]  # every formula goes through them


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and 3.2 stretch RoPE's slow rotations for long texts (model cards, `rope_type: llama3`)."""

    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_seq_len: Size = 8192

    def __post_init__(self):
        check_fields(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must exceed low_freq_factor ({self.low_freq_factor}): "
                "what lies between is stretched in part; Llama 3.1 has 4.0 and 1.0"
            )


@checked
def check_groups(num_experts: Size, top_k: Size, num_groups: Size = 1, max_groups: Size | None = None) -> None:
    """Raises ValueError if a token cannot choose that many experts, or not from that many groups (nodes)."""
    max_groups = num_groups if max_groups is None else max_groups
    if num_experts % num_groups:
        fitting = ", ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
        raise ValueError(
            f"num_experts ({num_experts}) must be divisible by num_groups ({num_groups}); choose from {fitting}"
        )
    if not 1 <= max_groups <= num_groups:
        raise ValueError(f"max_groups is {max_groups}; required: 1 to num_groups ({num_groups})")
    reachable = num_experts // num_groups * max_groups
    if top_k > reachable:
        raise ValueError(
            f"top_k ({top_k}) exceeds the {reachable} experts that a token can choose from ({max_groups} of "
            f"{num_groups} groups of {num_experts // num_groups}); choose 1 to {reachable}"
        )


@checked(num_tokens=Count, top_k=Size, num_experts=Size, capacity_factor=Positive)
def capacity_of(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Rows that an expert accepts from num_tokens tokens: factor times its fair share, rounded up.

    Raises   ValueError unless the factor is more than 0
    Source   Fedus et al. 2021 (arXiv:2101.03961), equation 3, where top_k is 1; Lepikhin et al. 2020 (arXiv:2006.16668)
    """
    if not capacity_factor > 0:
        raise ValueError(f"capacity_factor is {capacity_factor}; choose more than 0: 1 holds a perfectly even routing")
    share = capacity_factor * top_k * num_tokens / num_experts
    return math.ceil(round(share, 9))  # 1.1 x 40 is 44.00000000000001 in floating point


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of the MLP: `num_experts` small MLPs, of which each token uses `top_k`.

    score             "softmax" over the experts (Switch, Mixtral) | "sigmoid" of each one (DeepSeek-V3)
    normalise_weights whether a token's chosen weights are divided by their sum
    balancing         "none" | "aux_loss" (times aux_coefficient) | "bias" (moved by bias_speed after each step)
    capacity_factor   an expert takes factor * top_k * tokens / num_experts choices, the rest is dropped; None: no drops
    num_groups        experts lie in so many equal groups (nodes), of which a token reaches at most max_groups
    routed_scale      factor on the routed experts' sum, beside the shared ones
    first_dense_layers  so many blocks at the front keep an MLP of width d_ff
    every             of the others every n-th has experts, the last of each n (2 in Llama 4 Maverick)

    Raises   ValueError where no token could be routed so
    Source   Fedus et al. 2021 (arXiv:2101.03961); DeepSeek-V3 (arXiv:2412.19437), section 2.1.2
    """

    num_experts: Size
    top_k: Size
    d_expert: Size
    num_shared_experts: Count = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise_weights: bool = True
    balancing: Literal["none", "aux_loss", "bias"] = "none"
    aux_coefficient: Amount = 0.01
    bias_speed: Amount = 0.001
    capacity_factor: Positive | None = None
    num_groups: Size = 1
    max_groups: Size | None = None  # filled in: num_groups, no limit
    routed_scale: Positive = 1.0
    first_dense_layers: Count = 0
    every: Size = 1

    def __post_init__(self):
        check_fields(self)
        if self.max_groups is None:
            object.__setattr__(self, "max_groups", self.num_groups)
        check_groups(self.num_experts, self.top_k, self.num_groups, self.max_groups)
        if self.top_k == 1 and self.normalise_weights:
            raise ValueError(
                "normalise_weights with top_k 1 makes every weight 1, so that the loss teaches the router nothing; "
                "use normalise_weights=False"
            )


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention's shape: queries, and keys with values, pass through a narrow latent vector.

    Source   DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3's config.json
    """

    q_rank: Size
    kv_rank: Size
    nope_dim: Size  # elements of a query and key head without position
    rope_dim: Size  # and with; this part of the key is one for all heads
    value_dim: Size

    def __post_init__(self):
        check_fields(self)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim ({self.rope_dim}) must be even: RoPE rotates pairs of numbers")

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. The defaults are those of a small Llama.

    Letters  D d_model · F d_ff · N num_heads · K num_kv_heads · H head_dim · V vocab_size · S at most max_seq_len
    Raises   ValueError where two sizes do not fit each other
    """

    name: str
    num_layers: Layers
    d_model: Size
    num_heads: Size
    num_kv_heads: Size
    d_ff: Size
    vocab_size: Size
    max_seq_len: Size
    tied: bool = False  # the output head uses the embedding's weights
    head_dim: Size | None = None  # filled in: d_model // num_heads; with mla nope_dim + rope_dim
    family: Literal[FAMILIES] = "llama"
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Positive = 1e-5
    dropout: Annotated[float, partial(number, least=0, below=1)] = 0.0  # the gpt family only
    moe: MoeConfig | None = None  # experts in place of the MLP, in all blocks but the first few
    mla: MlaConfig | None = None  # latent attention in all blocks
    qk_norm: bool = False  # an RMSNorm over each query and key head before RoPE, as in Qwen3 (arXiv:2505.09388)

    def __post_init__(self):
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads}), "
                "so that every key/value head serves the same number of query heads; choose a divisor"
            )
        if self.head_dim is None and self.mla:
            object.__setattr__(self, "head_dim", self.mla.head_dim)
        if self.head_dim is None:
            if self.d_model % self.num_heads:
                raise ValueError(
                    f"d_model ({self.d_model}) must be divisible by num_heads ({self.num_heads}); "
                    "change one of them or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.d_model // self.num_heads)
        if self.family == "llama" and self.rope_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: RoPE rotates pairs of numbers")
        if self.family != "llama" and self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must equal num_heads ({self.num_heads}) in the {self.family} "
                "family; grouped queries exist in the llama family"
            )
        if self.family == "llama" and self.dropout:
            raise ValueError(f"dropout is {self.dropout}, but Llama has none; use family='gpt' or dropout=0.0")
        if self.qk_norm and (self.family != "llama" or self.mla):
            raise ValueError(
                "qk_norm is set, but only attention with full queries and keys in the llama family has it; use "
                "family='llama' without mla, or qk_norm=False"
            )
        self._check_mla()
        self._check_moe()

    def _check_mla(self):
        if self.mla is None:
            return
        if self.family != "llama":
            raise ValueError(f"mla is set, but the {self.family} family has no latent attention; use family='llama'")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must equal num_heads ({self.num_heads}): latent attention makes "
                "keys and values for every head"
            )
        if self.head_dim != self.mla.head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be nope_dim + rope_dim ({self.mla.head_dim}), the length of latent "
                "attention's queries; leave it out"
            )

    def _check_moe(self):
        if self.moe is None:
            return
        if self.family != "llama":
            raise ValueError(f"moe is set, but the {self.family} family has no experts; use family='llama' or moe=None")
        if self.moe.first_dense_layers >= self.num_layers:
            raise ValueError(
                f"first_dense_layers ({self.moe.first_dense_layers}) must be below num_layers ({self.num_layers}), "
                "or no block has experts"
            )
        if self.num_moe_layers == 0:
            raise ValueError(
                f"every ({self.moe.every}) must not exceed num_layers ({self.num_layers}), or no block has experts"
            )

    @property
    def rope_dim(self) -> int:
        """How many numbers of a query or key turn with its position."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """How many numbers one head's value has."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return self.moe_layers_before(self.num_layers)

    def moe_layers_before(self, layer: int) -> int:
        """Blocks with experts among the first `layer` blocks."""
        if self.moe is None:
            return 0
        first, every = self.moe.first_dense_layers, self.moe.every
        return max(0, layer // every - first // every)

    def has_experts(self, layer: int) -> bool:
        """Whether that block, counted from 0, has experts in place of the MLP."""
        return self.moe_layers_before(layer + 1) > self.moe_layers_before(layer)


@dataclass(frozen=True)
class TrainSettings:
    """What `training.TrainConfig` and `train.TrainPlan` are both given; raises ValueError for what makes no sense."""

    steps: Size = 20
    seq_len: Size = 64
    seed: Seed = 0
    learning_rate: Positive = 3e-3
    weight_decay: Amount = 0.01
    clip_norm: Positive | None = 1.0

    def __post_init__(self):
        check_fields(self)


def config_from_dict(values: dict) -> ModelConfig:
    """Return the config that `dataclasses.asdict` was given, after JSON; a wrong field raises as `ModelConfig` does."""
    parts = {"rope_scaling": RopeScaling, "moe": MoeConfig, "mla": MlaConfig}
    return ModelConfig(**{key: parts[key](**x) if key in parts and x is not None else x for key, x in values.items()})


_MODELS = read_toml(Path(__file__).with_name("models.toml"))
_KNOWN = {
    name: config_from_dict({"name": name} | _MODELS.get(fields.pop("like", None), {}) | fields)
    for name, fields in _MODELS.items()
}
PRESETS: dict[str, ModelConfig] = {name: config for name, config in _KNOWN.items() if config.moe is None}
MOE_PRESETS: dict[str, ModelConfig] = {name: config for name, config in _KNOWN.items() if config.moe is not None}


def require_dense(config: ModelConfig, what: str, latent: bool = False) -> None:
    """Raises ValueError if the model has experts or, unless `latent`, latent attention: `what` knows none."""
    if config.moe or (config.mla and not latent):
        kind = "experts" if config.moe else "latent attention"
        raise ValueError(f"{what} knows no {kind}, but {config.name} has; use a dense model")


def require_bytes(config: ModelConfig) -> None:
    """Raises ValueError unless every byte is a token of the model: training/data.py has bytes as tokens."""
    if config.vocab_size < _NUM_BYTES:
        raise ValueError(
            f"vocab_size ({config.vocab_size}) must be at least {_NUM_BYTES}: each byte of the text is a token"
        )


OTHER_NAMES = {"llama-3-405b": "llama-3.1-405b"}  # as its paper calls it (arXiv:2407.21783)


@checked
def preset(name: str) -> ModelConfig:
    """The preset of that name; raises ValueError naming the presets that exist."""
    name = OTHER_NAMES.get(name, name)
    one_of("preset", name, tuple(_KNOWN))
    return _KNOWN[name]
