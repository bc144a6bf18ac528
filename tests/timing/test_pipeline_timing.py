"""Modelled seconds of pipeline stages and transfers, beside published scaling."""

import pytest

from course_lib.config import ModelConfig, preset
from course_lib.flops import stage_flops, step_flops
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout, even_layers
from course_lib.run import Run
from course_lib.schedules import one_f_one_b, simulate
from course_lib.timing import stage_costs

LLAMA_8B = preset("llama-3.1-8b")


def test_stages_together_do_the_model_s_flops():
    layers = even_layers(32, 8)
    stages = [stage_flops(LLAMA_8B, 2, 4096, layers, stage) for stage in range(8)]
    assert sum(map(sum, stages)) == step_flops(LLAMA_8B, 2 * 4096, 4096)
    assert stages[0] == stages[6] and stages[7][0] - stages[6][0] == 2 * 8192 * 128_256 * 4096


def test_zero_bubble_s_table_1():
    s, h = 1024, 256
    gpt = ModelConfig("gpt", 4, h, 8, 8, 4 * h, 100, s, family="gpt")
    assert stage_flops(gpt, 3, s, [2, 2], 0) == tuple(
        2 * 3 * s * h * each for each in (24 * h + 4 * s, 24 * h + 8 * s, 24 * h)
    )
    with pytest.raises(ValueError, match="4 together"):
        stage_flops(gpt, 3, s, [2, 3], 0)


def _costs(layers, between="ib-ndr400", tp=1, **how):
    layout = Layout(pp=8, tp=tp, micro_batches=32, layers_of_stage=tuple(layers), **how)
    cluster = Cluster(gpu("h100"), link("nvlink4"), link(between), gpus_per_node=tp)
    return stage_costs(Run(LLAMA_8B, layout, 4096), cluster)


def test_a_transfer_between_nodes_is_short_beside_a_stage():
    ib, even = link("ib-ndr400"), even_layers(32, 8)
    costs = _costs(even)
    assert costs.transfer_s == pytest.approx(ib.latency_s + 4096 * 4096 * 2 / 50e9)
    assert costs.transfer_s < 0.05 * costs.forward_s[0]
    shared = _costs(even, tp=4, sequence_parallel=True)  # whose sums are in F and I
    assert [4 * seconds for seconds in shared.weight_backward_s] == pytest.approx(costs.weight_backward_s, rel=0.2)
    assert shared.transfer_s - ib.latency_s == pytest.approx((costs.transfer_s - ib.latency_s) / 4)


def test_equal_layers_leave_everybody_waiting_for_the_stage_with_the_head():
    bubbles = {}
    for name, layers in (("even", even_layers(32, 8)), ("balanced", [5, 5, 4, 4, 4, 4, 4, 2])):
        bubbles[name] = simulate(one_f_one_b(8, 32), _costs(layers, "nvlink4")).bubble_of_ideal
    assert 7 / 32 < bubbles["balanced"] < 0.75 * bubbles["even"]
