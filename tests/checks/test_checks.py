"""A grader by hand: what the learner reads, and that every run is a new one."""

import pytest

from course_lib.checks.core import CheckFailed, NotWritten, fail, grader


@grader
def check_double(student, rng):
    """Twice x."""
    x = rng.random()
    if student(x) != 2 * x:
        fail("squared, not doubled" if student(x) == x * x else f"it returned {student(x)!r}")


def test_a_right_answer_prints_one_line(capsys):
    check_double(lambda x: x + x)
    assert capsys.readouterr().out == "check_double: passed\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x * x, "check_double: squared, not doubled\n"),
        (lambda x: None, "check_double: it returned None\n"),
        (lambda x: x / {}["y"], "check_double: your code raised KeyError: 'y' in <lambda>, line"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(answer, message):
    with pytest.raises(CheckFailed) as failure:
        check_double(answer)
    assert message in str(failure.value) and "seed=" in str(failure.value)
    assert failure.value._render_traceback_()[0].startswith("check_double: ")


def test_an_undone_exercise_is_no_failure_of_its_own_kind():
    def undone(x):
        raise NotImplementedError("double: your code goes here")

    def without_a_word(x):
        raise NotImplementedError

    for answer in (undone, without_a_word, None, ...):
        with pytest.raises(NotWritten, match="check_double: .*your code goes here"):
            check_double(answer)


def test_each_run_draws_anew_and_a_seed_repeats_one():
    seen = []
    answer = lambda x: seen.append(x) or 2 * x  # noqa: E731
    for seed in (None, None, 7, 7):
        check_double(answer, seed=seed)
    assert seen[0] != seen[1] and seen[2] == seen[3]


def test_a_fault_of_the_grader_itself_is_not_blamed_on_the_answer():
    @grader
    def check_broken(student, rng):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        check_broken(len)
