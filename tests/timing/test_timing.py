"""Hand values, papers' formulas, and the quantitative claims that the course recomputes (claim numbers in comments)."""

from math import log

import pytest

from course_lib import flops, timing
from course_lib.claims.formulas import LAYER_OF_22B_MS
from course_lib.config import preset
from course_lib.hardware import (
    GPUS,
    LINKS,
    PUBLISHED_BUS_BANDWIDTH,
    PUBLISHED_DP_THROUGHPUT,
    Cluster,
    Link,
    measured_bus_bandwidth,
    published_link,
)
from course_lib.timing.collectives import _NETWORK_CALL_US, TUNING

PLAYBOOK_3B = preset("playbook-3b")
H100 = GPUS["h100"]
NCCL = {  # src/graph/tuning.cc of NCCL 2.30 (github.com/NVIDIA/nccl, 5067397): LL, LL128, Simple; microseconds
    "baseLatencies": {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0)},
    "NVLINK": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25)},
    "PCI": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0, 0, 0)},
    "NET": {"tree": (5.0, 8.5, 14), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 20.9)},  # of NVLSTree, between nodes
}
NCCL_LL_GB_PER_S = {"nvlink2": 39.0, "nvlink3": 87.7, "nvlink4": 141.0, "nvlink5": 2 * 141.0}  # llMaxBws, one node
NCCL_LL_GB_PER_S |= dict.fromkeys(("ib-hdr200", "ib-ndr400", "roce-400", "efa", "ethernet-100g"), 20.4)  # Intel, N4
NCCL_SHARES = {  # ncclTopoTuneModel: what is left of the ring's bandwidth
    ("ring", "LL"): 0.5, ("ring", "LL128"): 0.92, ("ring", "Simple"): 1.0,
    ("tree", "LL"): 0.92 / 3.8, ("tree", "LL128"): 0.92 * 120.0 / 128.0, ("tree", "Simple"): 0.92,
}  # fmt: skip
NCCL_NVLINK_GB_PER_S = {"nvlink2": 20.0, "nvlink3": 20.0, "nvlink4": 20.6, "nvlink5": 40.1}  # topo.h, of one NVLink


def _link(bytes_per_s, latency_s=0.0):
    return Link("test", latency_s, bytes_per_s, 2 * bytes_per_s, "test", "test")


def test_a_link_that_nccl_does_not_know_is_a_ring_of_its_own_latency():
    link = _link(1e9, latency_s=1e-3)
    assert timing.collective_s("all_reduce", 4e9, 4, link) == pytest.approx(6e-3 + 6)
    assert timing.collective_s("all_gather", 4e9, 4, link) == pytest.approx(3e-3 + 3)
    assert timing.collective_s("broadcast", 4e9, 4, link) == pytest.approx(3e-3 + 4)
    assert timing.collective_s("send", 4e9, 2, link) == pytest.approx(1e-3 + 4)
    assert timing.collective_s("all_reduce", 4e9, 1, link) == 0
    both = Cluster(H100, link, _link(1e8, latency_s=1e-2))  # 2 nodes of 8: two steps of 30 cross
    assert timing.collective_s("all_reduce", 16e9, 16, both) == pytest.approx(28e-3 + 2e-2 + 30 / 8e8 * 1e9)
    with pytest.raises(ValueError, match="collective 'allreduce' is unknown"):
        timing.collective_s("allreduce", 1, 2, link)
    with pytest.raises(ValueError, match=r"world_size \(12\) must be a multiple of the ranks in a node \(8\)"):
        timing.collective_s("all_reduce", 1e9, 12, NODES)


def test_bus_bandwidth_gives_the_link_back():
    seconds = timing.collective_s("all_reduce", 1e9, 8, _link(450e9))
    assert timing.bus_bandwidth("all_reduce", 1e9, seconds, 8) == pytest.approx(450e9)


def _way(name, world_size, network, algorithm, protocol, per_node=None):
    costs = timing.collective_costs(name, world_size, network, per_node)
    return next(cost for cost in costs if (cost.algorithm, cost.protocol) == (algorithm, protocol))


NODES = Cluster(H100, LINKS["nvlink4"], LINKS["efa"])
MEASURED = PUBLISHED_BUS_BANDWIDTH


def _bus_gb_per_s(name, cost, world_size, payload_bytes=256e6):
    return timing.bus_bandwidth(name, payload_bytes, cost.seconds(payload_bytes), world_size) / 1e9


