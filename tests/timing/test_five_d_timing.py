"""Modelled step time: hand values, its parts against the chapters' models, and its error beside published runs."""

from dataclasses import replace

import pytest

from course_lib.config import preset
from course_lib.flops import attention_flops_per_token, step_flops
from course_lib.hardware import PUBLISHED_CP_THROUGHPUT, Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.schedules import bubble
from course_lib.timing import (
    FLASH_ATTENTION_3,
    Overlap,
    Utilisation,
    calls_s,
    collective_s,
    ranks_in_a_node,
    step_time,
    tensor_parallel_layer_spans,
    waiting_s,
)
from course_lib.traffic import calls

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
HALF = Utilisation(matmul=0.5, attention=0.5)  # one share for all, as the chapters' models have it
WHOLE_SCORES = replace(HALF, causal=False)


def _run(config, layout, seq_len=4096):
    """A run whose backward computes no scores again, and whose gradients travel in FP32."""
    return Run(config, layout, seq_len, "bf16-master-fp32-grads", attention="standard")


LLAMA_8B, LLAMA_405B = preset("llama-3.1-8b"), preset("llama-3.1-405b")


def test_one_gpu_computes_and_does_nothing_else():
    for recompute in ("none", "selective", "full"):
        time = step_time(_run(LLAMA_8B, Layout(micro_batches=3, recompute=recompute)), H100, WHOLE_SCORES)
        assert time.compute_s == pytest.approx(step_flops(LLAMA_8B, 3 * 4096, 4096, recompute) / (0.5 * 989e12))
        assert time.total_s == pytest.approx(time.compute_s)
    without = step_time(_run(LLAMA_8B, Layout()), H100, WHOLE_SCORES)
    assert without.mfu == pytest.approx(0.5)
    assert without.tokens_per_s_per_gpu == pytest.approx(4096 / without.total_s)
    skipping = step_time(_run(LLAMA_8B, Layout()), H100, HALF)
    assert skipping.causal_mfu == pytest.approx(0.5) and skipping.mfu > 0.5


@pytest.mark.parametrize(("sequence_parallel", "regather"), [(False, False), (True, False), (True, True)])
def test_tp_alone_takes_its_calls_less_what_a_layer_hides(sequence_parallel, regather):
    layout = Layout(tp=8, sequence_parallel=sequence_parallel, regather=regather, micro_batches=2)
    run = _run(LLAMA_8B, layout)
    bare, hidden = (step_time(run, H100, HALF, Overlap(tp=hide)) for hide in (False, True))
    listed = calls(run)["tp"]
    assert bare.tp_s + bare.data_s == pytest.approx(calls_s(listed, layout, H100, "tp"))
    assert (bare.data_s > 0) == sequence_parallel  # the gradients of norms, once a step
    waits = [waiting_s(tensor_parallel_layer_spans(run, H100, HALF, overlap)) for overlap in (False, True)]
    assert bare.total_s - hidden.total_s == pytest.approx(2 * 32 * (waits[0] - waits[1]))
    head_s = 2 * 3 * 2 * 4096 * 4096 * 128_256 / 8 / (0.5 * 989e12)
    spans = tensor_parallel_layer_spans(run, H100, HALF)
    layer_s = sum(span.seconds for span in spans if span.lane == "compute")
    assert [bare.compute_s, hidden.compute_s] == pytest.approx(2 * [2 * 32 * layer_s + head_s])


def test_equal_stages_wait_as_the_closed_form_says():
    config = replace(LLAMA_8B, vocab_size=8)  # no head to speak of
    far = replace(H100, between=replace(H100.between, latency_s=0.0, bytes_per_s=1e30), gpus_per_node=1)
    for name, v in (("1f1b", 1), ("interleaved", 2)):
        layout = Layout(pp=4, schedule=name, v=v, micro_batches=8)
        time = step_time(_run(config, layout), far, HALF)
        expected = bubble(name, 4, 8, v).of_ideal
        assert time.bubble_s / time.compute_s == pytest.approx(expected, rel=1e-3)
        assert time.transfer_s == pytest.approx(0, abs=1e-6) and time.data_s == 0
    slow = step_time(_run(config, layout), replace(H100, gpus_per_node=1), HALF)
    assert slow.transfer_s > 0


