"""Every collective of one training step, for any rank of any run, by axis: what all other files here add up to.

    axis        what                                                        listed by
    pp          activations and their gradients at each boundary;           here
                a tied weight's gradient between the two ends
    tp          of my stages' layers, and of the ends that I have;          tensor.py
                once a step gradients of norms (with SP) and of heads that ranks share
    cp          attention of my stages' layers                              context.py
    ep          rows to their experts and back, of my layers with experts   experts.py
    data        gradients, and with ZeRO parameters; the experts' load      data.py
    expert_dp   gradients and parameters of experts                         data.py
    shard, replicate, expert_shard, expert_replicate: with replicas (HSDP)  data.py
    world       the lengths of micro-batches, the loss, and one number to clip

All sizes are those of one rank: S / cp tokens (with SP / tp between stages), heads and features / tp, experts / ep.
Folded, whole experts get rows of S / (cp tp) tokens, and nothing is gathered over tp for them.
With ZeRO a rank holds shards, so what is summed beyond ZeRO's own sums is a shard.
"""

from collections.abc import Sequence
from dataclasses import replace

from course_lib.layout.mesh import REPLICA_AXES
from course_lib.layout.partition import piece_sizes, stage_config
from course_lib.memory.flats import flats_of, layers_of
from course_lib.memory.states import wire_grad_bytes
from course_lib.run import Run, recipe_of
from course_lib.traffic.collectives import Call, sent_bytes
from course_lib.traffic.context import attention_calls
from course_lib.traffic.data import gradient_calls, held, load_calls
from course_lib.traffic.experts import expected_calls, routed_calls
from course_lib.traffic.routing import Routing
from course_lib.traffic.tensor import partial_gradient_calls, tensor_calls
from course_lib.validate import Index, checked

AXES = ("pp", "tp", "cp", "ep", "data", "expert_dp", *REPLICA_AXES, "world")
_LENGTH_BYTES = 8  # of a micro-batch, int64, as the longest and as the shortest of all ranks

Calls = dict[str, list[Call]]


@checked
def calls(run: Run, rank: Index = 0, clip: bool = False, routings: Sequence[Routing] | None = None) -> Calls:
    """List every collective that a rank calls in one step, by axis; an axis of one rank has none.

    clip       whether gradients are clipped
    routings   the choices of each of this rank's layers with experts and each micro-batch, for exact bytes of ep;
               without them the rows are expected ones, of tokens that choose evenly
    """
    layout, place = run.layout, run.layout.mesh.coordinates(rank)
    stages = layout.stages_of_rank(place["pp"])
    itemsize = recipe_of(run.recipe).param_bytes
    flats = flats_of(run.config, layout, place["pp"], place["tp"], itemsize, run.lora)
    by_axis: Calls = {axis: [] for axis in AXES}
    for stage in stages:
        for axis, of_stage in stage_calls(run, stage).items():
            by_axis[axis] += [replace(call, count=call.count * layout.micro_batches) for call in of_stage]
    if routings is not None:
        by_axis["ep"] = routed_calls(run, routings, layout.members(rank)["ep"].index(rank))
    for call in _boundary_calls(run, place["pp"], place["tp"]):
        by_axis["pp"].append(replace(call, count=call.count * layout.micro_batches))
    if tied := held(flats, "tied", layout):  # its gradient is summed between the two ranks that have a copy of it
        grad_bytes = wire_grad_bytes(recipe_of(run.recipe))
        by_axis["pp"].append(Call("tied weight", "all_reduce", tied * grad_bytes, 2, grad_bytes))
    by_axis["tp"] += partial_gradient_calls(run, flats)
    for axis, of_axis in (*load_calls(run, stages).items(), *gradient_calls(run, flats).items()):
        by_axis[axis] += of_axis
    world_size, number = layout.world_size, max(recipe_of(run.recipe).compute_bytes, 4)
    names = ["loss", "norm of gradients"] if clip else ["loss"]
    lengths = Call("lengths", "all_reduce", 2 * _LENGTH_BYTES * layout.micro_batches, world_size, _LENGTH_BYTES)
    by_axis["world"] = [*(Call(name, "all_reduce", number, world_size, number) for name in names), lengths]
    return {axis: [call for call in of_axis if call.group_size > 1] for axis, of_axis in by_axis.items()}


@checked
def sent(run: Run, rank: Index = 0, clip: bool = False, routings: Sequence[Routing] | None = None) -> dict[str, int]:
    """Count the bytes that a rank sends in one step, by axis, as `ByteMeter(axes=engine.axes).by_axis` has them."""
    places = {axis: ranks.index(rank) for axis, ranks in run.layout.members(rank).items()} | {"world": rank}
    places["pp"] = int(places["pp"] != 0)  # of a tied weight's two ranks: what is sent on takes no place
    listed = calls(run, rank, clip, routings).items()
    return {axis: sent_bytes(of_axis, places[axis]) for axis, of_axis in listed if of_axis}


def stage_calls(run: Run, stage: Index) -> Calls:
    """List what one micro-batch makes a rank of one stage send inside it, forward and backward: over tp, cp and ep."""
    layers = layers_of(run.config, run.layout)
    part = stage_config(run.config, layers, stage)
    return {
        "tp": tensor_calls(run, part, (stage == 0, stage == len(layers) - 1)),
        "cp": [replace(call, count=call.count * part.num_layers) for call in attention_calls(run)],
        "ep": expected_calls(run, part.num_moe_layers),
    }


def _boundary_calls(run: Run, pp_rank: int, tp_rank: int) -> list[Call]:
    """List what a rank sends of each micro-batch: activations to the next stage, gradients to the one before. Two
    consecutive stages on the same rank send nothing. Of the schedule only v matters: with v stages per rank, v times
    the bytes or nearly. With sequence parallelism each tp rank sends its own tokens."""
    layout, itemsize, owners = run.layout, recipe_of(run.recipe).compute_bytes, run.layout.rank_of_stage
    share = (layout.tp, tp_rank) if layout.sequence_parallel else (1, 0)
    tokens = piece_sizes(run.seq_len // layout.cp, share[0])[share[1]]
    payload = layout.micro_batch * tokens * run.config.d_model * itemsize
    crossed = [(stage, stage + 1) for stage in range(len(owners) - 1) if owners[stage] != owners[stage + 1]]
    counts = {
        "activations": sum(owners[before] == pp_rank for before, _ in crossed),
        "gradients": sum(owners[after] == pp_rank for _, after in crossed),
    }
    return [Call(place, "send", payload, 2, itemsize, count) for place, count in counts.items() if count]
