"""Tensors of a model, and of one rank of tensor parallelism: names, shapes, how many parameters; adapters beside them.

A rank of tp has heads N / t and K / t (at least one), MLP and experts F / t, vocabulary V / t; the width D of the
residual stream stays. So every formula of the package works on `narrow(config, tp)` as it is.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.validate import Checked, Size, checked

Shapes = dict[str, tuple[tuple[int, ...], int]]  # tensor -> (shape, how many of them)


@checked
def parameter_shapes(config: ModelConfig) -> Shapes:
    """List every parameter tensor of a model: name -> (shape, number of such tensors).

    Source   Llama: arXiv:2302.13971; GPT-2: OpenAI's release; XLM-R: arXiv:1911.02116, arXiv:2105.00572; Mixtral:
             arXiv:2401.04088; DeepSeek-V3: arXiv:2412.19437
    """
    before, behind = end_shapes(config)
    found = before | behind
    for has_experts, layers in ((False, config.num_layers - config.num_moe_layers), (True, config.num_moe_layers)):
        for name, (shape, copies) in (block_shapes(config, has_experts) if layers else {}).items():
            found[name] = shape, copies * layers + found.get(name, (shape, 0))[1]
    return found


def end_shapes(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """List what comes before the blocks, and what comes behind them; of XLM-R the encoder alone, without its head."""
    D, V, encoder, llama = config.d_model, config.vocab_size, config.family == "xlmr", config.family == "llama"
    before, behind = {"embed": (V, D)}, {"norm": (D,)} | ({} if llama else {"norm.bias": (D,)})
    if not llama:
        before["positions"] = config.max_seq_len + 2 * encoder, D  # two rows of padding
    if encoder:
        before["token_type"] = 1, D
    if not (config.tied or encoder):
        behind["head"] = V, D
    return tuple({name: (shape, 1) for name, shape in shapes.items()} for shapes in (before, behind))


def block_shapes(config: ModelConfig, has_experts: bool = False) -> Shapes:
    """List the tensors of one block in the model's order: attention, then its MLP or its experts.

    Latent attention (MLA) has queries, and keys with values, pass through narrow matrices, each with a norm.
    """
    D, N, moe, mla, llama = config.d_model, config.num_heads, config.moe, config.mla, config.family == "llama"
    NH, KH = N * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"norm": (D,), "q": (NH, D), "k": (KH, D), "v": (KH, D), "o": (D, NH)}
    if config.qk_norm:
        attention |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if mla:
        attention = {"norm": (D,), "o": (D, N * mla.value_dim)}
        attention |= {"q_down": (mla.q_rank, D), "q_norm": (mla.q_rank,), "q_up": (NH, mla.q_rank)}
        attention |= {"kv_down": (mla.kv_rank + mla.rope_dim, D), "kv_norm": (mla.kv_rank,)}
        attention["kv_up"] = N * (mla.nope_dim + mla.value_dim), mla.kv_rank
    found = {f"attention.{name}": (shape, 1) for name, shape in attention.items()} | {"mlp.norm": ((D,), 1)}
    parts = {"mlp": (config.d_ff, 1)}
    if has_experts:
        found["moe.router"] = (moe.num_experts, D), 1
        shared = moe.num_shared_experts * moe.d_expert
        parts = {"moe.experts": (moe.d_expert, moe.num_experts), "moe.shared": (shared, 1)}
    for part, (width, copies) in parts.items():
        for name in ("gate", "up", "down")[not llama :] if width else ():
            found[f"{part}.{name}"] = ((D, width) if name == "down" else (width, D)), copies
    if llama:
        return found
    return {f"{name}{end}": (of[: 1 if end else 2], n) for name, (of, n) in found.items() for end in ("", ".bias")}


def count(shapes: Shapes) -> int:
    """Count the parameters of so many tensors."""
    return sum(prod(shape) * copies for shape, copies in shapes.values())


@checked
def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model exactly (a tied head once): 8,030,261,248 for llama-3.1-8b."""
    return count(parameter_shapes(config))


