"""A pipeline's steady state is not walked to its end: the seconds are those of every micro-batch."""

import random

import pytest

from course_lib.schedules import Costs, make, simulate
from course_lib.timing import step


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_a_steady_state_that_is_not_walked_takes_as_long(name, v):
    draw = random.Random(name)
    for pp in (2, 3, 4):
        times = [[draw.uniform(1, 2) for _ in range(pp * v)] for _ in range(3)]
        for transfer_s, odd in ((0.0, 0), (0.3, 0), (0.0, pp - 1 if v == 1 else 0)):
            costs = Costs(*map(tuple, times), transfer_s)
            found, busy_s = step._simulated(name, pp, 23 * pp + odd, v, costs)
            walked = simulate(make(name, pp, 23 * pp + odd, v), costs)
            assert found == pytest.approx(walked.makespan_s, rel=1e-9)
            assert busy_s == pytest.approx(walked.busy_s, rel=1e-9)


def test_most_of_a_long_steady_state_is_not_walked(monkeypatch):
    walked, real = [], step._walked
    monkeypatch.setattr(step, "_walked", lambda *given: walked.append(given[2]) or real(*given))
    step._simulated("1f1b", 4, 1024, 1, Costs((1.0,) * 4, (1.5,) * 4, (0.5,) * 4, 0.25))
    assert walked == [16, 20, 24]


def test_where_two_rounds_differ_all_is_walked(monkeypatch):
    monkeypatch.setattr(step, "_walked", lambda name, pp, m, v, costs: (float(m * m), (float(m),) * pp))
    assert step._simulated("1f1b", 4, 1024, 1, Costs())[0] == 1024.0**2
