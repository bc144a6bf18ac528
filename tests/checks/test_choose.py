"""A layout chosen under a limit of memory: without a measured run no fixed margin is right under every limit."""

import pytest

from course_lib.checks.ch11 import check_choose
from course_lib.checks.ch11.choose import with_a_margin
from course_lib.checks.core import CheckFailed


@pytest.mark.slow
@pytest.mark.parametrize("margin", [1.0, 0.97, 0.95, 0.93, 0.92, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6])
@pytest.mark.parametrize("seed", range(2))
def test_no_margin_on_predictions_passes_without_a_measured_run(margin, seed):
    with pytest.raises(CheckFailed, match="out of memory|no fixed margin"):
        check_choose(with_a_margin(margin), seed=seed)
