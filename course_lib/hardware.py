"""GPUs and links: every number with its unit and its source.

Three habits of datasheets to know:
- FLOP/s are printed "with sparsity", twice what a dense matrix multiplication can reach. Here they are dense.
- NVLink and PCIe are printed as the sum of both directions. A ring sends one way, so `bytes_per_s` is one direction.
- "80 GB" of GPU memory are 80 GiB = 85.9 GB: memory chips come in powers of two. A program sees a little less: what
  CUDA reports as total capacity is `usable_bytes`.

A GPU or a link that is in no table is given by its numbers: `custom_gpu`, `link_of("12.5")`.
"""

import re
from dataclasses import dataclass, replace
from math import inf, log
from typing import Literal

from course_lib.validate import Amount, Checked, Positive, Size, checked, one_of

GB = 10**9
GIB = 2**30
TERA = 10**12


@dataclass(frozen=True)
class GPU(Checked):
    """One GPU. Peaks are dense FLOP/s of a matrix multiplication; None where the GPU has no such units."""

    name: str
    memory_bytes: Positive  # what is built in
    usable_bytes: Positive  # what CUDA reports as total capacity (typical; it varies a little with driver and ECC)
    memory_bytes_per_s: Positive
    fp32_flops: Positive
    tf32_flops: Positive | None
    fp16_flops: Positive
    bf16_flops: Positive | None
    fp8_flops: Positive | None
    link: str  # to its neighbours in the node: a key of LINKS
    source: str
    sustained: Positive = 1.0  # the rate that it keeps up under a power cap, over an uncapped one's; or calibrated
    per_node: Size = 8  # so many are usually joined by its link


@dataclass(frozen=True)
class Link(Checked):
    """One way from GPU to GPU, with what it is sold as, and what a collective reaches on it.

    kind    "nvlink" | "pci" | "network": what NCCL's tuning tells apart; "plain": a link that it does not know, over
            which every collective is a ring whose steps cost latency_s each
    """

    name: str
    latency_s: Amount  # of one message, or of one step of a ring with the Simple protocol
    bytes_per_s: Positive  # the line rate of one direction, for each GPU
    both_directions_bytes_per_s: Positive  # as the datasheet prints it
    source: str
    latency_source: str
    kind: Literal["nvlink", "pci", "network", "plain"] = "plain"
    achieved_share: Positive = 1.0  # of the line rate: what a ring's bus bandwidth is at best
    low_latency_bytes_per_s: Positive | None = None  # the most that the LL protocol gives
    switch_share: Positive | None = None  # of the line rate: an all-reduce's bus bandwidth where the switch sums
    measured: bool = False  # collectives over several nodes get no more than measured_bus_bandwidth
    curve: Literal["efa-measured", "efa-p4d"] = "efa-measured"  # whose: a key of BUS_BANDWIDTH
    by_nodes: bool = False  # a step on it was measured over nodes: bandwidth falls, and ranks wait (timing/step.py)

    @property
    def achieved_bytes_per_s(self) -> float:
        """What a ring or a large message gets of the line rate."""
        return self.achieved_share * self.bytes_per_s


@dataclass(frozen=True)
class Cluster(Checked):
    """Nodes of equal GPUs: the link inside a node, and the port of each GPU to the network between nodes."""

    gpu: GPU
    inside: Link
    between: Link
    gpus_per_node: Size = 8


def _gpu(name, memory_gib, usable_gib, memory_gb_per_s, tflops, link, source, sustained=1.0):
    peaks = [None if tera is None else tera * TERA for tera in tflops]  # of fp32, tf32, fp16, bf16, fp8
    sizes = (memory_gib * GIB, int(usable_gib * GIB), memory_gb_per_s * GB)
    return GPU(name, *sizes, *peaks, link, source, sustained)


