"""Tensors of a model and of one rank of it, and the bytes of their states: what does not depend on the batch.

A rank of tensor parallelism has heads N / t and K / t (at least one), MLP and experts F / t, vocabulary V / t; the
width D of the residual stream stays. So every formula of this folder works on `narrow(config, tp)` as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Annotated, Literal

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_heads, piece_sizes
from course_lib.layout.sequence_sharding import check_context
from course_lib.validate import Amount, Bytes, Checked, Count, Size, checked, one_of, whole

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


def _count(shapes: Shapes) -> int:
    return sum(prod(shape) * copies for shape, copies in shapes.values())


@checked
def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model exactly (a tied head once): 8,030,261,248 for llama-3.1-8b."""
    return _count(parameter_shapes(config))


def active_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses: all but the experts that it did not choose; the embedding whole."""
    shapes = parameter_shapes(config)
    experts = _count({name: entry for name, entry in shapes.items() if name.startswith("moe.experts.")})
    left_out = experts - experts * config.moe.top_k // config.moe.num_experts if experts else 0
    return _count(shapes) - left_out


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
    return _count({name: entry for name, entry in parameter_shapes(config).items() if is_replicated(name)})


def for_length(config: ModelConfig, seq_len: int) -> ModelConfig:
    """The same model, allowed to read that many tokens: RoPE has no table that ends, its memory is the same."""
    return config if seq_len <= config.max_seq_len else replace(config, max_seq_len=seq_len)


def kv_block_bytes(config: ModelConfig, batch_size: int, seq_len: int, cp: int, itemsize: int = 2, tp: int = 1) -> int:
    """Count keys and values of one rank's tokens in one layer: 2 B s K H numbers; latent attention's B s K (H + W)."""
    check_context(seq_len, cp, "contiguous")
    local = narrow(config, tp)
    return batch_size * seq_len // cp * local.num_kv_heads * (local.head_dim + local.value_dim) * itemsize


@dataclass(frozen=True)
class Recipe(Checked):
    """How many bytes each parameter costs, by kind. `moment_bytes` is both of Adam's moments together."""

    name: str
    param_bytes: Count
    grad_bytes: Count
    master_bytes: Count
    moment_bytes: Count
    compute_bytes: Count  # size of one activation number
    note: str = ""

    @property
    def bytes_per_param(self) -> int:
        """Bytes of model state a parameter, with AdamW."""
        return self.param_bytes + self.grad_bytes + self.master_bytes + self.moment_bytes


_RECIPES = (
    Recipe("fp32", 4, 4, 0, 8, 4, "everything in FP32"),
    Recipe("autocast", 4, 4, 0, 8, 2, "FP32 states; matmuls run on BF16 casts, which are kept during the step"),
    Recipe("bf16-master", 2, 2, 4, 8, 2, "BF16 parameters and gradients, FP32 master copy (ZeRO paper, playbook)"),
    Recipe("bf16-master-fp32-grads", 2, 4, 4, 8, 2, "gradients kept in FP32 only (Megatron-Core's estimator: 18)"),
    Recipe("bf16-master-both-grads", 2, 6, 4, 8, 2, "a BF16 gradient and its FP32 accumulator (playbook: 20)"),
    Recipe("fp16-master-fp32-grads", 2, 4, 4, 8, 2, "FP16 with loss scaling: the same bytes as with BF16"),
    Recipe("bf16", 2, 2, 0, 4, 2, "pure BF16, moments too: small updates are lost"),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
FP64 = Recipe("fp64", 8, 8, 0, 16, 8, "everything in FP64, in which equality to one process is tested")
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "sgd-momentum", "sgd")


def recipe_of(recipe: Recipe | str) -> Recipe:
    """Look a recipe up by its name, ValueError if it is unknown; a Recipe passes through."""
    if isinstance(recipe, Recipe):
        return recipe
    one_of("recipe", recipe, tuple(RECIPES))
    return RECIPES[recipe]


