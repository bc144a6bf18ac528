"""Graders of chapter 12: how often to save, the same batch on fewer ranks, and who is slow."""

import math
from statistics import mean, median

import torch.distributed as dist

from course_lib.checks import Each, Exercise, named, several
from course_lib.comm import all_gather_json


# ------------------------------------------------------------------------------------ 1. an interval
def interval(mtbf_of_gpu_s, num_gpus, save_s, two=2, lost=0.5, saves=1):
    """Young's interval, and the share of the time that saves and lost work take then."""
    job_s = mtbf_of_gpu_s / num_gpus
    interval_s = math.sqrt(two * save_s * job_s)
    return interval_s, saves * save_s / interval_s + lost * interval_s / job_s


_WRONG_INTERVAL = {
    "a job fails when any of its GPUs fails: divide by the number of GPUs": {"num_gpus": 1},
    "the factor 2 under the root is missing": {"two": 1},
    "a failure loses half an interval on average, not a whole one": {"lost": 1},
    "this is the share of the saves alone, or of the lost work alone; add both": {"lost": 0},
}
check_interval = Exercise(
    interval,
    lambda rng: [(rng.randrange(10**7, 10**9), rng.randrange(100, 20_000), rng.randrange(5, 90)) for _ in range(3)],
    _WRONG_INTERVAL,
    several("return two numbers, the interval in seconds and the share of the time", "the interval", "its share"),
)


# ------------------------------------------------------------------------------------ 2. lost work
def restart(failed, every, before=0, again=1):
    first = (failed + before) // every * every
    return first, failed + again - first


def failures(rng):
    every = rng.randrange(2, 9)
    ends = (every * rng.randrange(2, 9) - 1, every * rng.randrange(2, 9), rng.randrange(every - 1))
    return [(failed, every) for failed in ends]


_WRONG_RESTART = {
    "the checkpoint that was due then is not written": {"before": 1},
    "the failed step was computed too, and is computed again": {"again": 0},
    "the steps below it are in the checkpoint; go on with the next": lambda failed, every: (
        restart(failed, every)[0] - 1,
        restart(failed, every, again=2)[1],
    ),
}
_steps = several("return two numbers, (first step, steps computed again)", "the first step", "steps computed again")
check_restart = Exercise(restart, failures, _WRONG_RESTART, _steps)


# ------------------------------------------------------------------------------------ 3. fewer ranks
def micro_batches_of(sequences, ranks, tp, pp, micro_batch):
    """Micro-batches with which these ranks process exactly so many sequences in a step; None if they cannot."""
    dp, ranks_left_over = divmod(ranks, tp * pp)
    if ranks_left_over or not dp:
        return None
    micro_batches, sequences_left_over = divmod(sequences, dp * micro_batch)
    return None if sequences_left_over or not micro_batches else micro_batches


def clusters(rng):
    """(sequences, ranks, tp, pp, micro-batch): only the first two divide."""
    possible = (128, rng.choice([8, 16, 32]), 2, rng.choice([1, 2]), 2)
    return [possible, (24, 12, 2, 2, 1), (16, 6, 4, 1, 1), (16, 12, 2, 2, 1), (8, 2, 4, 1, 1), (2, 8, 2, 1, 1)]


_WRONG_FEWER = {
    "tp and pp ranks share their sequences; divide by dp alone": {"tp": 1, "pp": 1},
    "a micro-batch has several sequences": {"micro_batch": 1},
    "None is right where the ranks or the sequences do not divide": [
        lambda sequences, ranks, tp, pp, micro_batch: sequences // (max(1, ranks // (tp * pp)) * micro_batch),
        lambda sequences, ranks, tp, pp, micro_batch: sequences * tp * pp // (ranks * micro_batch),
    ],
}
_SAYS_FEWER = {"the number": "is None where the ranks or the sequences do not divide"}
check_fewer_ranks = Exercise(micro_batches_of, clusters, _WRONG_FEWER, named("the number", none="None"), _SAYS_FEWER)


# ------------------------------------------------------------------------------------ 6. the slow rank
def slow_rank(seconds, group, of_rank=median, of_others=None):
    """The rank above 1.5 times the median of the others; None if there is none."""
    known = all_gather_json(of_rank(seconds), group)
    slowest = known.index(max(known))
    others = median(known[:slowest] + known[slowest + 1 :])
    return slowest if known[slowest] > 1.5 * (of_others(known) if of_others else others) else None


def _seconds_of_steps(rng):
    size = rng.choice([3, 4])
    slow = rng.randrange(1, size)
    usual = [[0.1 + 0.01 * rng.random() for _ in range(7)] for _ in range(size)]

    def times(factor, of_slow):
        return [[(of_slow if rank == slow else factor) * s for s in row] for rank, row in enumerate(usual)]

    hiccup = times(1, 1)
    hiccup[slow][rng.randrange(7)] = 9.0
    between = [[0.1] * 7 for _ in range(size)]  # above 1.5 times the median of the others, but not of all
    between[slow], between[0] = [0.17] * 7, [0.12 if size == 3 else 0.14] * 7
    rows = {
        "all are alike": usual,
        "all are alike, in a larger model": times(4, 4),
        "one has a single slow step": hiccup,
        "one takes twice as long": times(1, 2),
        "all are slower than before, one 1.6 times as slow as the others": times(4, 6.4),
        "one takes 1.7 times as long as the fastest, and another lies between": between,
    }
    return [(size, name, Each(of_ranks)) for name, of_ranks in rows.items()]


def _watch_slow(answer, ranks, seconds):
    found = answer(list(seconds[dist.get_rank()]), dist.group.WORLD)
    return {"the slow rank": "None" if found is None else found}


_WRONG_SLOW = {
    "a single slow step is no slow rank; compare medians": {"of_rank": mean},
    "compare with the others, not with a fixed time": {"of_others": lambda known: 0.1},
    "the ranks answer otherwise; all must name the same: let them tell each other their medians": (
        lambda seconds, group: dist.get_rank(group) if median(seconds) > 0.15 else None
    ),
    "compare with the median of the other ranks' medians; with its own among them, a slow rank raises what it is "
    "compared with": {"of_others": median},
}
_SAYS_SLOW = {"the slow rank": "all ranks must name the same, and None if none is slow"}
check_slow_rank = Exercise(slow_rank, _seconds_of_steps, _WRONG_SLOW, _watch_slow, _SAYS_SLOW, ranks=True)
