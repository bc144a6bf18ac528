"""How often to save when GPUs fail: the work that is lost against the time that saving takes.

    failures = Failures(mtbf_s=mtbf_of_job_s(50_000 * 3600, num_gpus=16_384), save_s=30, restart_s=600)
    interval_s = best_interval_s(failures)
    goodput(failures, interval_s)              # the share of the job's time that is training which is kept

A job works for `interval_s` seconds, saves, and so on. Failures come at any moment, also while it saves or restarts,
with the same chance in each second (a Poisson process). After one it restarts and goes on from the last checkpoint.
With x = (interval + save) / mtbf an interval takes, from save to save,

    mtbf e^(restart / mtbf) (e^x - 1)                          seconds on average

Source   Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order
         estimate of the optimum checkpoint interval for restart dumps", equation 13 (the time) and 37 (the interval)
"""

import math
import random
from dataclasses import dataclass

from course_lib.validate import Amount, Positive, Seed, Size, check_fields, checked

_MOST_EXPONENT = 500.0  # e to this power is still a number


@dataclass(frozen=True)
class Failures:
    """What decides when to save, in seconds."""

    mtbf_s: Positive  # between failures of the whole job, on average: of any of its GPUs
    save_s: Positive  # for which training stands still while it saves
    restart_s: Amount = 0.0  # from a failure until training goes on, without the work that is done again

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("save_s", "restart_s"):
            if getattr(self, name) > 10 * self.mtbf_s:
                raise ValueError(
                    f"{name} is {getattr(self, name):g} and mtbf_s is {self.mtbf_s:g}; give at most 10 times mtbf_s, "
                    "or the job comes to no end"
                )


@checked
def mtbf_of_job_s(mtbf_of_gpu_s: Positive, num_gpus: Size) -> float:
    """Seconds between failures of a job that stands still when any of its GPUs fails."""
    return mtbf_of_gpu_s / num_gpus


@checked
def young_interval_s(failures: Failures) -> float:
    """Young's interval, sqrt(2 save mtbf): good where saving takes far less than the time between failures."""
    return math.sqrt(2 * failures.save_s * failures.mtbf_s)


@checked
def best_interval_s(failures: Failures) -> float:
    """The interval of the highest goodput, found by halving: there (1 - t) e^(t + save / mtbf) = 1, t in units of mtbf.

    How long a restart takes changes nothing about it.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + failures.save_s / failures.mtbf_s > 0:
            low = middle
        else:
            high = middle
    return high * failures.mtbf_s


@checked
def shares(failures: Failures, interval_s: Positive) -> dict[str, float]:
    """Where the job's time goes, on average: "training" (the goodput), "saving", "lost work" and "restarting"."""
    exponent = (interval_s + failures.save_s) / failures.mtbf_s
    if exponent > _MOST_EXPONENT:
        raise ValueError(
            f"interval_s is {interval_s:g}, {exponent:g} times mtbf_s with its save; give less than {_MOST_EXPONENT:g} "
            "times, or no interval ever ends"
        )
    working_s = failures.mtbf_s * math.expm1(exponent)
    restarting_s = working_s * math.expm1(failures.restart_s / failures.mtbf_s)
    total_s = working_s + restarting_s
    return {
        "training": interval_s / total_s,
        "saving": failures.save_s / total_s,
        "lost work": max(0.0, working_s - interval_s - failures.save_s) / total_s,
        "restarting": restarting_s / total_s,
    }


@checked
def goodput(failures: Failures, interval_s: Positive) -> float:
    """The share of the job's time that is training which is kept (0 to 1)."""
    return shares(failures, interval_s)["training"]


@checked
def simulated_goodput(failures: Failures, interval_s: Positive, num_intervals: Size = 1000, seed: Seed = 0) -> float:
    """Goodput, counted: failures are drawn one after the other until so many intervals are saved."""
    exponent = (interval_s + failures.save_s) / failures.mtbf_s
    if exponent > math.log(1000) or num_intervals * math.exp(exponent + failures.restart_s / failures.mtbf_s) > 10**7:
        raise ValueError(
            f"interval_s is {interval_s:g} and mtbf_s is {failures.mtbf_s:g}; give a shorter interval or fewer than "
            f"{num_intervals} intervals: too many failures would be drawn"
        )
    draw = random.Random(seed)
    clock_s, next_failure_s = 0.0, draw.expovariate(1 / failures.mtbf_s)
    saved, is_restarting = 0, False
    while saved < num_intervals:
        end_s = clock_s + (failures.restart_s if is_restarting else interval_s + failures.save_s)
        if end_s <= next_failure_s:
            clock_s, saved, is_restarting = end_s, saved + (not is_restarting), False
        else:
            clock_s, is_restarting = next_failure_s, True
            next_failure_s = clock_s + draw.expovariate(1 / failures.mtbf_s)
    return num_intervals * interval_s / clock_s
