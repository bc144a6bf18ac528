"""The picture of checkpoint intervals draws what the formula says."""

import matplotlib.pyplot as plt
import pytest

from course_lib.plots.failures import default_intervals, share_rows, show_checkpoint_interval
from course_lib.timing.failures import Failures, best_interval_s, goodput

FAILURES = Failures(mtbf_s=10_000.0, save_s=60.0, restart_s=300.0)


def test_rows_are_the_shares_and_the_best_interval_is_their_highest():
    intervals_s = default_intervals(FAILURES)
    rows = share_rows(FAILURES, intervals_s)
    assert rows["training"] == [goodput(FAILURES, interval_s) for interval_s in intervals_s]
    assert all(sum(column) == pytest.approx(1) for column in zip(*rows.values(), strict=True))
    highest_s = intervals_s[rows["training"].index(max(rows["training"]))]
    assert highest_s == pytest.approx(best_interval_s(FAILURES), rel=0.1)


def test_the_line_stands_at_the_best_interval(monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf().axes[0].lines[0].get_xdata()[0]))
    show_checkpoint_interval(FAILURES)
    assert drawn == [best_interval_s(FAILURES)]