def test_gradients_hide_behind_backward_until_the_link_is_too_slow():
    layout = Layout(dp=8, zero_stage=1, micro_batches=4)
    fast = step_time(_run(LLAMA_8B, layout), H100, HALF)
    assert fast.data_s == 0
    bare = step_time(_run(LLAMA_8B, layout), H100, HALF, overlap=Overlap(data=False))
    numel = 8_030_261_248
    by_hand = collective_s("reduce_scatter", 4 * numel, 8, H100.inside) + collective_s(
        "all_gather", 2 * numel, 8, H100.inside
    )
    assert bare.data_s == pytest.approx(by_hand, rel=0.1)  # in one message here, in buckets there
    for zero_stage, messages in ((2, (4 * 4 + 2) / 6), (3, (4 * 4 + 4 * 2 * 2) / 6)):  # 4 bytes summed, 2 gathered
        again = step_time(
            _run(LLAMA_8B, replace(layout, zero_stage=zero_stage)), H100, HALF, overlap=Overlap(data=False)
        )
        assert again.data_s == pytest.approx(messages * bare.data_s, rel=0.1)
    ethernet = replace(H100, gpus_per_node=1, between=link("ethernet-100g"))
    assert step_time(_run(LLAMA_8B, layout), ethernet, HALF).data_s > 1
    stage_3 = [
        step_time(_run(LLAMA_8B, replace(layout, zero_stage=3)), ethernet, HALF, overlap=Overlap(data=data))
        for data in (False, True)
    ]
    assert stage_3[1].data_s == pytest.approx(stage_3[0].data_s - stage_3[0].compute_s)  # all computing hides some


def test_where_groups_lie_follows_from_the_order_of_the_axes():
    inner = Layout(dp=4, tp=8, pp=2)
    assert [ranks_in_a_node(inner, H100, axis) for axis in ("tp", "data", "pp")] == [8, 1, 1]
    outer = replace(inner, order=("tp", "pp", "cp", "dp"))
    assert [ranks_in_a_node(outer, H100, axis) for axis in ("tp", "data", "pp")] == [1, 4, 2]
    assert ranks_in_a_node(Layout(pp=4, tp=4), H100, "pp") == 1  # two of four share a node, and two messages cross
    times = [
        step_time(_run(LLAMA_8B, replace(layout, sequence_parallel=True)), H100, HALF) for layout in (inner, outer)
    ]
    assert times[1].tp_s > 3 * times[0].tp_s


def test_experts_send_rows_and_two_micro_batches_at_once_hide_them():
    config = preset("mixtral-8x7b")
    layout = Layout(dp=64, ep=8, zero_stage=1)
    spread = replace(layout, dp=64, order=("pp", "cp", "tp", "dp"))
    time = step_time(_run(config, spread), H100, HALF)
    assert 0 < time.ep_s < 0.2 * time.total_s
    assert step_time(_run(config, spread), H100, HALF, overlap=Overlap(ep=True)).ep_s == 0
    assert step_time(_run(config, spread), replace(H100, gpus_per_node=1), HALF).ep_s > 2 * time.ep_s


@pytest.mark.slow
def test_llama_3_405b_beside_its_published_mfu():
    """43, 41 and 38 % (Llama 3, table 4). Two things are ours: interleaving by 4, which the paper does not tell, and
    55 % of the peak while computing. The third figure fits only if attention counts half, as its kernels do it."""
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("roce-400"))
    common = (
        "tp=8,pp=16,zero_stage=1,sequence_parallel=true,schedule=interleaved,v=4,cp_method=all_gather,layers_of_stage="
    )
    common += "-".join(map(str, (1, *[2] * 62, 1)))
    for text, seq_len, published in (
        ("dp=64,micro_batches=32,", 8192, 0.43),
        ("dp=128,micro_batches=16,", 8192, 0.41),
        ("dp=8,cp=16,micro_batches=16,", 131_072, 0.38),
    ):
        time = step_time(
            Run(LLAMA_405B, Layout.parse(text + common), seq_len, "bf16-master-fp32-grads"),
            cluster,
            Utilisation(0.55, FLASH_ATTENTION_3),
        )
        assert time.num_tokens == 2**24
        assert time.causal_mfu == pytest.approx(published, rel=0.06)


