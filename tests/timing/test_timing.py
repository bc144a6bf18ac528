"""Hand values, papers' formulas, and the quantitative claims that the course recomputes (claim numbers in comments)."""

from math import log

import pytest

from course_lib import timing
from course_lib.claims.formulas import LAYER_OF_22B_MS, STEPS
from course_lib.config import ModelConfig, preset
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
from course_lib.traffic import ring_all_reduce_bytes

H100, A100 = GPUS["h100"], GPUS["a100-80"]
PLAYBOOK_3B = preset("playbook-3b")


def _link(bytes_per_s, latency_s=0.0):
    return Link("test", latency_s, bytes_per_s, 2 * bytes_per_s, "test", "test")


# ------------------------------------------------------------------------------------ seconds
def test_10_gb_over_8_gpus_on_nvlink_and_on_pcie():
    as_circulated = 2 * 10e9 / 900e9, 2 * 10e9 / 64e9
    assert as_circulated == pytest.approx((0.0222, 0.3125), abs=1e-4)  # claim C166: both directions, and no (N - 1) / N
    assert timing.collective_s("all_reduce", 10e9, 8, _link(450e9)) == pytest.approx(0.0389, rel=1e-3)
    assert timing.collective_s("all_reduce", 10e9, 8, _link(32e9)) == pytest.approx(0.547, rel=1e-3)


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


def test_the_way_changes_with_the_message():
    def ways(name, world_size, network):
        best = [timing.fastest(name, 10**k, world_size, network) for k in range(3, 11)]
        return [f"{cost.algorithm} {cost.protocol}" for cost in best]

    assert ways("all_reduce", 8, LINKS["nvlink4"]) == ["ring LL"] * 4 + ["nvls Simple"] * 4
    assert ways("all_reduce", 8, LINKS["nvlink3"])[-1] == "ring Simple"  # no switch that sums
    assert (
        ways("all_reduce", 64, LINKS["efa"])
        == ["tree LL"] * 3 + ["tree LL128"] * 2 + ["tree Simple"] + ["ring Simple"] * 2
    )
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


def test_latency_does_not_explain_33_gb_per_s_over_64_nodes():
    every_step = 2 * 511 * 14e-6
    assert every_step == pytest.approx(14.3e-3, abs=1e-5)  # if each step of the ring crossed the network
    ring = _way("all_reduce", 512, NODES, "ring", "Simple")
    assert ring.latency_s == pytest.approx(4.8e-3, abs=0.05e-3)  # 126 steps do, 896 stay on NVLink
    assert _bus_gb_per_s("all_reduce", ring, 512) == pytest.approx(82.5, abs=0.5)
    chosen = timing.fastest("all_reduce", 256e6, 512, NODES)
    assert (chosen.algorithm, chosen.latency_s) == ("nvls", pytest.approx(276e-6, abs=1e-6))
    modelled = {nodes: _bus_gb_per_s("all_reduce", timing.fastest("all_reduce", 256e6, 8 * nodes, NODES), 8 * nodes)
                for nodes in MEASURED["all_reduce"]}  # fmt: skip
    assert modelled[64] > 300 > 9 * MEASURED["all_reduce"][64] / 1e9  # ten times what was measured
    gaps = [modelled[nodes] / (rate / 1e9) for nodes, rate in MEASURED["all_reduce"].items()]
    assert gaps == sorted(gaps) and gaps[0] < 1.1  # it grows with every doubling


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


def test_tensor_parallel_traffic_is_a_fifth_of_the_compute_not_3_percent():
    config, tp = preset("llama-3.1-70b"), 8
    # four all-reduces a layer and token (two forward, two backward), bf16; claim C205
    sent = 4 * config.num_layers * ring_all_reduce_bytes(config.d_model * 2, tp, itemsize=2)
    compute_s = 6 * 70.6e9 / (tp * 0.45 * H100.bf16_flops)
    assert sent / 450e9 / compute_s == pytest.approx(0.17, abs=0.005)
    assert sent / 360e9 / compute_s == pytest.approx(0.21, abs=0.005)


def test_gradients_of_a_32nd_of_70b_take_a_sixth_of_a_second():
    params, link = 70.6e9 / 32, LINKS["ib-ndr400"]  # claim C206
    assert timing.collective_s("all_reduce", params * 2, 80, link) == pytest.approx(0.17, abs=0.01)
    assert timing.collective_s("all_reduce", params * 4, 80, link) == pytest.approx(0.34, abs=0.02)


