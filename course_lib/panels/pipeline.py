"""Pipeline schedules on the clock: the chart, both bubbles, and what each rank keeps in flight (lesson 8)."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.panels.controls import controls, named
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Columns, Lanes
from course_lib.schedules import SCHEDULES, Schedule, make, simulate, stages_per_rank
from course_lib.schedules.instructions import Instruction
from course_lib.schedules.simulator import Costs, Simulation

_MOST_BOXES = 700  # more cannot be told apart in one chart
NAMES = {
    "naive": "naive: one micro-batch after the other",
    "afab": "all forward, all backward (GPipe)",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zbv": "ZBV",
    "dualpipe_v": "DualPipeV",
}
PARTS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradients"}
Times = Sequence[Sequence[tuple[Instruction, float, float]]]
TIMES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


def chart(title: str, schedule: Schedule, times: Times, stop_s: float) -> Lanes:
    """Return a lane for each rank; a rank's later stages are lighter. `times`: by rank what ran from when to when."""
    lanes = {}
    for rank, row in enumerate(times):
        stages = schedule.stages_of_rank(rank)
        shades = {stage: 0.55 * place / max(1, len(stages) - 1) for place, stage in enumerate(stages)}
        lanes[f"rank {rank}"] = [
            Box(start, stop, PARTS[one.op], str(one.micro_batch), shades[one.stage]) for one, start, stop in row
        ]
    return Lanes(title, lanes, 0.0, stop_s, "time")


def clocked(simulation: Simulation) -> Times:
    """Return what ran when, rank by rank."""
    rows = zip(simulation.schedule.instructions, simulation.times, strict=True)
    return [[(one, *time) for one, time in zip(row, times, strict=True)] for row, times in rows]


def peaks(simulation: Simulation) -> tuple[list[float], list[float]]:
    """Return for each rank its most micro-batches in flight, and its most of these and those that wait for W together.

    1 is one micro-batch through all of a rank's layers.
    """
    v, alone, together = simulation.schedule.v, [], []
    for rows in zip(simulation.live, simulation.waiting, strict=True):
        changes: dict[float, dict[int, int]] = {}
        for kind, row in enumerate(rows):
            for at, count in row:
                changes.setdefault(at, {})[kind] = count
        now, most = {}, 0
        for at in sorted(changes):
            now |= changes[at]
            most = max(most, sum(now.values()))
        alone.append(max((count for _, count in rows[0]), default=0) / v)
        together.append(most / v)
    return alone, together


def _draw_pipeline(schedule, pp, micro_batches, v, forward, input_gradient, weight_gradient, transfer) -> Shown:
    """Clock a schedule. Times are of all layers of a rank, for one micro-batch; v: stages a rank (interleaved)."""
    made = make(schedule, pp, micro_batches, v)
    boxes = sum(map(len, made.instructions))
    if boxes > _MOST_BOXES:
        raise ValueError(
            f"{boxes} instructions are more than one chart has room for ({_MOST_BOXES}); choose fewer micro-batches, "
            "ranks or stages a rank"
        )
    stages = stages_per_rank(schedule, v)
    costs = Costs(*(seconds / stages for seconds in (forward, input_gradient, weight_gradient, transfer)))
    simulation = simulate(made, costs)
    alone, together = peaks(simulation)
    said = (
        f"Ideal {sum(simulation.busy_s) / pp:.4g} (all work, no waiting), simulated {simulation.makespan_s:.4g}: idle "
        f"time is {simulation.bubble_of_ideal:.1%} of the ideal time, {simulation.bubble_of_total:.1%} of the total "
        "time. "
    )
    if simulation.back_to_back_s < simulation.makespan_s - 1e-9:
        said += (
            f"Without a barrier the next step can follow after {simulation.back_to_back_s:.4g}: then "
            f"{simulation.bubble_of_ideal_back_to_back:.1%} and {simulation.bubble_of_total_back_to_back:.1%}. "
        )
    said += (
        f"Peak: activations of {max(alone):.3g} micro-batches in 1/{pp} of the layers, as many bytes as "
        f"{max(alone) / pp:.3g} in the whole model."
    )
    if together != alone:
        said += f" With those that wait for weight gradients, at most {max(together):.3g} at once."
    pairs = zip(alone, together, strict=True)
    columns = [{"in flight": one, "waiting for weight gradients": both - one} for one, both in pairs]
    title = f"{NAMES.get(schedule, schedule)}: a bubble of {simulation.bubble_of_ideal:.1%} of the ideal time"
    lanes = chart(title, made, clocked(simulation), simulation.makespan_s)
    ranks = [f"rank {rank}" for rank in range(pp)]
    return [lanes, Columns("Most micro-batches kept at once, by rank", columns, ranks, "count", height=90)], said


PIPELINE = Panel(
    "A pipeline schedule",
    {
        "schedule": Control("schedule", tuple((NAMES.get(key, key), key) for key in SCHEDULES), "1f1b"),
        **controls(pp=(4, named(range(1, 9)))),
        **controls(micro_batches=(8, named((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)))),
        "v": Control("stages a rank", named(range(1, 5)), 1, "slider"),
        "forward": Control("forward", named(TIMES), 1.0, "slider"),
        "input_gradient": Control("input gradient", named(TIMES), 1.0, "slider"),
        "weight_gradient": Control("weight gradient", named(TIMES), 1.0, "slider"),
        "transfer": Control("transfer", named((0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)), 0.0, "slider"),
    },
    _draw_pipeline,
)
