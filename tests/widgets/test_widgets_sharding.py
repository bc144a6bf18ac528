"""The explorers of sharding: what their functions compute, that Measure runs real ranks, and the wiring."""

import matplotlib.pyplot as plt
import pytest
from widget_tree import control, shown, texts

from course_lib.compare.five_d_profile import SENT, FiveDComparison
from course_lib.compare.profile import Row
from course_lib.compare.sharded_profile import Sizes, measure_tensor, measure_zero
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.memory.states import count_parameters
from course_lib.run import Run
from course_lib.timing import step_time
from course_lib.widgets import tensor, zero
from course_lib.widgets.tensor import TensorChoice, explore_tensor, step_times, tensor_explorer
from course_lib.widgets.zero import ZeroChoice, explore_zero, zero_explorer

P8 = count_parameters(preset("llama-3.1-8b"))


# ---------------------------------------------------------------- the functions


def test_the_zero_view_is_the_budget_beside_plain_data_parallelism():
    view = explore_zero(ZeroChoice())
    assert view.budget == budgets(Run(preset("llama-3.1-8b"), Layout(zero_stage=3, dp=8), 4096))[0]
    assert view.budget.states_bytes == 16 * P8 // 8 and view.bars[1].total_bytes == view.budget.total_bytes
    assert view.bars[0].total_bytes == budgets(Run(preset("llama-3.1-8b"), Layout(dp=8), 4096))[0].total_bytes
    assert view.limits_bytes == {gpu("h100").name: gpu("h100").usable_bytes}
    assert view.title == "llama-3.1-8b, stage 3 on 8 GPUs: fits on H100 SXM 80 GB"
    assert "fits on" not in explore_zero(ZeroChoice(stage=1, gpu_key="a100-40")).title


