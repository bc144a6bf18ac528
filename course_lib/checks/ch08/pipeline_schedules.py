"""Graders of chapter 08, exercises 3 and 8: 1F1B with a limit of memory, and a schedule that waits less."""

from itertools import pairwise

from course_lib.checks import Cost, Exercise, Stops
from course_lib.minimal.one_f_one_b import afab, naive, one_f_one_b
from course_lib.schedules import from_lists, make, problems, simulate
from course_lib.schedules.simulator import Costs


def lists_of(name, p, m):
    """The lists of a schedule of the package."""
    return [[f"{one.op}{one.micro_batch}" for one in row] for row in make(name, p, m).instructions]


def scheduled(rows, p, m):
    """The schedule that an answer gave, or the error that is seen of one that cannot be run."""
    if not isinstance(rows, list | tuple) or len(rows) != p:
        return None, {"error": f"no lists\nreturn {p} lists, one for each rank; got {rows!r:.80}"}
    try:
        schedule = from_lists(rows, range(p), m)
    except ValueError as error:
        return None, {"error": f"no schedule\n{error}"}
    if found := problems(schedule):
        return None, {"error": f"cannot be run\nthis cannot be run: {found[0]}"}
    return schedule, {}


# ------------------------------------------------------------------------------------ 3. a limit of memory
def limited(p, m, most, ahead_of=lambda p, rank, most: min(p - 1 - rank, most - 1)):
    """1F1B whose warm-up is cut so that no rank keeps more than `most` micro-batches. A mistake cuts it otherwise."""
    rows = []
    for rank in range(p):
        ahead = max(0, min(ahead_of(p, rank, most), m))
        turns = [word for i in range(ahead, m) for word in (f"F{i}", f"B{i - ahead}")]
        rows.append([f"F{i}" for i in range(ahead)] + turns + [f"B{i}" for i in range(m - ahead, m)])
    return rows


def limits(rng):
    p = rng.choice([4, 5])
    few, many = rng.randrange(1, p - 1), p + rng.randrange(1, 6)
    return [(p, m, most) for m in (few, many) for most in (1, rng.randrange(2, p), p + rng.randrange(3))]


def _watch_limited(answer, p, m, most):
    schedule, seen = scheduled(answer(p, m, most), p, m)
    if schedule is None:
        return seen
    got = simulate(schedule)
    return {
        "whether backward is split": schedule.splits_backward,
        "micro-batches that each rank keeps": tuple(map(Cost, got.peak_live)),
        "slots": Cost(got.makespan_s),
    }


_WRONG_LIMITED = {
    "this is 1F1B without the limit": {"ahead_of": lambda p, rank, most: p - 1 - rank},
    "these are all forwards before all backwards": lambda p, m, most: afab(p, m),
    "after warm-up a forward comes before the first backward, and counts too": {
        "ahead_of": lambda p, rank, most: min(p - 1 - rank, most)
    },
    "rank i never needs more than p - i micro-batches": {"ahead_of": lambda p, rank, most: most - 1},
    "with room for more, start the next micro-batch before the backward of this one": lambda p, m, most: naive(p, m),
    "use whole backwards, B; I and W are for exercise 8": lambda p, m, most: lists_of("zb_h1", p, m),
    "deadlock": Stops({"ahead_of": lambda p, rank, most: min(rank, most - 1)}),
    "is missing, the backward": Stops(lambda p, m, most: [row[: 2 * m - 1] for row in limited(p, m, p)]),
}
_SAYS_LIMITED = {
    "whether backward is split": "use whole backwards, B; I and W are for exercise 8",
    "micro-batches that each rank keeps": "shorten the warm-up",
    "slots": "use the memory that is allowed; warm-up has as many forwards as fit",
}
check_limited = Exercise(limited, limits, _WRONG_LIMITED, _watch_limited, _SAYS_LIMITED)


# ------------------------------------------------------------------------------------ 8. shorter
def _whole_backwards_on_rank_0(p, m):
    """Rank 0 puts nothing off: its backward may stay whole."""
    rows = lists_of("zb_h1", p, m)
    rows[0] = [word.replace("I", "B") for word in rows[0] if word[0] != "W"]
    return rows


def _w_behind_i(p, m):
    halves = {"F": "F", "B": "IW"}
    return [[half + word[1:] for word in row for half in halves[word[0]]] for row in one_f_one_b(p, m)]


def _watch_shorter(answer, p, m):
    """In flight may be p - rank, as in 1F1B, and a rank may wait p - 1 slots."""
    schedule, seen = scheduled(answer(p, m), p, m)
    if schedule is None:
        return seen
    got = simulate(schedule, Costs(1, 1, 1))
    behind = [two for row in schedule.instructions for two in pairwise(row) if two[1].op == "W"]
    return {
        "micro-batches in flight": tuple(Cost(max(n, p - rank)) for rank, n in enumerate(got.peak_live)),
        "whether backward is split": schedule.splits_backward,
        "whether each W is behind its I": all(i == w._replace(op="I") for i, w in behind),
        "slots that each rank waits": Cost(max(got.idle_s[0], p - 1)),
    }


_WRONG_SHORTER = {
    "it buys its time with memory, as ZB-H2": lambda p, m: lists_of("zb_h2", p, m),
    "with unsplit backwards nothing can be delayed; split B into I and W": one_f_one_b,
    "W stands directly behind each I; the next I comes later for it, and the end stays empty": _w_behind_i,
    "delay W where others wait for an I, and do it where the rank itself would wait": lambda p, m: [
        [word.replace("B", "I") for word in row] + [f"W{i}" for i in range(m)] for row in one_f_one_b(p, m)
    ],
}
_SAYS_SHORTER = {
    "slots that each rank waits": "delay W where others wait for an I, and do it where the rank itself would wait"
}
check_shorter = Exercise(
    (lambda p, m: lists_of("zb_h1", p, m)),
    lambda rng: [(p, p + rng.randrange(5)) for p in (rng.choice([2, 3]), rng.choice([4, 5]))],
    _WRONG_SHORTER,
    _watch_shorter,
    _SAYS_SHORTER,
    right=_whole_backwards_on_rank_0,
)
