"""GPUs and links; hardware.toml has every number of theirs with its unit and its source.

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
from pathlib import Path
from typing import Literal

from course_lib.validate import Amount, Bytes, Checked, Positive, Size, checked, one_of, read_toml

GB = 10**9
GIB = 2**30
TERA = 10**12
_VARIANTS = {"PCIE", "NVL", "TI", "SUPER", "D", "MAX", "LAPTOP", "MOBILE", "ADA"}  # in names of devices
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


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
class Multiprocessor(Checked):
    """What the programs on one multiprocessor (SM) share, what one of them may have, and how many a GPU has.

    Source: CUDA C++ Programming Guide, table of compute capabilities: 9.0 (H100, H200), 8.0 (A100), 10.0 (B200). Count
    and L2: whitepapers "NVIDIA H100 (A100) Tensor Core GPU Architecture"; B200 as Chips and Cheese reports them (2025)
    """

    name: str
    count: Size = 132  # SMs of a GPU
    l2_bytes: Bytes = 50 * 2**20  # the cache that all SMs share
    registers: Size = 65_536  # of 4 bytes
    shared_bytes: Bytes = 228 * 1024
    threads: Size = 2048
    reserved_bytes: Bytes = 1024  # of shared memory, for each program
    lanes_bytes: Size = 128  # that shared memory delivers to an SM in a clock: 32 banks of 4


@dataclass(frozen=True)
class Cluster(Checked):
    """Nodes of equal GPUs: the link inside a node, and the port of each GPU to the network between nodes."""

    gpu: GPU
    inside: Link
    between: Link
    gpus_per_node: Size = 8


_DATA = read_toml(Path(__file__).with_name("hardware.toml"))
_PUBLISHED = _DATA["published"]


def _gpu(memory_gib, usable_gib, memory_gb_per_s, tflops, **fields) -> GPU:
    peaks = {f"{name}_flops": tflops[name] * TERA if name in tflops else None for name in PRECISIONS}
    sizes = {"memory_bytes": memory_gib * GIB, "usable_bytes": int(usable_gib * GIB)}
    return GPU(memory_bytes_per_s=memory_gb_per_s * GB, **sizes, **peaks, **fields)


def _link(latency_us, gb_per_s, both_gb_per_s, low_latency_gb_per_s=None, **fields) -> Link:
    """A share may be a pair: so much of so much."""
    nccl = f"NCCL src/graph/tuning.cc, hwLatencies, ring with the Simple protocol: {latency_us:g} us a step"
    shares = {name: fields[name][0] / fields[name][1] for name in fields if isinstance(fields[name], tuple)}
    rates = {"bytes_per_s": gb_per_s * GB, "both_directions_bytes_per_s": both_gb_per_s * GB}
    if low_latency_gb_per_s:
        rates["low_latency_bytes_per_s"] = low_latency_gb_per_s * GB
    return Link(latency_s=latency_us * 1e-6, **({"latency_source": nccl} | rates | fields | shares))


GPUS: dict[str, GPU] = {key: _gpu(**fields) for key, fields in _DATA["gpus"].items()}
LINKS: dict[str, Link] = {key: _link(**fields) for key, fields in _DATA["links"].items()}

HOPPER = Multiprocessor("Hopper")
AMPERE = Multiprocessor("Ampere, A100", count=108, l2_bytes=40 * 2**20, shared_bytes=164 * 1024)
BLACKWELL = Multiprocessor("Blackwell, B200", count=148, l2_bytes=126 * 10**6)

# For which lessons work out what to do: a good network, a cloud's as it was measured, and older GPUs. Nodes of 8.
CLUSTERS: dict[str, Cluster] = {
    name: Cluster(GPUS[device], LINKS[inside], LINKS[between])
    for name, (device, inside, between) in _DATA["clusters"].items()
}


def _by_number(row: dict) -> dict:
    """Return a row with numbers as keys, which are text in a file."""
    return {float(key) if "." in key else int(key): value for key, value in row.items()}


def _by_name(table: str) -> dict[str, dict]:
    return {name: _by_number(row) for name, row in _PUBLISHED[table].items()}


# What others measured, each with its source and its units in hardware.toml.
MEASURED_PER_NODE = 8
MOST_NODES = 64
PUBLISHED_BUS_BANDWIDTH: dict[str, dict[int, float]] = _by_name("bus_bandwidth")
BUS_BANDWIDTH: dict[str, dict[str, dict[int, float]]] = {  # of each measured link
    "efa-measured": PUBLISHED_BUS_BANDWIDTH,
    "efa-p4d": _by_name("bus_bandwidth_p4d"),
}
PUBLISHED_DP_THROUGHPUT: dict[int, float] = _by_number(_PUBLISHED["dp_throughput"])
PUBLISHED_BATCH_RAMPS: dict[str, dict[float, float]] = _by_name("batch_ramps")
PUBLISHED_TP_THROUGHPUT: dict[int, tuple[float, int]] = _by_number(_PUBLISHED["tp_throughput"])
PUBLISHED_TP_SP_THROUGHPUT: dict[int, tuple[float, int]] = _by_number(_PUBLISHED["tp_sp_throughput"])
PUBLISHED_1F1B_THROUGHPUT: dict[str, dict[int, float]] = _by_name("1f1b_throughput")
PUBLISHED_1F1B_FALLS: dict[str, dict[int, float]] = _by_name("1f1b_falls")
PUBLISHED_RING_SHARE: dict[str, dict[str, float]] = _PUBLISHED["ring_share"]
PUBLISHED_CP_THROUGHPUT: dict[int, float] = _by_number(_PUBLISHED["cp_throughput"])


@checked
def gpu(key: str) -> GPU:
    """The GPU of that key (A100-80GB is a100-80); raises ValueError naming the keys, or what a shorter name means."""
    short = re.sub(r"(\d)gb?$", r"\1", re.sub(r"[ _-]+", "-", key.strip().lower()))
    short = _DATA["other_keys"].get(short, short)
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
    """The GPU in a run of that recipe, in fp32 at FP32's rate; raises ValueError for BF16 where it has no units."""
    if recipe.startswith("fp32"):
        return replace(gpu, bf16_flops=gpu.fp32_flops, fp16_flops=gpu.fp32_flops)
    if gpu.bf16_flops is None and not recipe.startswith("fp16"):
        raise ValueError(f"{gpu.name} has no bf16 units; choose recipe fp16-master-fp32-grads or fp32")
    return gpu


