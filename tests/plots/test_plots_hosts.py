"""The picture of two hosts: lines as wide as the bytes, in the colours of the axes, beside the numbers of each row."""

from dataclasses import replace

import pytest

from course_lib.plots.hosts import WIDEST_POINTS, link_widths, show_two_hosts
from course_lib.plots.palette import AXIS_COLORS
from course_lib.simulate.two_hosts import MEASURED


def test_the_lines_across_are_as_wide_as_the_bytes(shown):
    show_two_hosts(MEASURED)
    panels = shown[0].axes
    for panel, row in zip(panels, MEASURED, strict=True):
        above, below, *inside = panel.lines
        assert {line.get_color() for line in (above, below)} == {AXIS_COLORS[row.across]}
        assert {line.get_color() for line in inside} == {AXIS_COLORS[row.inside]}
        assert above.get_linewidth() == pytest.approx(WIDEST_POINTS * row.link_bytes / MEASURED[3].link_bytes)
        texts = [text.get_text() for text in panel.texts]
        assert f"{row.link_bytes / 1e6:.1f} MB on the link\n{row.step_s:.1f} s for a step" in texts


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="rows is empty"):
        link_widths([])
    assert link_widths([replace(MEASURED[0], link_bytes=5)]) == [WIDEST_POINTS]