def test_latencies_are_nccls_microseconds_by_hand():
    """NCCL src/graph/tuning.cc: launch + steps, of which only those between nodes cost what a network costs."""
    inside = {
        ("ring", "LL"): 6.6 + 14 * 0.6,
        ("ring", "LL128"): 14 + 14 * 1.9,
        ("ring", "Simple"): 8.4 + 14 * 3.4,
        ("tree", "LL"): 6.8 + 2 * 7 * 0.6,
        ("tree", "Simple"): 8.4 + 2 * 7 * 4.0,
        ("nvls", "Simple"): 25,
    }
    for way, us in inside.items():
        assert _way("all_reduce", 8, LINKS["nvlink4"], *way).latency_s == pytest.approx(us * 1e-6)
    over_4_nodes = {
        ("ring", "LL"): 6.6 + 56 * 1.0 + 6 * 2.7,  # the network's call costs 1 us, more than NVLink's 0.6
        ("ring", "Simple"): 8.4 + 56 * 3.4 + 6 * 14,
        ("tree", "LL128"): 14 + 2 * (7 * 1.25 + 2 * 8.5),
        ("nvls", "Simple"): 25 + 2 * 2 * 20.9,
    }
    for way, us in over_4_nodes.items():
        assert _way("all_reduce", 32, NODES, *way).latency_s == pytest.approx(us * 1e-6)
    one_a_node = _way("all_gather", 32, NODES, "ring", "LL", per_node=1)
    assert one_a_node.latency_s == pytest.approx((6.6 + 31 * 5.0) * 1e-6)  # nothing else hides a step: a tree's 5.0
    assert _way("all_reduce", 8, LINKS["pcie5"], "ring", "LL128").latency_s == pytest.approx((14 + 14 * 2.5) * 1e-6)


def test_the_way_changes_with_the_message():
    def ways(name, world_size, network):
        best = [timing.fastest(name, 10**k, world_size, network) for k in range(3, 11)]
        return [f"{cost.algorithm} {cost.protocol}" for cost in best]

    assert ways("all_reduce", 8, LINKS["nvlink4"]) == ["ring LL"] * 4 + ["nvls Simple"] * 4
    assert ways("all_reduce", 8, LINKS["nvlink3"])[-1] == "ring Simple"  # no switch that sums
    expected = ["tree LL"] * 3 + ["tree LL128"] * 2 + ["tree Simple"] + ["ring Simple"] * 2
    assert ways("all_reduce", 64, LINKS["efa"]) == expected
    assert set(ways("all_gather", 64, NODES)) == {"ring LL", "ring LL128", "ring Simple"}


def test_436_gb_per_s_is_no_ring():
    rings = [_way("all_reduce", 8, NODES, "ring", protocol) for protocol in ("LL", "LL128", "Simple")]
    best = max(_bus_gb_per_s("all_reduce", ring, 8) for ring in rings)
    assert best < 371 < MEASURED["all_reduce"][1] / 1e9 < 450  # below the line rate, and yet more than any ring
    switch = timing.fastest("all_reduce", 256e6, 8, NODES)
    assert switch.algorithm == "nvls"
    assert _bus_gb_per_s("all_reduce", switch, 8) == pytest.approx(468, abs=1)  # measured: 436
    assert _bus_gb_per_s("all_reduce", switch, 8, 1e11) == pytest.approx(480, abs=1)
    pair = timing.fastest("all_reduce", 1e9, 2, LINKS["nvlink4"])
    assert pair.algorithm == "ring"  # a switch saves two GPUs nothing


def test_two_phases_cost_an_all_reduce_by_ring_and_up_to_1_75_times_it_in_the_switch():
    def phases_s(size, network):
        return sum(timing.collective_s(name, size, 8, network) for name in ("reduce_scatter", "all_gather"))

    for size in (1e8, 1e10):
        by_ring = _way("all_reduce", 8, LINKS["nvlink3"], "ring", "Simple").seconds(size)
        assert phases_s(size, LINKS["nvlink3"]) / by_ring == pytest.approx(1, abs=0.02)
        assert phases_s(size, LINKS["efa"]) / timing.collective_s("all_reduce", size, 8, LINKS["efa"]) < 1.06
    in_switch = [phases_s(size, NODES) / timing.collective_s("all_reduce", size, 8, NODES) for size in (1e7, 1e8, 1e10)]
    assert in_switch == pytest.approx([1.72, 1.38, 1.30], abs=0.01)
    measured = MEASURED["all_reduce"][1] / MEASURED["all_gather"][1]  # seconds go as 1 / bandwidth
    assert measured == pytest.approx(1.745, abs=0.001)
    gathered = _bus_gb_per_s("all_gather", timing.fastest("all_gather", 256e6, 8, NODES), 8)
    assert gathered / (MEASURED["all_gather"][1] / 1e9) == pytest.approx(1.41, abs=0.01)  # the model is too fast here