@pytest.mark.parametrize(("stage", "trips"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_stage_sends_two_or_three_times_the_parameters(stage, trips):
    view = explore_zero(ZeroChoice(stage=stage))
    assert view.trips == pytest.approx(trips, rel=1e-6)
    assert view.sent_bytes == pytest.approx(trips * 2 * P8 * 7 / 8, rel=1e-6)
    assert f"{trips}.00 times the parameters" in view.text
    assert "sends nothing" in explore_zero(ZeroChoice(stage=stage, dp_size=1)).text


def test_with_micro_batches_stage_2_needs_less_than_stage_1_and_sends_more():
    alone = [explore_zero(ZeroChoice(stage=stage)) for stage in (1, 2)]
    many = [explore_zero(ZeroChoice(stage=stage, micro_batches=16)) for stage in (1, 2)]
    assert alone[0].bars[1].total_bytes == alone[1].bars[1].total_bytes
    for before, after in zip(alone, many, strict=True):
        assert after.bars[1].total_bytes > before.bars[1].total_bytes
    saved_bytes = many[0].bars[1].total_bytes - many[1].bars[1].total_bytes
    assert 0.9 * 2 * P8 * 7 / 8 < saved_bytes <= 2 * P8 * 7 / 8  # but for the gradients of the unit at work
    assert [round(view.trips) for view in many] == [2, 17]
    run = Run(preset("llama-3.1-8b"), Layout(dp=8, zero_stage=1, micro_batches=16), 4096)
    assert many[0].budget == budgets(run)[0]  # worked out with fewer micro-batches


def test_offload_moves_bytes_away_and_over_the_links():
    near, host = explore_zero(ZeroChoice()), explore_zero(ZeroChoice(offload="optimizer on the CPU"))
    disk = explore_zero(ZeroChoice(offload="optimizer, parameters on disk"))
    assert host.budget.optimizer == 0 and host.budget.elsewhere == {"host": near.budget.optimizer}
    assert host.link_bytes["device to host"] == near.budget.gradients and not host.link_bytes["disk to host"]
    assert disk.budget.parameters == 0 and disk.budget.elsewhere == {"disk": 14 * P8 // 8}
    assert near.offload_s == 0 and 0 < host.offload_s < disk.offload_s
    assert disk.offload_s > disk.link_bytes["disk to host"] / link("nvme").bytes_per_s
    assert "On disk: 14.1 GB for each GPU, 112 GB for all" in disk.text and "modelled" in disk.text
    assert "a drive" in disk.text and "a drive" not in host.text
    with pytest.raises(ValueError, match="ZeRO stage is 2, but .* choose 3, or offload the optimizer alone"):
        explore_zero(ZeroChoice(stage=2, offload="optimizer, parameters on disk"))


def test_the_tensor_view_is_the_budget_and_the_modelled_step():
    view = explore_tensor(TensorChoice())
    config, cluster = preset("llama-3.1-8b"), Cluster(gpu("h100"), link("nvlink4"), link("efa"), 8)
    assert view.budget == budgets(Run(config, Layout(tp=8, sequence_parallel=True), 4096))[0]
    assert [bar.label for bar in view.bars] == ["one GPU", "TP 8", "TP 8 + SP"]
    assert view.bars[2].total_bytes < view.bars[1].total_bytes < view.bars[0].total_bytes
    run = Run(config, Layout(tp=8, sequence_parallel=True), 4096)
    step = step_time(run, cluster, tensor.ENGINE)
    assert view.steps[8] == step and list(view.steps) == [1, 2, 4, 8, 16, 32]  # 32 heads
    assert step_times(view)["tp 8"] == (step.working_s, step.total_s - step.working_s)
    assert view.title.endswith(f"modelled: {100 * step.waiting_share:.0f} % communication")
    assert "Modelled, not measured" in view.text


def test_leaving_the_node_costs_and_gathering_again_trades_bytes_for_memory():
    inside, outside = explore_tensor(TensorChoice(tp=8)).steps[8], explore_tensor(TensorChoice(tp=16)).steps[16]
    assert outside.tp_s > inside.tp_s and outside.waiting_share > inside.waiting_share
    assert "between 2 nodes" in explore_tensor(TensorChoice(tp=16)).text
    kept, again = explore_tensor(TensorChoice()), explore_tensor(TensorChoice(mode="tp+sp regather"))
    assert again.budget.activations < kept.budget.activations and again.sent_bytes > kept.sent_bytes


@pytest.mark.parametrize(("model", "tp", "allowed"), [("llama-3.1-8b", 64, "1, 2, 4, 8, 16, 32"), ("gpt2-xl", 2, "1")])
def test_heads_that_do_not_divide_are_answered_with_values_of_the_slider(model, tp, allowed):
    with pytest.raises(ValueError, match=rf"^{model} has .* heads.* choose tp from {allowed}$"):
        explore_tensor(TensorChoice(model=model, tp=tp, seq_len=1024))


def test_one_gpu_alone_is_one_bar_and_sends_nothing():
    view = explore_tensor(TensorChoice(tp=1))
    assert [bar.label for bar in view.bars] == ["one GPU"] and view.bars[0].total_bytes == view.budget.total_bytes
    assert view.title == "llama-3.1-8b on one GPU does not fit on H100 SXM 80 GB"
    assert "One GPU alone sends nothing" in view.text and "over NVLink" not in view.text


def test_the_tensor_explorer_offers_the_gpus_that_compute_in_bf16():
    keys = [key for _, key in control(tensor_explorer(), "GPU").options]
    assert "h100" in keys and "t4" not in keys
    for key in keys:
        assert explore_tensor(TensorChoice(gpu_key=key)).steps[8].compute_s > 0


# ---------------------------------------------------------------- real ranks

SMALL = Sizes(batch_size=1, seq_len=64)


@pytest.mark.parametrize(("stage", "recipe"), [(0, "fp32"), (1, "fp32"), (2, "bf16-master"), (3, "bf16-master")])
@pytest.mark.launches
def test_what_ranks_hold_and_send_under_zero_is_the_formula_to_the_byte(stage, recipe):
    result = measure_zero(stage, 2, recipe, sizes=SMALL)
    for kind in ("parameters", "gradients", "optimizer", "gathered", SENT):
        assert result.row(kind).error_percent == 0, (kind, result.row(kind))
    assert abs(result.row("activations").error_percent) < 2
    assert result.row(SENT).measured_bytes > 0 and f"stage {stage}" in str(result)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.launches
def test_what_ranks_hold_and_send_in_four_micro_batches_is_the_formula_to_the_byte(stage):
    result = measure_zero(stage, 2, "bf16-master", sizes=SMALL, micro_batches=4)
    for kind in ("parameters", "gradients", "optimizer", SENT):
        assert result.row(kind).error_percent == 0, (kind, result.row(kind))


@pytest.mark.parametrize("how", [(False, False), (True, False), (True, True)])
@pytest.mark.launches
def test_what_ranks_hold_and_send_under_tensor_parallelism_is_the_formula(how):
    result = measure_tensor(2, *how, sizes=SMALL)
    for kind in ("parameters", "gradients", "optimizer", "gathered", SENT):
        assert result.row(kind).error_percent == 0, (kind, result.row(kind))
    assert abs(result.row("activations").error_percent) < 2
    assert abs(result.row("temporary").error_percent) < 50, "a rule of thumb, but of the right size"


def test_what_cannot_be_measured_is_refused_before_a_rank_starts():
    with pytest.raises(ValueError, match="no engine takes; choose from fp32"):
        measure_zero(2, 2, "autocast")
    with pytest.raises(ValueError, match="choose offload none"):
        zero.measure_zero_choice(ZeroChoice(offload="optimizer on the CPU"))
    with pytest.raises(ValueError, match="choose tp from"):
        tensor.measure_tensor_choice(TensorChoice(tp=64))
    with pytest.raises(ValueError, match="there is no row"):
        FiveDComparison("toy", ((), ()), 1.0).row("peak")


# ---------------------------------------------------------------- the wiring

RESULT = FiveDComparison("toy, made up", ((Row("parameters", 90, 100), Row(SENT, 5, 5)),) * 2, 0.5)
EXPLORERS = [
    (zero, zero_explorer, "measure_zero_choice", ("ZeRO stage", 2), "2.00 times the parameters"),
    (tensor, tensor_explorer, "measure_tensor_choice", ("tp", 16), "between 2 nodes"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "explorer", "measure", "move", "said"), EXPLORERS)
def test_a_move_replaces_the_picture_and_takes_a_measurement_away(module, explorer, measure, move, said, monkeypatch):
    monkeypatch.setattr(module, measure, lambda chosen: RESULT)
    box = explorer()
    (before,) = shown(box)
    control(box, "Measure").click()
    assert (
        len(shown(box)) == 2
        and "toy, made up" in texts(box)
        and "stand-in for llama-3.1-8b on 8 GPUs" in texts(box)
        and not control(box, "Measure").disabled
    )
    description, value = move
    control(box, description).value = value
    (after,) = shown(box)
    assert before[:8] == after[:8] == b"\x89PNG\r\n\x1a\n" and before != after
    assert said in texts(box) and "made up" not in texts(box)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(("module", "explorer", "measure", "move", "said"), EXPLORERS)
def test_a_measurement_that_fails_is_told_and_leaves_the_button_usable(
    module, explorer, measure, move, said, monkeypatch
):
    def broken(chosen):
        raise RuntimeError("<no memory left>")

    monkeypatch.setattr(module, measure, broken)
    box = explorer()
    control(box, "Measure").click()
    assert "RuntimeError: &lt;no memory left&gt;" in texts(box) and not control(box, "Measure").disabled


@pytest.mark.slow
def test_an_impossible_choice_is_told_and_the_next_one_works():
    box = zero_explorer(ZeroChoice(offload="optimizer, parameters on disk"))
    control(box, "ZeRO stage").value = 1
    assert "Not possible" in texts(box) and shown(box) == []
    control(box, "offload").value = "none"
    assert "Not possible" not in texts(box) and len(shown(box)) == 1
    box = tensor_explorer()
    control(box, "tp").value = 64
    assert "choose tp from" in texts(box) and shown(box) == []
