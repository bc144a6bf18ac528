"""A layout measured on real ranks: what each holds and sends is what the formulas say, to the byte."""

from dataclasses import replace

import pytest
import torch

from course_lib.compare import five_d_profile
from course_lib.compare.five_d_profile import first_times, measure_five_d
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.run import RECIPES
from course_lib.traffic import sent
from course_lib.training.precision import ENGINE_RECIPES

LAYOUTS = {
    "toy-moe": "dp=2,pp=2,ep=2,zero_stage=0,micro_batches=5",
    "toy": "dp=2,tp=2,sequence_parallel=true,zero_stage=3,micro_batches=2",
}


@pytest.mark.launches
@pytest.mark.parametrize(
    ("model", "recipe"), [*(("toy-moe", recipe) for recipe in ENGINE_RECIPES), ("toy", "bf16-master-fp32-grads")]
)
def test_in_every_recipe_states_and_bytes_sent_are_the_formulas_to_the_byte(model, recipe):
    result = measure_five_d(preset(model), Layout.parse(LAYOUTS[model]), 64, recipe)
    assert [row for _, row in result.unequal] == []
    for kind in ("parameters", "gradients", "optimizer", "sent over data"):
        assert result.row(kind).measured_bytes > 0


ZERO = "dp=2,zero_stage={},micro_batches={}"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (ZERO.format(1, 4), "bf16-master"),
        (ZERO.format(3, 1), "fp32"),
        ("tp=2,sequence_parallel=true,regather=true", "fp32"),
    ],
)
def test_what_a_rank_holds_for_backward_is_the_formula_within_2_percent(layout, recipe):
    result = measure_five_d(preset("toy"), Layout.parse(layout), 64, recipe)
    assert result.unequal == [] and abs(result.row("activations").error_percent) < 2
    if "tp" in layout:
        assert result.row("gathered").error_percent == 0
        assert abs(result.row("temporary").error_percent) < 50, "a rule of thumb, but of the right size"


@pytest.mark.launches
def test_a_model_with_fewer_words_than_the_text_has_is_measured_too():
    assert measure_five_d(replace(preset("toy"), vocab_size=16), Layout(), 64).unequal == []


@pytest.mark.launches
def test_a_wrong_formula_is_seen(monkeypatch):
    monkeypatch.setattr(five_d_profile, "sent", lambda *a, **k: sent(*a, **k) | {"pp": 5})
    result = measure_five_d(preset("toy"), Layout(tp=2, zero_stage=0), 32)
    assert [(rank, row.kind) for rank, row in result.unequal] == [(0, "sent over pp"), (1, "sent over pp")]
    assert "Rank 0 differs, sent over pp: 0 bytes instead of 5" in str(result)
    assert result.row("parameters").error_percent == 0 and result.row("sent over tp").measured_bytes > 0
    with pytest.raises(ValueError, match="no row 'sent over cp'"):
        result.row("sent over cp")


def test_what_is_too_large_is_refused_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr(five_d_profile, "launch", lambda *a, **k: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match="at most 16 ranks and a toy"):
        measure_five_d(preset("toy"), Layout(dp=32))
    with pytest.raises(ValueError, match="choose toy, toy-moe or speaks"):
        measure_five_d(preset("llama-3.1-8b"), Layout())
    with pytest.raises(ValueError, match="nearest: tp=2"):
        measure_five_d(preset("toy"), Layout(tp=3))
    for recipe in sorted(set(RECIPES) - set(ENGINE_RECIPES)):
        with pytest.raises(ValueError, match="no engine takes; choose from fp32"):
            measure_five_d(preset("toy"), Layout(), recipe=recipe)


def test_of_a_routers_runs_the_second_is_left_out():
    a, b = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    assert [x.tolist() for x in first_times([a, b, a, b, a, a])] == [x.tolist() for x in (a, b, a)]