def active_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses: all but the experts that it did not choose; the embedding whole."""
    shapes = parameter_shapes(config)
    experts = count({name: entry for name, entry in shapes.items() if name.startswith("moe.experts.")})
    left_out = experts - experts * config.moe.top_k // config.moe.num_experts if experts else 0
    return count(shapes) - left_out


def dense_twin(config: ModelConfig) -> ModelConfig:
    """A model without experts whose tokens need the same FLOPs, but for the router's: MLPs as wide as what one uses."""
    if config.moe is None:
        return config
    width = (config.moe.top_k + config.moe.num_shared_experts) * config.moe.d_expert
    if config.num_moe_layers < config.num_layers and width != config.d_ff:
        raise ValueError(
            f"{config.name} has dense blocks of width {config.d_ff} and uses experts of width {width} in all; "
            "a twin of equal blocks needs first_dense_layers=0"
        )
    return replace(config, name=f"{config.name}, dense", d_ff=width, moe=None)


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


def is_replicated(name: str) -> bool:
    """Whether every rank of tp has all of a parameter: norms, biases after a sum, and what is too narrow to cut."""
    return "norm" in name or name.endswith(("o.bias", "down.bias", "_down", "positions", "token_type", "router"))


def whole_parameters(config: ModelConfig) -> int:
    """Count the parameters that every rank of tp has whole."""
    return count({name: entry for name, entry in parameter_shapes(config).items() if is_replicated(name)})


def for_length(config: ModelConfig, seq_len: int) -> ModelConfig:
    """The same model, allowed to read that many tokens: RoPE has no table that ends, its memory is the same."""
    return config if seq_len <= config.max_seq_len else replace(config, max_seq_len=seq_len)


@dataclass(frozen=True)
class LoRA(Checked):
    """Low-rank adapters on the named matrices; with four_bits (QLoRA) the frozen ones of blocks are stored in 4 bits.

    Source   Hu et al. 2021 (arXiv:2106.09685); Dettmers et al. 2023 (arXiv:2305.14314)
    """

    rank: Size
    targets: tuple[str, ...] = ("q", "v")
    four_bits: bool = False


_NO_LINEAR = ("embed", "positions", "token_type", "moe.router")  # matrices that no linear layer has


def _linear(shapes: Shapes) -> Shapes:
    return {name: entry for name, entry in shapes.items() if len(entry[0]) == 2 and name not in _NO_LINEAR}


def adapter_shapes(shapes: Shapes, lora: LoRA) -> Shapes:
    """List the adapters' tensors beside those matrices that are targets: rank x d_in and d_out x rank."""
    found = {}
    for name, (shape, copies) in _linear(shapes).items():
        if name.rpartition(".")[2] in lora.targets:
            found[f"{name}.lora_a"] = ((lora.rank, shape[1]), copies)
            found[f"{name}.lora_b"] = ((shape[0], lora.rank), copies)
    return found


def quantized_shapes(config: ModelConfig) -> Shapes:
    """List the matrices that QLoRA stores in 4 bits: those of linear layers in the blocks."""
    return {name: entry for name, entry in _linear(parameter_shapes(config)).items() if "." in name}


def lora_shapes(config: ModelConfig, lora: LoRA) -> Shapes:
    """List the adapters' tensors of a whole model; ValueError if a target names no linear layer of it."""
    known = {name.rpartition(".")[2] for name in _linear(parameter_shapes(config))}
    if missing := set(lora.targets) - known:
        raise ValueError(f"targets {sorted(missing)} name no matrix of {config.name}; choose from {sorted(known)}")
    return adapter_shapes(parameter_shapes(config), lora)


@checked
def lora_parameters(config: ModelConfig, lora: LoRA) -> int:
    """Count the trained parameters: sum over targets of rank (d_in + d_out)."""
    return count(lora_shapes(config, lora))