@pytest.mark.slow
def test_rows_that_recomputation_sends_again_hide_behind_backward():
    """Over no network are rows hidden without recomputation, and seen with it: half of them then are in backward."""
    layout, hidden = Layout(pp=16, dp=128, ep=64, zero_stage=1, micro_batches=32), []
    for speed in (1, 2, 4, 8, 16):
        network = replace(H100.between, bytes_per_s=speed * H100.between.bytes_per_s)
        faster, runs = replace(H100, between=network), [replace(layout, recompute=each) for each in ("none", "full")]
        of = [step_time(_run(preset("deepseek-v3"), each), faster, HALF, Overlap(ep=True)).ep_s for each in runs]
        hidden.append((of[0] == 0, of[1] == 0))
    assert (True, True) in hidden and (False, False) in hidden and (True, False) not in hidden


def test_attention_runs_at_its_own_rate_and_a_fused_kernel_computes_its_scores_again():
    """By hand, one GPU, 32k tokens: products at one share of the peak, scores at another."""
    seq_len, peak = 32_768, 989e12
    scores = seq_len * attention_flops_per_token(LLAMA_8B, seq_len, causal=True)
    products = step_flops(LLAMA_8B, seq_len, seq_len, causal=True) - 3 * scores
    for attention, passes in (("standard", 3), ("fused", 3.5)):
        time = step_time(Run(LLAMA_8B, Layout(), seq_len, attention=attention), H100, Utilisation())
        assert time.total_s == pytest.approx(products / (0.5 * peak) + passes * scores / (0.35 * peak))


def test_long_sequences_on_cp_ranks_beside_published_throughput():
    """8B with Float8 products and full recomputation on 8 H100; the products' share is fitted to 8,192 tokens alone.

    Attention at the products' rate would be 23 to 143 % too fast. At its own rate half of that is left, and of the rest
    most at 4 and 8 ranks: a ring of contiguous pieces, which waits, would explain it. The source names no sequence
    sharding.
    """
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))

    def speed(utilisation, cp, sequence_sharding="zigzag"):
        layout = Layout(dp=8 // cp, cp=cp, zero_stage=3, recompute="full", cp_sharding=sequence_sharding)
        return step_time(Run(LLAMA_8B, layout, 32_768 * cp), cluster, utilisation).tokens_per_s_per_gpu

    alike, own = Utilisation(0.476, 0.476), Utilisation(0.476)
    errors = {
        name: [speed(utilisation, cp, sharding) / published - 1 for cp, published in PUBLISHED_CP_THROUGHPUT.items()]
        for name, utilisation, sharding in (
            ("alike", alike, "zigzag"), ("own", own, "zigzag"), ("waiting", own, "contiguous"),
        )
    }  # fmt: skip
    assert max(errors["own"]) < 0.7 * max(errors["alike"])
    assert all(own < alike for own, alike in zip(errors["own"], errors["alike"], strict=True))


def test_a_utilisation_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="matmul is 55; give a finite number"):
        step_time(_run(LLAMA_8B, Layout()), H100, Utilisation(55))


@pytest.mark.parametrize("axes", [{"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_stages_of_dense_layers_before_those_with_experts_are_timed_over_tp_and_cp(axes):
    config = replace(preset("deepseek-v3"), num_layers=8)  # its first three layers are dense
    time = step_time(Run(config, Layout(pp=8, micro_batches=8, **axes), 4096), H100, HALF)
    assert time.tp_s + time.cp_s > 0
