"""Graders of chapter 08, exercises 3 and 8: 1F1B with a limit of memory, and a schedule that waits less."""

from collections.abc import Callable

from course_lib.checks.core import fail, grader
from course_lib.schedules import one_f_one_b
from course_lib.schedules.check import problems
from course_lib.schedules.instructions import Schedule, from_lists
from course_lib.schedules.simulator import Costs, Simulation, simulate


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


# ------------------------------------------------------------------------------------ 3. a limit of memory
@grader
def check_limited(answer, rng):
    """Runs in the memory that is allowed, and waits no longer than 1F1B with a shorter warm-up."""
    p = rng.choice([4, 5])
    for most in (1, rng.randrange(2, p), p + rng.randrange(3)):
        for m in (p + rng.randrange(1, 6), rng.randrange(1, p - 1)):
            schedule = _schedule(lambda p, m, most=most: answer(p, m, most), p, m)
            _expect_limited(simulate(schedule), p, m, most)


def _expect_limited(got: Simulation, p: int, m: int, most: int) -> None:
    where, want = f"p = {p}, m = {m}, most = {most}", simulate(limited(p, m, most))
    if got.schedule.splits_backward:
        fail(f"{where}: use whole backwards, B; I and W are for exercise 8")
    if max(got.peak_live) > most:
        kept = f"{where}: ranks keep up to {got.peak_live} micro-batches, and {most} are allowed"
        if got.peak_live == simulate(one_f_one_b(p, m)).peak_live:
            fail(f"{kept}: this is 1F1B without the limit")
        if got.peak_live == (m,) * p:
            fail(f"{kept}: these are all forwards before all backwards")
        if max(got.peak_live) == most + 1:
            fail(f"{kept}: after warm-up a forward comes before the first backward, and counts too")
        fail(f"{kept}: shorten the warm-up")
    if any(count > p - rank for rank, count in enumerate(got.peak_live)):
        fail(f"{where}: rank i never needs more than p - i micro-batches, here they are {got.peak_live}")
    if got.makespan_s > want.makespan_s:
        slow = f"{where}: it takes {got.makespan_s:.0f} slots, and {want.makespan_s:.0f} are possible"
        if max(got.peak_live) == 1:
            fail(f"{slow}: with room for more, start the next micro-batch before the backward of this one")
        fail(f"{slow}: use the memory that is allowed; warm-up has as many forwards as fit")


def limited(p: int, m: int, most: int) -> Schedule:
    """1F1B whose warm-up is cut so that no rank keeps more than `most` micro-batches."""
    rows = []
    for rank in range(p):
        ahead = min(p - 1 - rank, m, most - 1)
        turns = [word for i in range(ahead, m) for word in (f"F{i}", f"B{i - ahead}")]
        rows.append([f"F{i}" for i in range(ahead)] + turns + [f"B{i}" for i in range(m - ahead, m)])
    return from_lists(rows)


# ------------------------------------------------------------------------------------ 8. shorter
@grader
def check_shorter(answer, rng):
    """Split backwards fill the gap, in the memory of 1F1B."""
    for p in (rng.choice([2, 3]), rng.choice([4, 5])):
        m = p + rng.randrange(5)
        schedule = _schedule(answer, p, m)
        got = simulate(schedule, Costs(1, 1, 1))
        idle_s, in_flight, where = got.idle_s[0], got.peak_live, f"p = {p}, m = {m}"
        if any(count > p - rank for rank, count in enumerate(in_flight)):
            most = tuple(p - rank for rank in range(p))
            fail(f"{where}: in flight are {in_flight}, at most {most} may be: it buys its time with memory, as ZB-H2")
        if idle_s <= p - 1:
            continue
        slow = f"{where}: each rank waits {idle_s:.0f} slots, and {p - 1} are possible"
        if not schedule.splits_backward:
            fail(f"{slow}: with unsplit backwards nothing can be delayed; split B into I and W")
        if all(_directly_behind(row) for row in schedule.instructions):
            fail(f"{slow}: W stands directly behind each I; the next I comes later for it, and the end stays empty")
        fail(f"{slow}: delay W where others wait for an I, and do it where the rank itself would wait")


def _directly_behind(row) -> bool:
    """Whether each W stands behind its own I."""
    return all(
        one.op != "W" or (row[place - 1].op == "I" and row[place - 1].micro_batch == one.micro_batch)
        for place, one in enumerate(row)
    )
