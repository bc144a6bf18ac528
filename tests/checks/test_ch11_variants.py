"""The graders of chapter 11 accept right answers that are arranged otherwise: three choosers under a limit."""

from fractions import Fraction

import numpy as np
import pytest

from course_lib.checks import ch11
from course_lib.hardware import GB
from course_lib.plan import work_out


def estimate_by_time(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu):
    seconds = tokens * (6 * psi + 12 * num_layers * d_model * seq_len) / num_gpus / peak / mfu
    return [tokens / seconds, seconds / 3600 / 24]


def deadline_by_loop(mfu_of, flops_per_token, tokens, peak, days):
    found = None
    for num_gpus in sorted(mfu_of, key=lambda n: -mfu_of[n]):  # the highest MFU has the fewest GPU hours
        if tokens * flops_per_token <= days * 86_400 * num_gpus * peak * mfu_of[num_gpus]:
            found = num_gpus if found is None else found
    return found


def yield_by_numpy(predicted, measured, k):
    real = np.array(measured)[np.argsort(predicted)[::-1]]
    return float(real[:k].max() / real.max())


def margin_by_counting(predicted, measured, share):
    pairs = list(zip(measured, predicted, strict=True))
    for factor in sorted(real / told for real, told in pairs):
        covered = sum(real <= factor * told * (1 + 1e-12) for real, told in pairs)
        if Fraction(covered, len(pairs)) >= Fraction(str(share)):
            return factor
    return None


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


def choose_by_margin(job, layouts, limit_gb, measure):
    """Never measures: a margin of a fifth."""
    return next(one.layout for one in _fastest_first(job, layouts) if 1.2 * one.memory_bytes <= limit_gb * GB)


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


RIGHT = [
    (ch11.check_estimate, [estimate_by_time]),
    (ch11.check_deadline, [deadline_by_loop]),
    (ch11.check_yield, [yield_by_numpy]),
    (ch11.check_margin, [margin_by_counting]),
    (ch11.check_choose, [choose_the_first_that_fits, choose_by_margin, choose_with_a_learned_margin]),
]


@pytest.mark.parametrize(
    ("check", "answer"),
    [pytest.param(check, answer, id=answer.__name__) for check, answers in RIGHT for answer in answers],
)
@pytest.mark.parametrize("seed", range(3))
def test_another_right_answer_passes(check, answer, seed, capsys):
    check(answer, seed=seed)
    assert capsys.readouterr().out == f"{check.__name__}: passed\n"
