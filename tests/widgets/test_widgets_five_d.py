"""The explorer of whole layouts: what its function computes, known layouts, what cannot be, and real ranks."""

from dataclasses import replace

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import overlapping_texts
from widget_tree import control, shown, texts

from course_lib.compare import five_d_profile
from course_lib.compare.five_d_profile import first_times, measure_five_d
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.memory.states import RECIPES
from course_lib.plots.memory import kinds_of
from course_lib.plots.style import style
from course_lib.run import Run
from course_lib.timing import step_time
from course_lib.traffic import sent
from course_lib.training.precision import ENGINE_RECIPES
from course_lib.widgets import five_d
from course_lib.widgets.five_d import KNOWN, NOTHING, FiveDChoice, explore_five_d, five_d_explorer, five_d_figure

LLAMA_405B, DEEPSEEK, LLAMA_70B, LAPTOP = (known.choice for known in KNOWN.values())


# ---------------------------------------------------------------- the function


def test_the_view_is_what_the_formulas_say():
    view, config = explore_five_d(LLAMA_70B), preset("llama-3.1-70b")
    layout = Layout(dp=2, tp=8, pp=2, zero_stage=1, sequence_parallel=True, micro_batches=16)
    assert view.layout == layout
    of_ranks = budgets(Run(config, layout, 4096))
    assert [bar.bytes_by_kind for bar in view.bars] == [kinds_of(rank) for rank in of_ranks]
    assert view.limits_bytes == {gpu("a100-80").name: gpu("a100-80").usable_bytes}
    assert view.largest == 0 and view.sent_bytes == sent(Run(config, layout, 4096))
    cluster = Cluster(gpu("a100-80"), link("nvlink3"), link("ib-hdr200"), 8)
    assert view.time == step_time(Run(config, layout, 4096, "bf16-master"), cluster, five_d.ENGINE)
    assert f"MFU {100 * view.time.mfu:.2g} %" in view.text and "Modelled, not measured" in view.text
    assert "32 ranks on 4 nodes, 131,072 tokens a step. In a node: tp. Over the network: pp, dp." in view.text


def test_the_fullest_stage_is_the_one_whose_bytes_are_shown():
    choice = FiveDChoice(pp=4, dp=2, tp=1, sequence_parallel=False, zero_stage=0, micro_batches=1, seq_len=1024)
    view = explore_five_d(choice)
    totals = [bar.total_bytes for bar in view.bars]
    assert view.largest == totals.index(max(totals)) > 0  # the last one has the head and its logits
    of_ranks = [sent(Run(preset(choice.model), choice.layout, 1024), rank) for rank in (0, 2, 4, 6)]
    assert view.sent_bytes == of_ranks[view.largest] != of_ranks[0]


def test_inputs_that_are_gathered_again_are_kept_as_own_tokens():
    held = []
    for regather in (False, True):
        view = explore_five_d(FiveDChoice(tp=8, dp=2, pp=1, regather=regather))
        assert view.layout.regather == regather
        held.append(view.bars[0].total_bytes)
    assert held[1] < 0.9 * held[0]


@pytest.mark.slow
def test_what_is_said_of_known_layouts_is_so():
    view = explore_five_d(LLAMA_405B)
    assert view.layout.world_size == 16_384 and view.time.num_tokens == 2**24
    assert view.layout.layers_of_stage == (1, *[2] * 62, 1) and "(one layer less at both ends)" in view.text
    assert view.time.causal_mfu == pytest.approx(0.41, rel=0.15)  # published; modelled, no rank late
    assert not view.bars[view.largest].fits
    recomputed = explore_five_d(replace(LLAMA_405B, recompute="full"))
    assert recomputed.bars[recomputed.largest].fits
    assert all(bar.fits for bar in explore_five_d(LLAMA_70B).bars)
    assert explore_five_d(LAPTOP).layout.world_size == 8


@pytest.mark.slow
def test_deepseek_v3_fits_with_another_schedule():
    few = replace(DEEPSEEK, micro_batches=32)  # as many alive as with 120
    v_shaped, plain = explore_five_d(few), explore_five_d(replace(few, schedule="1f1b"))
    assert DEEPSEEK.layout.world_size == 2048 and DEEPSEEK.layout.sequences_per_step == 15_360
    assert not v_shaped.bars[v_shaped.largest].fits and plain.bars[plain.largest].fits
    assert plain.time.tokens_per_s_per_gpu < v_shaped.time.tokens_per_s_per_gpu


