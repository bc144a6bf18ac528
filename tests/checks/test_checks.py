"""A grader by hand: what the learner reads, and that every run is a new one."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checks.core import (
    CheckFailed,
    NotWritten,
    expect_close,
    fresh_generator,
    grader,
    run_ranks,
)

pytestmark = pytest.mark.launches


@grader
def check_double(student, rng):
    """Twice x."""
    x = torch.randn(rng.randrange(2, 9), generator=fresh_generator(rng), dtype=torch.float64)
    expect_close(student(x), 2 * x, "twice x", {"squared, not doubled": x * x, "all of it summed": 2 * x.sum()})


def test_a_right_answer_prints_one_line(capsys):
    check_double(lambda x: x + x)
    assert capsys.readouterr().out == "check_double: passed\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x * x, "check_double: twice x: squared, not doubled"),
        (lambda x: 2 * x.sum(), "twice x: all of it summed"),
        (lambda x: 3 * x, "twice x is wrong: it differs by up to"),
        (lambda x: x * float("nan"), "twice x is wrong"),
        (lambda x: None, "twice x is None; does your function return it?"),
        (lambda x: (2 * x).float(), "twice x is torch.float32, and torch.float64 is right"),
        (lambda x: (2 * x)[:-1], "twice x has shape"),
        (lambda x: 2.0, "twice x must be a tensor, got float"),
        (lambda x: x / {}["y"], "your code raised KeyError: 'y' in <lambda>, line"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(answer, message):
    with pytest.raises(CheckFailed) as failure:
        check_double(answer)
    assert message in str(failure.value)
    assert "seed=" in str(failure.value)
    assert failure.value._render_traceback_()[0].startswith("check_double: ")


def test_an_undone_exercise_is_no_failure_of_its_own_kind():
    def undone(x):
        raise NotImplementedError("double: your code goes here")

    for answer in (undone, None, ...):
        with pytest.raises(NotWritten, match="check_double: .*your code goes here"):
            check_double(answer)


def test_each_run_draws_anew_and_a_seed_repeats_one():
    seen = []
    answer = lambda x: seen.append(x) or 2 * x  # noqa: E731
    for seed in (None, None, 7, 7):
        check_double(answer, seed=seed)
    assert not torch.equal(seen[0].sum(), seen[1].sum())
    assert torch.equal(seen[2], seen[3])


def test_a_fault_of_the_grader_itself_is_not_blamed_on_the_answer():
    @grader
    def check_broken(student, rng):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        check_broken(len)


def sum_of_ranks(student):
    return student(dist.get_rank())


def test_ranks_run_the_answer_and_its_failure_names_the_rank():
    def fails_on_one(rank):
        if rank == 1:
            raise RuntimeError("no luck")
        return rank

    def undone(rank):
        raise NotImplementedError("sum: your code goes here")

    assert list(run_ranks(sum_of_ranks, 2, lambda rank: rank * 10)) == [0, 10]
    with pytest.raises(CheckFailed, match="your code failed on 2 ranks:\nrank 1 of 2(.|\n)*no luck"):
        run_ranks(sum_of_ranks, 2, fails_on_one)
    with pytest.raises(NotImplementedError, match="sum: your code goes here"):
        run_ranks(sum_of_ranks, 2, undone)
