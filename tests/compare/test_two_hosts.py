"""The stored steps on two hosts: their payload is what the formulas have, and the link carried little more."""

import pytest

from course_lib.compare.two_hosts import LINK_BYTES_PER_S, MEASURED
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.traffic.step import sent


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.inside} inside, {row.across} across")
def test_the_link_carried_what_the_formulas_have_for_the_axis_across(row):
    run, axis = Run(preset("toy"), Layout.parse(row.layout), 256, "fp32"), row.across.replace("dp", "data")
    of_ranks = [sent(run, rank).get(axis, 0) for rank in range(4)]
    assert row.formula_bytes == max(sum(of_ranks[:2]), sum(of_ranks[2:]))
    assert row.formula_bytes < row.link_bytes < 1.1 * row.formula_bytes
    assert row.link_bytes / LINK_BYTES_PER_S < row.step_s
