"""A prediction is kept, compared in one sentence, and silent where none was made."""

import pytest

from course_lib.minimal import predict


@pytest.mark.parametrize(
    ("unit", "mine", "measured", "said"),
    [
        ("bytes", ..., 42, ""),  # an open prediction
        ("bytes", 90, 100, "You predicted 90 bytes; measured 100 bytes, 10% too low.\n"),
        ("bytes", 3.5, 2, "You predicted 3.5 bytes; measured 2 bytes, 75% too high.\n"),
        ("bytes", 100, 100, "You predicted 100 bytes: right.\n"),
        ("bytes", 5, 0, "You predicted 5 bytes; measured 0 bytes.\n"),
        ("%", 90, 78, "You predicted 90 %; measured 78 %, 12 percentage points too high.\n"),
        ("%", 0.5, 27.3, "You predicted 0.5 %; measured 27.3 %, 26.8 percentage points too low.\n"),
        ("%", 5, 0, "You predicted 5 %; measured 0 %, 5 percentage points too high.\n"),
    ],
)
def test_a_prediction_says_how_far_off_it_was_and_shares_differ_by_points(unit, mine, measured, said, capsys):
    predict("How many?", unit=unit, mine=mine).compare(measured)
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("wrong", ["12", True, None])
def test_a_prediction_that_is_no_number_is_refused(wrong):
    with pytest.raises(ValueError, match="give your prediction as a number"):
        predict("How many bytes?", unit="bytes", mine=wrong)
