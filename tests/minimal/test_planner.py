"""The smallest planner finds what `course_lib.plan.search` finds; planted bugs do not."""

import inspect
from dataclasses import replace

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


def test_cuts_are_all_triples_whose_product_is_the_number_of_gpus():
    assert sorted(planner.cuts(4)) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    for num_gpus in (1, 8, 12, 64, 512):
        found = planner.cuts(num_gpus)
        assert len(set(found)) == len(found) and all(dp * tp * pp == num_gpus for dp, tp, pp in found)
    assert [len(planner.cuts(num_gpus)) for num_gpus in (8, 64, 512)] == [10, 28, 55]


def test_candidates_use_all_gpus_and_the_whole_batch(job):
    for layout in planner.candidates(job):
        assert layout.world_size == job.num_gpus and layout.sequences_per_step == job.sequences
        assert layout.tp <= job.cluster.gpus_per_node


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


def test_a_batch_that_grows_keeps_mfu_and_a_fixed_one_does_not():
    small, large = measured_job("8B", 8), measured_job("8B", 512)
    grown = replace(large, batch_tokens=64 * large.batch_tokens)
    start, fixed, weak = (planner.plan(one)[0].mfu for one in (small, large, grown))
    assert fixed < 0.75 * start and weak > 0.85 * start
