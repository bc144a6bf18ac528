"""A pipeline's steady state is not walked to its end: the seconds are those of every micro-batch."""

import random
from dataclasses import replace

import pytest

from course_lib.schedules import Costs, make, simulate
from course_lib.timing import step


@pytest.mark.parametrize(
    "name, v", [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_h2", 1), ("zbv", 1)]
)
def test_a_steady_state_that_is_not_walked_takes_as_long(name, v):
    draw = random.Random(name)
    for pp in (2, 3, 4):
        stages = pp * (2 if name == "zbv" else v)
        uneven = [[draw.uniform(1, 2) for _ in range(stages)] for _ in range(3)]
        even = [[1.0] * (stages - 1) + [last] for last in (1.3, 1.1, 1.2)]
        for times in (uneven, even):
            for transfer_s, odd in ((0.0, 0), (0.3, 0), (0.0, 0 if name == "interleaved" else pp - 1)):
                costs = Costs(*map(tuple, times), transfer_s)
                found, busy_s = step._simulated(name, pp, 23 * pp + odd, v, costs)
                walked = simulate(make(name, pp, 23 * pp + odd, v), costs)
                assert found == pytest.approx(walked.makespan_s, rel=1e-9)
                assert busy_s == pytest.approx(walked.busy_s, rel=1e-9)


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_most_of_a_long_steady_state_is_not_walked(name, v, monkeypatch):
    walked, real = [], step._walked
    monkeypatch.setattr(step, "_walked", lambda *given: walked.append(given[2]) or real(*given))
    step._simulated(name, 4, 1024, v, Costs(1.0, 1.5, 0.5, 0.25))
    assert walked == [20]


def test_where_two_rounds_differ_all_is_walked(monkeypatch):
    monkeypatch.setattr(step, "_walked", lambda name, pp, m, v, costs: (float(m * m), (float(m),) * pp, None))
    assert step._simulated("1f1b", 4, 1024, 1, Costs())[0] == 1024.0**2


def test_rounds_that_differ_on_one_rank_are_no_steady_state():
    found = simulate(make("1f1b", 4, 16), Costs(1.0, 1.5, 0.5))
    assert step._round_s(found) == pytest.approx(4 * 3.0)
    late = [(start + (place > 20), stop + (place > 20)) for place, (start, stop) in enumerate(found.times[2])]
    assert step._round_s(replace(found, times=(*found.times[:2], tuple(late), found.times[3]))) is None
    assert step._round_s(simulate(make("afab", 4, 16), Costs(1.0, 1.5, 0.5))) is None