def test_pieces_for_other_nodes_leave_by_the_port():
    nvlink, port = LINKS["nvlink4"], LINKS["efa"]
    inside = timing.collective_s("all_to_all", 8e9, 8, NODES)
    assert inside == pytest.approx(7 * (nvlink.latency_s + 1e9 / nvlink.achieved_bytes_per_s))
    assert timing.collective_s("all_to_all", 16e9, 16, NODES) == pytest.approx(8 * (port.latency_s + 1e9 / 50e9))


def test_forward_flops_of_8b():
    config = preset("llama-3.1-8b")
    every_parameter = 8_030_261_248
    assert 2 * every_parameter / 1e9 == pytest.approx(16.06, abs=0.005)  # claim C170
    assert flops.attention_flops_per_token(config, 8192) / 1e9 == pytest.approx(4.3, abs=0.01)  # claim C170
    embedding_and_norms = 128_256 * 4096 + (2 * 32 + 1) * 4096
    assert flops.matmul_parameters(config) == every_parameter - embedding_and_norms
    assert flops.attention_flops_per_token(config, 8192, causal=True) * 2 == flops.attention_flops_per_token(
        config, 8192
    )


def test_flops_per_token_reproduce_published_mfu():
    # torchtitan, 8 H100, 8B at 8192 tokens: it states 33 % and 39 %
    flops = timing.flops_per_token(preset("llama-3.1-8b"), 8192)
    assert timing.mfu(5762 * flops, 1, 1, H100.bf16_flops) == pytest.approx(0.337, abs=0.001)
    assert timing.mfu(6667 * flops, 1, 1, H100.bf16_flops) == pytest.approx(0.390, abs=0.001)
    # nanotron, 3.57B at 4096 tokens: 363.66 TFLOP/s at 14,167.25 tokens/s
    assert timing.flops_per_token(PLAYBOOK_3B, 4096) == pytest.approx(363.66e12 / 14167.25, rel=1e-3)


def test_buckets_overlap_the_backward_until_communication_is_the_longer():
    spans = timing.dp_spans(1.0, 2.0, [0.5, 0.5])
    assert [(span.name, span.start_s, span.stop_s) for span in spans] == [
        ("forward", 0.0, 1.0), ("backward", 1.0, 3.0), ("all-reduce 0", 2.0, 2.5), ("all-reduce 1", 3.0, 3.5),
    ]  # fmt: skip
    assert timing.exposed_s(spans) == 0.5  # the last bucket can never be hidden
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [0.5, 0.5], overlap=False)) == 1.0
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [4.0, 4.0])) == 7.0  # 8 s from when the first bucket is ready
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [])) == 0.0


def test_more_buckets_expose_less_but_pay_more_latency():
    exposed = [timing.dp_step_s(1, 2, 1.0, num_buckets=count) - 3 for count in (1, 4, 20)]
    assert exposed == pytest.approx([1.0, 0.25, 0.05])
    link = _link(1e9, latency_s=1e-3)
    one, many = (count * timing.collective_s("all_reduce", 1e9 / count, 4, link) for count in (1, 100))
    # claim C047: the bytes stay, only the number of calls changes
    assert many - one == pytest.approx(99 * 6e-3)


def test_accumulation_steps_complete_the_global_batch():
    assert timing.accumulation_steps(1024, micro_batch_size=2, dp_size=128) == 4  # claim C051
    assert timing.accumulation_steps(1024, micro_batch_size=2, dp_size=512) == 1  # claim C052
    with pytest.raises(ValueError, match=r"global_batch_size \(1024\) must be a multiple of .* 24"):
        timing.accumulation_steps(1024, micro_batch_size=2, dp_size=12)  # claim C051: 42.67


