"""When to save: formulas against a simulation that draws failures, and against each other."""

import math

import pytest

from course_lib.cluster.failures import (
    Failures,
    best_interval_s,
    goodput,
    mtbf_of_job_s,
    shares,
    simulated_goodput,
    young_interval_s,
)

OFTEN = Failures(mtbf_s=3600.0, save_s=60.0, restart_s=300.0)
RARE = Failures(mtbf_s=86_400.0, save_s=5.0, restart_s=120.0)
CASES = [(failures, factor) for failures in (OFTEN, RARE) for factor in (0.2, 1.0, 5.0)]


@pytest.mark.parametrize(("failures", "factor"), CASES)
def test_the_formula_is_what_drawn_failures_give(failures, factor):
    interval_s = factor * best_interval_s(failures)
    found = [simulated_goodput(failures, interval_s, 4000, seed) for seed in range(5)]
    assert sum(found) / 5 == pytest.approx(goodput(failures, interval_s), rel=0.006)
    assert len(set(found)) == 5 and found[0] == simulated_goodput(failures, interval_s, 4000, 0)


@pytest.mark.parametrize("failures", [OFTEN, RARE])
def test_no_other_interval_is_better_and_the_estimates_are_near(failures):
    best_s = best_interval_s(failures)
    best = goodput(failures, best_s)
    assert all(goodput(failures, best_s * factor) < best for factor in (0.5, 0.99, 1.01, 2.0))
    assert goodput(failures, young_interval_s(failures)) == pytest.approx(best, rel=2e-3)


def test_numbers_by_hand():
    assert young_interval_s(Failures(mtbf_s=10_000.0, save_s=50.0)) == 1000.0
    assert mtbf_of_job_s(50_000 * 3600.0, 16_384) == pytest.approx(10_986, abs=1)  # three hours
    one = Failures(mtbf_s=100.0, save_s=1.0)
    assert goodput(one, 99.0) == pytest.approx(0.99 / (math.e - 1))


def test_shares_are_all_of_the_time_and_restarts_move_no_optimum():
    parts = shares(OFTEN, 600.0)
    assert sum(parts.values()) == pytest.approx(1) and min(parts.values()) > 0
    assert parts["saving"] / parts["training"] == pytest.approx(60 / 600)
    assert best_interval_s(OFTEN) == best_interval_s(Failures(3600.0, 60.0, 0.0))
    assert shares(Failures(3600.0, 60.0), 600.0)["restarting"] == 0


def test_what_never_ends_is_refused():
    with pytest.raises(ValueError, match="at most 10 times mtbf_s"):
        Failures(mtbf_s=10.0, save_s=1.0, restart_s=1000.0)
    with pytest.raises(ValueError, match="no interval ever ends"):
        goodput(OFTEN, 1e9)
    with pytest.raises(ValueError, match="too many failures"):
        simulated_goodput(OFTEN, 1e6)
