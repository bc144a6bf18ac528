"""Graders of chapter 08, exercises 3 and 7: 1F1B as lists, and a schedule that waits less."""

from collections.abc import Callable

from course_lib.checks.core import fail, grader
from course_lib.schedules import one_f_one_b
from course_lib.schedules.check import problems
from course_lib.schedules.instructions import Schedule, from_lists
from course_lib.schedules.simulator import Costs, simulate


def _schedule(answer: Callable, p: int, m: int) -> Schedule:
    """What the answer gave, if it can be run."""
    rows = answer(p, m)
    where = f"p = {p}, m = {m}"
    if not isinstance(rows, list | tuple) or len(rows) != p:
        fail(f"{where}: return {p} lists, one for each rank; got {rows!r:.80}")
    try:
        schedule = from_lists(rows, range(p), m)
    except ValueError as error:
        fail(f"{where}: {error}")
    if found := problems(schedule):
        fail(f"{where}: this cannot be run: {found[0]}")
    return schedule


# ------------------------------------------------------------------------------------ 3. 1F1B
@grader
def check_one_f_one_b(answer, rng):
    """Runs, with 1F1B's bubble and no more alive."""
    p = rng.choice([3, 4, 5])
    for m in (p + rng.randrange(1, 6), rng.randrange(1, p - 1)):  # p - 1 forwards ahead are then too many
        schedule, right = _schedule(answer, p, m), one_f_one_b(p, m)
        got, want = simulate(schedule), simulate(right)
        where = f"p = {p}, m = {m}"
        if schedule.splits_backward:
            fail(f"{where}: 1F1B has whole backwards, B; I and W are for exercise 7")
        if any(a > b for a, b in zip(got.peak_live, want.peak_live, strict=True)):
            kept = f"{where}: alive are {got.peak_live}, and {want.peak_live} is right"
            if got.peak_live == (m,) * p:
                fail(f"{kept}: these are all forwards before all backwards")
            if len(set(got.peak_live)) == 1:
                fail(f"{kept}: every rank runs as far ahead as rank 0; the last need not run ahead at all")
            fail(f"{kept}: rank i runs p - 1 - i forwards ahead, not more")
        if got.makespan_s > want.makespan_s:
            slow = f"{where}: it takes {got.makespan_s:.0f} slots, and {want.makespan_s:.0f} are right"
            if max(got.peak_live) == 1:
                fail(f"{slow}: every rank waits for the backward of one micro-batch before it starts the next")
            fail(f"{slow}: rank i runs p - 1 - i forwards ahead, not fewer")
        if schedule.instructions != right.instructions:
            fail(f"{where}: it is as short, but another order than 1F1B's: {right}")


# ------------------------------------------------------------------------------------ 7. shorter
@grader
def check_shorter(answer, rng):
    """Split backwards fill the gap, in the memory of 1F1B."""
    for p in (rng.choice([2, 3]), rng.choice([4, 5])):
        m = p + rng.randrange(5)
        schedule = _schedule(answer, p, m)
        got = simulate(schedule, Costs(1, 1, 1))
        idle_s, alive, where = got.idle_s[0], got.peak_live, f"p = {p}, m = {m}"
        if any(count > p - rank for rank, count in enumerate(alive)):
            most = tuple(p - rank for rank in range(p))
            fail(f"{where}: alive are {alive}, at most {most} are allowed: it buys its time with memory, as ZB-H2")
        if idle_s <= p - 1:
            continue
        slow = f"{where}: each rank waits {idle_s:.0f} slots, and {p - 1} are possible"
        if not schedule.splits_backward:
            fail(f"{slow}: with whole backwards nothing can be put off; split B into I and W")
        if all(_directly_behind(row) for row in schedule.instructions):
            fail(f"{slow}: W stands directly behind each I; the next I comes later for it, and the end stays empty")
        fail(f"{slow}: put W off where others wait for an I, and do it where the rank itself would wait")


def _directly_behind(row) -> bool:
    """Whether each W stands behind its own I."""
    return all(
        one.op != "W" or (row[place - 1].op == "I" and row[place - 1].micro_batch == one.micro_batch)
        for place, one in enumerate(row)
    )