@pytest.mark.slow
@pytest.mark.parametrize("choice", [LLAMA_405B, LAPTOP], ids=["405B", "toy"])
def test_the_picture_has_no_text_on_another(choice):
    with style():
        figure = five_d_figure(explore_five_d(choice))
        FigureCanvasAgg(figure)
        assert overlapping_texts(figure) == []


# ---------------------------------------------------------------- the widget


@pytest.mark.slow
def test_a_known_layout_sets_all_controls_and_a_change_makes_it_ones_own(monkeypatch):
    drawn = []
    monkeypatch.setattr(five_d, "five_d_png", lambda choice: drawn.append(choice) or choice.model.encode())
    explorer = five_d_explorer()
    menu = control(explorer, "layout of")
    menu.value = "one laptop (toy), 8 ranks"
    assert drawn == [FiveDChoice(), LAPTOP]  # nothing in between
    assert control(explorer, "ep").value == 2 and shown(explorer) == [b"toy-moe"]
    assert "press Measure" in texts(explorer)
    control(explorer, "ZeRO stage").value = 3
    assert menu.value == NOTHING and drawn[-1] == replace(LAPTOP, zero_stage=3)
    assert "press Measure" not in texts(explorer)
    for name, known in KNOWN.items():
        menu.value = name
        assert drawn[-1] == known.choice and "Not possible" not in texts(explorer)


def test_what_cannot_be_is_answered_with_the_nearest_in_place_of_the_picture(monkeypatch):
    monkeypatch.setattr(five_d, "five_d_png", lambda choice: explore_five_d(choice).text.encode())
    explorer = five_d_explorer(FiveDChoice("toy", seq_len=64, dp=2, tp=2, pp=2))
    assert len(shown(explorer)) == 1
    control(explorer, "tp").value = 3
    assert shown(explorer) == []
    assert "Not possible" in texts(explorer) and "nearest: tp=2 or tp=4" in texts(explorer)
    control(explorer, "Measure").click()
    assert texts(explorer).count("nearest: tp=2 or tp=4") == 2  # nothing is measured either
    control(explorer, "tp").value = 4
    assert len(shown(explorer)) == 1 and "Not possible" not in texts(explorer)
    wrong_values = (("pp", 8, "nearest: pp=4"), ("ep", 2, "nearest: ep=1"), ("sequence", 512, "seq_len is"))
    for field, wrong, said in wrong_values:
        before = control(explorer, field).value
        control(explorer, field).value = wrong
        assert said in texts(explorer), field
        control(explorer, field).value = before


# ---------------------------------------------------------------- real ranks


@pytest.mark.launches
def test_measure_runs_the_layout_and_every_rank_equals_the_formulas():
    choice = replace(LAPTOP, tp=1, sequence_parallel=False, recompute="full")
    explorer = five_d_explorer(choice)
    control(explorer, "Measure").click()
    assert len(shown(explorer)) == 2
    assert "Measured in" in texts(explorer) and "to the byte, on all 4." in texts(explorer)
    control(explorer, "ep").value = 1
    assert len(shown(explorer)) == 1 and "Measured in" not in texts(explorer)  # it was of another choice


LAYOUTS = {
    "toy-moe": "dp=2,pp=2,ep=2,zero_stage=0,micro_batches=5",
    "toy": "dp=2,tp=2,sequence_parallel=true,zero_stage=3,micro_batches=2",
}


@pytest.mark.launches
@pytest.mark.parametrize("recipe", ENGINE_RECIPES)
@pytest.mark.parametrize("model", LAYOUTS)
def test_in_every_recipe_states_and_bytes_sent_are_the_formulas_to_the_byte(model, recipe):
    result = measure_five_d(preset(model), Layout.parse(LAYOUTS[model]), 64, recipe)
    assert [row for _, row in result.unequal] == []
    for kind in ("parameters", "gradients", "optimizer", "sent over data"):
        assert result.row(kind).measured_bytes > 0


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
    with pytest.raises(ValueError, match="at most 8 ranks and a toy"):
        measure_five_d(preset("toy"), Layout(dp=16))
    with pytest.raises(ValueError, match="choose toy or toy-moe"):
        measure_five_d(preset("llama-3.1-8b"), Layout())
    with pytest.raises(ValueError, match="nearest: tp=2"):
        measure_five_d(preset("toy"), Layout(tp=3))
    for recipe in sorted(set(RECIPES) - set(ENGINE_RECIPES)):
        with pytest.raises(ValueError, match="no engine takes; choose from fp32"):
            measure_five_d(preset("toy"), Layout(), recipe=recipe)


def test_of_a_routers_runs_the_second_is_left_out():
    a, b = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    assert [x.tolist() for x in first_times([a, b, a, b, a, a])] == [x.tolist() for x in (a, b, a)]