# ------------------------------------------------------------------------------------ FLOPs
def test_forward_flops_of_8b():
    config = preset("llama-3.1-8b")
    every_parameter = 8_030_261_248
    assert 2 * every_parameter / 1e9 == pytest.approx(16.06, abs=0.005)  # claim C170
    assert timing.attention_flops_per_token(config, 8192) / 1e9 == pytest.approx(4.3, abs=0.01)  # claim C170
    embedding_and_norms = 128_256 * 4096 + (2 * 32 + 1) * 4096
    assert timing.matmul_parameters(config) == every_parameter - embedding_and_norms
    assert timing.attention_flops_per_token(config, 8192, causal=True) * 2 == timing.attention_flops_per_token(
        config, 8192
    )


def test_flops_per_token_reproduce_published_mfu():
    # torchtitan, 8 H100, 8B at 8192 tokens: it states 33 % and 39 %
    flops = timing.flops_per_token(preset("llama-3.1-8b"), 8192)
    assert timing.mfu(5762 * flops, 1, 1, H100.bf16_flops) == pytest.approx(0.337, abs=0.001)
    assert timing.mfu(6667 * flops, 1, 1, H100.bf16_flops) == pytest.approx(0.390, abs=0.001)
    # nanotron, 3.57B at 4096 tokens: 363.66 TFLOP/s at 14,167.25 tokens/s
    assert timing.flops_per_token(PLAYBOOK_3B, 4096) == pytest.approx(363.66e12 / 14167.25, rel=1e-3)


def test_full_recomputation_is_narayanans_factor_96():
    config, seq_len, batch = preset("gpt3-175b"), 2048, 1
    layers, h, vocab = config.num_layers, config.d_model, config.vocab_size
    papers = 96 * batch * seq_len * layers * h**2 * (1 + seq_len / (6 * h) + vocab / (16 * layers * h))
    assert timing.step_flops(config, batch * seq_len, seq_len, recompute="full") == pytest.approx(papers, rel=1e-9)


def test_recomputation_costs_a_third_in_full_and_3_percent_of_the_forward_when_selective():
    config, tokens = preset("gpt3-175b"), 2048
    none, selective, full = (timing.step_flops(config, tokens, 2048, how) for how in ("none", "selective", "full"))
    assert full / none == pytest.approx(4 / 3, abs=0.005)  # claims C013, C035: 4 units of forward where 3 were
    assert (selective - none) / (none / 3) == pytest.approx(0.027, abs=0.001)  # claim C044: 2.7 % of the forward
    assert selective / none == pytest.approx(1.009, abs=0.001)  # which is 0.9 % of the step
    with pytest.raises(ValueError, match="recompute is 'half'; choose from none, selective, full"):
        timing.step_flops(config, tokens, 2048, "half")


def test_a_layer_of_22b_took_39_percent_longer_under_full_recomputation_and_7_under_selective():
    ms = {name: sum(passes) for name, passes in LAYER_OF_22B_MS.items()}
    longer = {name: round(100 * (taken / ms["kept"] - 1)) for name, taken in ms.items()}
    assert longer["full"] == 39  # claims C013, C035, C043: more than the FLOPs, 33 %
    assert longer["selective"] == 7 and longer["selective, sequence parallel"] == 4  # claim C044
    assert ms["kept"] / ms["kept, sequence parallel"] == pytest.approx(1.03, abs=0.005)  # claim C186: by itself


def test_sequence_parallelism_and_selective_recomputation_together_gain_what_full_recomputation_costs():
    gain, in_flops, reached = {}, {}, {}
    for name, (layers, h, heads, batch, num_gpus, full_s, both_s) in STEPS.items():
        config = ModelConfig(name, layers, h, heads, heads, 4 * h, 51_200, 2048, tied=True, family="gpt")
        flops = {how: timing.step_flops(config, batch * 2048, 2048, how) for how in ("none", "selective", "full")}
        reached[name] = 100 * timing.mfu(flops["none"], both_s, num_gpus, A100.bf16_flops)
        gain[name], in_flops[name] = full_s / both_s, flops["full"] / flops["selective"]
    # claim C183: above 50 % of an A100 from 175B on, not at 22B
    assert reached == pytest.approx({"22B": 41.5, "175B": 51.4, "530B": 56.0, "1T": 56.3}, abs=0.2)
    assert gain["175B"] == pytest.approx(1.318, abs=0.001)  # claim C189: 31.8 %, not 1.5 times
    assert min(gain.values()) > 1.29 and max(gain.values()) < 1.325  # claim C186: by the pair, not by one of the two
    assert gain == pytest.approx(in_flops, abs=0.03)  # claim C204: the third is the recomputation that is left out


def test_recomputing_scores_inside_a_kernel_is_faster_because_memory_is_the_limit():
    """Claim C043, one head of 128 features: FLOPs and traffic of the attention core, forward and backward."""
    s, head = 8192, 128
    flops = 3 * 4 * s * s * head
    written_bytes = 2 * s * s * (4 + 5)  # bf16 scores: four passes forward, five or more backward
    again = 2 * s * s * head  # q k^T once more, in backward; only q, k, v, o and their gradients travel
    written_s = timing.roofline_s(flops, written_bytes, H100)
    fused_s = timing.roofline_s(flops + again, 2 * 8 * s * head, H100)
    assert fused_s < written_s / 2
    assert written_s > 2 * flops / H100.bf16_flops  # memory is the limit; where it is not, computing again costs time


