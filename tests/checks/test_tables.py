"""Every exercise: its solution and unusual right answers pass, and each wrong one is told its own message.

The solutions are read from their notebooks, and run without a kernel; all answers of a table in one launch a world.
"""

import random
from contextlib import redirect_stdout
from io import StringIO

import pytest
from harness import EXHAUSTIVE
from test_exercises import EXERCISES, definitions, grader_of

from course_lib.checks.core import CheckFailed
from course_lib.checks.table import Exercise, message_for, observe, pairs

pytestmark = pytest.mark.launches

# Whole trainers: for make nightly; their solutions pass in the solutions' own notebooks.
LONG = {
    "check_zero3",
    "check_zero2_buckets",
    "check_tensor_parallel",
    "check_sequence_parallel",
    "check_ddp",
    "check_pipeline",
    "check_hooked_sequence",
    "check_capstone",
}
ANSWERS = {grader_of(stem, name): (f"solutions/{stem}.ipynb", answer) for stem, name, answer in EXERCISES}


def marked(tables) -> list:
    """Cases for `parametrize`."""
    return [pytest.param(ex, id=ex.__name__, marks=EXHAUSTIVE if ex.__name__ in LONG else ()) for ex in tables]


def problems(ex: Exercise, seed: int) -> list[str]:
    """Right answers that do not pass, and wrong ones that are told something else than their own message."""
    cases, wrong, (path, name) = list(ex.inputs(random.Random(seed))), pairs(ex.wrong), ANSWERS[ex]
    right = [definitions(path)[name], *([ex.right] if ex.right else [])]
    want, *seen = observe(ex, [ex.reference, *right, *(answer for _, answer in wrong)], cases)
    wants_told = [*[None] * len(right), *(message for message, _ in wrong)]
    told = [message_for(ex, cases, want, got, lambda: seen[len(right) :]) for got in seen]
    return [
        f"{message} -> {said or 'passed'}"
        for message, said in zip(wants_told, told, strict=True)
        if (said and said.partition("\n(")[0]) != message
    ]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("ex", marked(ANSWERS))
def test_right_answers_of_a_table_pass_and_each_wrong_one_is_told_its_own_message(ex, seed):
    assert problems(ex, seed) == []


@pytest.mark.parametrize("ex", marked(ex for ex in ANSWERS if pairs(ex.wrong, stop=True)))
def test_answers_of_a_table_that_raise_or_hang_are_told_so(ex):
    for part, answer in pairs(ex.wrong, stop=True):
        with redirect_stdout(StringIO()), pytest.raises(CheckFailed) as failure:
            ex(answer)
        assert part in str(failure.value), part


def test_every_grader_is_a_table_of_three_wrong_answers_or_more_and_has_its_name():
    tables = zip(ANSWERS, EXERCISES, strict=True)
    assert all(isinstance(ex, Exercise) and ex.__name__ == name and len(ex.wrong) >= 3 for ex, (_, name, _) in tables)