# usable: the total capacity in PyTorch's out-of-memory messages of such GPUs, as found in public reports; where a card
# has ECC on GDDR (T4, L4, A10G, A40, L40, L40S), with it. Tensor cores' rates are those with FP32 accumulation.
# fmt: off
GPUS: dict[str, GPU] = {
    "t4": _gpu("T4", 16, 14.56, 320, (8.1, None, 65, None, None), "pcie3",
               "NVIDIA T4 datasheet: 65 TFLOPS FP16, 320 GB/s; no bf16 units"),
    "l4": _gpu("L4", 24, 22.03, 300, (30.3, 60, 121, 121, 242.5), "pcie4",
               "NVIDIA L4 datasheet, halved where it says with sparsity (TF32 120, BF16 242, FP8 485)"),
    "l40": _gpu("L40", 48, 44.39, 864, (90.5, 90.5, 181, 181, 362), "pcie4",
                "NVIDIA L40 datasheet, dense column"),
    "l40s": _gpu("L40S", 48, 44.39, 864, (91.6, 183, 362, 362, 733), "pcie4",
                 "NVIDIA L40S datasheet, dense column (BF16 362, with sparsity 733)"),
    "a10": _gpu("A10", 24, 22.06, 600, (31.2, 62.5, 125, 125, None), "pcie4",
                "NVIDIA A10 datasheet, dense column"),
    "a10g": _gpu("A10G", 24, 22.06, 600, (35, 35, 70, 70, None), "pcie4",
                 "NVIDIA A10G datasheet for AWS G5, dense column"),
    "a40": _gpu("A40", 48, 44.42, 696, (37.4, 74.8, 149.7, 149.7, None), "pcie4",
                "NVIDIA A40 datasheet, dense column; an NVLink bridge joins two"),
    "rtx-a6000": _gpu("RTX A6000", 48, 47.54, 768, (38.7, 77.4, 154.8, 154.8, None), "pcie4",
                      "NVIDIA RTX A6000 datasheet, halved: it prints sparsity (309.7); ECC off"),
    "rtx-6000-ada": _gpu("RTX 6000 Ada", 48, 47.5, 960, (91.1, 182.1, 364.2, 364.2, 728.5), "pcie4",
                         "NVIDIA RTX 6000 Ada datasheet, halved: it prints sparsity (FP8 1457); ECC off"),
    "rtx-3090": _gpu("RTX 3090", 24, 23.69, 936, (35.6, 35.6, 71, 71, None), "pcie4-host",
                     "NVIDIA Ampere GA102 whitepaper, dense with FP32 accumulation"),
    "rtx-4090": _gpu("RTX 4090", 24, 23.64, 1008, (82.6, 82.6, 165.2, 165.2, 330.3), "pcie4-host",
                     "NVIDIA Ada architecture whitepaper, dense with FP32 accumulation"),
    "rtx-5090": _gpu("RTX 5090", 32, 31.36, 1792, (104.8, 104.8, 209.5, 209.5, 419), "pcie5-host",
                     "NVIDIA RTX Blackwell whitepaper, dense with FP32 accumulation"),
    "p100-pcie": _gpu("P100 PCIe", 16, 15.89, 732, (9.3, None, 18.7, None, None), "pcie3",
                      "NVIDIA P100 datasheet, PCIe 16 GB (Kaggle's): no tensor cores, no bf16"),
    "v100-16": _gpu("V100 SXM2 16 GB", 16, 15.77, 900, (15.7, None, 125, None, None), "nvlink2",
                    "NVIDIA V100 datasheet; no bf16 units"),
    "v100-32": _gpu("V100 SXM2 32 GB", 32, 31.74, 900, (15.7, None, 125, None, None), "nvlink2",
                    "NVIDIA V100 datasheet; no bf16 units"),
    "a100-pcie-40": _gpu("A100 PCIe 40 GB", 40, 39.39, 1555, (19.5, 156, 312, 312, None), "pcie4",
                         "NVIDIA A100 datasheet, PCIe, dense column"),
    "a100-pcie-80": _gpu("A100 PCIe 80 GB", 80, 79.15, 1935, (19.5, 156, 312, 312, None), "pcie4",
                         "NVIDIA A100 datasheet, PCIe, dense column"),
    "a800": _gpu("A800 SXM 80 GB", 80, 79.15, 2039, (19.5, 156, 312, 312, None), "nvlink-a800",
                 "NVIDIA A800 datasheet: an A100 whose NVLink has 400 GB/s"),
    "a100-40": _gpu("A100 SXM 40 GB", 40, 39.49, 1555, (19.5, 156, 312, 312, None), "nvlink3",
                    "NVIDIA A100 datasheet, dense column"),
    "a100-80": _gpu("A100 SXM 80 GB", 80, 79.15, 2039, (19.5, 156, 312, 312, None), "nvlink3",
                    "NVIDIA A100 datasheet, dense column"),
    "h100": _gpu("H100 SXM 80 GB", 80, 79.19, 3350, (67, 494.5, 989, 989, 1979), "nvlink4",
                 "NVIDIA H100 datasheet, halved: it prints sparsity (BF16 1979, FP8 3958); 989 as in torchtitan"),
    "h100-96": _gpu("H100 SXM 96 GB, 500 W", 96, 95.0, 2400, (67, 494.5, 989, 989, 1979), "nvlink4",
                    "torchtitan's benchmarks of December 2024: HBM2e, 2.4 TB/s, 500 of 700 W; usable memory assumed",
                    500 / 700),
    "h100-pcie": _gpu("H100 PCIe 80 GB", 80, 79.11, 2000, (51, 378, 756, 756, 1513), "pcie5",
                      "NVIDIA H100 datasheet of 2022, PCIe, halved: it prints sparsity (BF16 1513, FP8 3026)"),
    "h800": _gpu("H800 SXM 80 GB", 80, 79.11, 3350, (67, 494.5, 989, 989, 1979), "nvlink-h800",
                 "as H100 SXM, NVLink of 400 GB/s: DeepSeek-V3 report (arXiv:2412.19437), section 3.1"),
    "h20": _gpu("H20 96 GB", 96, 95.22, 4000, (44, 74, 148, 148, 296), "nvlink4",
                "NVIDIA H20 datasheet: 148 TFLOPS of BF16, 4.0 TB/s, NVLink 900 GB/s"),
    "h200": _gpu("H200 SXM 141 GB", 141, 139.80, 4800, (67, 494.5, 989, 989, 1979), "nvlink4",
                 "NVIDIA H200 datasheet, halved: it prints sparsity (BF16 1979, FP8 3958)"),
    "b200": _gpu("B200 (HGX) 180 GB", 180, 178.35, 8000, (80, 1100, 2250, 2250, 4500), "nvlink5",
                 "NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense"),
    "gb200": replace(_gpu("GB200 (NVL72) 186 GB", 186, 184.31, 8000, (80, 1250, 2500, 2500, 5000), "nvlink5",
                          "NVIDIA GB200 NVL72 datasheet, a 72th, dense (FP8 720 PFLOPS with sparsity)"), per_node=72),
    "mi300x": _gpu("MI300X", 192, 191.98, 5300, (163.4, 653.7, 1307.4, 1307.4, 2614.9), "infinity-fabric3",
                   "AMD Instinct MI300X data sheet, without structured sparsity"),
}