def test_a_trade_off_table_without_a_measurement():
    speed_of_checkpointing, speed_of_all = 0.8, 0.9  # claim C224
    assert speed_of_all / speed_of_checkpointing == pytest.approx(1.125)  # stacked: the last row is that much faster
    config = preset("llama-3.1-8b")
    flops = [timing.step_flops(config, 4096, 4096, how) for how in ("none", "full")]
    assert 0.75 < flops[0] / flops[1] < 0.77  # in FLOPs recomputation alone leaves three quarters


def test_mfu_falls_when_recomputation_takes_time():
    forward, backward, again = 100, 200, 50
    assert forward + backward + again == 350 and forward + backward + forward == 400  # claim C040
    assert timing.mfu(500, 1.0, 1, 1000) == timing.hfu(500, 1.0, 1, 1000) == 0.5
    # claims C041, C042: 700 FLOPs in 1.1 s on a GPU of 1000 FLOP/s; HFU and MFU were given as 70 % and 50 %
    assert timing.hfu(700, 1.1, 1, 1000) == pytest.approx(0.636, abs=0.0005)
    assert timing.mfu(500, 1.1, 1, 1000) == pytest.approx(0.455, abs=0.0005)


def test_a_token_budget_costs_the_same_flops_whatever_the_batch():
    config = preset("llama-3.2-1b")  # claim C020
    small, large = (tokens * timing.step_flops(config, 2**20 // tokens, 1024) for tokens in (1, 16))
    assert small == large
    assert 15360 * 4096 == 62_914_560  # claim C017: 62.9 M tokens a batch; claim C019: above Llama 3's 16 M


def test_percentages_name_their_peak():
    assert 280e12 / A100.bf16_flops == pytest.approx(0.90, abs=0.003)  # claim C184: not on an A100
    assert (190e12 / H100.bf16_flops, 280e12 / H100.bf16_flops) == pytest.approx((0.19, 0.28), abs=0.005)
    assert (700e12 / H100.fp8_flops, 900e12 / H100.fp8_flops) == pytest.approx((0.35, 0.45), abs=0.006)  # claim C188
    without_recomputation = [hfu * 72 / 96 for hfu in (0.44, 0.52)]
    assert without_recomputation == pytest.approx([0.33, 0.39])  # claim C190: 44 to 52 % counted it
    assert (600e12 / H100.fp8_flops, 750e12 / H100.fp8_flops) == pytest.approx((0.30, 0.38), abs=0.005)  # claim C197
    assert (600e12 / H100.bf16_flops, 750e12 / H100.bf16_flops) == pytest.approx((0.61, 0.76), abs=0.005)
    assert (0.45 * H100.bf16_flops / 1e12, 640 * 0.45 * H100.bf16_flops / 1e15) == pytest.approx(
        (445, 284.8), abs=0.1
    )  # claim C200


def test_640_h100_train_70b_on_15_trillion_tokens():
    peak, day_s = H100.bf16_flops, 86_400
    psi = 70_553_706_496 - 128_256 * 8192 - 161 * 8192  # of matrix products: without embedding and norms
    flops = 6 * psi + 12 * 80 * 8192 * 8192  # attention of 80 layers over 8,192 tokens
    implied = [timing.mfu(tokens * flops, 1, 640, peak) for tokens in (150e3, 200e3)]
    assert implied == pytest.approx([0.11, 0.15], abs=0.005)  # claim C198
    assert timing.tokens_per_s(flops, 640, peak, 0.45) == pytest.approx(591_632, abs=1)  # claim C198
    assert timing.tokens_per_s(420e9, 1, 288e15, 1.0) == pytest.approx(685_714, abs=1)  # claim C202
    assert 15e12 / timing.tokens_per_s(420e9, 1, 288e15, 1.0) / day_s == pytest.approx(253, abs=0.5)  # claim C202
    gpu_hours = 6.4e6  # what Llama 3 70B really took
    assert gpu_hours / 640 / 24 == pytest.approx(417, abs=0.5)  # claim C202: days
    assert timing.mfu(6 * 70.6e9 * 15e12, gpu_hours * 3600, 1, peak) == pytest.approx(0.279, abs=0.001)


def test_15_trillion_tokens_at_78_000_a_second_take_six_years_not_55_hours():
    seconds = 15e12 / 78_000  # claim C172
    assert seconds == pytest.approx(192_307_692, abs=1)
    assert (seconds / 3600, seconds / 86_400) == pytest.approx((53_419, 2_226), abs=1)
    assert 3 * seconds / 86_400 / 365.25 == pytest.approx(18.3, abs=0.05)  # with the backward: 6 N instead of 2 N


def test_roofline_takes_the_longer_of_compute_and_memory():
    assert timing.roofline_s(989e12, 1, H100) == 1
    assert timing.roofline_s(1, 3350e9, H100) == 1


# ------------------------------------------------------------------------------------ data parallelism
def test_buckets_overlap_the_backward_until_communication_is_the_longer():
    spans = timing.dp_spans(1.0, 2.0, [0.5, 0.5])
    assert [(span.name, span.start_s, span.stop_s) for span in spans] == [
        ("forward", 0.0, 1.0), ("backward", 1.0, 3.0), ("all-reduce 0", 2.0, 2.5), ("all-reduce 1", 3.0, 3.5),
    ]  # fmt: skip
    assert timing.exposed_s(spans) == 0.5  # the last bucket can never be hidden
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [0.5, 0.5], overlap=False)) == 1.0
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [4.0, 4.0])) == 7.0  # 8 s from when the first bucket is ready
    assert timing.exposed_s(timing.dp_spans(1.0, 2.0, [])) == 0.0


