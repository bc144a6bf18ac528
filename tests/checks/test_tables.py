"""Every exercise: right answers pass, and each wrong one is told its own message, so no two are alike.

A table's answers run in one launch for each number of ranks, as the grader runs them. Graders by hand, which judge
events, get their answers one after the other.
"""

import importlib
import random
from contextlib import redirect_stdout
from io import StringIO

import pytest
from harness import EXHAUSTIVE
from test_exercises import LONG

from course_lib.authoring import notebook_paths
from course_lib.checks.core import CheckFailed
from course_lib.checks.table import Exercise, judge, observe, pairs

pytestmark = pytest.mark.launches

CHAPTERS = [importlib.import_module(f"course_lib.checks.ch{path.stem[:2]}") for path in notebook_paths("solutions")]
GRADERS = [check for of in CHAPTERS for name, check in sorted(vars(of).items()) if name.startswith("check_")]


def marked(graders: list) -> list:
    """Cases for `parametrize`; the long ones are for make nightly."""
    return [
        pytest.param(check, id=f"{check.__name__}", marks=EXHAUSTIVE if check.__name__ in LONG else ())
        for check in graders
    ]


TABLES = [check for check in GRADERS if isinstance(check, Exercise)]
BY_HAND = [check for check in GRADERS if not isinstance(check, Exercise)]


def message_of(check, answer, seed: int | None = None) -> str:
    """What an answer is told."""
    try:
        with redirect_stdout(StringIO()) as said:
            check(answer, seed)
    except CheckFailed as failure:
        return str(failure).removeprefix(f"{check.__name__}: ")
    return said.getvalue()


def problems(ex: Exercise, seed: int) -> list[str]:
    """Right answers that do not pass, and wrong ones that are told something else than their own message."""
    cases, wrong = ex.inputs(random.Random(seed)), pairs(ex.wrong)
    want, right, *of_wrong = observe(ex, [ex.reference, ex.right, *(answer for _, answer in wrong)], cases)
    wants_told = [None, *(message for message, _ in wrong)]
    told = [judge(ex, cases, want, got, lambda: of_wrong) for got in (right, *of_wrong)]
    return [
        f"{message} -> {said or 'passed'}"
        for message, said in zip(wants_told, told, strict=True)
        if (said and said.partition("\n(")[0]) != message
    ]


@pytest.mark.parametrize("ex", marked(TABLES))
def test_right_answers_of_a_table_pass_and_each_wrong_one_is_told_its_own_message(ex):
    assert problems(ex, seed=1) + problems(ex, seed=2) == []


@pytest.mark.parametrize("ex", marked([ex for ex in TABLES if ex.breaks]))
def test_answers_of_a_table_that_raise_or_hang_are_told_so(ex):
    for part, answer in pairs(ex.breaks):
        assert part in message_of(ex, answer), part


@pytest.mark.parametrize("ex", marked(TABLES))
def test_a_table_has_three_wrong_answers_and_its_name(ex):
    assert len(ex.wrong) + len(ex.breaks) >= 3
    assert any(getattr(of, ex.name, None) is ex for of in CHAPTERS)


@pytest.mark.parametrize("check", marked(BY_HAND))
def test_a_grader_by_hand_accepts_an_unusual_right_answer_and_tells_each_wrong_one_its_own_message(check):
    assert message_of(check, check.right) == f"{check.__name__}: passed\n"
    assert len(check.wrong) >= 3
    for part, answer in pairs(check.wrong):
        told = message_of(check, answer)
        assert [one for one in check.wrong if one in told] == [part], told
