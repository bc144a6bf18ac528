"""A table grades: what the learner reads, that every run is a new one, and what of two observations agrees."""

import math

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks.core import CheckFailed, NotWritten, numbers
from course_lib.checks.table import Exercise
from course_lib.checks.watch import Kept, collective
from course_lib.comm import all_reduce, recv

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(__import__(__name__))  # ranks do not have tests/ on their path


def doubled() -> Exercise:
    """A table of its own for each test: it remembers the failed try."""
    return Exercise(
        lambda x: 2 * x,
        lambda rng: [(numbers(rng, length),) for length in (3, rng.randrange(5, 9))],
        {"squared, not doubled": lambda x: x * x, "all of it summed": lambda x: 2 * x.sum()},
    )


def summed() -> Exercise:
    return Exercise(
        all_reduce,
        lambda rng: [(2, numbers(rng, length)) for length in (3, 4)],
        {"averaged, not summed": lambda x, group: all_reduce(x, group, op="mean")},
        collective,
        ranks="Nobody sends.",
        seconds=2.0,
    )


def told(check, answer, seed=None) -> str:
    with pytest.raises(CheckFailed) as failure:
        check(answer, seed)
    assert failure.value._render_traceback_()[0].startswith("a check: ") and "seed=" in str(failure.value)
    return str(failure.value)


def test_a_right_answer_prints_one_line(capsys):
    doubled()(lambda x: x + x)
    assert capsys.readouterr().out == "a check: passed\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x * x, "a check: squared, not doubled\n(the result: "),
        (lambda x: 2 * x.sum(), "a check: all of it summed\n"),
        (lambda x: 3 * x, "the result: "),
        (lambda x: x * math.nan, "the result: "),
        (lambda x: None, "the result: it is None; does your function return it?"),
        (lambda x: (2 * x).float(), "float32), and"),
        (lambda x: (2 * x)[:-1], "((2,), float64), and"),
        (lambda x: 2.0, "the result: 2, and"),
        (lambda x: x / {}["y"], "your code raised KeyError: 'y' in <lambda>, line"),
        (lambda x: x.mul_(2), "arguments changed: True, and False is right: work on a copy"),
        (lambda: 3, "your code raised TypeError"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong_with_it(answer, message):
    assert message in told(doubled(), answer)


@pytest.mark.parametrize("ranks", [False, True])
def test_an_exercise_that_is_not_done_says_so_with_or_without_a_word(ranks):
    def undone(*args):
        raise NotImplementedError("my_sum: your code goes here")

    def without_a_word(*args):
        raise NotImplementedError

    check = summed() if ranks else doubled()
    for answer in (undone, without_a_word, None, ...):
        with pytest.raises(NotWritten, match="a check: .*your code goes here"):
            check(answer)


def test_each_run_draws_anew_and_a_failed_one_comes_again_before_a_fresh_one():
    seen, check = [], doubled()

    def answer(x):
        seen.append(x.clone())
        return times * x

    times = 3
    told(check, answer)
    failed = seen[0]
    seen.clear()
    times = 2
    check(answer)
    assert [torch.equal(x[:3], failed) for x in seen if len(x) == 3] == [True, False]
    seen.clear()
    check(answer, seed=7)
    check(answer, seed=7)
    assert [torch.equal(*pair) for pair in zip(seen[:2], seen[2:], strict=True)] == [True, True]


def test_a_case_is_told_by_the_names_of_the_answers_arguments_where_the_watch_takes_any():
    def watch(answer, *args, slack=0):
        return {"the result": answer(*args)}

    check = Exercise(lambda x, times: x * times, lambda rng: [(2, 3)], {}, watch)
    assert "x=2, times=3: the result: 5" in told(check, lambda x, times: x + times)


def test_a_fault_of_the_table_itself_is_not_blamed_on_the_answer():
    broken = Exercise(len, lambda rng: [([1],)], {}, lambda answer, case: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken(lambda x: 1)


def test_the_failure_of_a_rank_is_told_with_its_rank_and_without_the_graders_own_lines():
    def fails_on_one(x, group):
        return all_reduce(x, group) if dist.get_rank() == 0 else {}["my key"]

    said = told(summed(), fails_on_one)
    assert "your code failed on 2 ranks:\nrank 1 of 2" in said and "in fails_on_one" in said and "'my key'" in said
    assert "course_lib/checks/" not in said


def test_an_answer_that_fails_in_one_case_is_told_what_is_wrong_in_a_smaller_one():
    def averages_three(x, group):
        return all_reduce(x, group, op="mean") if len(x) == 3 else {}["my key"]

    assert "averaged, not summed" in told(summed(), averages_three)


def test_ranks_that_wait_for_ever_are_told_the_likely_reason():
    said = told(summed(), lambda x, group: recv(x, 1 - dist.get_rank(), group))
    assert "your ranks wait for each other for ever" in said and "Nobody sends.\nrank 0 stood" in said


def test_forward_passes_that_wait_for_their_backward_are_counted():
    def most(together: bool) -> float:
        model, losses = torch.nn.Linear(3, 1), []
        kept = Kept(model)
        for _ in range(3):
            losses.append(model(torch.ones(2, 3)).sum())
            if not together:
                losses.pop().backward()
        return kept.most(slack=0).value

    assert [most(False), most(True)] == [0, 2]
