"""What a pipeline sends: activations and their gradients at each boundary, and a tied weight's gradient at its ends."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.memory.flats import Flat, placed_by
from course_lib.memory.ranks import boundary_bytes
from course_lib.memory.states import recipe_of
from course_lib.memory.zero import wire_grad_bytes
from course_lib.run import Run
from course_lib.traffic.collectives import Call
from course_lib.traffic.data import held
from course_lib.validate import Index


def boundary_calls(run: Run, pp_rank: Index, tp_rank: Index) -> list[Call]:
    """List what a rank sends of each micro-batch: activations to the next stage, gradients to the one before.

    Two consecutive stages on the same rank send nothing. Of the schedule only v matters: with v stages per rank, v
    times the bytes or nearly. With sequence parallelism each tp rank sends its own tokens.
    """
    layout, itemsize, owners = run.layout, recipe_of(run.recipe).compute_bytes, placed_by(run.layout).rank_of_stage
    share = (layout.tp, tp_rank) if layout.sequence_parallel else (1, 0)
    payload = boundary_bytes(run.config, layout.micro_batch, run.seq_len, itemsize, layout.cp, *share)
    crossed = [(stage, stage + 1) for stage in range(len(owners) - 1) if owners[stage] != owners[stage + 1]]
    counts = {
        "activations": sum(owners[before] == pp_rank for before, _ in crossed),
        "gradients": sum(owners[after] == pp_rank for _, after in crossed),
    }
    return [Call(place, "send", payload, 2, itemsize, count) for place, count in counts.items() if count]


def tied_calls(run: Run, flats: Sequence[Flat]) -> list[Call]:
    """List the sum of a tied weight's gradient between the two ranks that have a copy of it."""
    numel, itemsize = held(flats, "tied", run.layout), wire_grad_bytes(recipe_of(run.recipe))
    return [Call("tied weight", "all_reduce", numel * itemsize, 2, itemsize)] if numel else []
