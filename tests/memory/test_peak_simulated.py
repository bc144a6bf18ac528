"""The fullest rank's peak as a sum, against simulated ranks: random runs of four families, their peaks stored.

python benchmarks/simulated.py --count 300       # simulates those that are not stored yet
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import simulated

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.run import Run

USUAL, NINE_IN_TEN, MOST, OTHER_VERDICT = 0.01, 0.04, 0.12, 0.01
LIVE = {"llama": 31, "gpt": 37, "experts": 3, "latent": 5}  # of each a run that is simulated in a second or two


DOCUMENT = Path(__file__).parents[2] / "docs" / "PREDICTOR.md"


@pytest.mark.slow
@pytest.mark.parametrize("family", simulated.FAMILIES)
def test_the_fullest_rank_of_a_random_run_holds_what_the_sum_says(family):
    errors, differ = simulated.figures(family)
    assert errors[len(errors) // 2] <= USUAL
    assert errors[int(0.9 * len(errors)) - 1] <= NINE_IN_TEN
    assert errors[-1] <= MOST
    assert differ <= OTHER_VERDICT
    assert simulated.line(family) in DOCUMENT.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("family", simulated.FAMILIES)
def test_a_stored_peak_is_simulated_again_to_the_byte(family):
    number = LIVE[family]
    pp_rank, peak_bytes = simulated.stored_peaks(family)[number]
    assert simulated.simulated_bytes(simulated.random_runs(family, number + 1)[number], pp_rank) == peak_bytes


@pytest.mark.slow
def test_zero_3_sums_both_gradients_of_a_tied_weight_in_a_third_tensor():
    config = ModelConfig("gpt", 2, 1024, 16, 16, 4096, 128_256, 1024, tied=True, family="gpt")
    run = Run(config, Layout(dp=2, zero_stage=3, micro_batches=2, recompute="full"), 256, "fp32")
    assert simulated.fullest(run)[1] == pytest.approx(simulated.simulated_bytes(run, 0), rel=0.01)
