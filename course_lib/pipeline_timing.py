"""Modelled time of pipelines: seconds of each stage and transfer for the simulator, and published scaling beside it.

What a stage does is counted in FLOPs, as everywhere, at one share of the GPU's peak: forward F, and backward in its two
parts, I for the gradient of the input and W for those of the weights. A matrix costs the same in all three, attention's
scores nothing in W and twice the forward in I.

Source   Qi et al. 2024 (arXiv:2401.10241), table 1: F 24 h + 4 s, I 24 h + 8 s, W 24 h, each times s b h
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course_lib.config import ModelConfig
from course_lib.hardware import GPU, Link, peak_flops
from course_lib.layout.partition import check_layers, check_num_stages
from course_lib.memory.context import tokens_of_rank
from course_lib.memory.flats import stage_config
from course_lib.memory.pipeline import boundary_bytes
from course_lib.memory.zero import layer_units
from course_lib.schedules.bubbles import bubble
from course_lib.schedules.simulator import Costs
from course_lib.timing import (
    attention_flops_per_token,
    collective_s,
    forward_flops_per_token,
    layer_matmul_parameters,
    matmul_parameters,
)


def transfer_s(
    config: ModelConfig, batch_size: int, seq_len: int, link: Link, itemsize: int = 2, cp: int = 1, tp: int = 1
) -> float:
    """Seconds in which one micro-batch's activations, or their gradient, go from a stage to the next."""
    return collective_s("send", boundary_bytes(config, batch_size, seq_len, itemsize, cp, tp), 2, link)


def stage_flops(
    config: ModelConfig, batch_size: int, seq_len: int, layers: Sequence[int], stage: int, causal: bool = False
) -> tuple[int, int, int]:
    """FLOPs of one micro-batch on one stage: F, I, W. The head is on the last stage; an embedding has none.

    Of experts those that a token uses count; with `causal` half of the scores, as kernels skip the others.
    Raises   ValueError unless `layers` are those of the model
    """
    check_layers(config, layers)
    tokens, part = batch_size * seq_len, stage_config(config, layers, stage)
    matrices = matmul_parameters(part)
    if stage < len(layers) - 1 or config.family == "xlmr":
        matrices -= config.vocab_size * config.d_model
    scores = attention_flops_per_token(part, seq_len, causal)
    return tokens * (2 * matrices + scores), tokens * (2 * matrices + 2 * scores), tokens * 2 * matrices


def stage_costs(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    layers: Sequence[int],
    gpu: GPU,
    utilisation: float,
    link: Link,
    cp: int = 1,
    tp: int = 1,
) -> Costs:
    """What the simulator needs: seconds of each stage's F, I and W, and of a transfer; cp * tp GPUs share a stage.

    Raises   ValueError unless `layers` are those of the model, and tokens divide by cp
    """
    tokens_of_rank(seq_len, cp)
    rate = cp * tp * utilisation * peak_flops(gpu)
    each = [stage_flops(config, batch_size, seq_len, layers, stage) for stage in range(len(layers))]
    forward_s, input_s, weight_s = (tuple(flops / rate for flops in column) for column in zip(*each))
    return Costs(forward_s, input_s, weight_s, transfer_s(config, batch_size, seq_len, link, cp=cp, tp=tp))


# ------------------------------------------------------------------------------------ published scaling
def busy_share(pp: int, num_micro_batches: int) -> float:
    """Share of the time in which a rank computes under 1F1B with equal stages and free transfers: m / (m + pp - 1)."""
    return 1 - bubble("1f1b", pp, num_micro_batches).of_total


def micro_batches_of(label: str, pp: int) -> int:
    """The micro-batches that a label of `hardware.PUBLISHED_1F1B_THROUGHPUT` stands for: "pp - 1", or a number."""
    return pp - 1 if label == "pp - 1" else int(label)


def bubble_alone(published: Mapping[int, float], label: str) -> dict[int, float]:
    """What published throughput would be if the bubble were all that changes, anchored at the shortest pipeline.

    Takes and gives tokens per second and GPU by pp. What was measured below this is no bubble.
    """
    first = min(published)
    without_bubble = published[first] / busy_share(first, micro_batches_of(label, first))
    return {pp: without_bubble * busy_share(pp, micro_batches_of(label, pp)) for pp in published}


def balanced_layers(config: ModelConfig, num_stages: int, by: str = "parameters", seq_len: int = 4096) -> list[int]:
    """Layers of each stage such that the largest stage is as small as can be, embedding and head counted.

    by       "parameters", or "flops": an embedding costs no multiplication, a head as much as its matrix
    Raises   ValueError if a stage would have no layer, or for another word
    """
    check_num_stages(config.num_layers, num_stages)
    embed, layer, *_, end = layer_units(config)
    end += config.vocab_size * config.d_model if config.tied and num_stages > 1 else 0  # a tied head is a copy there
    if by == "flops":
        embed, end = 0, 2 * config.vocab_size * config.d_model
        layer = 2 * layer_matmul_parameters(config) + 4 * config.num_heads * config.head_dim * seq_len
        assert end + config.num_layers * layer == forward_flops_per_token(config, seq_len)
    elif by != "parameters":
        raise ValueError(f"by is {by!r}; choose from parameters, flops")
    layers = [1] * num_stages
    weights = [layer] * num_stages
    weights[0] += embed
    weights[-1] += end
    for _ in range(config.num_layers - num_stages):
        lightest = weights.index(min(weights))
        layers[lightest] += 1
        weights[lightest] += layer
    return layers