def test_the_modelled_curve_stays_near_the_published_one_up_to_128_gpus():
    """Assumed, since the source names no model: 1.34B parameters, FP32 gradients, one sequence of 4096 tokens a GPU."""
    tokens, grad_bytes = 4096, 4 * 1.34e9
    compute_s = tokens / PUBLISHED_DP_THROUGHPUT[8]
    error = {
        dp: timing.dp_throughput(dp, tokens, compute_s, grad_bytes, published_link(dp // 8)) / published - 1
        for dp, published in PUBLISHED_DP_THROUGHPUT.items()
    }
    assert max(abs(error[dp]) for dp in (8, 16, 32, 64, 128)) < 0.12
    assert error[256] > 0.25  # what the model leaves out: late ranks, and a network shared with others


def test_copies_in_the_same_stream_hide_nothing_and_beside_it_all_but_the_last():
    same, beside = (timing.copy_spans(2.0, 1.0, 3, side_stream) for side_stream in (False, True))
    assert [(s.start_s, s.stop_s) for s in same if s.lane == "compute"] == [(0, 2), (3, 5), (6, 8)]
    assert [(s.start_s, s.stop_s) for s in beside if s.lane == "copy"] == [(2, 3), (4, 5), (6, 7)]
    slow = timing.copy_spans(1.0, 2.0, 3)  # the copies are the longer ones: each waits for the one before it
    assert [(s.start_s, s.stop_s) for s in slow if s.lane == "copy"] == [(1, 3), (3, 5), (5, 7)]
    assert timing.exposed_s(slow) == 4.0 and timing.exposed_s(beside) == 1.0


def test_collectives_over_a_measured_network_get_what_was_measured():
    """Over whole nodes the published bus bandwidth; one rank a node has one port of eight."""
    measured = Cluster(H100, LINKS["nvlink4"], LINKS["efa-measured"])
    for nodes, gb in ((2, 184.6132), (8, 68.9975), (64, 11.0383)):
        seconds = timing.collective_s("all_gather", 256e9, 8 * nodes, measured)  # so long that latency is nothing
        assert timing.bus_bandwidth("all_gather", 256e9, seconds, 8 * nodes) == pytest.approx(gb * 1e9, rel=1e-3)
    one_a_node = timing.collective_s("all_reduce", 256e9, 8, measured, 1)
    assert timing.bus_bandwidth("all_reduce", 256e9, one_a_node, 8) == pytest.approx(99.5643e9 / 8, rel=1e-3)
    assert timing.collective_s("all_gather", 256e6, 8, measured) == timing.collective_s("all_gather", 256e6, 8, NODES)
    assert timing.collective_s("send", 256e6, 2, measured, 1) == timing.collective_s("send", 256e6, 2, NODES, 1)


def test_between_two_measured_numbers_of_nodes_the_line_is_straight_on_logarithmic_axes():
    assert measured_bus_bandwidth(32, "all_gather") == 27.9692e9
    assert measured_bus_bandwidth(24, "all_gather") == pytest.approx(
        27.9692e9 ** (log(1.5) / log(2)) * 54.9723e9 ** (1 - log(1.5) / log(2))
    )
    assert measured_bus_bandwidth(2_048, "all_gather") == 11.0383e9


def test_a_layer_of_22b_took_39_percent_longer_under_full_recomputation_and_7_under_selective():
    ms = {name: sum(passes) for name, passes in LAYER_OF_22B_MS.items()}
    longer = {name: round(100 * (taken / ms["kept"] - 1)) for name, taken in ms.items()}
    assert longer["full"] == 39  # claims C013, C035, C043: more than the FLOPs, 33 %
    assert longer["selective"] == 7 and longer["selective, sequence parallel"] == 4  # claim C044
    assert ms["kept"] / ms["kept, sequence parallel"] == pytest.approx(1.03, abs=0.005)  # claim C186: by itself


def test_every_constant_of_nccl_is_that_of_its_source():
    for (algorithm, protocol), found in TUNING.items():
        index = ("LL", "LL128", "Simple").index(protocol)
        launch_us, nvlink_us, pci_us, network_us = (table[algorithm][index] for table in NCCL.values())
        assert (found.launch_us, found.nvlink_us, found.network_us) == (launch_us, nvlink_us, network_us)
        assert (found.pci_us or 0) == pci_us and found.bandwidth_share == NCCL_SHARES.get((algorithm, protocol))
    assert len(TUNING) == 7
    assert _NETWORK_CALL_US == {"LL": 1.0, "LL128": 1.0, "Simple": 3 * 1.0}  # getNetOverhead, Intel
    for key, one in LINKS.items():
        if one.latency_source.startswith("NCCL"):
            table = {"nvlink": "NVLINK", "pci": "PCI", "network": "NET"}[one.kind]
            assert one.latency_s == NCCL[table]["ring"][2] * 1e-6, key
    assert {key: LINKS[key].low_latency_bytes_per_s / 1e9 for key in NCCL_LL_GB_PER_S} == NCCL_LL_GB_PER_S
    for key, gb_per_s in NCCL_NVLINK_GB_PER_S.items():
        assert LINKS[key].achieved_share == gb_per_s / (50 if key == "nvlink5" else 25), key  # as they are sold
    assert LINKS["pcie3"].achieved_share == 12.0 / 15.75  # PCI_BW of topo.h
    assert LINKS["nvlink5"].switch_share / LINKS["nvlink4"].switch_share == pytest.approx(0.74 / 0.85)  # nvlsEfficiency
    in_a_node = _way("all_reduce", 8, LINKS["nvlink4"], "tree", "LL128").payload_bytes_per_s
    assert in_a_node == pytest.approx(0.92 * 7.0 / 9.0 / 2 * LINKS["nvlink4"].achieved_bytes_per_s)
