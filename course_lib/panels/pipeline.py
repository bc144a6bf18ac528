"""Pipelines (lesson 8): schedules on the clock, and a puzzle: to write down a pipeline's work by hand."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.panels.controls import controls, named
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Chart, columns
from course_lib.schedules import SCHEDULES, Schedule, from_lists, make, problems, simulate, stages_per_rank
from course_lib.schedules.instructions import Instruction, loop_placement, read_instruction
from course_lib.schedules.simulator import Costs, Simulation, clock
from course_lib.span import Span
from course_lib.validate import Size, checked

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


def schedule_chart(title: str, schedule: Schedule, spans: Sequence[Sequence[Span]], stop_s: float) -> Chart:
    """A lane for each rank, with what ran of its work, simulated or measured; a rank's later stages are lighter."""
    rows = {}
    for rank, row in enumerate(spans):
        stages = schedule.stages_of_rank(rank)
        shades = {stage: 0.55 * place / max(1, len(stages) - 1) for place, stage in enumerate(stages)}
        instructions = [(read_instruction(span.name, rank, f"rank {rank}"), span) for span in row]
        rows[f"rank {rank}"] = [
            Box(span.start_s, span.stop_s, PARTS[one.op], str(one.micro_batch), shades[one.stage])
            for one, span in instructions
        ]
    return Chart(title, rows, stop_s, unit="count", ground=True)


def _draw_pipeline(schedule, pp, micro_batches, v, forward, input_gradient, weight_gradient, transfer) -> Shown:
    """Clock a schedule. Times are of all layers of a rank, for one micro-batch; v: stages a rank (interleaved)."""
    made, stages = make(schedule, pp, micro_batches, v), stages_per_rank(schedule, v)
    if (boxes := sum(map(len, made.instructions))) > _MOST_BOXES:
        raise ValueError(
            f"{boxes} instructions are more than one chart has room for ({_MOST_BOXES}); choose fewer micro-batches, "
            "ranks or stages a rank"
        )
    each = (forward, input_gradient, weight_gradient, transfer)
    clocked = simulate(made, Costs(*(seconds / stages for seconds in each)))
    alone, together = ([size / stages for size in clocked.peak_bytes(1, waiting)] for waiting in (0, 1))
    said = (
        f"Ideal {sum(clocked.busy_s) / pp:.4g} (all work, no waiting), simulated {clocked.makespan_s:.4g}: idle time "
        f"is {clocked.bubble_of_ideal:.1%} of the ideal time, {clocked.bubble_of_total:.1%} of the total time. "
    )
    if clocked.back_to_back_s < clocked.makespan_s - 1e-9:
        said += (
            f"Without a barrier the next step can follow after {clocked.back_to_back_s:.4g}: then "
            f"{clocked.bubble_of_ideal_back_to_back:.1%} and {clocked.bubble_of_total_back_to_back:.1%}. "
        )
    said += (
        f"Peak: activations of {max(alone):.3g} micro-batches in 1/{pp} of the layers, as many bytes as "
        f"{max(alone) / pp:.3g} in the whole model."
    )
    if together != alone:
        said += f" With those that wait for weight gradients, at most {max(together):.3g} at once."
    most = {
        f"rank {rank}": {"in flight": one, "waiting for weight gradients": both - one}
        for rank, (one, both) in enumerate(zip(alone, together, strict=True))
    }
    title = f"{NAMES.get(schedule, schedule)}: a bubble of {clocked.bubble_of_ideal:.1%} of the ideal time"
    return [
        schedule_chart(title, clocked.schedule, clocked.rows, clocked.makespan_s),
        columns("Most micro-batches kept at once, by rank", most, "count", upright=90),
    ], said


PIPELINE = Panel(
    "A pipeline schedule",
    controls(schedule=("1f1b", tuple((NAMES.get(key, key), key) for key in SCHEDULES)), pp=(4, named(range(1, 9))))
    | controls(micro_batches=(8, named((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32))))
    | controls(v=(1, named(range(1, 5))), forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0),
    _draw_pipeline,
)

# ------------------------------------------------------------------------------------ a puzzle
RANKS, MICRO_BATCHES = 3, 4
_COSTS = Costs(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)
_RULES = "F takes 1; B takes 2, or in its place I and W, 1 each: the next rank needs only I."
_SHOWN = 4  # problems at once; the rest is counted


def as_typed(row: Sequence[Instruction]) -> str:
    """Return one rank's work as it is typed."""
    return " ".join(f"{one.op}{one.micro_batch}" for one in row)


def read_schedule(rows: Sequence[str], micro_batches: int) -> Schedule:
    """Return typed rows as a schedule with one stage a rank; commas and small letters are fine.

    Raises   ValueError for a word that cannot be read
    """
    words, placement = [row.replace(",", " ").upper().split() for row in rows], loop_placement(len(rows), 1)
    if not any(words):
        return Schedule("Your schedule", len(rows), micro_batches, placement, tuple(() for _ in rows))
    return from_lists(words, placement, micro_batches, name="Your schedule")