_NCCL = "NCCL src/graph/tuning.cc, hwLatencies, ring with the Simple protocol: {:g} us a step"
_ASSUMED = "the course's own assumption"


_NO_PEERS = "nccl-tests issue 117: 12 to 18 us between GPUs without peer access"


def _link(name, latency_us, gb_per_s, both_gb_per_s, source, latency_source=_NCCL, **nccl):
    latency_source = latency_source.format(latency_us)
    return Link(name, latency_us * 1e-6, gb_per_s * GB, both_gb_per_s * GB, source, latency_source, **nccl)


# What NCCL counts on, from src/graph/topo.h: GB/s of one NVLink of each generation (sold as 25, 50 from Blackwell on),
# 12 GB/s of PCIe 3.0 x16 and twice that for each later one, the whole line rate of a network port. From llMaxBws in
# tuning.cc: the most that LL gives, in one node by GPU, between nodes by CPU (Intel, more than two nodes).
# An all-reduce in the switch: 480 GB/s of bus bandwidth are measured on 8 H100 (nccl-tests); for Blackwell scaled by
# nvlsEfficiency of tuning.cc, 0.74 where Hopper has 0.85.
def _nvlink(achieved_gb_per_s, sold_gb_per_s, low_latency_gb_per_s, switch_share=None):
    share = achieved_gb_per_s / sold_gb_per_s
    return {"kind": "nvlink", "achieved_share": share, "low_latency_bytes_per_s": low_latency_gb_per_s * GB,
            "switch_share": switch_share}


_PCI = {"kind": "pci", "achieved_share": 12 / 15.75}
_NETWORK = {"kind": "network", "low_latency_bytes_per_s": 20.4 * GB}
# Measured beside the line rate that NCCL counts on, all of ring all-reduces, the best of large messages:
#   NDR: 46 to 48 GB/s of 50 (nccl-tests issue 290, NVIDIA's engineer), 49 (nccl issue 1801: 196.7 GB/s over 4 ports)
#   HDR: 24 GB/s of 25, and 12 of 12.5 on 100 Gb/s (nccl-tests issue 119, NVIDIA's engineer)
#   RoCE: 75 of 100 GB/s over 8 ports of 100 Gb/s (nccl issue 495); 231 of 400 over 8 of 400 Gb/s (nccl issue 2409)
#   TCP: 4 to 6 GB/s of 12.5 (nccl issue 450), at most 60 % of 32 Gb/s (nccl issue 209)
# And where the switch sums: 476 GB/s on 8 H100 (nccl-tests issue 290), 215 on 8 H800 (nccl issue 1374), 847 on the 72
# of an NVL72 (coreweave/nccl-tests pull request 43); 231 GB/s by rings on 8 A100 (nccl issue 527).
# Without peer access a ring goes through the host's memory: NCCL counts on 10 GB/s between the sockets of a node with
# eight RTX 4090 (nccl-tests issue 307); eight RTX 5090 reach 28 GB/s, four 35 (nccl issue 1639).

