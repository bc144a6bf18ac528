"""The tests of a day on GPUs that time models, rehearsed on a fake GPU: their rows reach the table and the page."""

import pytest
from test_fake_gpu_engines import launches, notebook_of

from course_lib.authoring import ROOT
from course_lib.labs.gpu_day import page, read_rows

pytestmark = [pytest.mark.long, pytest.mark.launches]

REHEARSAL = """
import sys
from contextlib import suppress
from course_lib.labs.gpu_day import add_row
from course_lib.launch import launch

def rehearse():
    sys.path.insert(0, {gpu_tests!r})
    import test_models_gpu as day
    day.RUNS = {{name: ("toy", day.RUNS[name][1]) for name in ("1B", "3B, recomputed")}}
    day.SEQ_LEN, day.ROUNDS = 64, 1
    day.launch = lambda fn, ranks, *args, **options: [fn(*args)]
    for name in day.RUNS:
        record = lambda **figures: add_row({table!r}, part="models", name=name, outcome="measured", figures=figures)
        with suppress(AssertionError):  # a fake GPU has no speed, and its allocator no peak
            day.test_a_model_s_step_and_peak_lie_where_the_estimate_says(name, record)

launch(rehearse, 1)
"""


def test_models_are_measured_beside_their_estimates(tmp_path):
    table = tmp_path / "table.json"
    cell = REHEARSAL.format(gpu_tests=str(ROOT / "tests" / "gpu"), table=str(table))
    [launched] = launches(notebook_of(tmp_path, [cell]))
    assert launched.get("error") is None and launched.get("left_out") is None
    rows = read_rows(table)
    assert [row["name"] for row in rows] == ["1B", "3B, recomputed"]
    assert page(rows).count("| peak, GB |") == len(rows)
