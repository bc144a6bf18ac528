"""The clock: hand values, its parts beside the chapters' models and the simulator, and what was measured."""

import random
from dataclasses import replace

import pytest

from course_lib.config import preset
from course_lib.engines import ENGINES
from course_lib.flops import attention_flops_per_token, layer_matmul_parameters
from course_lib.hardware import PUBLISHED_CP_THROUGHPUT, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.flats import flats_of
from course_lib.run import Run
from course_lib.schedules import Costs, bubble, make, simulate, stages_per_rank
from course_lib.schedules.simulator import clock
from course_lib.timing import RATES, Rates, calls_s, collective_s, stage_costs, step_time
from course_lib.timing.collectives import ranks_in_a_node
from course_lib.timing.layer import network_s
from course_lib.timing.rates import RANGES
from course_lib.timing.step import least_waiting_slots, waiting_slots
from course_lib.traffic import stage_calls

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
MEASURED = replace(H100, between=link("efa"))
COURSE, MEGATRON = ENGINES["course"], ENGINES["megatron"]
NOTHING_HIDDEN = replace(COURSE, hides_behind_weights=False, hides_data=False)
LLAMA_8B, LLAMA_405B = preset("llama-3.1-8b"), preset("llama-3.1-405b")


def _run(config, layout, seq_len=4096):
    return Run(config, layout, seq_len, "bf16-master-fp32-grads")


def test_one_gpu_computes_as_the_sum_of_products_attention_and_small_operations():
    """By hand, from the constants: one layer of 8B and 4,096 tokens more."""
    deep, shallow = (replace(LLAMA_8B, num_layers=layers) for layers in (9, 8))
    more_s = step_time(_run(deep, Layout()), H100).compute_s - step_time(_run(shallow, Layout()), H100).compute_s
    tokens, width, peak, bandwidth = 4096, 4096, 989e12, 3.35e12
    share = RATES.matmul_share * tokens / (tokens + RATES.half_width) * width / (width + RATES.half_width)
    products_s = 6 * tokens * layer_matmul_parameters(LLAMA_8B) / (share * peak)
    one = replace(LLAMA_8B, num_layers=1)
    scores_s = 3.5 * tokens * attention_flops_per_token(one, tokens, causal=True) / (0.35 * peak)
    read = 2 * tokens * (4 * width + 2 * (32 + 8) * 128 + 4 * 14_336)
    assert more_s == pytest.approx(products_s + scores_s + RATES.small_passes * read / bandwidth)


