"""A grader accepts every right answer: each is tested with three that are arranged otherwise."""

from importlib import import_module

import pytest

CHAPTERS = [f"{number:02d}" for number in range(13)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_grader_that_is_no_table_has_three_right_variants(chapter):
    graders = vars(import_module(f"course_lib.checks.ch{chapter}"))
    without = {name for name, check in graders.items() if name.startswith("check_") and check.right is None}
    right = import_module(f"test_ch{chapter}_variants").RIGHT if without else {}
    assert set(right) == without
    for check, answers in right.items():
        assert len({answer.__name__ for answer in answers}) >= 3, check
