"""Wrong answers to the exercises of chapter 11, each with what its grader must say about it."""

import numpy as np

from course_lib.checks.ch11 import check_choose, check_deadline, check_estimate, check_margin, check_yield
from course_lib.checks.ch11.choose import advice, margin_of, yield_of
from course_lib.checks.ch11.estimates import DAY_S, estimate
from course_lib.hardware import GB
from course_lib.plan import work_out


# ------------------------------------------------------------------------------------ 1. tokens/s and days
def _estimate(flops, tokens, gpus, reached):
    return estimate(flops, tokens, gpus, reached)


def forward_alone(psi, L, D, S, tokens, gpus, peak, mfu):
    return _estimate(2 * psi + 12 * L * D * S, tokens, gpus, peak * mfu)


def without_attention(psi, L, D, S, tokens, gpus, peak, mfu):
    return _estimate(6 * psi, tokens, gpus, peak * mfu)


def at_peak(psi, L, D, S, tokens, gpus, peak, mfu):
    return _estimate(6 * psi + 12 * L * D * S, tokens, gpus, peak)


def one_gpu(psi, L, D, S, tokens, gpus, peak, mfu):
    return _estimate(6 * psi + 12 * L * D * S, tokens, 1, peak * mfu)


def in_hours(psi, L, D, S, tokens, gpus, peak, mfu):
    rate, days = _estimate(6 * psi + 12 * L * D * S, tokens, gpus, peak * mfu)
    return rate, 24 * days


def rate_alone(psi, L, D, S, tokens, gpus, peak, mfu):
    return _estimate(6 * psi + 12 * L * D * S, tokens, gpus, peak * mfu)[0]


# ------------------------------------------------------------------------------------ 2. a deadline
def _days(mfu_of, flops, tokens, peak):
    return {n: tokens * flops / (n * peak * mfu) / DAY_S for n, mfu in mfu_of.items()}


def fastest(mfu_of, flops, tokens, peak, days):
    needed = _days(mfu_of, flops, tokens, peak)
    in_time = [n for n in needed if needed[n] <= days]
    return min(in_time, key=needed.get, default=None)


def cheapest_of_all(mfu_of, flops, tokens, peak, days):
    needed = _days(mfu_of, flops, tokens, peak)
    if min(needed.values()) > days:
        return None
    return min(needed, key=lambda n: n * needed[n])


def never_none(mfu_of, flops, tokens, peak, days):
    needed = _days(mfu_of, flops, tokens, peak)
    in_time = [n for n in needed if needed[n] <= days]
    return min(in_time or needed, key=lambda n: n * needed[n])


def always_none(mfu_of, flops, tokens, peak, days):
    return None


def fewest_in_time(mfu_of, flops, tokens, peak, days):
    needed = _days(mfu_of, flops, tokens, peak)
    return min((n for n in needed if needed[n] <= days), default=None)


# ------------------------------------------------------------------------------------ 3. yield
def of_one_try(predicted, measured, k):
    return yield_of(predicted, measured, 1)


def over_best_prediction(predicted, measured, k):
    return yield_of(predicted, measured, k) * max(measured) / max(predicted)


def of_the_slowest_predicted(predicted, measured, k):
    return yield_of([-speed for speed in predicted], measured, k)


def mean_of_the_tries(predicted, measured, k):
    order = sorted(range(len(predicted)), key=lambda index: -predicted[index])
    return sum(measured[index] for index in order[:k]) / k / max(measured)


def knows_all(predicted, measured, k):
    return 1.0


# ------------------------------------------------------------------------------------ 4. a margin
def turned_round(predicted, measured, share):
    return margin_of(measured, predicted, share)


def of_all(predicted, measured, share):
    return margin_of(predicted, measured, 1.0)


def mean_factor(predicted, measured, share):
    return sum(real / told for real, told in zip(measured, predicted, strict=True)) / len(measured)


def numpys_quantile(predicted, measured, share):
    return float(np.quantile(np.array(measured) / np.array(predicted), share))


def sorted_downwards(predicted, measured, share):
    ratios = sorted((real / told for real, told in zip(measured, predicted, strict=True)), reverse=True)
    return ratios[round(share * len(ratios)) - 1]


# ------------------------------------------------------------------------------------ 5. a choice
def as_advised(job, layouts, limit_gb, measure):
    return advice(job, layouts, limit_gb)


def leanest(job, layouts, limit_gb, measure):
    found = min(layouts, key=lambda layout: work_out(job, layout).memory_bytes)
    measure(found)
    return found


def with_a_margin(margin):
    """Never measures; the fastest predicted below this share of the limit."""

    def choose(job, layouts, limit_gb, measure):
        options = sorted((work_out(job, layout) for layout in layouts), key=lambda option: -option.tokens_per_s)
        return next(option.layout for option in options if option.memory_bytes <= margin * limit_gb * GB)

    return choose


def measures_all(job, layouts, limit_gb, measure):
    found = {layout: measure(layout) for layout in layouts}
    return max((one for one in found if found[one][1] <= limit_gb), key=lambda one: found[one][0])


def returns_an_option(job, layouts, limit_gb, measure):
    return work_out(job, layouts[0])


WRONG = {
    "my_estimate": {
        "check": check_estimate,
        "answers": [
            (forward_alone, "2 psi is the forward pass alone"),
            (without_attention, "attention's scores need FLOPs too"),
            (at_peak, "its peak times the MFU"),
            (one_gpu, "all GPUs together, not one"),
            (in_hours, "days, not hours"),
            (rate_alone, "return two numbers"),
        ],
    },
    "my_deadline": {
        "check": check_deadline,
        "answers": [
            (fastest, "is not the cheapest"),
            (cheapest_of_all, "the cheapest of all is too late"),
            (never_none, "nobody is in time"),
            (always_none, "it is in time"),
            (fewest_in_time, "the fewest GPUs that are in time"),
        ],
    },
    "my_yield": {
        "check": check_yield,
        "answers": [
            (of_one_try, "keep the fastest of them"),
            (over_best_prediction, "divide by the best measured run"),
            (of_the_slowest_predicted, "not the lowest"),
            (knows_all, "needs no planner"),
            (mean_of_the_tries, "this is their mean"),
        ],
    },
    "my_margin": {
        "check": check_margin,
        "answers": [
            (turned_round, "not predicted over measured"),
            (of_all, "this covers every run"),
            (mean_factor, "this is the mean"),
            (sorted_downwards, "sort upwards"),
            (numpys_quantile, "a quantile between two runs"),
        ],
    },
    "my_choose": {
        "check": check_choose,
        "answers": [
            (as_advised, "out of memory"),
            (leanest, "spend the three runs on the first that may fit"),
            (with_a_margin(0.9), "no fixed margin on predictions"),
            (measures_all, "the cluster is free for 3 short runs"),
            (returns_an_option, "return one of the layouts that were given"),
        ],
    },
}
