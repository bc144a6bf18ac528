"""A model cut into pipeline stages: how many layers each has, and which parameters.

A stage is a run of consecutive layers; the first has the embedding as well, the last the final norm and the head. Equal
numbers of layers are therefore not equal stages: of 8B's 8 billion parameters embedding and head are 0.5 each, as much
as 2.4 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from course_lib.config import ModelConfig
from course_lib.layout.partition import check_layers
from course_lib.memory.zero import buckets_of, layer_units, tensor_sizes_by_part
from course_lib.validate import one_of


def stage_config(config: ModelConfig, layers: Sequence[int], stage: int) -> ModelConfig:
    """The layers of a stage as a model of their own: dense ones first, where the model's first layers are dense.

    Both ends are in it, whatever the stage. A stage of dense layers alone has no experts.
    """
    one_of("stage", stage, range(len(layers)))
    moe = config.moe
    if moe is not None:
        dense = max(0, moe.first_dense_layers - sum(layers[:stage]))
        moe = replace(moe, first_dense_layers=dense) if dense < layers[stage] else None
    return replace(config, num_layers=layers[stage], moe=moe)


def stage_units(config: ModelConfig, layers: Sequence[int], stage: int) -> list[int]:
    """Parameters of a stage, unit by unit: embedding if it is the first, blocks, norm and head if it is the last.

    A tied head is the embedding's weight; where the two are on different stages the last has a copy.
    Raises   ValueError unless `layers` are those of the model
    """
    check_layers(config, layers)
    embed, block, *_, end = layer_units(config)
    first, last = stage == 0, stage == len(layers) - 1
    before, after = [embed] * first, [end + tied_copy(config, len(layers))] * last
    return [*before, *[block] * layers[stage], *after]


def stage_parameters(config: ModelConfig, layers: Sequence[int]) -> list[int]:
    """Parameters of each stage. Together they are the model's, and a tied embedding's copy."""
    return [sum(stage_units(config, layers, stage)) for stage in range(len(layers))]


def tied_copy(config: ModelConfig, num_stages: int) -> int:
    """Count the parameters of a tied embedding's second copy, on the last of several stages."""
    return config.vocab_size * config.d_model if config.tied and num_stages > 1 else 0


def rank_tensors(local: ModelConfig, layers: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Numbers in each tensor of a rank. Both ends of a tied model on one rank share their weight."""
    before, block, after = tensor_sizes_by_part(local)
    first, last = 0 in stages, len(layers) - 1 in stages
    copy = [tied_copy(local, len(layers))] if last and not first and local.tied else []
    return before * first + block * sum(layers[stage] for stage in stages) + (after + copy) * last


def rank_units(
    tensors: Sequence[int], local: ModelConfig, num_blocks: int, ends: tuple[bool, bool], zero_stage: int, itemsize: int
) -> list[int]:
    """ZeRO's units of a rank: a tensor each, buckets, or what comes before, each block, what comes after."""
    if zero_stage == 0:
        return list(tensors)
    if zero_stage < 3:
        return buckets_of(tensors, itemsize)
    before, block, _ = tensor_sizes_by_part(local)
    embed, blocks = sum(before) * ends[0], num_blocks * sum(block)
    return [*[embed] * ends[0], *[sum(block)] * num_blocks, *[sum(tensors) - embed - blocks] * ends[1]]
