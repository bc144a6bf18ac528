"""Everything that one rank of a layout sends in one optimizer step, axis by axis: the sum of what the chapters count.

    calls = five_d_calls(config, layout, seq_len, rank=0)
    {axis: sent_bytes(calls[axis], place_in(layout, axis, rank)) for axis in calls}     # or: five_d_sent(...)

    axis        what                                                        counted by
    pp          activations and their gradients at each boundary;           traffic.pipeline_calls
                a tied weight's gradient between the two ends
    tp          of my stages' layers, and of the ends that I have;          traffic.tensor_parallel_calls
                once a step gradients of norms (with SP) and of heads that ranks share
    cp          attention of my stages' layers                              traffic.attention_calls
    ep          rows to their experts and back, of my layers with experts   routing.moe_traffic
    data        gradients, and with ZeRO parameters; the experts' load      traffic.zero_calls
    expert_dp   the same of experts                                         traffic.zero_calls
    shard       both over the ranks of one replica, where there are         traffic.zero_calls
    replicate   several; then the shards' gradients once a step; of experts over expert_shard and expert_replicate
    world       the lengths of micro-batches, the loss, and one number to clip

What SP and ZeRO have in common: with ZeRO a rank holds shards, so what is summed beyond ZeRO's own sums is a shard.
All sizes are those of one rank: S / cp tokens (with SP / tp between stages), heads and features / tp, experts / ep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.experts import ExpertLayout
from course_lib.layout.mesh import REPLICA_AXES
from course_lib.layout.partition import copies_of_kv
from course_lib.memory.context import tokens_of_rank
from course_lib.memory.five_d import Flat, flats_of, layers_of, schedule_of
from course_lib.memory.stages import stage_config
from course_lib.memory.states import Recipe, recipe_of
from course_lib.memory.zero import wire_grad_bytes
from course_lib.traffic import Call, sent_bytes
from course_lib.traffic.odds import expected_places
from course_lib.traffic.routing import COUNT_BYTES, ID_BYTES, moe_traffic
from course_lib.traffic.step import attention_calls, pipeline_calls, tensor_parallel_calls, zero_calls

AXES = ("pp", "tp", "cp", "ep", "data", "expert_dp", *REPLICA_AXES, "world")
LENGTH_BYTES = 8  # of a micro-batch, int64, as the longest and as the shortest of all ranks
LOAD_BYTES = 8  # how many tokens chose an expert, int64

Calls = dict[str, list[Call]]
Routing = Sequence[Tensor]  # expert_Tk of each rank of an ep group: one layer, one micro-batch


def five_d_calls(
    config: ModelConfig,
    layout: Layout,
    seq_len: int,
    rank: int = 0,
    recipe: Recipe | str = "fp32",
    clip: bool = False,
    routings: Sequence[Routing] | None = None,
) -> Calls:
    """What a rank sends in one step, by axis; an axis of one rank has no calls.

    rank       of layout.mesh: `layout.mesh.rank(pp=1, tp=0, ...)` finds it by its coordinates
    clip       whether gradients are clipped
    routings   the choices of each of this rank's layers with experts and each micro-batch, for exact bytes of ep;
               without them rows are expected ones, of tokens that choose evenly
    Raises     ValueError if the model cannot lie so
    """
    layout.check_model(config, seq_len)
    recipe, here = recipe_of(recipe), layout.mesh.coordinates(rank)
    stages = schedule_of(layout).stages_of_rank(here["pp"])
    calls: Calls = {axis: [] for axis in AXES}
    for stage in stages:
        for axis, each in stage_calls(config, layout, seq_len, stage, recipe.compute_bytes).items():
            calls[axis] += [replace(call, count=call.count * layout.accumulation) for call in each]
    if routings is not None:
        place = layout.mesh.members(rank, layout.ep)["ep"].index(rank)
        calls["ep"] = _routed(config, layout, routings, place, recipe.compute_bytes)
    flats = flats_of(config, layout, here["pp"], here["tp"], recipe.param_bytes)
    calls["pp"] = boundary_calls(config, layout, seq_len, here, recipe) + _tied_calls(flats, layout, recipe)
    calls["tp"] += _partial_sums(config, layout, flats, recipe)
    calls["data"] += _balancing_calls(config, layout, stages)
    for axis, each in gradient_calls(layout, flats, recipe).items():
        calls[axis] += each
    number = max(recipe.compute_bytes, 4)
    names = ["loss", "norm of gradients"] if clip else ["loss"]
    calls["world"] = [Call(name, "all_reduce", number, layout.world_size, number) for name in names]
    lengths = 2 * LENGTH_BYTES * layout.accumulation
    calls["world"].append(Call("lengths", "all_reduce", lengths, layout.world_size, LENGTH_BYTES))
    return {axis: [call for call in each if call.group_size > 1] for axis, each in calls.items()}


def five_d_sent(
    config: ModelConfig,
    layout: Layout,
    seq_len: int,
    rank: int = 0,
    recipe: Recipe | str = "fp32",
    clip: bool = False,
    routings: Sequence[Routing] | None = None,
) -> dict[str, int]:
    """Bytes that a rank sends in one step, by axis, as `ByteMeter(axes=engine.axes).by_axis` has them."""
    calls = five_d_calls(config, layout, seq_len, rank, recipe, clip, routings)
    places = {axis: ranks.index(rank) for axis, ranks in layout.members(rank).items()}
    places["world"] = rank
    return {axis: sum(_sent(call, axis, places, layout) for call in each) for axis, each in calls.items() if each}


def _sent(call: Call, axis: str, places: dict[str, int], layout: Layout) -> int:
    """Groups that lie inside those of an axis: copies of a head are neighbours in tp, two ends of a pipeline in pp."""
    place = places[axis]
    if axis == "pp" and call.collective == "all_reduce":  # of two: which end is first follows from the mesh
        place = int(place != 0)
    return sent_bytes([call], place)


# ------------------------------------------------------------------------------------ one micro-batch on one stage
def stage_calls(config: ModelConfig, layout: Layout, seq_len: int, stage: int, itemsize: int = 2) -> Calls:
    """What one micro-batch makes a rank of one stage send inside it, forward and backward: over tp, cp and ep."""
    layers = layers_of(config, layout)
    part, tokens = stage_config(config, layers, stage), tokens_of_rank(seq_len, layout.cp)
    ends = (stage == 0, stage == len(layers) - 1)
    dense = replace(part, moe=None)
    tp_calls = tensor_parallel_calls(
        part, layout.micro_batch, tokens, layout.tp, layout.sequence_parallel, layout.regather, layout.recompute,
        itemsize, ends=ends,
    )  # fmt: skip
    cp_calls = [] if layout.cp == 1 else attention_calls(
        dense, layout.micro_batch, seq_len, layout.cp, layout.cp_method, 1, layout.recompute, itemsize, tp=layout.tp
    )  # fmt: skip
    return {
        "tp": [call for call in tp_calls if call.place not in _ONCE_A_STEP],
        "cp": [replace(call, count=call.count * part.num_layers) for call in cp_calls],
        "ep": [
            replace(call, count=call.count * part.num_moe_layers)
            for call in expected_expert_calls(part, layout, seq_len, itemsize)
        ],
    }


_ONCE_A_STEP = ("gradients of whole parameters", "key/value gradients")


def expected_expert_calls(config: ModelConfig, layout: Layout, seq_len: int, itemsize: int = 2) -> list[Call]:
    """What one layer with experts sends for one micro-batch on average, if tokens choose evenly and none is dropped.

    plain            k rows a token
    once_per_rank    a row for each rank that a token reaches, to there with k ids and weights, and back with none
    """
    if config.moe is None or layout.ep == 1:
        return []
    moe, tokens, row = config.moe, layout.micro_batch * tokens_of_rank(seq_len, layout.cp), config.d_model * itemsize
    plain = layout.expert_method == "plain"
    weights = 0 if plain else moe.top_k * max(4, itemsize)
    reached = moe.top_k if plain else expected_places(moe.num_experts, layout.ep, moe.top_k)
    again = 2 if layout.recompute == "full" else 1

    def call(place: str, rows: float, row_bytes: int, count: int = 1) -> Call:
        payload = round(rows * row_bytes / itemsize) * itemsize
        return Call(place, "all_to_all", payload, layout.ep, itemsize, count)

    counts = COUNT_BYTES * (moe.num_experts if plain else layout.ep)
    return [
        Call("counts", "all_to_all", counts, layout.ep, COUNT_BYTES, again),
        call("dispatch", tokens * reached, row + weights + (0 if plain else moe.top_k * ID_BYTES), again),
        call("combine", tokens * reached, row, again),
        call("combine backward", tokens * reached, row),
        call("dispatch backward", tokens * reached, row + weights),
    ]


def _routed(config: ModelConfig, layout: Layout, routings: Sequence[Routing], place: int, itemsize: int) -> list[Call]:
    """The same, to the byte, of real choices: what leaves this rank, layer by layer and micro-batch by micro-batch."""
    if layout.ep == 1:
        return []
    experts, calls = ExpertLayout(config.moe.num_experts, layout.ep), []
    for routing in routings:
        sent = moe_traffic(routing, experts, config.d_model, layout.expert_method, itemsize)
        forward = sent.forward(place).total_bytes * (2 if layout.recompute == "full" else 1)
        for where, size in (("experts forward", forward), ("experts backward", sent.backward(place).total_bytes)):
            calls.append(Call(where, "all_to_all", size, layout.ep, 1, to_one=True))  # all of it leaves
    return calls


# ------------------------------------------------------------------------------------ once a step
def boundary_calls(
    config: ModelConfig, layout: Layout, seq_len: int, here: dict[str, int], recipe: Recipe
) -> list[Call]:
    """Activations to the next stage and gradients to the one before, of all micro-batches."""
    if layout.pp == 1:
        return []
    calls = pipeline_calls(
        replace(config, tied=False), layout.micro_batch, seq_len, schedule_of(layout).rank_of_stage, here["pp"],
        layout.accumulation, recipe.compute_bytes, layout.cp, layout.tp if layout.sequence_parallel else 1,
        here["tp"] if layout.sequence_parallel else 0,
    )  # fmt: skip
    return [call for call in calls if call.collective == "send"]


def gradient_calls(layout: Layout, flats: Sequence[Flat], recipe: Recipe) -> Calls:
    """Gradients and ZeRO's parameters: over data, and of experts over expert_dp; with replicas over theirs."""
    calls: Calls = {}
    itemsize, replicas = wire_grad_bytes(recipe), layout.dp_replicate
    sizes = (layout.shard_size, layout.expert_shard_size)
    for axis, replicate, ranks in zip(layout.shard_axes, ("replicate", "expert_replicate"), sizes, strict=True):
        mine = [flat for flat in flats if (flat.kind == "experts") == axis.startswith("expert")]
        calls[axis] = zero_calls([flat.numel for flat in mine], layout.zero, ranks, recipe, layout.accumulation)
        if replicas > 1 and mine:
            summed = itemsize * sum(flat.padded // flat.ranks for flat in mine)
            calls[replicate] = [Call("gradients of replicas", "all_reduce", summed, replicas, itemsize)]
    return calls


def _held(flats: Sequence[Flat], kind: str, layout: Layout) -> int:
    """Numbers of one kind whose gradients this rank has after ZeRO's sums."""
    return sum(flat.padded // flat.ranks if layout.zero else flat.numel for flat in flats if flat.kind == kind)


def _tied_calls(flats: Sequence[Flat], layout: Layout, recipe: Recipe) -> list[Call]:
    numel, itemsize = _held(flats, "tied", layout), wire_grad_bytes(recipe)
    return [Call("tied weight", "all_reduce", numel * itemsize, 2, itemsize)] if numel else []


def _partial_sums(config: ModelConfig, layout: Layout, flats: Sequence[Flat], recipe: Recipe) -> list[Call]:
    """Gradients of which each tp rank has a part: all that SP leaves whole, and heads that ranks share."""
    itemsize, calls = wire_grad_bytes(recipe), []
    if layout.sequence_parallel and (numel := _held(flats, "norms", layout)):
        calls.append(Call("gradients of whole parameters", "all_reduce", numel * itemsize, layout.tp, itemsize))
    if numel := _held(flats, "kv", layout):
        copies = copies_of_kv(config, layout.tp)
        calls.append(Call("key/value gradients", "all_reduce", numel * itemsize, copies, itemsize))
    return calls


def _balancing_calls(config: ModelConfig, layout: Layout, stages: Sequence[int]) -> list[Call]:
    """The load of all ranks' tokens, one number an expert: for each auxiliary loss, or once a step for biases."""
    layers = layers_of(config, layout)
    num_layers = sum(stage_config(config, layers, stage).num_moe_layers for stage in stages)
    times = {"aux_loss": layout.accumulation, "bias": 1}.get(config.moe.balancing, 0) if config.moe else 0
    if not num_layers * times:
        return []
    payload = LOAD_BYTES * config.moe.num_experts
    return [Call("load of experts", "all_reduce", payload, layout.data_size, LOAD_BYTES, num_layers * times)]
