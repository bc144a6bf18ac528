"""Modelled seconds of context parallelism: Ring Attention's condition, hand values, what is exposed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from course_lib.config import preset
from course_lib.hardware import Cluster, Link, gpu, link
from course_lib.layout import Layout
from course_lib.run import Run
from course_lib.tensors import for_length
from course_lib.timing import Utilisation, ring_spans, tokens_that_hide_a_hop
from course_lib.timing.collectives import ring_link
from course_lib.timing.context import AttentionTime, attention_time
from course_lib.timing.tensor import layer_parts

H100, NVLINK, IB = gpu("h100"), link("nvlink4"), link("ib-ndr400")
CLUSTER = Cluster(H100, NVLINK, IB)
LLAMA_8B = preset("llama-3.1-8b")
RATE = Utilisation().attention_flops_per_s(CLUSTER)
INSTANT = Link("no latency", 0.0, 450e9, 900e9, "", "")


def test_ring_attention_s_condition_is_flops_over_bandwidth():
    """Block of at least FLOPS / bandwidth tokens, for 2-byte numbers, no mask, as many key heads as query heads."""
    peak = H100.bf16_flops
    published = peak / NVLINK.achieved_bytes_per_s
    assert tokens_that_hide_a_hop(peak, NVLINK, causal=False) == pytest.approx(published)
    half = tokens_that_hide_a_hop(peak / 2, NVLINK, causal=False)  # a slower kernel hides more
    assert half == pytest.approx(published / 2)
    assert tokens_that_hide_a_hop(peak / 2, NVLINK) == pytest.approx(2 * half)  # half of the pairs
    assert tokens_that_hide_a_hop(peak / 2, NVLINK, queries_per_key=4) == pytest.approx(2 * half / 4)  # 8B's GQA
    assert tokens_that_hide_a_hop(peak / 2, IB) == pytest.approx(370.8 / 50 * 2 * half)  # GB/s achieved
    backward = tokens_that_hide_a_hop(peak / 2, NVLINK, backward=True)
    assert backward == pytest.approx(2 * half * 3 / 2.5)  # 2 + 4 bytes for 2.5 times the FLOPs


def _run(seq_len, **how):
    return Run(for_length(LLAMA_8B, seq_len), Layout(**how), seq_len)


def test_above_the_condition_a_ring_exposes_the_last_hop_home_alone():
    cp = 4
    for factor, hidden in ((1.3, True), (0.7, False)):
        tokens = int(tokens_that_hide_a_hop(RATE, INSTANT, 4, backward=True) * factor // 2 * 2)
        time = attention_time(_run(tokens * cp, cp=cp), Cluster(H100, INSTANT, INSTANT))
        last_s = 2 * tokens * 8 * 128 * 4 / INSTANT.bytes_per_s
        assert (time.exposed_s == pytest.approx(last_s, rel=0.01)) == hidden
        assert time.waiting_s == pytest.approx(0.0, abs=1e-12)


def test_spans_of_a_ring_lie_one_after_the_other_in_each_lane():
    spans = ring_spans([1.0] * 3, [2.0] * 3, kv_bytes=1, grad_bytes=2, link=Link("slow", 0.0, 0.75, 1.5, "", ""))
    for lane in ("compute", "communication"):
        mine = [span for span in spans if span.lane == lane]
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(mine))
    names = [span.name for span in spans if span.lane == "communication"]
    assert names == ["kv1", "kv2", "kv1", "kv2", "dkv1", "dkv2"]
    start = {span.name: span.start_s for span in spans if span.lane == "compute"}
    assert start["forward 1"] == pytest.approx(4 / 3)  # the ring step of 1 / 0.75 s outlasts the step of 1 s
    assert max(span.stop_s for span in ring_spans([1.0], [2.0], 1, 2, INSTANT)) == 3.0  # one rank, no ring step


def test_a_slow_link_makes_each_backward_step_wait_for_keys_behind_gradients():
    """Ring steps of 4/3 s and 8/3 s beside steps of 1 s; forward ends at 5 s."""
    spans = ring_spans([1.0] * 4, [1.0] * 4, kv_bytes=1, grad_bytes=2, link=Link("slow", 0.0, 0.75, 1.5, "", ""))
    starts = {span.name: span.start_s for span in spans}
    assert [3 * starts[f"backward {step}"] for step in range(4)] == pytest.approx([15, 19, 23, 35])
    assert [3 * starts[f"dkv{step}"] for step in (1, 2, 3)] == pytest.approx([23, 35, 43])
    assert max(span.stop_s for span in spans) == pytest.approx(17)


def test_contiguous_waits_and_gathering_hides_nothing():
    def time(method="ring", sequence_sharding="zigzag", seq_len=131_072, per_node=8) -> AttentionTime:
        cluster = Cluster(H100, NVLINK, IB, gpus_per_node=per_node)
        return attention_time(_run(seq_len, cp=8, cp_method=method, cp_sharding=sequence_sharding), cluster)

    def total_s(of: AttentionTime) -> float:
        return of.compute_s + of.waiting_s + of.exposed_s

    ring, contiguous, gathered, ulysses = time(), time("ring", "contiguous"), time("all_gather"), time("ulysses")
    assert ring.compute_s == contiguous.compute_s == pytest.approx(gathered.compute_s)
    assert total_s(contiguous) / total_s(ring) == pytest.approx(15 / 8, rel=0.01)  # 2 N - 1 over N
    assert gathered.exposed_s == gathered.comm_s == pytest.approx(ring.comm_s, rel=0.02)  # the same bytes
    assert ulysses.comm_s < gathered.comm_s and ring.exposed_s < ulysses.exposed_s
    short = 8192  # a node of 8: the ring still hides; between nodes nothing does, and heads cost least
    assert time(seq_len=short).exposed_s < 0.1 * time(seq_len=short).comm_s
    apart = {method: total_s(time(method, seq_len=short, per_node=1)) for method in ("ring", "all_gather", "ulysses")}
    assert min(apart, key=apart.get) == "ulysses" and apart["ring"] > 2 * total_s(time(seq_len=short))
    assert [ring_link(Layout(cp=cp, tp=tp), CLUSTER, "cp", cp) for cp, tp in ((16, 1), (8, 1), (8, 8))] == [
        IB,
        NVLINK,
        IB,
    ]


def test_a_layer_is_timed_in_a_model_whose_first_layers_are_dense():
    run = Run(preset("deepseek-v3"), Layout(cp=2, tp=2), seq_len=8192)
    dense = replace(run, config=replace(run.config, moe=None))
    assert attention_time(run, CLUSTER) == attention_time(dense, CLUSTER)
    assert layer_parts(run, CLUSTER) == layer_parts(dense, CLUSTER)