LINKS: dict[str, Link] = {
    "nvlink2": _link("NVLink 2", 3.4, 150, 300, "NVIDIA V100 datasheet: 300 GB/s, 6 links x 25 GB/s each way",
                     **_nvlink(20.0, 25, 39)),
    "nvlink3": _link("NVLink 3", 3.4, 300, 600, "NVIDIA A100 datasheet: 600 GB/s, 12 links x 25 GB/s each way",
                     **_nvlink(20.0, 25, 87.7)),
    "nvlink4": _link("NVLink 4", 3.4, 450, 900, "NVIDIA H100 datasheet: 900 GB/s, 18 links x 25 GB/s each way",
                     **_nvlink(20.6, 25, 141, 480 / 450)),
    "nvlink5": _link("NVLink 5", 3.4, 900, 1800, "NVIDIA B200 datasheet: 1.8 TB/s, 18 links x 50 GB/s each way",
                     **_nvlink(40.1, 50, 282, 480 / 450 * 0.74 / 0.85)),
    "nvlink-h800": _link("NVLink of the H800", 3.4, 200, 400,
                         "8 links x 25 GB/s each way; DeepSeek-V3 report (arXiv:2412.19437): 160 GB/s are reached",
                         **_nvlink(20.0, 25, 141)),
    "nvlink-a800": _link("NVLink of the A800", 3.4, 200, 400, "NVIDIA A800 datasheet: 400 GB/s, 8 links x 25 GB/s",
                         **_nvlink(20.0, 25, 87.7)),
    "infinity-fabric3": _link("Infinity Fabric (MI300X)", 3.4, 448, 896,
                              "AMD MI300X platform data sheet: 896 GB/s to 7 peers", _ASSUMED + ": as NVLink 4",
                              **_nvlink(20.6, 25, 141)),
    "pcie3": _link("PCIe 3.0 x16", 5.7, 15.75, 31.5, "PCI-SIG: 8 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "pcie4": _link("PCIe 4.0 x16", 5.7, 31.5, 63.0, "PCI-SIG: 16 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "pcie5": _link("PCIe 5.0 x16", 5.7, 63.0, 126.0, "PCI-SIG: 32 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "pcie3-host": _link("PCIe 3.0 x16, no peer access", 14, 15.75, 31.5, "share assumed: as pcie4-host", _NO_PEERS,
                        kind="pci", achieved_share=10 / 31.5),
    "pcie4-host": _link("PCIe 4.0 x16, no peer access", 14, 31.5, 63.0, "10 GB/s: nccl-tests issue 307, eight RTX 4090",
                        _NO_PEERS, kind="pci", achieved_share=10 / 31.5),
    "pcie5-host": _link("PCIe 5.0 x16, no peer access", 14, 63.0, 126.0, "28 GB/s: nccl issue 1639, eight RTX 5090",
                        _NO_PEERS, kind="pci", achieved_share=28 / 63),
    "ib-edr100": _link("InfiniBand EDR", 14, 12.5, 25, "100 Gb/s a port, one port a GPU", **_NETWORK),
    "ib-hdr200": _link("InfiniBand HDR", 14, 25, 50, "200 Gb/s a port, one port a GPU", **_NETWORK),
    "ib-ndr400": _link("InfiniBand NDR", 14, 50, 100, "400 Gb/s a port, one port a GPU", **_NETWORK),
    "ib-xdr800": _link("InfiniBand XDR", 14, 100, 200, "800 Gb/s a port, one port a GPU", **_NETWORK),
    "roce-100": _link("RoCE 100G", 14, 12.5, 25, "100 Gb/s a GPU; nccl issue 495 reaches 75 %", **_NETWORK,
                      achieved_share=0.75),
    "roce-200": _link("RoCE 200G", 14, 25, 50, "200 Gb/s a GPU; share assumed: as roce-100", **_NETWORK,
                      achieved_share=0.75),
    "roce-400": _link("RoCE 400G", 14, 50, 100, "Llama 3 paper (arXiv:2407.21783): 400 Gb/s a GPU", **_NETWORK),
    "efa": _link("EFA v2 (p5.48xlarge)", 14, 50, 100, "AWS EC2 guide: 3,200 Gb/s a node of 8 GPUs", **_NETWORK,
                 by_nodes=True),
    "efa-measured": _link("EFA v2, collectives as measured", 14, 50, 100, "Ultra-Scale Playbook, bandwidth over nodes",
                          **_NETWORK, measured=True, by_nodes=True),
    "efa-p4d": _link("EFA (p4d.24xlarge)", 14, 6.25, 12.5, "AWS EC2 guide: 4 x 100 Gb/s for 8 A100; nccl issue 527: "
                     "60 % of it on 3 and 4 nodes", **_NETWORK, achieved_share=0.6, measured=True, curve="efa-p4d"),
    "ethernet-10g": _link("Ethernet 10G, a port a GPU", 50, 1.25, 2.5, "10 Gb/s; share assumed: TCP's headers",
                          _ASSUMED, kind="network", achieved_share=0.94),
    "ethernet-25g": _link("Ethernet 25G, a port a GPU", 50, 3.125, 6.25, "25 Gb/s; nccl issue 209: 60 % of 32 Gb/s",
                          _ASSUMED, kind="network", achieved_share=0.6),
    "ethernet-100g": _link("Ethernet 100G", 14, 12.5, 25, "100 Gb/s, all of it: RDMA; by TCP tcp-100g", **_NETWORK),
    "tcp-100g": _link("Ethernet 100G by TCP", 50, 12.5, 25, "100 Gb/s; nccl issue 450: 4 to 6 GB/s", _ASSUMED,
                      kind="network", achieved_share=0.4),
    "nvme": _link("NVMe SSD, PCIe 4.0 x4", 100, 7, 7, _ASSUMED + "; PCIe 4.0 x4 allows 7.9 GB/s", _ASSUMED),
}
# fmt: on

# For which lessons work out what to do: a good network, a cloud's as it was measured, and older GPUs. Nodes of 8.
CLUSTERS: dict[str, Cluster] = {
    "H100, InfiniBand": Cluster(GPUS["h100"], LINKS["nvlink4"], LINKS["ib-ndr400"]),
    "H100, measured EFA": Cluster(GPUS["h100"], LINKS["nvlink4"], LINKS["efa-measured"]),
    "A100, InfiniBand": Cluster(GPUS["a100-80"], LINKS["nvlink3"], LINKS["ib-hdr200"]),
}

# Measured on nodes of 8 H100, EFA between nodes, messages of 256 MB: collective -> {nodes: bytes per second}.
# Source: Ultra-Scale Playbook, data of its figure of bandwidth over nodes. It does not say whether these are bus or
# algorithm bandwidth; the course reads them as bus bandwidth. 436 GB/s is then more than a ring's 370: the NVSwitch
# sums. As algorithm bandwidth it would be 763 GB/s of bus bandwidth, which nobody has measured on NVLink 4.
MEASURED_PER_NODE = 8
MOST_NODES = 64
PUBLISHED_BUS_BANDWIDTH: dict[str, dict[int, float]] = {
    "all_reduce": {
        1: 435.9668e9, 2: 361.7492e9, 4: 160.1395e9, 8: 99.5643e9, 16: 84.7405e9, 32: 64.9254e9, 64: 32.9378e9,
    },
    "all_gather": {
        1: 249.8488e9, 2: 184.6132e9, 4: 118.9675e9, 8: 68.9975e9, 16: 54.9723e9, 32: 27.9692e9, 64: 11.0383e9,
    },
    "reduce_scatter": {
        1: 249.729e9, 2: 181.5536e9, 4: 115.7576e9, 8: 68.5511e9, 16: 54.5242e9, 32: 27.9443e9, 64: 11.0697e9,
    },
}  # fmt: skip

# Of each measured link: collective -> {nodes of 8 GPUs: bytes per second}. efa-p4d: nccl issue 527, NCCL 2.9.9, 1 GiB
# in a message, nodes of 8 A100 (2022).
BUS_BANDWIDTH: dict[str, dict[str, dict[int, float]]] = {
    "efa-measured": PUBLISHED_BUS_BANDWIDTH,
    "efa-p4d": {"all_reduce": {1: 230.8e9, 2: 57.2e9, 3: 31.8e9, 4: 29.6e9}},
}

# Tokens per second and GPU of plain data parallelism on H100, 8 to 256 GPUs.
# Source: Ultra-Scale Playbook, data of its figure of DP scaling. It does not name the model; 36.66 GB a GPU were used.
PUBLISHED_DP_THROUGHPUT: dict[int, float] = {
    8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38,
}  # fmt: skip

# Batches of published runs: billions of tokens seen -> millions of tokens in a step. In between the batch grows evenly;
# two entries close together are a sudden change. The runs of Llama 3 and DeepSeek-V3 go on, with the last batch, to
# 15,600 and 14,800 billion tokens. Sources: LLaMA (arXiv:2302.13971), table 2; Llama 3 (arXiv:2407.21783), section 3.4;
# DeepSeek-V3 (arXiv:2412.19437), section 4.2: 3,072 to 15,360 sequences of 4,096 tokens.
PUBLISHED_BATCH_RAMPS: dict[str, dict[float, float]] = {
    "DeepSeek-V3": {0: 12.6, 469: 62.9, 5000: 62.9},
    "Llama 3 405B": {0: 4, 0.252: 4, 0.253: 8, 2870: 8, 2871: 16, 5000: 16},
    "LLaMA-1 65B": {0: 4, 1400: 4},
}

# Tensor parallelism alone, and with sequence parallelism, on H100 in nodes of 8, sequences of 4096 tokens, the model
# "playbook-3b": tp -> (tokens per second and GPU, largest micro-batch). Each point runs its largest micro-batch.
# Source: Ultra-Scale Playbook, data of its figures of TP and of TP + SP scaling (nanotron).
PUBLISHED_TP_THROUGHPUT: dict[int, tuple[float, int]] = {
    2: (13923.18, 3), 4: (12420.76, 8), 8: (10903.32, 12), 16: (6245.6, 16), 32: (2146.44, 20),
}  # fmt: skip
PUBLISHED_TP_SP_THROUGHPUT: dict[int, tuple[float, int]] = {
    2: (14167.25, 4), 4: (13460.16, 10), 8: (10888.53, 20), 16: (6159.3, 40), 32: (3609.73, 100),
}  # fmt: skip

# Pipeline parallelism alone, 1F1B, on nodes of 8 H100: micro-batches -> {pp: tokens per second and GPU}.
# Source: Ultra-Scale Playbook, figure of 1F1B scaling, bar heights read to about 20. It prints how much lower some bars
# are than the bar before (PUBLISHED_1F1B_FALLS), and names neither the model nor the length of its sequences.
PUBLISHED_1F1B_THROUGHPUT: dict[str, dict[int, float]] = {
    "pp - 1": {2: 7370, 4: 8030, 8: 7860, 16: 6680, 32: 3720},
    "32": {2: 15310, 4: 13850, 8: 11630, 16: 7850, 32: 3740},
}
PUBLISHED_1F1B_FALLS: dict[str, dict[int, float]] = {
    "pp - 1": {16: 0.149, 32: 0.443},
    "32": {4: 0.095, 8: 0.161, 16: 0.324, 32: 0.524},
}

# Ring attention, forward and backward, causal, over 8 GPUs with NVLink, the attention of llama-3.1-8b: speed as a share
# of a flash kernel's on one GPU that has an eighth of the pairs. Measured on a whole attention layer: kernels on small
# blocks, merging and the network are in it, so it is not the share that counting pairs allows (block_pairs.py).
# Source: README of github.com/zhuzilin/ring-flash-attention, batch API, forward + backward.
PUBLISHED_RING_SHARE: dict[str, dict[str, float]] = {
    "8 H800": {"contiguous": 0.539, "zigzag": 0.902, "striped": 0.829},
    "8 A100": {"contiguous": 0.525, "zigzag": 0.898, "striped": 0.826},
}

# Context parallelism of Llama 3.1 8B with 32,768 tokens for each of 8 H100, FSDP over the other ranks, Float8 linear
# layers, torch.compile, full recomputation: cp -> tokens per second and GPU. On the same machines, without CP, without
# recomputation of more than every second operator, and with 2 sequences of 8,192 tokens: 8,532.
# Source: torchtitan, docs/performance.md, tables 1 and 2 (Liang et al. 2024, arXiv:2410.06511).
PUBLISHED_CP_THROUGHPUT: dict[int, float] = {1: 3890, 2: 2540, 4: 1071, 8: 548}

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


OTHER_KEYS = {
    "h100-80": "h100", "h100-sxm": "h100", "h100-sxm-80": "h100", "h100-pcie-80": "h100-pcie", "h800-80": "h800",
    "a100-sxm-40": "a100-40", "a100-sxm-80": "a100-80", "a800-80": "a800", "h20-96": "h20", "h200-141": "h200",
    "p100": "p100-pcie", "a6000": "rtx-a6000", "6000-ada": "rtx-6000-ada", "rtx6000-ada": "rtx-6000-ada",
    **{f"{word}{model}": f"rtx-{model}" for model in ("3090", "4090", "5090") for word in ("", "rtx", "geforce-rtx-")},
}  # fmt: skip


@checked
def gpu(key: str) -> GPU:
    """The GPU of that key; a100-80g, A100-80GB and the like are a100-80.

    Raises   ValueError naming the keys that exist, or those that a shorter name could mean
    """
    short = re.sub(r"(\d)gb?$", r"\1", re.sub(r"[ _-]+", "-", key.strip().lower()))
    short = OTHER_KEYS.get(short, short)
    if short not in GPUS and (several := [known for known in GPUS if known.startswith(f"{short}-")]):
        raise ValueError(f"GPU is {key!r}, of which there are several: {', '.join(several)}; give one of them")
    one_of("GPU", key if short not in GPUS else short, tuple(GPUS))
    return GPUS[short]


@checked
def gpu_with(
    key: str, memory_gb: Positive | None = None, tflops: Positive | None = None, gb_per_s: Positive | None = None
) -> GPU:
    """The GPU of that key with other numbers; with all three of them also one that is in no table.

    memory_gb   as its data sheet prints it: 48 are 48 GiB, of which 98.5 % are usable
    tflops      dense, of products in whatever precision the run has
    gb_per_s    of its memory
    Raises      ValueError as `gpu`, or naming what an unknown one lacks
    """
    told = {"memory": memory_gb, "tflops": tflops, "bandwidth": gb_per_s}
    try:
        known = gpu(key)
    except ValueError as error:
        missing = [name for name, value in told.items() if value is None]
        if len(missing) == len(told):
            other = "" if "several" in str(error) else "; or give memory, tflops and bandwidth of another"
            raise ValueError(f"{error}{other}") from None
        if missing:
            raise ValueError(f"GPU {key!r} is in no table: give its {' and '.join(missing)} too") from None
        known = replace(GPUS["l40"], name=key, link="pcie4", source="as given")
    changes: dict[str, float | int] = {}
    if memory_gb is not None:
        changes |= {"memory_bytes": memory_gb * GIB, "usable_bytes": int(0.985 * memory_gb * GIB)}
    if tflops is not None:
        changes |= {f"{precision}_flops": tflops * TERA for precision in PRECISIONS}
    if gb_per_s is not None:
        changes["memory_bytes_per_s"] = gb_per_s * GB
    return replace(known, **changes) if changes else known


def gpu_for(gpu: GPU, recipe: str) -> GPU:
    """The GPU as a run of that recipe (fp32, fp16-..., else BF16) uses it: in FP32 at the rate of FP32.

    Raises   ValueError where the run is in BF16, and the GPU has no such units
    """
    if recipe.startswith("fp32"):
        return replace(gpu, bf16_flops=gpu.fp32_flops, fp16_flops=gpu.fp32_flops)
    if gpu.bf16_flops is None and not recipe.startswith("fp16"):
        raise ValueError(f"{gpu.name} has no bf16 units; choose recipe fp16-master-fp32-grads or fp32")
    return gpu


@checked
def link(key: str) -> Link:
    """The link of that key.

    Raises   ValueError naming the keys that exist
    """
    one_of("link", key, tuple(LINKS))
    return LINKS[key]


def link_of(text: str, inside: bool = False) -> Link:
    """A link between nodes, or inside one, by its key or by the GB/s of one direction that a ring gets for each GPU.

    Raises   ValueError naming the keys that such a link can have
    """
    if re.fullmatch(r"\d+\.?\d*|\.\d+", text) and float(text) > 0:
        rate = float(text)
        kind = "network" if not inside else "nvlink" if rate >= 64 else "pci"
        return _link(f"{text} GB/s", 14 if kind == "network" else 5.7, rate, 2 * rate, "as given", _ASSUMED, kind=kind)
    kinds = ("nvlink", "pci") if inside else ("network",)
    name = "link inside a node" if inside else "link between nodes"
    one_of(name, text, tuple(key for key, known in LINKS.items() if known.kind in kinds))
    return LINKS[text]


def cluster_of(gpu: GPU, between: str, inside: str | None = None, per_node: Size | None = None) -> Cluster:
    """The cluster of that GPU: its own link inside a node and its usual number of GPUs, unless they are given.

    EFA of A100 is a p4d's, whatever name it is given: a p5's ports, the "efa" of the table, belong to H100. A p4d has
    four ports: where fewer than 8 of its GPUs are used, each has as much of a port as there is.
    """
    per_node = per_node or gpu.per_node
    if between in ("efa", "efa-measured") and gpu.name.startswith("A100"):
        between = "efa-p4d"
    network = link_of(between)
    if network == LINKS["efa-p4d"] and per_node < MEASURED_PER_NODE:
        rate = min(12.5, 50 / per_node) * GB
        network = replace(network, bytes_per_s=rate, both_directions_bytes_per_s=2 * rate, measured=False)
    inside_link = LINKS[gpu.link] if inside is None else link_of(inside, inside=True)
    return Cluster(gpu, inside_link, network, per_node)


def nodes_of(num_gpus: int, per_node: int) -> int:
    """How many nodes so many GPUs are; fewer than a node has are on one.

    Raises   ValueError where they do not fill nodes
    """
    if num_gpus > per_node and num_gpus % per_node:
        down = num_gpus // per_node * per_node
        raise ValueError(f"num_gpus ({num_gpus}) must fill nodes of {per_node}; choose {down} or {down + per_node}")
    return max(1, num_gpus // per_node)


@checked
def published_link(num_nodes: Size, collective: Literal[tuple(PUBLISHED_BUS_BANDWIDTH)] = "all_reduce") -> Link:
    """The bandwidth that PUBLISHED_BUS_BANDWIDTH measured over that many nodes of 8 H100, as a Link.

    Raises   ValueError naming the numbers of nodes that were measured
    """
    measured = PUBLISHED_BUS_BANDWIDTH[collective]
    if num_nodes not in measured:
        raise ValueError(f"{num_nodes} nodes were not measured; choose from {', '.join(map(str, measured))}")
    return Link(
        name=f"{collective} measured over {num_nodes} nodes",
        latency_s=0.0,
        bytes_per_s=measured[num_nodes],
        both_directions_bytes_per_s=2 * measured[num_nodes],
        source="Ultra-Scale Playbook, bandwidth over nodes, 256 MB",
        latency_source="none to add: the measured bandwidth has it inside",
    )


def measured_bus_bandwidth(
    num_nodes: Size,
    collective: Literal[tuple(PUBLISHED_BUS_BANDWIDTH)],
    curve: Literal[tuple(BUS_BANDWIDTH)] = "efa-measured",
) -> float:
    """Bytes per second over that many nodes of 8 GPUs, by BUS_BANDWIDTH; infinite where nobody measured it.

    Between two numbers of nodes that were measured it is a straight line on logarithmic axes; beyond the last one
    it is the last one's, which is more than such a cluster would give.
    """
    measured = BUS_BANDWIDTH[curve].get(collective)
    if measured is None:
        return inf
    fewer = max(nodes for nodes in measured if nodes <= num_nodes)
    more = min((nodes for nodes in measured if nodes >= num_nodes), default=fewer)
    if fewer == more:
        return measured[fewer]
    way = log(num_nodes / fewer) / log(more / fewer)
    return measured[fewer] ** (1 - way) * measured[more] ** way


@checked
def peak_flops(gpu: GPU, precision: Literal[PRECISIONS] | None = None) -> float:
    """Dense peak of a matrix multiplication in FLOP/s; without a precision in BF16, in FP16 where BF16 has no units.

    Raises   ValueError if the precision is unknown, or the GPU has no units for it
    """
    precision = precision or ("bf16" if gpu.bf16_flops is not None else "fp16")
    peak = getattr(gpu, f"{precision}_flops")
    if peak is None:
        possible = [p for p in PRECISIONS if getattr(gpu, f"{p}_flops") is not None]
        raise ValueError(f"{gpu.name} has no {precision} units; choose from {', '.join(possible)}")
    return peak


def gpu_of_device(device_name: str, total_bytes: Positive | None = None) -> GPU | None:
    """The GPU that CUDA calls `device_name` ("NVIDIA H100 80GB HBM3"); None if the course has no numbers for it.

    total_bytes (of torch.cuda.get_device_properties) tells sizes apart where the name does not.
    A variant that is not listed, such as NVL, Ti or a laptop's, has other rates than those that are, so it gives None.
    """
    words = set(device_name.upper().replace("-", " ").split())
    for key, found in GPUS.items():
        model = {word for word in key.upper().split("-") if word != str(round(found.memory_bytes / GIB))}
        if model <= words and _VARIANTS & words <= model and _fits(found, total_bytes):
            return found
    return None


_VARIANTS = {"PCIE", "NVL", "TI", "SUPER", "D", "MAX", "LAPTOP", "MOBILE", "ADA"}


def _fits(gpu: GPU, total_bytes: int | None) -> bool:
    return total_bytes is None or 0.9 * gpu.memory_bytes <= total_bytes <= 1.02 * gpu.memory_bytes
