"""A model cut into pipeline stages: how many layers each has, and which parameters.

Equal numbers of layers are not equal stages: of 8B's 8 billion parameters embedding and head are 0.5 each, as much as
2.4 layers. Parameters are divided by stage, activations hardly: rank 0 of 1F1B has started pp micro-batches before the
first comes back, each in L / pp layers.

    schedule                    rank i keeps, in micro-batches of its own layers     rank 0, in layers of the model
    naive                       1                                                    L / pp
    all-forward-all-backward    m                                                    m / pp  L
    1F1B                        min(m, pp - i)                                       L          if m >= pp
    interleaved, v a rank       more, as more are started ahead                      (1 + (pp - 1) / (pp v)) L

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Korthikanti et al. 2022 (arXiv:2205.05198), 4.2.3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from course_lib.config import ModelConfig
from course_lib.flops import forward_flops_per_token, head_parameters
from course_lib.layout import Layout
from course_lib.layout.partition import check_layers, check_num_stages
from course_lib.memory.flats import tensors_of
from course_lib.memory.zero import layer_units
from course_lib.schedules.instructions import Schedule
from course_lib.validate import Size, checked


@checked
def stage_parameters(config: ModelConfig, layers: Sequence[int]) -> list[int]:
    """Count the parameters of each stage; ValueError unless `layers` are those of the model.

    Together they are the model's, and a tied embedding's copy.
    """
    check_layers(config, layers)
    layout = Layout(pp=len(layers), layers_of_stage=tuple(layers))
    return [sum(one.numel for one in tensors_of(config, layout, stage)) for stage in range(len(layers))]


@checked
def balanced_layers(
    config: ModelConfig, num_stages: Size, by: Literal["parameters", "flops"] = "parameters", seq_len: Size = 4096
) -> list[int]:
    """Divide layers so that the largest stage is as small as possible, embedding and head counted.

    by       "parameters", or "flops": an embedding costs no multiplication, a head as much as its matrix
    Raises   ValueError if a stage would have no layer, or for another word
    """
    check_num_stages(config.num_layers, num_stages)
    embed, layer, *_, end = layer_units(config)
    end += config.vocab_size * config.d_model if config.tied and num_stages > 1 else 0  # a tied head is a copy there
    if by == "flops":
        embed, end = 0, 2 * head_parameters(config)
        layer = (forward_flops_per_token(config, seq_len) - end) // config.num_layers
    layers, weights = [1] * num_stages, [layer] * num_stages
    weights[0] += embed
    weights[-1] += end
    for _ in range(config.num_layers - num_stages):
        lightest = weights.index(min(weights))
        layers[lightest] += 1
        weights[lightest] += layer
    return layers


def live_layers(schedule: Schedule, layers: Sequence[int]) -> list[int]:
    """For each rank the layers whose activations it keeps at once, one micro-batch each: compare with num_layers."""
    change = {"F": 1, "B": -1, "I": -1, "W": 0}  # F saves, B or I frees, W has nothing of these
    return [max(accumulate(change[one.op] * layers[one.stage] for one in row)) for row in schedule.instructions]
