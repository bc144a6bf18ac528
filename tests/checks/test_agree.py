"""What of two observations agrees: of an answer and of the reference, in every grader."""

import pytest
import torch

from course_lib.checks.watch import Cost, agree, difference


@pytest.mark.parametrize(("off_by", "is_right"), [(1e-12, True), (9e-7, True), (1.1e-6, False), (1e-4, False)])
def test_an_answer_may_be_off_by_a_millionth_and_no_more(off_by, is_right):
    x = torch.tensor([3.0, -4.0, 5.0], dtype=torch.float64)
    assert agree(x * (1 + off_by), x) == agree(3.0 * (1 + off_by), 3.0) == is_right
    assert agree(torch.full_like(x, off_by * 1e-3), torch.zeros_like(x)) == is_right


def test_a_cost_may_be_smaller_and_larger_by_its_slack_and_counts_are_exact():
    for got, is_right in ((90, True), (100, True), (104, True), (105, False)):
        assert agree(Cost(got), Cost(100, slack=4), within=True) == is_right
    assert not agree(Cost(90), Cost(100))  # two that do the same cost the same
    assert difference(Cost(5000), Cost(100)) == "5,000, and 100 are enough"
    assert agree([8, (1,)], (8, [1])) and agree(8.0, 8) and not agree(True, 1) and not agree(8, 7)
    assert agree(torch.ones(1), torch.tensor(1.0)) and not agree({"a": 1}, {"b": 1})
