from math import inf

import pytest

from course_lib.hardware import (
    BUS_BANDWIDTH,
    GIB,
    GPUS,
    LINKS,
    PUBLISHED_DP_THROUGHPUT,
    cluster_of,
    gpu,
    gpu_for,
    gpu_of_device,
    gpu_with,
    link,
    link_of,
    measured_bus_bandwidth,
    peak_flops,
    published_link,
)
from course_lib.timing import collective_s


def test_every_number_has_a_source():
    assert all(one.source and one.link in LINKS for one in GPUS.values())
    assert all(one.source and one.latency_source for one in LINKS.values())


def test_a_program_sees_a_little_less_memory_than_is_built_in():
    for one in GPUS.values():
        assert 0.9 < one.usable_bytes / one.memory_bytes < 1
    assert 79.1 * GIB <= GPUS["h100"].usable_bytes <= 79.6 * GIB  # claim C225: "79 GB" are GiB
    assert GPUS["t4"].usable_bytes == int(14.56 * GIB)


def test_peaks_are_dense_not_sparse():
    h100, a100 = GPUS["h100"], GPUS["a100-80"]
    assert h100.bf16_flops == 989e12 and h100.fp8_flops == 1979e12 == 3958e12 / 2  # claim C199
    assert a100.bf16_flops == 312e12
    assert a100.bf16_flops / a100.tf32_flops == 2 and a100.bf16_flops / a100.fp32_flops == 16  # claims C028, C208
    assert GPUS["h200"].bf16_flops == h100.bf16_flops


def test_memory_is_as_fast_as_the_datasheets_say():
    rates = {"a100-80": 2039e9, "h100": 3350e9, "h200": 4800e9}
    assert {key: GPUS[key].memory_bytes_per_s for key in rates} == rates


def test_half_precision_peaks_do_not_exceed_fp8_nor_fall_below_fp32():
    for one in GPUS.values():
        assert one.fp32_flops <= one.fp16_flops
        assert one.fp8_flops is None or one.fp8_flops == pytest.approx(2 * one.bf16_flops, rel=0.015)


def test_links_count_one_direction_and_datasheets_both():
    assert LINKS["nvlink3"].bytes_per_s == 300e9 == 12 * 25e9  # claim C162: 12 links of 25 each way, 50 both ways
    assert LINKS["nvlink3"].both_directions_bytes_per_s == 600e9 == 12 * 50e9
    assert LINKS["nvlink4"].bytes_per_s == 450e9 == 18 * 25e9  # claims C138, C162
    assert LINKS["nvlink4"].both_directions_bytes_per_s == 900e9
    duplex = [one for key, one in LINKS.items() if key != "nvme"]
    assert all(one.both_directions_bytes_per_s == 2 * one.bytes_per_s for one in duplex)


def test_a_ring_achieves_less_than_the_line_rate_and_a_switch_more():
    nvlink = LINKS["nvlink4"]
    assert nvlink.achieved_bytes_per_s == pytest.approx(370.8e9) and nvlink.switch_share == 480 / 450
    assert LINKS["pcie3"].achieved_bytes_per_s == pytest.approx(12e9)
    assert LINKS["pcie5"].achieved_bytes_per_s == pytest.approx(48e9)
    assert 800e9 < LINKS["nvlink5"].switch_share * LINKS["nvlink5"].bytes_per_s < 850e9
    for key, one in LINKS.items():
        assert (one.switch_share is not None) == (key in ("nvlink4", "nvlink5"))
        low = 0.7 if one.latency_source.startswith("NCCL") and not one.measured else 0.3
        assert low < one.achieved_share <= 1 and (one.kind == "plain") == (key == "nvme")


@pytest.mark.parametrize(("key", "transfers_per_s"), [("pcie3", 8e9), ("pcie4", 16e9), ("pcie5", 32e9)])
def test_pcie_is_its_lanes_times_its_rate(key, transfers_per_s):
    assert LINKS[key].bytes_per_s == pytest.approx(16 * transfers_per_s * 128 / 130 / 8, rel=1e-3)  # claim C134


def test_networks_between_nodes():
    assert 8 * LINKS["efa"].bytes_per_s == 400e9 == 3.2e12 / 8  # claim C196: 8 x 400 Gb/s = 3.2 Tb/s = 400 GB/s
    assert LINKS["ib-ndr400"].bytes_per_s == 50e9 and LINKS["nvlink-h800"].achieved_bytes_per_s == 160e9  # claim C164
    assert LINKS["ib-hdr200"].bytes_per_s == 25e9


def test_published_dp_throughput_per_gpu_only_falls():
    assert list(PUBLISHED_DP_THROUGHPUT.values()) == sorted(PUBLISHED_DP_THROUGHPUT.values(), reverse=True)


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"), ("Tesla T4", 14.6, "t4"), ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"), ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"), ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
        ("NVIDIA L4", 22.0, "l4"), ("NVIDIA B200", 178.4, "b200"), ("AMD Instinct MI300X", 192.0, "mi300x"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"), ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80"), ("NVIDIA H100 NVL", 93.1, None), ("NVIDIA H20", 95.2, "h20"),
        ("NVIDIA H20-3e", 139.8, None), ("NVIDIA H800", 79.1, "h800"), ("NVIDIA A800-SXM4-80GB", 79.2, "a800"),
        ("NVIDIA GB200", 184.3, "gb200"), ("NVIDIA L40S", 44.4, "l40s"), ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA A40", 44.4, "a40"), ("NVIDIA RTX A6000", 47.5, "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "rtx-6000-ada"), ("NVIDIA GeForce RTX 3090", 23.7, "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None), ("NVIDIA GeForce RTX 5090", 31.4, "rtx-5090"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, None), ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("Tesla P100-PCIE-16GB", 15.9, "p100-pcie"), ("Tesla P100-SXM2-16GB", 15.9, None),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"), ("Tesla V100-PCIE-16GB", 15.8, None),
        ("NVIDIA GeForce RTX 3060", 11.8, None),
    ],
)  # fmt: skip
def test_gpus_are_recognised_by_the_name_cuda_gives_them(name, gib, key):
    assert gpu_of_device(name, int(gib * GIB)) is (GPUS[key] if key else None)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        *[("a100-80g", "a100-80"), ("A100-SXM4-80GB".lower().replace("sxm4", "sxm"), "a100-80"), ("H100", "h100")],
        *[("h100-80g", "h100"), ("4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("a6000", "rtx-a6000")],
        *[("h20-96gb", "h20"), ("v100-32g", "v100-32"), ("a100_40gb", "a100-40"), ("p100", "p100-pcie")],
    ],
)
def test_a_gpu_is_found_by_the_names_that_people_write(said, key):
    assert gpu(said) is GPUS[key]