def test_a_larger_micro_batch_is_faster_and_a_wider_model_nearer_to_its_share():
    small, large = (
        step_time(_run(LLAMA_8B, Layout(dp=8, micro_batch=size, micro_batches=8 // size)), H100) for size in (1, 8)
    )
    assert large.total_s < small.total_s
    wide = step_time(_run(LLAMA_405B, Layout(tp=8)), H100, MEGATRON)
    narrow = step_time(_run(preset("llama-3.2-1b"), Layout()), H100, MEGATRON)
    assert wide.mfu > narrow.mfu


def test_a_small_micro_batch_takes_as_long_as_its_kernels_need_to_be_launched():
    """A layer of 128 tokens computes in a fraction of a millisecond; launching its kernels takes 4 ms, fused ones 1."""
    small = Run(replace(LLAMA_8B, vocab_size=64), Layout(), 128)
    eager, fused = (step_time(small, H100, name) for name in ("fsdp2", "torchtitan"))
    assert eager.compute_s + eager.launches_s == pytest.approx(32 * RATES.layer_launch_ms / 1000, rel=0.03)
    assert eager.launches_s > eager.compute_s and fused.launches_s < eager.launches_s / 3


def test_products_of_few_rows_take_as_long_as_reading_their_weights():
    """One token: 2 bytes a weight at 3.35 TB/s; eight tokens take hardly longer."""
    one, eight = (
        step_time(Run(replace(LLAMA_8B, vocab_size=64), Layout(), seq_len), H100).compute_s for seq_len in (1, 8)
    )
    read_s = 3 * 2 * 32 * layer_matmul_parameters(LLAMA_8B) / 3.35e12
    assert read_s <= one < 1.4 * read_s and eight < 1.3 * one


def test_what_is_faster_is_modelled_to_be():
    run, full = _run(LLAMA_8B, Layout(dp=8)), _run(LLAMA_8B, Layout(dp=8, recompute="full"))
    some = replace(run, layout=replace(run.layout, recompute="selective"))
    operators = replace(run, operators=True)
    for faster, slower in (
        ((replace(run, fp8=True), "torchtitan"), (run, "torchtitan")),
        ((run, "torchtitan"), (run, "fsdp2")),
        ((run, "torchtitan"), (operators, "torchtitan")),
        ((operators, "torchtitan"), (full, "torchtitan")),
        ((some, "megatron"), (full, "megatron")),
        ((run, "megatron"), (replace(run, attention="standard"), "megatron")),
    ):
        assert step_time(faster[0], H100, faster[1]).total_s < step_time(slower[0], H100, slower[1]).total_s


def test_frozen_weights_have_no_weight_gradients():
    from course_lib.tensors import LoRA

    full, adapters = (step_time(Run(LLAMA_8B, Layout(), 4096, lora=lora), H100) for lora in (None, LoRA(16)))
    assert 0.6 < adapters.compute_s / full.compute_s < 0.75 and adapters.update_s < full.update_s


@pytest.mark.parametrize(("sequence_parallel", "regather"), [(False, False), (True, False), (True, True)])
def test_tp_alone_takes_its_calls_less_what_a_layer_hides(sequence_parallel, regather):
    layout = Layout(tp=8, sequence_parallel=sequence_parallel, regather=regather, micro_batches=2)
    run = _run(LLAMA_8B, layout)
    bare, hidden = (step_time(run, H100, engine) for engine in (NOTHING_HIDDEN, COURSE))
    assert bare.tp_s == pytest.approx(2 * calls_s(stage_calls(run, 0)["tp"], layout, H100, "tp"))
    assert bare.tp_s / 2 < hidden.tp_s < bare.tp_s  # forward sums cannot be hidden
    assert step_time(run, H100, replace(NOTHING_HIDDEN, hides_tp=0.8)).tp_s < 0.25 * bare.tp_s


def test_gradients_hide_behind_backward_until_the_link_is_too_slow():
    layout = Layout(dp=8, zero_stage=1, micro_batches=4)
    assert step_time(_run(LLAMA_8B, layout), H100).data_s == 0
    bare = step_time(_run(LLAMA_8B, layout), H100, NOTHING_HIDDEN)
    numel = 8_030_261_248
    by_hand = sum(
        collective_s(name, size * numel, 8, H100.inside) for name, size in (("reduce_scatter", 4), ("all_gather", 2))
    )
    assert bare.data_s == pytest.approx(by_hand, rel=0.01)
    for zero_stage, messages in ((2, (4 * 4 + 2) / 6), (3, (4 * 4 + 4 * 2 * 2) / 6)):  # 4 bytes summed, 2 gathered
        again = step_time(_run(LLAMA_8B, replace(layout, zero_stage=zero_stage)), H100, NOTHING_HIDDEN)
        assert again.data_s == pytest.approx(messages * bare.data_s, rel=0.01)
    ethernet = replace(H100, gpus_per_node=1, between=link("ethernet-100g"))
    assert step_time(_run(LLAMA_8B, layout), ethernet).data_s > 1


def test_where_groups_lie_follows_from_the_order_of_the_axes():
    inner = Layout(dp=4, tp=8, pp=2)
    assert [ranks_in_a_node(inner, H100, axis) for axis in ("tp", "data", "pp")] == [8, 1, 1]
    outer = replace(inner, order=("tp", "pp", "cp", "dp"))
    assert [ranks_in_a_node(outer, H100, axis) for axis in ("tp", "data", "pp")] == [1, 4, 2]
    assert ranks_in_a_node(Layout(pp=4, tp=4), H100, "pp") == 1  # two of four share a node, and two messages cross
    times = [step_time(_run(LLAMA_8B, replace(layout, sequence_parallel=True)), H100) for layout in (inner, outer)]
    assert times[1].tp_s > 3 * times[0].tp_s


def test_in_another_order_a_layer_is_timed_for_where_its_own_groups_lie():
    """With pp inside tp the two ranks of tp are 8 apart, without a pipeline they are neighbours."""
    order = ("dp", "tp", "pp", "cp")
    near, far = (Layout(tp=2, micro_batches=8, order=order, **axes) for axes in ({"dp": 8}, {"pp": 8}))
    times = [step_time(_run(LLAMA_8B, layout), H100) for layout in (near, far)]
    assert times[1].tp_s > 5 * times[0].tp_s / 8  # an eighth of the layers each


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_groups_of_gradients_lie_as_the_mesh_says(tp, dp_replicate):
    layout = Layout(dp=64 // tp, tp=tp, zero_stage=3 if dp_replicate > 1 else 1, dp_replicate=dp_replicate)
    axes = {layout.shard_axes[0]: layout.shard_size} | ({"replicate": 2} if dp_replicate > 1 else {})
    for axis, ranks in axes.items():
        nearer = tp * (layout.shard_size if axis == "replicate" else 1)  # ranks nearer to each other than the group's
        assert ranks_in_a_node(layout, H100, axis) == min(ranks, max(1, 8 // nearer)), axis


def test_experts_send_rows_and_two_micro_batches_at_once_hide_them():
    config = preset("mixtral-8x7b")
    spread = Layout(dp=64, ep=8, zero_stage=1)
    time = step_time(_run(config, spread), H100)
    assert 0 < time.ep_s < 0.2 * time.total_s
    assert step_time(_run(config, spread), H100, replace(COURSE, hides_ep=("1f1b",))).ep_s == 0
    assert step_time(_run(config, spread), replace(H100, gpus_per_node=1)).ep_s > 2 * time.ep_s


def test_dualpipe_trains_deepseek_v3_as_fast_as_its_report_says_where_the_engine_hides_rows():
    """180,000 H800 hours for 10^12 tokens: 2,048 GPUs, pp 16, ep 64, ZeRO-1, FP8 (arXiv:2412.19437, section 3)."""
    published, h800 = 1e12 / (180_000 * 3600), gpu("h800")
    layout = Layout(dp=128, pp=16, ep=64, zero_stage=1, micro_batches=120, schedule="dualpipe_v")
    cluster = Cluster(h800, link(h800.link), link("ib-ndr400"))
    run = Run(preset("deepseek-v3"), replace(layout, expert_method="once_per_rank"), 4096, fp8=True)
    hidden, shown = (step_time(run, cluster, name).tokens_per_s_per_gpu for name in ("torchtitan", "megatron"))
    assert hidden == pytest.approx(published, rel=0.15)
    assert shown < 0.75 * published


def test_whole_experts_over_tp_send_each_row_once_and_lie_as_the_mesh_says():
    from course_lib.timing.data import numel_of_rank

    config, cut = preset("mixtral-8x7b"), Layout(dp=16, tp=2, ep=4, zero_stage=1, sequence_parallel=True)
    folded = replace(cut, expert_tp=1)
    assert step_time(_run(config, folded), H100).ep_s < 0.6 * step_time(_run(config, cut), H100).ep_s
    for layout in (cut, folded):
        held = sum(flat.numel for flat in flats_of(config, layout) if flat.kind == "experts")
        assert numel_of_rank(_run(config, layout), [config.num_layers], 0)[1] == held
        in_a_node = sum(rank < 8 for rank in layout.members(0)["expert_dp"])
        assert ranks_in_a_node(layout, H100, "expert_dp") == in_a_node


def test_a_contiguous_ring_waits_and_megatrons_zigzag_does_not():
    run = replace(_run(replace(LLAMA_8B, max_seq_len=2**18), Layout(cp=8), 262_144), fp8=True)
    waiting = [step_time(run, H100, name).cp_s for name in ("torchtitan", "megatron")]
    assert waiting[0] > 10 * waiting[1]


@pytest.mark.parametrize("axes", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_stages_of_dense_layers_before_those_with_experts_are_timed_over_tp_and_cp(axes):
    config = replace(preset("deepseek-v3"), num_layers=8)  # its first three layers are dense
    time = step_time(Run(config, Layout(pp=8, micro_batches=8, **axes), 4096), H100)
    assert time.tp_s + time.cp_s > 0


def test_equal_stages_wait_as_the_closed_form_says():
    config = replace(LLAMA_8B, vocab_size=8)  # no head to speak of
    for name, v in (("1f1b", 1), ("interleaved", 2)):
        layout = Layout(pp=4, schedule=name, v=v, micro_batches=8)
        time = step_time(_run(config, layout), H100)
        assert time.bubble_s / time.compute_s == pytest.approx(bubble(name, 4, 8, v).of_ideal, rel=0.01)
    slow = step_time(_run(config, layout), replace(H100, gpus_per_node=1))
    assert slow.transfer_s > time.transfer_s > 0


@pytest.mark.parametrize(("schedule", "v"), [("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("1f1b", 1)])
def test_equal_stages_wait_at_least_as_said_and_with_enough_micro_batches_as_long(schedule, v):
    for pp, m in ((2, 2), (4, 8), (6, 6), (4, 2), (8, 4)):
        if m < pp and schedule == "interleaved":
            continue  # it takes rounds of pp micro-batches
        shares = [share / v for share in (0.33, 0.36, 0.31)]
        found = clock(make(schedule, pp, m, v), Costs(*shares))
        waits, least = found.makespan_s - max(found.busy_s), least_waiting_slots(schedule, pp, v)
        assert least <= waits + 1e-9
        if m >= pp and schedule != "1f1b":
            assert least == pytest.approx(waits)


@pytest.mark.parametrize("name", ["afab", "zb_h1", "zb_h2", "zbv", "dualpipe_v"])
def test_equal_stages_wait_as_long_as_the_simulator_says_with_any_number_of_micro_batches(name):
    stages = stages_per_rank(name)
    costs = Costs(*(share / stages for share in (0.33, 0.36, 0.31)))
    for pp in (2, 3, 4, 7, 12, 16):
        for m in {1, 2, pp - 1, pp, pp + 1, 3 * pp // 2, 2 * pp - 3, 2 * pp - 2, 2 * pp - 1, 2 * pp, 3 * pp}:
            if m > 0 and (name != "dualpipe_v" or m >= 2 * pp):
                found = clock(make(name, pp, m), costs)
                waits = found.makespan_s - max(found.busy_s)
                assert waiting_slots(name, pp, m, 1) == pytest.approx(waits, rel=1e-9), (pp, m)


@pytest.mark.parametrize("seed", range(10))
def test_a_pipeline_of_any_schedule_takes_as_long_as_the_simulator_says(seed):
    """Stages differ by a layer, and the last has the head: within 4 %, on the V within 12 %."""
    rng = random.Random(seed)
    name, most = rng.choice([("1f1b", 0.03), ("interleaved", 0.04), ("zb_h1", 0.04), ("zbv", 0.12), ("naive", 0.03)])
    v = rng.choice([2, 4]) if name == "interleaved" else 1
    layout = Layout(pp=rng.choice([2, 4, 8]), schedule=name, v=v, micro_batches=8 * rng.randrange(1, 7))
    run = _run(replace(LLAMA_8B, num_layers=rng.randrange(64, 90)), layout)
    time = step_time(run, H100)
    schedule = make(name, layout.pp, layout.micro_batches, v)
    there_s = simulate(schedule, stage_costs(run, H100)).makespan_s
    assert time.total_s - time.data_s - time.update_s == pytest.approx(there_s, rel=most), layout


def test_a_measured_network_gives_what_it_gave_over_as_many_nodes():
    seconds = [network_s(MEASURED, "all_gather", 256e6, 8 * nodes, 8) for nodes in (8, 64)]
    assert seconds[0] == pytest.approx(63 / 64 * 256e6 / 68.9975e9)
    assert seconds[1] == pytest.approx(511 / 512 * 256e6 / 11.0383e9)
    alone = network_s(MEASURED, "all_gather", 256e6, 2, 1)  # a GPU of each node: no more than its port
    assert alone == pytest.approx(256e6 / 2 / 50e9)
    assert network_s(H100, "all_gather", 256e6, 512, 8) < seconds[1] / 10


def test_pipelines_over_many_measured_nodes_wait_and_few_nodes_do_not():
    def waits(nodes, cluster):
        layout = Layout(dp=2 * nodes, tp=2, pp=2, zero_stage=1, micro_batches=8)
        return step_time(_run(LLAMA_8B, layout), cluster, "nanotron").waiting_s

    assert waits(64, MEASURED) == pytest.approx(8 * RATES.stall_s)
    assert 0 < waits(4, MEASURED) < 0.01 * RATES.stall_s and waits(64, H100) == 0


def test_zero_0_over_64_measured_nodes_is_slower_than_zero_1_and_over_32_it_is_not():
    """3.57 billion parameters: measured, ZeRO-1 was six times as fast over 64 nodes."""
    for nodes, slower in ((64, True), (32, False)):
        layouts = [Layout(dp=4 * nodes, tp=2, sequence_parallel=True, zero_stage=stage) for stage in (0, 1)]
        zero, one = (step_time(_run(preset("playbook-3b"), each), MEASURED, "nanotron").total_s for each in layouts)
        assert (zero > 2 * one) == slower


@pytest.mark.parametrize(
    ("text", "seq_len", "published"),
    [("dp=64,micro_batches=32,", 8192, 0.43), ("dp=128,micro_batches=16,", 8192, 0.41),
     ("dp=8,cp=16,micro_batches=16,", 131_072, 0.38)],
)  # fmt: skip
def test_llama_3_405b_beside_its_published_mfu(text, seq_len, published):
    """Llama 3, table 4. Interleaving by 4 is ours: the paper does not tell it."""
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("roce-400"))
    text += "tp=8,pp=16,zero_stage=1,sequence_parallel=true,schedule=interleaved,v=4,cp_method=all_gather"
    layout = Layout.parse(f"{text},layers_of_stage={'-'.join(map(str, (1, *[2] * 62, 1)))}")
    time = step_time(_run(LLAMA_405B, layout, seq_len), cluster, MEGATRON)
    assert time.num_tokens == 2**24
    assert time.causal_mfu == pytest.approx(published, rel=0.22)


def test_long_sequences_on_cp_ranks_beside_published_throughput():
    """8B with Float8 products and full recomputation on 8 H100 of 500 W; torchtitan's pieces are contiguous."""
    cluster = replace(H100, gpu=gpu("h100-96"))
    for cp, published in PUBLISHED_CP_THROUGHPUT.items():
        layout = Layout(dp=8 // cp, cp=cp, zero_stage=3, recompute="full")
        run = replace(_run(replace(LLAMA_8B, max_seq_len=2**18), layout, 32_768 * cp), fp8=True)
        assert step_time(run, cluster, "torchtitan").tokens_per_s_per_gpu == pytest.approx(published, rel=0.21)


def test_a_constant_that_cannot_be_is_refused():
    for name, (least, most) in RANGES.items():
        assert least <= getattr(RATES, name) <= most
        with pytest.raises(ValueError, match=f"{name} is .*; plausible: {least} to {most}"):
            Rates(**{name: 2 * most})
    assert len(RANGES) == 7


def test_an_engine_that_cuts_by_cost_has_layers_for_every_stage_of_an_interleaved_pipeline():
    layout = Layout.parse("pp=2,dp=2,schedule=interleaved,v=2,micro_batches=4")
    assert step_time(_run(LLAMA_8B, layout), H100, "nanotron").bubble_s > 0


def test_a_stage_may_have_no_layer_and_the_head_alone():
    layout = Layout(pp=4, micro_batches=8, layers_of_stage=(11, 11, 10, 0))
    forward_s = stage_costs(_run(LLAMA_8B, layout), H100, "nanotron").forward_s
    assert forward_s[0] == forward_s[1] == pytest.approx(11 / 10 * forward_s[2])
    assert 0 < forward_s[3] < forward_s[2]
