"""The graders of chapter 11 accept right answers that are arranged otherwise, three of each."""

import heapq
from fractions import Fraction

import numpy as np
import pytest

from course_lib.checks import ch11
from course_lib.checks.core import CheckFailed
from course_lib.hardware import GB
from course_lib.plan import work_out


# ------------------------------------------------------------------------------------ 1. an estimate
def estimate_by_time(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu):
    seconds = tokens * (6 * psi + 12 * num_layers * d_model * seq_len) / num_gpus / peak / mfu
    return [tokens / seconds, seconds / 3600 / 24]


def estimate_layer_by_layer(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu):
    """Seconds of a token on one GPU: a forward, and a backward that costs two."""
    token_s = 0.0
    for _ in range(num_layers):
        forward = 2 * psi / num_layers + 4 * d_model * seq_len
        token_s += (forward + 2 * forward) / (peak * mfu)
    return num_gpus / token_s, tokens * token_s / (num_gpus * 24 * 60 * 60)


def estimate_by_days(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu):
    """The days first, from the FLOPs that a GPU does in a day; NumPy's numbers."""
    flops_per_day = np.prod([86_400, num_gpus, peak, mfu])
    days = 6 * tokens * (psi + 2 * num_layers * d_model * seq_len) / flops_per_day
    return tokens / days / 86_400, days


# ------------------------------------------------------------------------------------ 2. a deadline
def deadline_by_loop(mfu_of, flops_per_token, tokens, peak, days):
    found = None
    for num_gpus in sorted(mfu_of, key=lambda n: -mfu_of[n]):  # the highest MFU has the fewest GPU hours
        if tokens * flops_per_token <= days * 86_400 * num_gpus * peak * mfu_of[num_gpus]:
            found = num_gpus if found is None else found
    return found


def deadline_by_needed_mfu(mfu_of, flops_per_token, tokens, peak, days):
    """Those that reach the MFU that the deadline needs; of these the highest MFU has the fewest GPU hours."""
    needed = tokens * flops_per_token / (days * 86_400 * peak)
    in_time = [(mfu, num_gpus) for num_gpus, mfu in mfu_of.items() if mfu >= needed / num_gpus]
    return max(in_time)[1] if in_time else None


def deadline_by_numpy(mfu_of, flops_per_token, tokens, peak, days):
    num_gpus, mfu = np.array(list(mfu_of)), np.array(list(mfu_of.values()))
    gpu_days = tokens * flops_per_token / (peak * mfu * 86_400)
    gpu_days[gpu_days / num_gpus > days] = np.inf
    cheapest = gpu_days.argmin()
    return num_gpus[cheapest] if np.isfinite(gpu_days[cheapest]) else None


# ------------------------------------------------------------------------------------ 3. yield
def yield_by_numpy(predicted, measured, k):
    real = np.array(measured)[np.argsort(predicted)[::-1]]
    return float(real[:k].max() / real.max())


def yield_by_heap(predicted, measured, k):
    tries = heapq.nlargest(k, zip(predicted, measured, strict=True))
    return max(real / max(measured) for _, real in tries)


def yield_from_the_fastest(predicted, measured, k):
    """The fastest measured run that fewer than k others are predicted to beat."""
    fastest_first = sorted(zip(measured, predicted, strict=True), reverse=True)
    for real, told in fastest_first:
        if sum(other > told for other in predicted) < k:
            return real / fastest_first[0][0]


# ------------------------------------------------------------------------------------ 4. a margin
def margin_by_counting(predicted, measured, share):
    pairs = list(zip(measured, predicted, strict=True))
    for factor in sorted(real / told for real, told in pairs):
        covered = sum(real <= factor * told * (1 + 1e-12) for real, told in pairs)
        if Fraction(covered, len(pairs)) >= Fraction(str(share)):
            return factor
    return None


def margin_from_above(predicted, measured, share):
    """As many of the largest factors as may stay uncovered are taken away."""
    factors = [real / told for real, told in zip(measured, predicted, strict=True)]
    uncovered = int((1 - share) * len(factors) + 1e-9)
    for _ in range(uncovered):
        factors.remove(max(factors))
    return max(factors)


def margin_by_halving(predicted, measured, share):
    real, told = np.array(measured), np.array(predicted)
    low, high = 0.0, (real / told).max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if (real <= middle * told).mean() >= share else (middle, high)
    return high


# ------------------------------------------------------------------------------------ 5. three choosers
def _fastest_first(job, layouts):
    options = [work_out(job, layout) for layout in layouts]
    return sorted(options, key=lambda option: -option.tokens_per_s)


def choose_the_first_that_fits(job, layouts, limit_gb, measure):
    """Stops at the first try within the limit."""
    options = _fastest_first(job, layouts)
    for option in [one for one in options if one.memory_bytes / GB <= 1.05 * limit_gb][:3]:
        if measure(option.layout)[1] <= limit_gb:
            return option.layout
    return next(one.layout for one in options if one.memory_bytes / GB <= 0.8 * limit_gb)


def choose_with_a_safe_try(job, layouts, limit_gb, measure):
    """Two tries are predicted to fit, the third far below the limit."""
    options = _fastest_first(job, layouts)
    tries = [one.layout for one in options if one.memory_bytes / GB <= limit_gb][:2]
    tries.append(next(one.layout for one in options if one.memory_bytes / GB <= 0.85 * limit_gb))
    found = [(*measure(layout), layout) for layout in tries]
    return max((run for run in found if run[1] <= limit_gb), key=lambda run: run[0])[2]


def choose_with_a_learned_margin(job, layouts, limit_gb, measure):
    """Each try that is over the limit corrects the margin."""
    options, margin = _fastest_first(job, layouts), 1.0
    for _ in range(3):
        option = next(one for one in options if margin * one.memory_bytes / GB <= limit_gb)
        memory_gb = measure(option.layout)[1]
        if memory_gb <= limit_gb:
            return option.layout
        margin = max(margin, memory_gb / (option.memory_bytes / GB))
    return next(one.layout for one in options if 1.1 * margin * one.memory_bytes / GB <= limit_gb)


def choose_with_a_margin(margin):
    """No right answer: never measures, and takes the fastest predicted below a share of the limit."""

    def choose(job, layouts, limit_gb, measure):
        options = _fastest_first(job, layouts)
        fits = (one.layout for one in options if one.memory_bytes / GB <= margin * limit_gb)
        return next(fits, options[-1].layout)

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("margin", [1.0, 0.97, 0.95, 0.93, 0.92, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6])
@pytest.mark.parametrize("seed", range(2))
def test_no_margin_on_predictions_passes_without_a_measured_run(margin, seed):
    with pytest.raises(CheckFailed, match="out of memory|no fixed margin"):
        ch11.check_choose(choose_with_a_margin(margin), seed=seed)


RIGHT = {
    "check_estimate": (estimate_by_time, estimate_layer_by_layer, estimate_by_days),
    "check_deadline": (deadline_by_loop, deadline_by_needed_mfu, deadline_by_numpy),
    "check_yield": (yield_by_numpy, yield_by_heap, yield_from_the_fastest),
    "check_margin": (margin_by_counting, margin_from_above, margin_by_halving),
    "check_choose": (choose_the_first_that_fits, choose_with_a_safe_try, choose_with_a_learned_margin),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "answer"), [(check, answer) for check, answers in RIGHT.items() for answer in answers]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, seed, capsys):
    getattr(ch11, check)(answer, seed=seed)
    assert capsys.readouterr().out == f"{check}: passed\n"
