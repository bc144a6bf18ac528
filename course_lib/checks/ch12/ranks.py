"""Graders of chapter 12: how often to save, the same batch on fewer ranks, and who is slow."""

from __future__ import annotations

import math
from statistics import median

import torch
import torch.distributed as dist

from course_lib.checks.core import expect_close, expect_equal, fail, grader, run_ranks
from course_lib.train.health import slowest_rank


# ------------------------------------------------------------------------------------ 1. an interval
@grader
def check_interval(answer, rng):
    """Young's interval and the share of the time that it costs, for jobs drawn afresh."""
    for _ in range(3):
        mtbf_of_gpu_s, num_gpus, save_s = rng.randrange(10**7, 10**9), rng.randrange(100, 20_000), rng.randrange(5, 90)
        job_s = mtbf_of_gpu_s / num_gpus
        want = _interval(job_s, save_s)
        wrong = {
            "a job fails when any of its GPUs fails: divide by the number of GPUs": _interval(mtbf_of_gpu_s, save_s),
            "the factor 2 under the root is missing": _shares_at(math.sqrt(save_s * job_s), job_s, save_s),
            "a failure loses half an interval on average, not a whole one": torch.stack(
                [want[0], save_s / want[0] + want[0] / job_s]
            ),
            "this is the share of the saves alone, or of the lost work alone; add both": want / torch.tensor([1, 2]),
        }
        got = answer(mtbf_of_gpu_s, num_gpus, save_s)
        if not isinstance(got, tuple | list) or len(got) != 2:
            fail(f"return two numbers, the interval in seconds and the share of the time; got {got!r}")
        expect_close(torch.tensor(got, dtype=torch.float64), want, "the interval and its share", wrong)


def _interval(job_s: float, save_s: float) -> torch.Tensor:
    """Young's interval, and the share of the time that saves and lost work take then."""
    return _shares_at(math.sqrt(2 * save_s * job_s), job_s, save_s)


def _shares_at(interval_s: float, job_s: float, save_s: float) -> torch.Tensor:
    return torch.tensor([interval_s, save_s / interval_s + interval_s / (2 * job_s)], dtype=torch.float64)


# ------------------------------------------------------------------------------------ 2. lost work
@grader
def check_restart(answer, rng):
    """Of failures at the end of a step, whether or not a checkpoint was due then."""
    every = rng.randrange(2, 9)
    for failed in (every * rng.randrange(2, 9) - 1, every * rng.randrange(2, 9), rng.randrange(every - 1)):
        first = failed // every * every
        want = (first, failed + 1 - first)
        wrong = {
            "the failed step was computed too, and is computed again": (first, failed - first),
            "the steps below it are in the checkpoint; go on with the next": (first - 1, failed + 2 - first),
        }
        got = answer(failed, every)
        got = tuple(got) if isinstance(got, list) else got
        if (failed + 1) % every == 0 and got == (failed + 1, 0):
            fail(f"failed step {failed}, saved every {every} steps: the checkpoint that was due then is not written")
        what = f"with a failure in step {failed}, saved every {every} steps, (first step, steps computed again)"
        expect_equal(got, want, what, wrong)


# ------------------------------------------------------------------------------------ 3. fewer ranks
def micro_batches_of(sequences: int, ranks: int, tp: int, pp: int, micro_batch: int) -> int | None:
    """Micro-batches with which these ranks process exactly so many sequences in a step; None if they cannot."""
    dp, ranks_left_over = divmod(ranks, tp * pp)
    if ranks_left_over or not dp:
        return None
    micro_batches, sequences_left_over = divmod(sequences, dp * micro_batch)
    return None if sequences_left_over or not micro_batches else micro_batches


@grader
def check_fewer_ranks(answer, rng):
    """Of cases that divide, and of cases in which the ranks or the sequences do not."""
    possible = (128, rng.choice([8, 16, 32]), 2, rng.choice([1, 2]), 2)
    cases = [possible, (24, 12, 2, 2, 1), (16, 6, 4, 1, 1), (16, 12, 2, 2, 1), (8, 2, 4, 1, 1), (2, 8, 2, 1, 1)]
    for sequences, ranks, tp, pp, micro_batch in cases:
        want = micro_batches_of(sequences, ranks, tp, pp, micro_batch)
        got = answer(sequences, ranks, tp, pp, micro_batch)
        what = (
            f"with {sequences} sequences, {ranks} ranks, tp {tp}, pp {pp}, micro-batches of {micro_batch}: the number"
        )
        wrong = {
            "tp and pp ranks share their sequences; divide by dp alone": sequences // (ranks * micro_batch),
            "a micro-batch has several sequences": sequences * tp * pp // ranks,
        }
        if want is None and got is not None:
            fail(f"{what} is {got!r}, and None is right: the ranks or the sequences do not divide")
        if want is not None:
            expect_equal(got, want, what, wrong)


# ------------------------------------------------------------------------------------ 4. the slow rank
def _ask(answer, rows):
    return answer(list(rows[dist.get_rank()]), dist.group.WORLD)


@grader
def check_slow_rank(answer, rng):
    """On real ranks: every rank knows its own seconds alone, and all must name the same rank."""
    world_size = rng.choice([3, 4])
    slow = rng.randrange(1, world_size)
    usual = [[0.1 + 0.01 * rng.random() for _ in range(7)] for _ in range(world_size)]
    late = [list(row) for row in usual]
    late[slow] = [2 * seconds for seconds in late[slow]]
    hiccup = [list(row) for row in usual]
    hiccup[slow][rng.randrange(7)] = 9.0
    uneven = [[4 * seconds for seconds in row] for row in usual]
    uneven[slow] = [1.6 * seconds for seconds in uneven[slow]]
    between = _with_a_rank_between(world_size, slow)
    for name, rows in (
        ("one rank takes twice as long", late),
        ("all ranks are alike", usual),
        ("all ranks are alike, in a larger model", [[4 * seconds for seconds in row] for row in usual]),
        ("one rank has a single slow step", hiccup),
        ("all ranks are slower than before, one 1.6 times as slow as the others", uneven),
        ("one rank takes 1.7 times as long as the fastest, and another rank lies between", between),
    ):
        want = slowest_rank(rows, 1.5)
        answers = list(run_ranks(_ask, world_size, answer, rows))
        if len(set(map(repr, answers))) > 1:
            fail(f"{name}: the ranks answer {answers}; all must name the same: let them tell each other their medians")
        if want is None and answers[0] is not None:
            told = (
                "a single slow step is no slow rank; compare medians" if rows is hiccup else "compare with the others"
            )
            fail(f"{name}: you name rank {answers[0]}, and None is right: {told}")
        if want is not None:
            if answers[0] is None and not _is_slow_among_all(rows, want):
                fail(
                    f"{name}: you name None, and rank {want} is right: compare with the median of the other ranks' "
                    "medians; with its own among them, a slow rank raises what it is compared with"
                )
            expect_equal(answers[0], want, f"{name}: the slow rank")


def _with_a_rank_between(world_size: int, slow: int) -> list[list[float]]:
    """One rank is above 1.5 times the median of the others, and not above 1.5 times the median of all."""
    factors = [1.0] * world_size
    factors[slow], factors[0] = 1.7, 1.2 if world_size == 3 else 1.4
    return [[0.1 * factor] * 7 for factor in factors]


def _is_slow_among_all(rows: list[list[float]], rank: int) -> bool:
    medians = [median(row) for row in rows]
    return medians[rank] > 1.5 * median(medians)
