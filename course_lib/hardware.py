"""GPUs and links: every number with its unit and its source.

Three habits of datasheets to know:
- FLOP/s are printed "with sparsity", twice what a dense matrix multiplication can reach. Here they are dense.
- NVLink and PCIe are printed as the sum of both directions. A ring sends one way, so `bytes_per_s` is one direction.
- "80 GB" of GPU memory are 80 GiB = 85.9 GB: memory chips come in powers of two. A program sees a little less: what
  CUDA reports as total capacity is `usable_bytes`.
"""

from dataclasses import dataclass
from math import log
from typing import Literal

from course_lib.validate import Amount, Positive, Size, check_fields, checked, one_of

GB = 10**9
GIB = 2**30
TERA = 10**12


@dataclass(frozen=True)
class GPU:
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

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Link:
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
    by_nodes: bool = False  # a step on it was measured over nodes: bandwidth falls, and ranks wait (timing/step.py)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def achieved_bytes_per_s(self) -> float:
        """What a ring or a large message gets of the line rate."""
        return self.achieved_share * self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs: the link inside a node, and the port of each GPU to the network between nodes."""

    gpu: GPU
    inside: Link
    between: Link
    gpus_per_node: Size = 8

    def __post_init__(self) -> None:
        check_fields(self)


def _gpu(name, memory_gib, usable_gib, memory_gb_per_s, tflops, link, source, sustained=1.0):
    peaks = [None if tera is None else tera * TERA for tera in tflops]  # of fp32, tf32, fp16, bf16, fp8
    return GPU(name, memory_gib * GIB, int(usable_gib * GIB), memory_gb_per_s * GB, *peaks, link, source, sustained)


# usable: the total capacity in PyTorch's out-of-memory messages of such GPUs, as found in public reports.
# fmt: off
GPUS: dict[str, GPU] = {
    "t4": _gpu("T4", 16, 14.56, 320, (8.1, None, 65, None, None), "pcie3",
               "NVIDIA T4 datasheet: 65 TFLOPS FP16, 320 GB/s; no bf16 units"),
    "l4": _gpu("L4", 24, 22.03, 300, (30.3, 60, 121, 121, 242.5), "pcie4",
               "NVIDIA L4 datasheet, halved where it says with sparsity (TF32 120, BF16 242, FP8 485)"),
    "rtx-4090": _gpu("RTX 4090", 24, 23.64, 1008, (82.6, 82.6, 165.2, 165.2, 330.3), "pcie4",
                     "NVIDIA Ada architecture whitepaper, dense with FP32 accumulation"),
    "v100-32": _gpu("V100 SXM2 32 GB", 32, 31.74, 900, (15.7, None, 125, None, None), "nvlink2",
                    "NVIDIA V100 datasheet; no bf16 units"),
    "a100-40": _gpu("A100 SXM 40 GB", 40, 39.49, 1555, (19.5, 156, 312, 312, None), "nvlink3",
                    "NVIDIA A100 datasheet, dense column"),
    "a100-80": _gpu("A100 SXM 80 GB", 80, 79.15, 2039, (19.5, 156, 312, 312, None), "nvlink3",
                    "NVIDIA A100 datasheet, dense column"),
    "h100": _gpu("H100 SXM 80 GB", 80, 79.19, 3350, (67, 494.5, 989, 989, 1979), "nvlink4",
                 "NVIDIA H100 datasheet, halved: it prints sparsity (BF16 1979, FP8 3958); 989 as in torchtitan"),
    "h100-96": _gpu("H100 SXM 96 GB, 500 W", 96, 95.0, 2400, (67, 494.5, 989, 989, 1979), "nvlink4",
                    "torchtitan's benchmarks of December 2024: HBM2e, 2.4 TB/s, 500 of 700 W; usable memory assumed",
                    500 / 700),
    "h200": _gpu("H200 SXM 141 GB", 141, 139.80, 4800, (67, 494.5, 989, 989, 1979), "nvlink4",
                 "NVIDIA H200 datasheet, halved: it prints sparsity (BF16 1979, FP8 3958)"),
    "b200": _gpu("B200 (HGX) 180 GB", 180, 178.35, 8000, (80, 1100, 2250, 2250, 4500), "nvlink5",
                 "NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense"),
    "mi300x": _gpu("MI300X", 192, 191.98, 5300, (163.4, 653.7, 1307.4, 1307.4, 2614.9), "infinity-fabric3",
                   "AMD Instinct MI300X data sheet, without structured sparsity"),
}

_NCCL = "NCCL src/graph/tuning.cc, hwLatencies, ring with the Simple protocol: {:g} us a step"
_ASSUMED = "the course's own assumption"


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
    "infinity-fabric3": _link("Infinity Fabric (MI300X)", 3.4, 448, 896,
                              "AMD MI300X platform data sheet: 896 GB/s to 7 peers", _ASSUMED + ": as NVLink 4",
                              **_nvlink(20.6, 25, 141)),
    "pcie3": _link("PCIe 3.0 x16", 5.7, 15.75, 31.5, "PCI-SIG: 8 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "pcie4": _link("PCIe 4.0 x16", 5.7, 31.5, 63.0, "PCI-SIG: 16 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "pcie5": _link("PCIe 5.0 x16", 5.7, 63.0, 126.0, "PCI-SIG: 32 GT/s x 16 lanes x 128/130 / 8 bits", **_PCI),
    "ib-hdr200": _link("InfiniBand HDR", 14, 25, 50, "200 Gb/s a port, one port a GPU", **_NETWORK),
    "ib-ndr400": _link("InfiniBand NDR", 14, 50, 100, "400 Gb/s a port, one port a GPU", **_NETWORK),
    "roce-400": _link("RoCE 400G", 14, 50, 100, "Llama 3 paper (arXiv:2407.21783): 400 Gb/s a GPU", **_NETWORK),
    "efa": _link("EFA v2 (p5.48xlarge)", 14, 50, 100, "AWS EC2 guide: 3,200 Gb/s a node of 8 GPUs", **_NETWORK,
                 by_nodes=True),
    "efa-measured": _link("EFA v2, collectives as measured", 14, 50, 100, "Ultra-Scale Playbook, bandwidth over nodes",
                          **_NETWORK, measured=True, by_nodes=True),
    "ethernet-100g": _link("Ethernet 100G", 14, 12.5, 25, "100 Gb/s", **_NETWORK),
    "nvme": _link("NVMe SSD, PCIe 4.0 x4", 100, 7, 7, _ASSUMED + "; PCIe 4.0 x4 allows 7.9 GB/s", _ASSUMED),
}
# fmt: on

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


OTHER_KEYS = {"h100-80g": "h100", "a100-40g": "a100-40", "a100-80g": "a100-80", "v100-32g": "v100-32"}


@checked
def gpu(key: str) -> GPU:
    """The GPU of that key.

    Raises   ValueError naming the keys that exist
    """
    key = OTHER_KEYS.get(key, key)
    one_of("GPU", key, tuple(GPUS))
    return GPUS[key]


@checked
def link(key: str) -> Link:
    """The link of that key.

    Raises   ValueError naming the keys that exist
    """
    one_of("link", key, tuple(LINKS))
    return LINKS[key]


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


@checked
def measured_bus_bandwidth(num_nodes: Size, collective: Literal[tuple(PUBLISHED_BUS_BANDWIDTH)]) -> float:
    """Bytes per second over that many nodes of 8 H100 with EFA, by PUBLISHED_BUS_BANDWIDTH.

    Between two numbers of nodes that were measured it is a straight line on logarithmic axes; beyond the last one
    it is the last one's, which is more than such a cluster would give.
    """
    measured = PUBLISHED_BUS_BANDWIDTH[collective]
    fewer = max(nodes for nodes in measured if nodes <= num_nodes)
    more = min((nodes for nodes in measured if nodes >= num_nodes), default=fewer)
    if fewer == more:
        return measured[fewer]
    way = log(num_nodes / fewer) / log(more / fewer)
    return measured[fewer] ** (1 - way) * measured[more] ** way


@checked
def peak_flops(gpu: GPU, precision: Literal[PRECISIONS] = "bf16") -> float:
    """Dense peak of a matrix multiplication in FLOP/s.

    Raises   ValueError if the precision is unknown, or the GPU has no units for it
    """
    peak = getattr(gpu, f"{precision}_flops")
    if peak is None:
        possible = [p for p in PRECISIONS if getattr(gpu, f"{p}_flops") is not None]
        raise ValueError(f"{gpu.name} has no {precision} units; choose from {', '.join(possible)}")
    return peak


@checked
def gpu_of_device(device_name: str, total_bytes: Positive | None = None) -> GPU | None:
    """The GPU that CUDA calls `device_name` ("NVIDIA H100 80GB HBM3"); None if the course has no numbers for it.

    total_bytes (of torch.cuda.get_device_properties) tells sizes apart where the name does not.
    PCIe and NVL variants are slower than the SXM ones listed here, so they give None.
    """
    words = device_name.upper().replace("-", " ").split()
    if "PCIE" in words or "NVL" in words:
        return None
    for key, found in GPUS.items():
        model = key.split("-")[1] if key.startswith("rtx") else key.split("-")[0]
        if model.upper() in words and _fits(found, total_bytes):
            return found
    return None


def _fits(gpu: GPU, total_bytes: int | None) -> bool:
    return total_bytes is None or 0.9 * gpu.memory_bytes <= total_bytes <= 1.02 * gpu.memory_bytes