@dataclass(frozen=True)
class StateBytes(Checked):
    """Bytes of the states by kind. FP32 master parameters count as optimizer."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes

    @property
    def total(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


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
    return _count(lora_shapes(config, lora))


@checked
def state_bytes(
    config: ModelConfig,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    lora: LoRA | None = None,
    step_counters: bool = False,
) -> StateBytes:
    """Predict the bytes of parameters, gradients and optimizer states; with `lora` the adapters alone have all three.

    Bytes    N * (param + grad + master + moments); `step_counters` adds those of torch's optimizers, in host memory
    Raises   ValueError if recipe or optimizer is unknown
    """
    recipe, base = recipe_of(recipe), parameter_shapes(config)
    trained = lora_shapes(config, lora) if lora else base
    count, parameters = _count(trained), recipe.param_bytes * _count(base | trained)
    if lora is not None and lora.four_bits:
        for shape, copies in quantized_shapes(config).values():  # NF4: 64 numbers have an 8-bit scale, 256 scales one
            numel, blocks = prod(shape), -(-prod(shape) // 64)
            in_four_bits = -(-numel // 2) + blocks + 4 * -(-blocks // 256)
            parameters -= copies * (recipe.param_bytes * numel - in_four_bits)
    of_each = [(n, optimizer_bytes(shape, recipe, optimizer, step_counters)) for shape, n in trained.values()]
    return StateBytes(parameters, recipe.grad_bytes * count, sum(copies * size for copies, size in of_each))


def optimizer_bytes(shape: tuple[int, ...], recipe: Recipe, optimizer: str, step_counters: bool = False) -> int:
    """Bytes that an optimizer keeps of one tensor: master copy and moments; ValueError if it is unknown.

    8-bit Adam keeps an FP32 scale for each 256 numbers of each moment; tensors below 4096 numbers stay in FP32.
    Adafactor keeps no first moment, and of the second one number a row and one a column.

    step_counters   torch's 4 bytes as well, which the course's MasterAdamW has not
    Source   Dettmers et al. 2021 (arXiv:2110.02861), bitsandbytes' defaults; Shazeer and Stern 2018 (arXiv:1804.04235)
    """
    one_of("optimizer", optimizer, OPTIMIZERS)
    numel, of_one = prod(shape), recipe.moment_bytes // 2
    moments = {
        "adamw": recipe.moment_bytes * numel,
        "adamw-8bit": 2 * (numel + 4 * -(-numel // 256)) if numel >= 4096 else 8 * numel,
        "adafactor": of_one * (sum(shape) if len(shape) == 2 else numel),
        "sgd-momentum": of_one * numel,
        "sgd": 0,
    }[optimizer]
    counter = 4 * (step_counters and recipe.master_bytes == 0 and optimizer in ("adamw", "adafactor"))
    return recipe.master_bytes * numel + moments + counter


# ---- ZeRO: what each of dp data-parallel ranks holds
#
# With P parameters, 2 bytes each for parameter and gradient, 12 for an FP32 master copy and Adam's two moments:
#
#     stage   a rank holds             limit    sends a step (one micro-batch)
#     0       2P + 2P + 12P            16 P     2 P    all-reduce of gradients
#     1       2P + 2P + 12P/dp          4 P     2 P    reduce-scatter, all-gather of parameters
#     2       2P + (2P + 12P)/dp        2 P     2 P    the same, each bucket during backward
#     3       (2P + 2P + 12P)/dp          0     3 P    all-gather twice, reduce-scatter

Place = Literal["device", "host", "disk"]
Ranks = Annotated[int, partial(whole, least=1)]  # one only divides by them: 10**9 shows the limit
_ZeroStage = Literal[0, 1, 2, 3]  # 0: plain data parallelism
_SHARDED_FROM_STAGE = (3, 2, 1)  # parameters, gradients, optimizer


@checked
def zero_state_bytes(
    units: Sequence[int],
    stage: _ZeroStage,
    dp_size: Size,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    step_counters: bool = False,
) -> StateBytes:
    """Predict what each rank holds between two steps, by kind, of units of so many elements, padding included.

    Raises   ValueError if stage, recipe or optimizer is unknown, or the optimizer cannot work on flat shards
    """
    recipe = recipe_of(recipe)
    if optimizer == "adafactor" and stage:
        raise ValueError(
            "optimizer 'adafactor' keeps sums of a matrix's rows and columns, which flat shards cut apart; "
            "choose adamw, adamw-8bit, sgd-momentum, sgd"
        )
    whole = [padded(unit, dp_size) for unit in units] if stage else list(units)
    shards = [padded(unit, dp_size) // dp_size for unit in units]
    parameters, gradients, states = (shards if stage >= first else whole for first in _SHARDED_FROM_STAGE)
    of_optimizer = sum(optimizer_bytes((n,), recipe, optimizer, step_counters and not stage) for n in states)
    return StateBytes(recipe.param_bytes * sum(parameters), recipe.grad_bytes * sum(gradients), of_optimizer)


def padded(numel: int, ranks: int) -> int:
    """The next multiple of `ranks`: what a flat of so many elements occupies, all ranks together."""
    return -(-numel // ranks) * ranks


def wire_grad_bytes(recipe: Recipe) -> int:
    """Bytes of a gradient's number on the wire: FP32 where gradients are kept in FP32, one of the two if both are."""
    return min(recipe.grad_bytes, max(recipe.param_bytes, 4))


@checked
def zero_bytes_per_parameter(
    stage: _ZeroStage, dp_size: Ranks, recipe: Recipe | str = "bf16-master", optimizer_bytes: Amount | None = None
) -> float:
    """Bytes of state a parameter and rank, as the papers draw them: no units, no padding.

    optimizer_bytes   master and moments together, the paper's K; the recipe's by default
    Source   Rajbhandari et al. 2020 (arXiv:1910.02054), section 5 and figure 1
    """
    recipe = recipe_of(recipe)
    optimizer = recipe.master_bytes + recipe.moment_bytes if optimizer_bytes is None else optimizer_bytes
    kinds = zip((recipe.param_bytes, recipe.grad_bytes, optimizer), _SHARDED_FROM_STAGE, strict=True)
    return sum(size / dp_size if stage >= first else size for size, first in kinds)


@dataclass(frozen=True)
class Offload(Checked):
    """Where a rank's shards wait: "device", "host" or "disk". Parameters elsewhere need stage 3.

    activations   where they wait between the forward and the backward pass of their micro-batch
    Source        Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857)
    """

    optimizer: Place = "device"
    parameters: Place = "device"
    activations: Place = "device"


@checked
def offload_link_bytes(states: StateBytes, offload: Offload, micro_batches: Size = 1) -> dict[str, int]:
    """Count the bytes that cross each link, one way, in one step of one rank whose shards are `states`.

    The optimizer runs where its states are loaded: on the host. Its gradients go down; its new parameters come up,
    unless they wait on the host or the disk as well. States on disk are read and written back. Parameters off the
    device come up for the forward pass and again for the backward pass of each micro-batch.
    """
    states_off, parameters_off = offload.optimizer != "device", offload.parameters != "device"
    used = 2 * micro_batches * states.parameters * parameters_off
    on_disk, optimizer = offload.parameters == "disk", states.optimizer * (offload.optimizer == "disk")
    return {
        "device to host": states.gradients * states_off + states.parameters * (parameters_off and not states_off),
        "host to device": states.parameters * (states_off and not parameters_off) + used,
        "disk to host": optimizer + used * on_disk,
        "host to disk": optimizer + states.parameters * on_disk,
    }
