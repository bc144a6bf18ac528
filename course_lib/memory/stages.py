"""A model cut into pipeline stages: how many layers each has, and which parameters.

A stage is a run of consecutive layers; the first has the embedding as well, the last the final norm and the head. Equal
numbers of layers are therefore not equal stages: of 8B's 8 billion parameters embedding and head are 0.5 each, as much
as 2.4 layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.config import ModelConfig
from course_lib.flops import forward_flops_per_token, head_parameters
from course_lib.layout.partition import check_layers, check_num_stages
from course_lib.memory.zero import buckets_of, layer_units, tensor_sizes_by_part


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


def balanced_layers(config: ModelConfig, num_stages: int, by: str = "parameters", seq_len: int = 4096) -> list[int]:
    """Divide layers so that the largest stage is as small as possible, embedding and head counted.

    by       "parameters", or "flops": an embedding costs no multiplication, a head as much as its matrix
    Raises   ValueError if a stage would have no layer, or for another word
    """
    check_num_stages(config.num_layers, num_stages)
    embed, layer, *_, end = layer_units(config)
    end += tied_copy(config, num_stages)
    if by == "flops":
        embed, end = 0, 2 * head_parameters(config)
        layer = (forward_flops_per_token(config, seq_len) - end) // config.num_layers
    elif by != "parameters":
        raise ValueError(f"by is {by!r}; choose from parameters, flops")
    layers, weights = [1] * num_stages, [layer] * num_stages
    weights[0] += embed
    weights[-1] += end
    for _ in range(config.num_layers - num_stages):
        lightest = weights.index(min(weights))
        layers[lightest] += 1
        weights[lightest] += layer
    return layers


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
