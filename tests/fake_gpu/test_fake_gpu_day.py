"""The tests of a day on GPUs that measure, rehearsed on a fake GPU: their rows reach the table and the page."""

import pytest
from test_fake_gpu_engines import launches, notebook_of

from course_lib.authoring import ROOT
from course_lib.labs.gpu_day import page, read_rows

pytestmark = [pytest.mark.long, pytest.mark.launches]

REHEARSAL = """
import sys
from contextlib import suppress
from functools import partial
from course_lib.labs.gpu_day import add_row
from course_lib.launch import launch

def rehearse():
    sys.path.insert(0, FOLDER)
    SMALL_TESTS
    for name, test in tests.items():
        record = lambda **figures: add_row(TABLE, part="day", name=name, outcome="measured", figures=figures)
        with suppress(AssertionError):  # a fake GPU has no speed, and its allocator no peak
            test(record=record)

launch(rehearse, 1)
"""
MODELS = """
    import test_models_gpu as day
    day.RUNS = {name: ("toy", day.RUNS[name][1]) for name in ("1B", "3B, recomputed")}
    day.SEQ_LEN, day.ROUNDS = 64, 1
    day.launch = lambda fn, ranks, *args, **options: [fn(*args)]
    step = day.test_a_model_s_step_and_peak_lie_where_the_estimate_says
    tests = {name: partial(step, name) for name in day.RUNS}
"""
KERNELS = """
    import test_eight_bits_gpu as bits, test_kernels_gpu as day
    day.ROWS, day.COLUMNS, day.M, day.HEADS, day.TOKENS, day.ROUNDS, bits.N = 3, 48, 64, 1, 64, 1, 64
    product = partial(day.test_a_tiled_product_is_right_and_timed, (32, 32, 32))
    softmax, fp8 = day.test_one_softmax_kernel_takes_the_time_of_its_bytes, bits.test_an_fp8_product_is_near_and_faster
    attention = day.test_attention_by_one_kernel_is_right_and_faster_than_by_three
    tests = {"softmax": softmax, "product": product, "attention": attention, "fp8": fp8}
"""


def rehearsed(tmp_path, small_tests: str) -> list[dict]:
    """The rows that these tests leave: those that come before the first sentence that is not so."""
    table = tmp_path / "table.json"
    names = {"FOLDER": repr(str(ROOT / "tests" / "gpu")), "TABLE": repr(str(table)), "SMALL_TESTS": small_tests.strip()}
    cell = REHEARSAL
    for name, value in names.items():
        cell = cell.replace(name, value)
    [launched] = launches(notebook_of(tmp_path, [cell]))
    assert launched.get("error") is None and launched.get("left_out") is None, launched
    return read_rows(table)


def test_models_are_measured_beside_their_estimates(tmp_path):
    rows = rehearsed(tmp_path, MODELS)
    assert [row["name"] for row in rows] == ["1B", "3B, recomputed"]
    assert page(rows).count("| peak, GB |") == len(rows)


@pytest.mark.exhaustive
def test_kernels_and_fp8_are_found_right_and_then_measured(tmp_path):
    rows = rehearsed(tmp_path, KERNELS)
    assert [row["name"] for row in rows] == ["softmax", "product", "product", "attention", "fp8"]
    assert 0.01 < rows[-1]["figures"]["off_by"] < 0.06
    for figure in ("one kernel, ms", "TFLOP/s (predicted: every load", "three kernels / one", "fp8, TFLOP/s"):
        assert page(rows).count(f"| {figure}") == 1
