"""What is drawn of traces: intervals and sums, which agree."""

import pytest

from course_lib.measure.trace import RankTrace, seconds_of
from course_lib.plots.rank_traces import draw_sums, rank_row, show_rank_traces
from course_lib.span import Span


def trace(rank: int) -> RankTrace:
    """Compute 0-4 and 6-7; tp 3-6; data 5-9; nothing 9-10."""
    spans = [("compute", 0, 4), ("tp", 3, 6), ("data", 5, 9), ("compute", 6, 7)]
    return RankTrace(rank, tuple(Span(rank, lane, lane, float(a), float(b)) for lane, a, b in spans), 10.0, "cuda")


def test_a_row_has_the_intervals_known_by_hand_and_their_sums():
    row = rank_row(trace(0))
    assert row.compute == [(0, 4), (6, 7)]
    assert row.communication == {"tp": [(3, 6)], "data": [(5, 9)]}
    assert row.exposed == {"tp": [(4, 6)], "data": [(7, 9)]}  # 5-6 is tp's already
    for axis, seconds in seconds_of(trace(0)).exposed_s.items():
        assert sum(stop - start for start, stop in row.exposed[axis]) == pytest.approx(seconds)


def test_the_parts_of_a_bar_end_where_the_step_ends(axes):
    draw_sums(axes, [rank_row(trace(0)), rank_row(trace(1))], 1.0)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([5, 7, 9, 10] * 2)
    assert [text.get_text() for text in axes.texts] == [" 10.0 s, 40% exposed"] * 2


def test_a_picture_is_shown_and_none_without_traces(shown):
    show_rank_traces([trace(0), trace(1)])
    texts = [text.get_text() for text in shown[0].legends[0].get_texts()]
    assert texts == ["computing", "communication over tp", "communication over data", "neither (below)"]
    with pytest.raises(ValueError, match="there are no traces to draw"):
        show_rank_traces([])