def test_a_gpu_of_no_table_is_given_by_its_numbers():
    mine = gpu_with("mine", 48, 200, 900)
    assert (mine.name, mine.memory_bytes_per_s, peak_flops(mine), peak_flops(mine, "fp8")) == ("mine", 9e11, 2e14, 2e14)
    assert mine.usable_bytes == pytest.approx(0.985 * 48 * GIB)
    faster = gpu_with("h100", tflops=800)
    assert peak_flops(faster) == 8e14 and faster.memory_bytes == GPUS["h100"].memory_bytes
    assert gpu_with("h100") is GPUS["h100"]


def test_peaks_without_bf16_units_are_those_of_fp16_and_fp32_runs_at_its_own():
    assert peak_flops(GPUS["t4"]) == 65e12 and peak_flops(GPUS["h100"]) == 989e12
    assert peak_flops(gpu_for(GPUS["t4"], "fp32")) == 8.1e12
    assert gpu_for(GPUS["v100-16"], "fp16") is GPUS["v100-16"]


def test_links_are_named_or_given_in_gb_per_s():
    slow = link_of("12.5")
    assert (slow.kind, slow.bytes_per_s, slow.achieved_share, slow.name) == ("network", 12.5e9, 1, "12.5 GB/s")
    assert link_of("10", inside=True).kind == "pci" and link_of("300", inside=True).kind == "nvlink"
    assert link_of("efa") is LINKS["efa"] and link_of("pcie4-host", inside=True).achieved_bytes_per_s == 10e9


def test_efa_of_an_a100_is_a_p4ds():
    p4d = cluster_of(GPUS["a100-40"], "efa")
    assert p4d.between is LINKS["efa-p4d"] and 8 * 8 * p4d.between.bytes_per_s == 4 * 100e9
    assert cluster_of(GPUS["a100-40"], "efa", per_node=1).between.bytes_per_s == 12.5e9  # a port of its own
    assert cluster_of(GPUS["h100"], "efa").between is LINKS["efa"]
    assert cluster_of(GPUS["a100-80"], "25", "pcie4", 4).inside is LINKS["pcie4"]
    assert cluster_of(GPUS["gb200"], "ib-xdr800").gpus_per_node == 72
    assert not GPUS["rtx-4090"].link.endswith("pcie4")  # no peer access


def test_bandwidth_over_nodes_is_of_the_link_that_was_measured():
    assert {one.curve for one in LINKS.values() if one.measured} == set(BUS_BANDWIDTH)
    assert measured_bus_bandwidth(4, "all_reduce", "efa-p4d") == 29.6e9 < measured_bus_bandwidth(4, "all_reduce")
    assert measured_bus_bandwidth(4, "all_gather", "efa-p4d") == inf  # nobody measured it
    over_p4d = collective_s("all_reduce", 2**30, 32, cluster_of(GPUS["a100-40"], "efa"))
    assert over_p4d == pytest.approx(70.253e-3, rel=0.02)  # as measured: nccl issue 527


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gpu("h1000"), "GPU is 'h1000'; did you mean 'h100'. choose from t4, l4"),
        (lambda: gpu("a100"), "GPU is 'a100', of which there are several: a100-pcie-40, a100-pcie-80, a100-40"),
        (lambda: gpu("v100"), "GPU is 'v100', of which there are several: v100-16, v100-32; give one of them"),
        (lambda: gpu_with("mine"), "GPU is 'mine'; .*; or give memory, tflops and bandwidth of another"),
        (lambda: gpu_with("mine", 48), "GPU 'mine' is in no table: give its tflops and bandwidth too"),
        (lambda: gpu_for(GPUS["t4"], "bf16"), "T4 has no bf16 units; choose recipe fp16-master-fp32-grads or fp32"),
        (lambda: link_of("nvlink4"), "link between nodes is 'nvlink4'; .*choose from ib-edr100"),
        (lambda: link_of("efa", inside=True), "link inside a node is 'efa'; .*choose from nvlink2"),
        (lambda: link_of("-3"), "link between nodes is '-3'"),
        (lambda: link_of("0"), "link between nodes is '0'"),
        (lambda: link("nvlink"), "link is 'nvlink'; did you mean .* choose from nvlink2"),
        (lambda: peak_flops(GPUS["t4"], "bf16"), "T4 has no bf16 units; choose from fp32, fp16"),
        (lambda: peak_flops(GPUS["t4"], "int4"), "precision is 'int4'; choose from"),
        (lambda: published_link(3), "3 nodes were not measured; choose from 1, 2, 4"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