def left_of(row: Sequence[Instruction], micro_batches: int) -> list[str]:
    """Return what a rank still lacks, in words without the stage."""
    placed, left = {(one.op, one.micro_batch) for one in row}, []
    for i in range(micro_batches):
        has = {op for op in "FBIW" if (op, i) in placed}
        left += [f"F{i}"] * ("F" not in has)
        left += [f"B{i}"] if not has & set("BIW") else [f"{op}{i}" for op in "IW" if not has & {"B", op}]
    return left


@checked
def best_known(pp: Size, num_micro_batches: Size, split: bool) -> Simulation:
    """Return the shortest of the course's schedules with one stage a rank, with whole backwards or with split ones.

    Among equally long ones it is the one that keeps least alive.
    With whole backwards nothing is shorter: the last rank starts after pp - 1 forwards, and behind its last backward
    follow pp - 1 more.
    """
    made = [make(name, pp, num_micro_batches) for name in SCHEDULES if stages_per_rank(name) == 1]
    found = [simulate(one, _COSTS) for one in made if one.splits_backward == split]
    return min(found, key=lambda best: (best.makespan_s, sum(best.peak_live)))


def show_rows(rows: Sequence[str], micro_batches: int = MICRO_BATCHES) -> Shown:
    """Return the chart of what can run, and mistakes, what is missing, or how good it is.

    Told at once are mistakes that nothing placed later can mend; what is merely not placed yet is none.
    Raises   ValueError for a word that cannot be read
    """
    schedule = read_schedule(rows, micro_batches)
    left = {rank: left_of(row, micro_batches) for rank, row in enumerate(schedule.instructions)}
    lacks = "; ".join(f"rank {rank}: {' '.join(words)}" for rank, words in left.items() if words)
    if wrong := problems(schedule, whole=not lacks):
        more = [f"And {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        said = f"Not possible yet. {'. '.join([*wrong[:_SHOWN], *more])}."
    elif not lacks:
        clocked = simulate(schedule, _COSTS)
        return [schedule_chart("Your schedule", schedule, clocked.rows, clocked.makespan_s)], _score(clocked)
    else:
        said = f"Good so far. Still to place: {lacks}. {_RULES}"
    begun, longest = clock(schedule, _COSTS), best_known(len(rows), micro_batches, split=False)  # a scale that stays
    stop_s = max([longest.makespan_s, *(stop for times in begun.times for _, stop in times)])
    return [schedule_chart("What can run of it so far", schedule, begun.rows, stop_s)], said


def _score(clocked: Simulation) -> str:
    """How long, how much idle, how many in flight, and how far from the best known."""
    schedule, peaks = clocked.schedule, clocked.peak_live
    sizes = (schedule.pp, schedule.num_micro_batches)
    best, split = best_known(*sizes, schedule.splits_backward), best_known(*sizes, True)
    kind = "split backwards" if schedule.splits_backward else "whole backwards"
    behind_s = clocked.makespan_s - best.makespan_s
    said = (
        f"Complete and right. Length {clocked.makespan_s:.4g}; bubble {clocked.bubble_of_ideal:.1%} of ideal time, "
        f"{clocked.bubble_of_total:.1%} of total; peak in-flight micro-batches, by rank: {', '.join(map(str, peaks))}. "
    )
    if behind_s > 1e-9:
        said += f"The best known with {kind}, {best.schedule.name}, takes {best.makespan_s:.4g}: {behind_s:.4g} less."
    elif behind_s < -1e-9:
        said += f"That is {-behind_s:.4g} less than the best that this course knows, {best.schedule.name}!"
    elif sum(peaks) > sum(best.peak_live):
        fewer = ", ".join(map(str, best.peak_live))
        said += f"Nothing known with {kind} is shorter, but {best.schedule.name} has fewer in flight: {fewer}."
    else:
        said += f"Nothing known with {kind} is shorter or has fewer in flight."
    if split.makespan_s < clocked.makespan_s - 1e-9 and not schedule.splits_backward:
        said += f" With B split into I and W, {split.schedule.name} takes {split.makespan_s:.4g}: try it."
    return said


_SOLUTION = make("1f1b", RANKS, MICRO_BATCHES).instructions
PUZZLE = Panel(
    "Place the blocks of a pipeline",
    {
        f"rank{rank}": Control(f"rank {rank}", named(f"{op}{i}" for op in "FBIW" for i in range(4)), "", "words")
        for rank in range(RANKS)
    },
    lambda **rows: show_rows(list(rows.values())),
    {
        "a solution": ({f"rank{rank}": as_typed(row) for rank, row in enumerate(_SOLUTION)}, ""),
        "empty ranks": ({f"rank{rank}": "" for rank in range(RANKS)}, ""),
    },
)
