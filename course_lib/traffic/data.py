"""What data parallelism and ZeRO send once a step, or once a micro-batch: gradients, and with ZeRO parameters.

In units of P (dp - 1) / dp elements, with m micro-batches:

    zero_stage 0    2          an all-reduce of gradients at the end, bucket by bucket
    zero_stage 1    2          reduce-scatter at the end, all-gather of new parameters
    zero_stage 2    m + 1      reduce-scatter after each micro-batch: no rank could keep the sum of all gradients
    zero_stage 3    3 m        parameters gathered for the forward and for the backward pass of each micro-batch

Gradients of experts are summed over the ranks that have the same experts, all others over data.

Source   Rajbhandari et al. 2020 (arXiv:1910.02054), section 7
"""

from collections.abc import Sequence
from dataclasses import replace

from course_lib.layout import Layout
from course_lib.layout.partition import stage_config
from course_lib.memory.flats import Flat, layers_of
from course_lib.memory.states import wire_grad_bytes
from course_lib.run import Run, recipe_of
from course_lib.traffic.collectives import Call
from course_lib.validate import checked

_LOAD_BYTES = 8  # how many tokens chose an expert, int64


def gradient_calls(run: Run, flats: Sequence[Flat]) -> dict[str, list[Call]]:
    """List the sums of gradients and the gathers of parameters of one step, by axis: "data" and "expert_dp".

    With replicas (HSDP) both are over the ranks of one replica, "shard" and "expert_shard", and the gradients of shards
    are summed over "replicate" and "expert_replicate" once a step.
    """
    layout, grad_bytes, replicas = run.layout, wire_grad_bytes(recipe_of(run.recipe)), run.layout.dp_replicate
    calls: dict[str, list[Call]] = {axis: [] for axis in layout.shard_axes}
    summed = [0, 0]
    for flat in flats:
        is_expert, numel = flat.kind == "experts", flat.padded if layout.zero_stage else flat.numel
        for call in flat_calls(run, numel // flat.count, flat.ranks):
            calls[layout.shard_axes[is_expert]].append(replace(call, count=call.count * flat.count))
        summed[is_expert] += numel // flat.ranks
    for axis, numel in zip(("replicate", "expert_replicate"), summed, strict=True):
        if replicas > 1 and numel:
            calls[axis] = [Call("gradients of replicas", "all_reduce", numel * grad_bytes, replicas, grad_bytes)]
    return calls


def flat_calls(run: Run, numel: int, ranks: int, zero_stage: int | None = None) -> list[Call]:
    """List the collectives of one step for a flat parameter; with another zero_stage than the layout's if told."""
    recipe, m, grad_bytes = recipe_of(run.recipe), run.layout.micro_batches, wire_grad_bytes(recipe_of(run.recipe))
    zero_stage = run.layout.zero_stage if zero_stage is None else zero_stage
    if zero_stage == 0:
        return [Call("gradients", "all_reduce", numel * grad_bytes, ranks, grad_bytes)]
    scatters, gathers = {1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero_stage]
    return [
        Call("gradients", "reduce_scatter", numel * grad_bytes, ranks, grad_bytes, scatters),
        Call("parameters", "all_gather", numel * recipe.param_bytes, ranks, recipe.param_bytes, gathers),
    ]


@checked
def held(flats: Sequence[Flat], kind: str, layout: Layout) -> int:
    """Count the elements of one kind whose gradients this rank has after ZeRO's sums."""
    return sum(flat.padded // flat.ranks if layout.zero_stage else flat.numel for flat in flats if flat.kind == kind)


def load_calls(run: Run, stages: Sequence[int]) -> dict[str, list[Call]]:
    """List the sums of the experts' load, for each auxiliary loss, or once a step for biases.

    They are over data, and folded over tp too, whose ranks then route their own tokens.
    """
    moe, layout = run.config.moe, run.layout
    times = {"aux_loss": layout.micro_batches, "bias": 1}.get(moe.balancing, 0) if moe else 0
    layers = layers_of(run.config, layout)
    count = times * sum(stage_config(run.config, layers, stage).num_moe_layers for stage in stages)
    if not count:
        return {}
    ranks = {"data": layout.data_size} | ({"tp": layout.tp} if layout.folded else {})
    size = _LOAD_BYTES * moe.num_experts
    return {axis: [Call("load of experts", "all_reduce", size, of, _LOAD_BYTES, count)] for axis, of in ranks.items()}
