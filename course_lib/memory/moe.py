"""A mixture of experts' arithmetic: parameters in all and for one token, and which ranks hold them.

Of dp ranks ep neighbours share the experts among them, so dp / ep ranks hold the same ones; everything else is on all.

                         each rank holds                        ZeRO shards it over
    attention, norms,
    router, shared, ends     whole                                  dp
    experts                  E / ep of them                         dp / ep
    tp                       divides attention, every MLP and expert, the vocabulary; not norms and router
    folded                   tp does not divide experts: their ep neighbours are among dp x tp ranks, and dp tp / ep
                             ranks hold the same ones
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig
from course_lib.layout.partition import piece_sizes
from course_lib.memory.states import parameter_shapes
from course_lib.memory.tensor import narrow
from course_lib.validate import Index, Size, checked


@checked
def active_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses: all but the experts that it did not choose. Without experts, all.

    The embedding counts whole, as published figures count it: 12.9 billion of Mixtral 8x7B's 46.7.
    """
    idle = config.moe.num_experts - config.moe.top_k if config.moe else 0
    unused = sum(
        prod(shape) * copies // config.moe.num_experts * idle
        for name, (shape, copies) in parameter_shapes(config).items()
        if name.startswith("moe.experts.")
    )
    return sum(prod(shape) * copies for shape, copies in parameter_shapes(config).values()) - unused


@checked
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


@checked
def narrow_experts(config: ModelConfig, tp_size: Size, tp_rank: Index = 0) -> ModelConfig:
    """What one rank of tensor parallelism runs: fewer heads, narrower MLPs and experts; the first, a widest one."""
    return _narrow_experts(config, tp_size, tp_rank)


@lru_cache(maxsize=256)
def _narrow_experts(config: ModelConfig, tp_size: int, tp_rank: int) -> ModelConfig:
    local = narrow(replace(config, moe=None), tp_size, tp_rank)
    moe = config.moe and replace(config.moe, d_expert=piece_sizes(config.moe.d_expert, tp_size)[tp_rank])
    return replace(local, moe=moe)
