"""How the parts of a model are divided over ranks: elements, heads, layers, and which numbers of ranks suit them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from course_lib.config import ModelConfig
from course_lib.validate import Amount, Count, Size, checked, one_of

CP_METHODS = ("ring", "all_gather", "ulysses")  # how ranks of cp exchange keys and values


@checked
def piece_sizes(size: Count, parts: Size) -> list[int]:
    """How `size` things are cut into parts: ceil(size / parts) each, as long as there are any."""
    width = -(-size // parts)
    return [max(0, min(width, size - part * width)) for part in range(parts)]


@checked
def check_heads(num_heads: Size, num_kv_heads: Size, tp: Size) -> None:
    """Raises ValueError unless query heads divide, and key/value heads divide or are copied evenly."""
    N, K = num_heads, num_kv_heads
    if N % tp or (K % tp and tp % K):
        fitting = [size for size in range(1, N + 1) if N % size == 0 and (K % size == 0 or size % K == 0)]
        advice = f"choose tp from {', '.join(map(str, fitting))}"
        if N % tp:
            raise ValueError(f"num_heads ({N}) must be divisible by tp ({tp}); {advice}")
        raise ValueError(f"num_kv_heads ({K}) must be divisible by tp ({tp}), or divide it; {advice}")


@checked(tp_size=Size)
def kv_replication(config: ModelConfig, tp_size: int) -> int:
    """How many ranks have the same key/value head: more than one where there are more ranks than heads."""
    return max(1, tp_size // config.num_kv_heads)


@checked
def even_layers(num_layers: Size, num_stages: Size) -> list[int]:
    """Layers of each stage, as equal as can be; where they do not divide, the first stages have one more."""
    if num_stages > num_layers:
        raise ValueError(
            f"{num_stages} stages for {num_layers} layers: each stage needs one layer or more; choose 1 to {num_layers}"
        )
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def layers_by_cost(config: ModelConfig, num_stages: Size, head_cost: Amount = 0.95) -> list[int]:
    """Layers of each stage as nanotron cuts a model: a stage is full once it has its share of the parameters.

    head_cost   of the head's parameters that count: over 16 stages the last one has it alone
    Source      nanotron, models/llama.py, get_block_compute_costs
    """
    D, H = config.d_model, config.head_dim
    layer = 2 * D * H * (config.num_heads + config.num_kv_heads) + 3 * D * config.d_ff
    costs = [0, *[layer] * config.num_layers, head_cost * config.vocab_size * D]
    counts, reached, stage = [0] * num_stages, 0, 0
    for index, cost in enumerate(costs):
        reached += cost
        counts[stage] += 0 < index <= config.num_layers
        if stage < num_stages - 1 and reached * num_stages >= sum(costs) * (stage + 1):
            stage += 1
    return counts


@checked
def fewer_at_the_ends(num_layers: Size, num_stages: Size) -> list[int]:
    """One layer less on the first and on the last stage, which have the embedding and the head: 405B's 126 over 16.

    Source   Llama Team 2024 (arXiv:2407.21783), section 3.3.2
    """
    each, left = divmod(num_layers + 2, num_stages)
    if left or num_stages < 2 or each < 2:
        raise ValueError(
            f"num_layers + 2 ({num_layers + 2}) must be a multiple of the stages ({num_stages}, two or more), with at "
            "least 2 for each; choose another number of either, or give layers_of_stage"
        )
    return [each - 1, *[each] * (num_stages - 2), each - 1]


@checked
def check_layers(config: ModelConfig, layers: Sequence[Count], least: Count = 1) -> None:
    """Raises ValueError unless each stage has so many layers at least, and all together have the model's."""
    if sum(layers) != config.num_layers or min(layers) < least:
        raise ValueError(f"layers {list(layers)} must each be {least} or more, and {config.num_layers} together")


def stage_config(config: ModelConfig, layers: Sequence[int], stage: int) -> ModelConfig:
    """The layers of a stage, dense ones first, as a model with both ends; of dense layers alone it has no experts."""
    one_of("stage", stage, range(len(layers)))
    return _layers_of_config(config, layers[stage], sum(layers[:stage]))


@lru_cache(maxsize=1024)
def _layers_of_config(config: ModelConfig, num_layers: int, before: int) -> ModelConfig:
    moe = config.moe
    if moe is not None:
        end = before + num_layers
        dense = num_layers - config.moe_layers_before(end) + config.moe_layers_before(before)
        moe = replace(moe, first_dense_layers=dense, every=1) if dense < num_layers else None
    return replace(config, num_layers=num_layers, moe=moe)


@checked
def check_ulysses(num_heads: Size, num_kv_heads: Size, cp_size: Size) -> None:
    """Raises ValueError unless every rank gets whole heads, of queries and of keys and values."""
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads % cp_size:
            fitting = [size for size in range(1, heads + 1) if num_heads % size == 0 and num_kv_heads % size == 0]
            inner = max(size for size in fitting if cp_size % size == 0)  # a ring outside makes more ranks possible
            both = f", or both: Ulysses over {inner} inside, a ring over {cp_size // inner} outside" * (inner > 1)
            raise ValueError(
                f"{name} ({heads}) must be divisible by cp ({cp_size}): Ulysses gives each rank whole heads; choose "
                f'cp from {", ".join(map(str, fitting))}, or method="ring", which has no such limit{both}'
            )