def test_with_trees_many_buckets_are_nearly_free():
    """Chapter 3's model: 1B in FP32 gradients, one H100 in each node. By rings alone 256 GPUs want 4 pieces."""
    grad_bytes, compute_s = 4 * 1_235_814_400, 0.187

    def step_s(num_buckets, dp_size, by):
        comm_s = num_buckets * by(grad_bytes / num_buckets, dp_size)
        return timing.dp_step_s(compute_s / 3, 2 * compute_s / 3, comm_s, num_buckets)

    def fastest(size, dp_size):
        return timing.collective_s("all_reduce", size, dp_size, LINKS["efa"])

    def ring(size, dp_size):
        return _way("all_reduce", dp_size, LINKS["efa"], "ring", "Simple").seconds(size)

    counts = [2**k for k in range(7)]
    by_ring, chosen = ({count: step_s(count, 256, by) for count in counts} for by in (ring, fastest))
    assert min(by_ring, key=by_ring.get) == 4 and by_ring[64] == pytest.approx(0.72, abs=0.01)
    assert min(chosen, key=chosen.get) in (16, 32)
    assert 0.287 < min(chosen.values()) < chosen[64] < 0.295


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


def test_where_throughput_falls_depends_on_the_network_and_the_micro_batch():
    """Claim C054: "above 512 GPUs" is a rule of thumb of one network; modelled, share of the throughput on 8 GPUs."""
    second_per_token = 1 / PUBLISHED_DP_THROUGHPUT[8]

    def left(dp, tokens, link):
        on_8, on_dp = (
            timing.dp_throughput(size, tokens, tokens * second_per_token, 4 * 1.34e9, LINKS[link]) for size in (8, dp)
        )
        return on_dp / on_8

    assert PUBLISHED_DP_THROUGHPUT[16] < PUBLISHED_DP_THROUGHPUT[8]  # measured: it falls from the second node on
    assert 0.83 < left(512, 4096, "efa") < left(64, 4096, "efa") < 0.84  # of a ring's or a tree's bytes, not of steps
    assert PUBLISHED_DP_THROUGHPUT[64] / PUBLISHED_DP_THROUGHPUT[8] < 0.78  # measured: less is left
    assert left(512, 16 * 4096, "efa") > 0.99  # larger micro-batches hide them


# ------------------------------------------------------------------------------------ nonsense
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: timing.mfu(1e15, 1.0, 0, 1e15), ValueError, "num_gpus is 0; give a whole number"),
        (lambda: timing.mfu(1e15, -1.0, 8, 1e15), ValueError, "seconds is -1.0; give a finite number above 0"),
        (lambda: timing.hfu(float("nan"), 1.0, 8, 1e15), ValueError, "hardware_flops is nan"),
        (lambda: timing.tokens_per_s(6e9, 8, 1e15, 45), ValueError, "utilisation is 45"),
        (lambda: timing.tokens_per_s("6B", 8, 1e15, 0.4), TypeError, "flops_a_token is '6B'"),
        (lambda: timing.collective_s("all_reduce", -1, 8, LINKS["efa"]), ValueError, "payload_bytes is -1"),
        (
            lambda: timing.collective_s("all_reduce", 1e6, 10**15, LINKS["efa"]),
            ValueError,
            "world_size is 10000000",
        ),
        (lambda: timing.collective_s("all_reduce", 1e6, 8, "efa"), TypeError, "network is 'efa'"),
        (lambda: timing.collective_s("all_reduce", 1e6, 8, NODES, per_node=0), ValueError, "per_node is 0"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
