"""The smallest planner finds what `course_lib.plan.search` finds; planted bugs do not."""

import inspect

import pytest

from course_lib.minimal import planner
from course_lib.plan import search
from course_lib.plan.measured import measured_job
from course_lib.plan.search import front, ranked_s
from course_lib.plan.space import shapes, sharded

JOBS = (("8B", 8), ("8B", 64), ("80B", 128))


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} on {job[1]}")
def job(request):
    return measured_job(*request.param)


def agree(module, job) -> bool:
    """Whether a planner finds what the search does of its own candidates, fastest first, and the front of them."""
    found, ranked = search(job, 10_000).ranked, module["plan"](job)
    alike = {one.layout for one in found if one.layout.recompute == "none" and one.layout.micro_batch < 8}
    near = {one.layout for one in ranked if ranked_s(one) <= ranked_s(found[-1])}
    known = {one for shape in shapes(job) for one in sharded(job, shape)}
    in_order = [one.step_s for one in ranked] == sorted(one.step_s for one in ranked)
    return (
        near == alike
        and {one.layout for one in ranked} <= known
        and in_order
        and tuple(module["front"](ranked)) == front(tuple(ranked))
    )


def test_it_ranks_as_the_search_does(job):
    assert agree(vars(planner), job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("not in_a_node or ", ""),
        ("(1, 2, 4)", "(1,)"),
        ("if option.fits", "if option"),
        ("-one.tokens_per_s", "one.tokens_per_s"),
        ("option.memory_bytes < kept[-1]", "option.memory_bytes > kept[-1]"),
        ("(0, 1) if dp > 1 else (0,)", "(0,)"),
    ],
)
def test_a_planted_bug_is_seen(right, wrong):
    source = inspect.getsource(planner)
    assert source.count(right) == 1
    broken = {}
    exec(source.replace(right, wrong), broken)
    assert not agree(broken, measured_job("8B", 64))