@checked
def link(key: str) -> Link:
    """The link of that key; raises ValueError naming the keys that exist."""
    one_of("link", key, tuple(LINKS))
    return LINKS[key]


def link_of(text: str, inside: bool = False) -> Link:
    """A link by its key, or by a ring's GB/s of one direction a GPU; raises ValueError for a key of another kind."""
    if re.fullmatch(r"\d+\.?\d*|\.\d+", text) and float(text) > 0:
        rate = float(text)
        kind = "network" if not inside else "nvlink" if rate >= 64 else "pci"
        given = {"name": f"{text} GB/s", "source": "as given", "kind": kind}
        given["latency_source"] = "the course's own assumption"
        return _link(14 if kind == "network" else 5.7, rate, 2 * rate, **given)
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
    """How many nodes so many GPUs are, one for few; raises ValueError where they do not fill nodes."""
    if num_gpus > per_node and num_gpus % per_node:
        down = num_gpus // per_node * per_node
        raise ValueError(f"num_gpus ({num_gpus}) must fill nodes of {per_node}; choose {down} or {down + per_node}")
    return max(1, num_gpus // per_node)


@checked
def published_link(num_nodes: Size, collective: Literal[tuple(PUBLISHED_BUS_BANDWIDTH)] = "all_reduce") -> Link:
    """The bandwidth measured over that many nodes of 8 H100, as a Link; raises ValueError naming those measured."""
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
    """Dense FLOP/s, without a precision in BF16, else FP16; raises ValueError if the GPU has no units for it."""
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
        has_size = total_bytes is None or 0.9 * found.memory_bytes <= total_bytes <= 1.02 * found.memory_bytes
        if model <= words and _VARIANTS & words <= model and has_size:
            return found
    return None
