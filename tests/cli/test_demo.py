"""The table of `make demo`: true on a short run, and able to say that it is not."""

import dataclasses

import pytest

from course_lib.cli.demo import DemoRow, agrees, demo_table, formula_bytes, row_of

pytestmark = pytest.mark.launches


def test_formula_is_the_published_one():
    assert formula_bytes(1) == 0
    assert [formula_bytes(ranks) for ranks in (2, 4)] == [2 * 229_952 * 8 // 2, 2 * 3 * 229_952 * 8 // 4]


@pytest.fixture
def right():
    return DemoRow(2, 5.5, 3.1, gradient_difference=1e-15, measured_bytes=100, formula_bytes=100)


@pytest.mark.parametrize("wrong", [{"gradient_difference": 1e-6}, {"measured_bytes": 101}])
def test_a_row_that_differs_does_not_agree(right, wrong):
    assert agrees(right)
    assert not agrees(dataclasses.replace(right, **wrong))


def test_a_row_takes_the_worst_gradient_and_the_most_bytes_of_any_rank():
    row = row_of([([4.0, 2.0], 0.25, 12), ([4.0, 2.0], 0.5, 10)])
    assert (row.ranks, row.first_loss, row.last_loss) == (2, 4.0, 2.0)
    assert (row.gradient_difference, row.measured_bytes) == (0.5, 12)


def test_the_table_has_one_line_a_row_under_its_two_of_heading(right):
    lines = demo_table([right, right]).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines[2:]))) == 1
