"""A puzzle: write down a pipeline's work by hand, and read what is wrong, what it costs, what is best (lesson 8)."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.panels.pipeline import chart, clocked
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Form
from course_lib.schedules import SCHEDULES, Schedule, from_lists, make, problems, simulate, stages_per_rank
from course_lib.schedules.check import runnable_order
from course_lib.schedules.instructions import Instruction, loop_placement, needs
from course_lib.schedules.simulator import Costs, Simulation
from course_lib.validate import Size, checked

RANKS, MICRO_BATCHES = 3, 4
_COSTS = Costs(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)
RULES = "F takes 1; B takes 2, or in its place I and W, 1 each: the next rank needs only I."
SHOWN = 4  # problems at once; the rest is counted


def words_of(row: Sequence[Instruction]) -> str:
    """Return one rank's work as it is typed."""
    return " ".join(f"{one.op}{one.micro_batch}" for one in row)


def read_rows(rows: Sequence[str], micro_batches: int) -> Schedule:
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


def _clock_begun(schedule: Schedule) -> list[list[tuple[Instruction, float, float]]]:
    """Return when what can run of an unfinished schedule runs, rank by rank."""
    rows: list[list] = [[] for _ in range(schedule.pp)]
    stop_s: dict[Instruction, float] = {}
    for rank, group in runnable_order(schedule)[0]:
        for one in group:
            free_s = rows[rank][-1][2] if rows[rank] else 0.0
            start_s = max([free_s, *(stop_s[need] for need in needs(one, schedule))])
            stop_s[one] = start_s + _COSTS.seconds(one)
            rows[rank].append((one, start_s, stop_s[one]))
    return rows


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


def judge(rows: Sequence[str], micro_batches: int = MICRO_BATCHES) -> tuple[list[Form], str]:
    """Return the chart of what can run, and mistakes, what is missing, or how good it is.

    Told at once are mistakes that nothing placed later can mend; what is merely not placed yet is none.
    """
    try:
        schedule = read_rows(rows, micro_batches)
        wrong = problems(schedule, whole=False)
    except ValueError as error:
        return [], f"Not possible yet. {error}"
    left = {rank: left_of(row, micro_batches) for rank, row in enumerate(schedule.instructions)}
    if not any(left.values()):
        wrong = wrong or problems(schedule)
    if wrong:
        more = [f"And {len(wrong) - SHOWN} more"] * (len(wrong) > SHOWN)
        said = f"Not possible yet. {'. '.join([*wrong[:SHOWN], *more])}."
    elif any(left.values()):
        lacks = "; ".join(f"rank {rank}: {' '.join(words)}" for rank, words in left.items() if words)
        said = f"Good so far. Still to place: {lacks}. {RULES}"
    else:
        simulation = simulate(schedule, _COSTS)
        return [chart("Your schedule", schedule, clocked(simulation), simulation.makespan_s)], _score(simulation)
    times = _clock_begun(schedule)
    longest = best_known(len(rows), micro_batches, split=False).makespan_s  # a scale that stays
    stop_s = max([longest, *(stop for row in times for _, _, stop in row)])
    return [chart("What can run of it so far", schedule, times, stop_s)], said


def _score(simulation: Simulation) -> str:
    """How long, how much idle, how many in flight, and how far from the best known."""
    schedule, peaks = simulation.schedule, simulation.peak_live
    sizes = (schedule.pp, schedule.num_micro_batches)
    best, split = best_known(*sizes, schedule.splits_backward), best_known(*sizes, True)
    kind = "split backwards" if schedule.splits_backward else "whole backwards"
    behind_s = simulation.makespan_s - best.makespan_s
    said = (
        f"Complete and right. Length {simulation.makespan_s:.4g}; bubble {simulation.bubble_of_ideal:.1%} of ideal "
        f"time, {simulation.bubble_of_total:.1%} of total; peak in-flight micro-batches, by rank: "
        f"{', '.join(map(str, peaks))}. "
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
    if split.makespan_s < simulation.makespan_s - 1e-9 and not schedule.splits_backward:
        said += f" With B split into I and W, {split.schedule.name} takes {split.makespan_s:.4g}: try it."
    return said


def _draw_puzzle(**rows: str) -> Shown:
    """Judge what is placed on each rank."""
    forms, said = judge(list(rows.values()))
    if not forms:
        raise ValueError(said.removeprefix("Not possible yet. "))
    return forms, said


_BLOCKS = tuple((f"{op}{i}", f"{op}{i}") for op in "FBIW" for i in range(MICRO_BATCHES))
_SOLUTION = make("1f1b", RANKS, MICRO_BATCHES).instructions
PUZZLE = Panel(
    "Place the blocks of a pipeline",
    {f"rank{rank}": Control(f"rank {rank}", _BLOCKS, "", "words") for rank in range(RANKS)},
    _draw_puzzle,
    {
        "a solution": ({f"rank{rank}": words_of(row) for rank, row in enumerate(_SOLUTION)}, ""),
        "empty ranks": ({f"rank{rank}": "" for rank in range(RANKS)}, ""),
    },
)
