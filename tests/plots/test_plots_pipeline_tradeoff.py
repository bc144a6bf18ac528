"""The picture of bubble against memory: its points are the simulator's, and names keep apart."""

import matplotlib.pyplot as plt
import pytest

from course_lib.plots.pipeline_tradeoff import names_left, show_tradeoff, tradeoff_points
from course_lib.schedules import make, simulate

NAMES = ("afab", "1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe_v")


def test_points_are_bubbles_and_peaks_in_both_countings():
    points = {point.name: point for point in tradeoff_points([simulate(make(name, 4, 8)) for name in NAMES])}
    found = {name: (p.alive, round(p.to_the_end, 4), round(p.step_to_step, 4)) for name, p in points.items()}
    assert found["1F1B"] == (4, 0.375, 0.375) and found["ZB-H2"] == (7, 0.125, 0.0)
    assert found["ZBV"] == (4, 0.0625, 0.0) and found["DualPipeV"] == (4.5, 0.0625, 0.0625)
    left = dict(zip(points, names_left(list(points.values())), strict=True))
    assert [name for name, is_left in left.items() if is_left] == ["ZBV"]


def test_an_arrow_leads_to_a_second_point_where_the_countings_differ(monkeypatch):
    with pytest.raises(ValueError, match="no simulation"):
        show_tradeoff([])
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(len(plt.gcf().axes[0].lines)))
    show_tradeoff([simulate(make(name, 4, 8)) for name in NAMES])
    assert drawn == [len(NAMES) + 2]  # ZB-H2 and ZBV
