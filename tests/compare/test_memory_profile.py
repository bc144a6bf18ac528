"""Predicted beside measured, as the memory panel's Measure button shows it."""

import pytest

from course_lib.compare.profile import MEASURABLE_OPTIMIZERS, KindComparison, profile_step, profile_steps, scale_down
from course_lib.config import ModelConfig, preset
from course_lib.launch.limits import slowness
from course_lib.layout import Layout
from course_lib.measure.tracker import KINDS
from course_lib.memory.budget import budgets
from course_lib.memory.states import state_bytes
from course_lib.run import RECIPES, Run

SMALL = ModelConfig("small", 2, 64, num_heads=4, num_kv_heads=2, d_ff=192, vocab_size=256, max_seq_len=256)


def test_scaling_down_keeps_ratios_and_family():
    for name in ("llama-3.1-8b", "llama-3.1-405b", "gpt2-xl", "gpt3-175b", "xlm-r-large", "smollm-1.7b"):
        large, small = preset(name), scale_down(preset(name))
        assert small.family == large.family and small.tied == large.tied
        assert small.num_heads / small.num_kv_heads == large.num_heads / large.num_kv_heads
        assert small.d_ff / small.d_model == pytest.approx(large.d_ff / large.d_model, rel=0.02)
        assert small.vocab_size / small.d_model == pytest.approx(max(2, large.vocab_size / large.d_model), rel=0.02)
        assert small.d_model == 128 and small.num_layers == 4
    assert scale_down(SMALL) == SMALL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2"])
def test_a_scaled_down_model_is_measured_in_seconds_and_agrees(name):
    comparison = profile_step(scale_down(preset(name)), batch_size=2, seq_len=128, recipe="bf16-master")
    assert [row.kind for row in comparison.rows] == [*KINDS, "peak"]
    for kind in ("parameters", "gradients", "optimizer", "gathered"):
        assert comparison.row(kind).error_percent == 0
    assert abs(comparison.row("activations").error_percent) < 2
    assert abs(comparison.row("peak").error_percent) < 5
    assert comparison.seconds < 20 * slowness()  # about half a second where nothing else runs


def test_the_peak_of_fp32_gradient_sums_is_predicted_too():
    row = profile_step(scale_down(preset("llama-3.1-8b")), recipe="bf16-master-both-grads").row("peak")
    assert abs(row.error_percent) < 5


@pytest.mark.parametrize("recipe", RECIPES)
def test_states_of_every_recipe_equal_the_formula_to_the_byte(recipe):
    comparison = profile_step(SMALL, batch_size=1, seq_len=32, recipe=recipe)
    for kind in ("parameters", "gradients", "optimizer"):
        assert comparison.row(kind).error_percent == 0 and comparison.row(kind).measured_bytes > 0, kind
    assert abs(comparison.row("activations").error_percent) < 2


@pytest.mark.parametrize("optimizer", MEASURABLE_OPTIMIZERS)
def test_optimizer_states_equal_the_formula_to_the_byte(optimizer):
    comparison = profile_step(SMALL, batch_size=1, seq_len=32, optimizer=optimizer)
    assert comparison.row("optimizer").error_percent == 0
    run = Run(SMALL, Layout(), 32, "fp32", device="cpu", optimizer=optimizer)
    assert comparison.row("optimizer").predicted_bytes == budgets(run)[0].optimizer


def test_four_steps_show_states_appearing_in_the_first_and_gradients_coming_and_going():
    timeline = profile_steps(SMALL, steps=4, batch_size=4, seq_len=128)
    states = state_bytes(SMALL, "fp32", step_counters=True)
    starts = [t for t, name in timeline.marks if name == "forward"]
    ends = [t for t, name in timeline.marks if name == "end of step"]
    assert len(starts) == len(ends) == 4
    at_starts = [timeline.between(t, t + 1e-9).at(0) for t in starts]
    assert [row["optimizer"] for row in at_starts] == [0] + 3 * [states.optimizer]
    assert [row["gradients"] for row in at_starts] == 4 * [0]
    peaks = [timeline.between(a, b).peak_bytes for a, b in zip(starts, ends, strict=True)]
    assert peaks[1] == peaks[2] == peaks[3] and peaks[1] - peaks[0] == pytest.approx(states.optimizer, rel=0.01)


def test_what_cannot_be_measured_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="has a formula, but cannot be measured"):
        profile_step(SMALL, optimizer="adamw-8bit")
    with pytest.raises(ValueError, match="with fp32, autocast or bf16"):
        profile_step(SMALL, recipe="bf16-master", optimizer="sgd")
    with pytest.raises(ValueError, match="no fused attention with dropout"):
        profile_step(preset("gpt2"))
    with pytest.raises(ValueError, match="choose from parameters"):
        profile_step(SMALL, 1, 16).row("weights")


def test_a_row_of_nothing_has_no_error():
    assert KindComparison("gathered", 0, 0).error_percent == 0
    assert KindComparison("gathered", 1, 0).error_percent == float("inf")
    assert KindComparison("activations", 99, 100).error_percent == pytest.approx(-1)
