"""Arithmetic of time: seconds a collective takes, FLOPs of a step, MFU and HFU, overlap.

Plain functions of numbers: nothing here runs or measures anything. Two models carry it:
- alpha-beta: n bytes take alpha + n * beta seconds (latency, and the inverse of bandwidth), for each of the ways in
  which NCCL can do a collective; the fastest way counts;
- roofline: work takes as long as its FLOPs at peak, or its bytes at memory bandwidth, whichever is longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from course_lib.config import ModelConfig, require_dense
from course_lib.hardware import GPU, Cluster, Link, peak_flops
from course_lib.memory.moe import active_matmul_parameters
from course_lib.span import Span
from course_lib.validate import Amount, Positive, Share, Size, checked


# ------------------------------------------------------------------------------------ seconds of a collective
# What a collective costs depends on how it is done. NCCL chooses among algorithms and protocols for each call, by a
# model of its own; this is that model, for what the course needs of it. An algorithm says which way the bytes go:
# around a ring, up and down a tree, or through a switch that sums (NVLink SHARP, "nvls"). A protocol says how they are
# sent: LL flags every 4 bytes and costs half of the bandwidth, LL128 flags every 120, Simple waits for whole pieces.
#
# Left out: corrections for measured dips (trees of medium messages, rings of several nodes), PAT, CollNet, and NVLS
# for all-gathers and reduce-scatters, which NCCL's own model has behind the ring at every size.
# Source: NCCL, src/graph/tuning.cc: baseLatencies, hwLatencies, and how steps between nodes are charged.
@dataclass(frozen=True)
class Tuning:
    """What NCCL assumes of one algorithm with one protocol: microseconds, and a share of the ring's bandwidth."""

    launch_us: float
    nvlink_us: float  # of one step over NVLink ...
    pci_us: float | None
    network_us: float
    bandwidth_share: float | None = None


TUNING: dict[tuple[str, str], Tuning] = {
    ("ring", "LL"): Tuning(6.6, 0.6, 1.0, 2.7, 1 / 2),
    ("ring", "LL128"): Tuning(14.0, 1.9, 2.5, 4.0, 0.92),
    ("ring", "Simple"): Tuning(8.4, 3.4, 5.7, 14.0, 1.0),
    ("tree", "LL"): Tuning(6.8, 0.6, 1.0, 5.0, 0.92 / 3.8),
    ("tree", "LL128"): Tuning(14.0, 1.25, 1.9, 8.5, 0.92 * 120 / 128),
    ("tree", "Simple"): Tuning(8.4, 4.0, 4.0, 14.0, 0.92),
    ("nvls", "Simple"): Tuning(0.0, 25.0, None, 20.9),
}
_NETWORK_CALL_US = {"LL": 1.0, "LL128": 1.0, "Simple": 3.0}  # the least that any step costs once a network takes part
_RINGS = ("all_reduce", "ring_all_reduce", "reduce_scatter", "all_gather")
_CHAINS = ("broadcast", "reduce")
_MESSAGES = ("all_to_all", "gather", "scatter", "send")


@dataclass(frozen=True)
class Cost:
    """One way to do a collective: a latency, and a rate at which the payload passes."""

    algorithm: str
    protocol: str
    latency_s: float
    payload_bytes_per_s: float

    def seconds(self, payload_bytes: float) -> float:
        return self.latency_s + payload_bytes / self.payload_bytes_per_s


@dataclass(frozen=True)
class _Group:
    """Where the ranks of a group are: `per_node` in each of `nodes` nodes, over two links or the same link twice."""

    size: int
    per_node: int
    inside: Link
    between: Link

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    @property
    def ring_bytes_per_s(self) -> float:
        """Bus bandwidth of rings, one through each GPU's port; the slowest link on the way sets it."""
        if self.nodes == 1:
            return self.inside.achieved_bytes_per_s
        ports = self.per_node * self.between.achieved_bytes_per_s
        return ports if self.per_node == 1 else min(self.inside.achieved_bytes_per_s, ports)

    @property
    def outermost(self) -> Link:
        return self.inside if self.nodes == 1 else self.between


def _group(world_size: int, network: Link | Cluster, per_node: int | None) -> _Group:
    _check_world(world_size)
    if isinstance(network, Link):
        alone = network.kind == "network"  # a network joins nodes, so each of its ranks is in one of its own
        return _Group(world_size, 1 if alone else world_size, network, network)
    here = min(per_node or network.gpus_per_node, world_size)
    if world_size % here:
        raise ValueError(f"world_size ({world_size}) must be a multiple of the ranks in a node ({here})")
    return _Group(world_size, here, network.inside, network.between)


@checked
def collective_steps(name: str, world_size: Size) -> int:
    """How many messages follow one another in a ring of world_size ranks."""
    _check_world(world_size)
    if name in ("all_reduce", "ring_all_reduce"):
        return 2 * (world_size - 1)
    if name == "send":
        return 1
    if name in (*_RINGS, *_CHAINS, *_MESSAGES):
        return world_size - 1
    raise ValueError(f"collective {name!r} is unknown; choose all_reduce, reduce_scatter, all_gather, all_to_all, ...")


def bus_factor(name: str, world_size: int) -> float:
    """Payloads that cross one link: 2 (N - 1) / N for all_reduce, (N - 1) / N for its phases, 1 for a chain."""
    steps = collective_steps(name, world_size)
    if name in (*_CHAINS, "send"):  # a chain passes the whole payload on, in small pieces at once
        return 1.0 if steps else 0.0
    return steps / world_size


@checked
def collective_costs(name: str, world_size: Size, network: Link | Cluster, per_node: Size | None = None) -> list[Cost]:
    """Every way to do a collective on these ranks, with what it costs.

    network    a link that joins all ranks (a network link: one rank in each node), or a cluster
    per_node   ranks of the group in each node of the cluster, as many as fit unless given
    Raises     ValueError if the collective is unknown, or the group does not fill its nodes
    """
    group, steps = _group(world_size, network, per_node), collective_steps(name, world_size)
    if not steps or world_size == 1:
        return [Cost("none", "none", 0.0, inf)]
    if name in _MESSAGES:
        return [_messages(name, group)]
    costs = [_ring(name, group, protocol) for protocol in _protocols(group, "ring")]
    if name == "all_reduce" and "plain" not in (group.inside.kind, group.between.kind):
        costs += [_tree(group, protocol) for protocol in _protocols(group, "tree")]
        costs += _in_the_switch(group)
    return costs


@checked
def fastest(
    name: str, payload_bytes: Amount, world_size: Size, network: Link | Cluster, per_node: Size | None = None
) -> Cost:
    """The way to do a collective that takes least time for this payload, as NCCL chooses it."""
    costs = collective_costs(name, world_size, network, per_node)
    return min(costs, key=lambda cost: cost.seconds(payload_bytes))


def collective_s(
    name: str, payload_bytes: float, world_size: int, network: Link | Cluster, per_node: int | None = None
) -> float:
    """Seconds of a collective by the fastest algorithm and protocol; arguments as `collective_costs` has them."""
    return fastest(name, payload_bytes, world_size, network, per_node).seconds(payload_bytes)


def _protocols(group: _Group, algorithm: str) -> list[str]:
    if "plain" in (group.inside.kind, group.between.kind):
        return ["plain"]
    return [protocol for known, protocol in TUNING if known == algorithm]


def _step_s(group: _Group, link: Link, algorithm: str, protocol: str) -> float:
    """Seconds of one step over a link: as NCCL's table has it, or the link's own latency."""
    if protocol == "plain":
        return link.latency_s
    step_us = getattr(TUNING[algorithm, protocol], f"{link.kind}_us")
    if group.nodes > 1:
        step_us = max(step_us, _NETWORK_CALL_US[protocol])
    return step_us * 1e-6


def _launch_s(algorithm: str, protocol: str) -> float:
    return 0.0 if protocol == "plain" else TUNING[algorithm, protocol].launch_us * 1e-6


def _rate(group: _Group, algorithm: str, protocol: str) -> float:
    """Bus bandwidth: a share of the ring's, with LL at most what the link allows it."""
    if protocol == "plain":
        return group.ring_bytes_per_s
    share = TUNING[algorithm, protocol].bandwidth_share
    if (algorithm, protocol, group.nodes) == ("tree", "LL128", 1):
        share = 0.92 * 7 / 9
    most = group.outermost.low_latency_bytes_per_s if protocol == "LL" else None
    return min(share * group.ring_bytes_per_s, most or inf)


def _ring(name: str, group: _Group, protocol: str) -> Cost:
    """A ring of N ranks crosses from node to node once a node; every other step stays inside.

    With one rank in each node nothing else hides a step between nodes, and NCCL charges what a tree's costs.
    """
    steps = collective_steps(name, group.size)
    crossing = 0 if group.nodes == 1 else steps * (group.nodes - 1) // (group.size - 1)
    exposed = "tree" if group.per_node == 1 and protocol != "plain" else "ring"
    latency_s = _launch_s("ring", protocol) + (steps - crossing) * _step_s(group, group.inside, "ring", protocol)
    if crossing:
        latency_s += crossing * _step_s(group, group.between, exposed, protocol)
    return Cost("ring", protocol, latency_s, _rate(group, "ring", protocol) / bus_factor(name, group.size))


def _tree(group: _Group, protocol: str) -> Cost:
    """Up a tree of nodes and down again, and through each node as a chain; every rank passes the payload on twice."""
    latency_s = (group.per_node - 1) * _step_s(group, group.inside, "tree", protocol) if group.per_node > 1 else 0.0
    if group.nodes > 1:
        latency_s += _depth(group.nodes) * _step_s(group, group.between, "tree", protocol)
    return Cost("tree", protocol, _launch_s("tree", protocol) + 2 * latency_s, _rate(group, "tree", protocol) / 2)


def _in_the_switch(group: _Group) -> list[Cost]:
    """An all-reduce that the NVSwitch of each node sums and hands out, over nodes with a tree between them.

    A GPU gives its own payload to the switch and 1 / N of the sum, so no group of two gains. Two nodes exchange both
    ways at once.
    """
    link, ranks = group.inside, group.per_node
    if link.switch_share is None or ranks == 1:
        return []
    rate = link.switch_share * link.bytes_per_s
    rate = min(rate, link.achieved_bytes_per_s * 2 * (ranks - 1) / (ranks + 1))
    latency_s = _step_s(group, link, "nvls", "Simple")
    if group.nodes > 1:
        ports = ranks * group.between.achieved_bytes_per_s
        rate = min(rate, ports * (2 if group.nodes == 2 else 1))
        latency_s += 2 * _depth(group.nodes) * _step_s(group, group.between, "nvls", "Simple")
    return [Cost("nvls", "Simple", latency_s, rate / bus_factor("all_reduce", group.size))]


def _depth(nodes: int) -> int:
    return nodes.bit_length() - 1


def _messages(name: str, group: _Group) -> Cost:
    """Messages from each to each, one after the other; those inside a node pass while others leave by the port.

    NCCL's model has no numbers for them: each is charged one step of a ring and the rate that a ring achieves.
    """
    link = group.outermost
    if name == "send":
        return Cost("message", "Simple", link.latency_s, link.achieved_bytes_per_s)
    others = group.size - (1 if group.nodes == 1 else group.per_node)
    return Cost("message", "Simple", others * link.latency_s, link.achieved_bytes_per_s * group.size / others)


@checked
def bus_bandwidth(name: str, payload_bytes: Amount, seconds: Positive, world_size: Size) -> float:
    """Bytes per second over one link, as nccl-tests prints it: comparable with the link, whatever the world size."""
    return bus_factor(name, world_size) * payload_bytes / seconds


def _check_world(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be 1 or more")


# ------------------------------------------------------------------------------------ FLOPs
def matmul_parameters(config: ModelConfig) -> int:
    """Weights that a token is multiplied with: attention, feed-forward, head; not the embedding, a look-up.

    Of experts: the router, the top_k chosen ones and the shared ones.
    """
    if config.moe or config.mla:
        return active_matmul_parameters(config)
    return config.num_layers * layer_matmul_parameters(config) + config.vocab_size * config.d_model


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Weights of one layer's matrix multiplications: q, k, v, o, and two feed-forward matrices (three in Llama).

    Raises   ValueError if the model has experts: its layers are not alike
    """
    require_dense(config, "layer_matmul_parameters")
    attention = config.d_model * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    return attention + (3 if config.family == "llama" else 2) * config.d_model * config.d_ff


def attention_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """Forward FLOPs of scores and of their product with the values: 4 L h s a token; half of it if causal.

    With latent attention, whose heads are whole again in training, keys are longer than values.
    """
    score_dim = value_dim = config.head_dim
    if config.mla:
        score_dim, value_dim = config.mla.nope_dim + config.mla.rope_dim, config.mla.value_dim
    flops = 2 * config.num_layers * config.num_heads * (score_dim + value_dim) * seq_len
    return flops // 2 if causal else flops


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """2 N + 4 L h s, where N counts the weights that a token is multiplied with.

    Most published MFU figures do not halve the attention of a causal model; that is the default here.
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 5.1; Kaplan et al. 2020 (arXiv:2001.08361)
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, seq_len, causal)


def flops_per_token(config: ModelConfig, seq_len: int, causal: bool = False) -> int:
    """Model FLOPs of forward and backward, three times the forward: 6 N + 12 L h s. No recomputation."""
    return 3 * forward_flops_per_token(config, seq_len, causal)


def step_flops(
    config: ModelConfig, num_tokens: int, seq_len: int, recompute: str = "none", causal: bool = False
) -> int:
    """FLOPs that the hardware does in one step; with recompute="none" they are the model FLOPs.

    "full" repeats the forward of every layer (not of the head), "selective" that of the attention scores.
    Source   Korthikanti et al. 2022 (arXiv:2205.05198), sections 5 and 6.3
    """
    again = {
        "none": 0,
        "selective": attention_flops_per_token(config, seq_len, causal),
        "full": forward_flops_per_token(config, seq_len, causal) - 2 * config.vocab_size * config.d_model,
    }
    if recompute not in again:
        raise ValueError(f"recompute {recompute!r} is not one of {', '.join(again)}")
    return num_tokens * (flops_per_token(config, seq_len, causal) + again[recompute])


@checked
def mfu(model_flops: Amount, seconds: Positive, num_gpus: Size, peak_flops_per_s: Positive) -> float:
    """Model FLOPs utilisation: FLOPs that the model needs, over what the GPUs could have done in that time (0 to 1)."""
    return model_flops / (seconds * num_gpus * peak_flops_per_s)


@checked
def hfu(hardware_flops: Amount, seconds: Positive, num_gpus: Size, peak_flops_per_s: Positive) -> float:
    """Hardware FLOPs utilisation: as MFU, with the FLOPs of recomputation counted too."""
    return hardware_flops / (seconds * num_gpus * peak_flops_per_s)


@checked
def tokens_per_s(flops_a_token: Positive, num_gpus: Size, peak_flops_per_s: Positive, utilisation: Share) -> float:
    """Tokens per second of all GPUs together at that MFU (utilisation, 0 to 1)."""
    return num_gpus * peak_flops_per_s * utilisation / flops_a_token


@checked
def training_s(
    num_tokens: Amount, flops_a_token: Positive, num_gpus: Size, peak_flops_per_s: Positive, utilisation: Share
) -> float:
    """Seconds to train on num_tokens."""
    return num_tokens / tokens_per_s(flops_a_token, num_gpus, peak_flops_per_s, utilisation)


# ------------------------------------------------------------------------------------ roofline
@checked
def roofline_s(flops: Amount, moved_bytes: Amount, gpu: GPU, precision: str = "bf16") -> float:
    """At least this long: the FLOPs at peak or the bytes at memory bandwidth, whichever takes longer."""
    return max(flops / peak_flops(gpu, precision), moved_bytes / gpu.memory_bytes_per_s)


def ridge_flops_per_byte(gpu: GPU, precision: str = "bf16") -> float:
    """FLOPs per byte moved from which on the GPU is busy computing rather than waiting for memory."""
    return peak_flops(gpu, precision) / gpu.memory_bytes_per_s


@checked
def matmul_s(rows: Size, inner: Size, columns: Size, gpu: GPU, precision: str = "bf16", itemsize: Size = 2) -> float:
    """Roofline time of (rows x inner) @ (inner x columns), each matrix moved once."""
    moved_bytes = itemsize * (rows * inner + inner * columns + rows * columns)
    return roofline_s(2 * rows * inner * columns, moved_bytes, gpu, precision)


# ------------------------------------------------------------------------------------ data parallelism
def dp_spans(forward_s: float, backward_s: float, bucket_comm_s: Sequence[float], overlap: bool = True) -> list[Span]:
    """One data-parallel step on rank 0: forward and backward in one lane, an all-reduce for each bucket in another.

    Bucket i is ready when (i + 1) / K of the backward is done, and waits for the bucket before it. Without overlap all
    wait for the end of the backward.
    """
    spans = [Span(0, "compute", "forward", 0.0, forward_s)]
    spans.append(Span(0, "compute", "backward", forward_s, forward_s + backward_s))
    free_s = 0.0
    for index, comm_s in enumerate(bucket_comm_s):
        done = (index + 1) / len(bucket_comm_s) if overlap else 1.0
        start_s = max(forward_s + done * backward_s, free_s)
        free_s = start_s + comm_s
        spans.append(Span(0, "communication", f"all-reduce {index}", start_s, free_s))
    return spans


def exposed_s(spans: Sequence[Span]) -> float:
    """Seconds of communication that no computation hides: from the end of the compute lane to the end of all."""
    compute_stop_s = max(span.stop_s for span in spans if span.lane == "compute")
    return max(span.stop_s for span in spans) - compute_stop_s


def dp_step_s(forward_s: float, backward_s: float, comm_s: float, num_buckets: int = 1, overlap: bool = True) -> float:
    """Seconds of one step whose all-reduce takes comm_s in all, cut into equal buckets."""
    spans = dp_spans(forward_s, backward_s, [comm_s / num_buckets] * num_buckets, overlap)
    return max(span.stop_s for span in spans)


def dp_throughput(
    dp_size: int,
    tokens_per_gpu: float,
    compute_s: float,
    grad_bytes: float,
    link: Link,
    overlap: bool = True,
    num_buckets: int = 25,
) -> float:
    """Return tokens per second and GPU of data parallelism.

    Assumes: compute_s does not depend on dp_size; a third of it is forward, two thirds backward; `link` is the slowest
    of the ring, at the bandwidth it really gives at this size (see hardware.published_link); no rank is late; the
    optimizer's time is within compute_s.
    """
    comm_s = num_buckets * collective_s("all_reduce", grad_bytes / num_buckets, dp_size, link)
    step_s = dp_step_s(compute_s / 3, compute_s * 2 / 3, comm_s, num_buckets, overlap)
    return tokens_per_gpu / step_s


@checked
def accumulation_steps(global_batch_size: Size, micro_batch_size: Size, dp_size: Size) -> int:
    """Micro-batches that each rank runs before the optimizer steps: global batch / (micro-batch * dp_size).

    Raises   ValueError if that is not a whole number
    """
    together = micro_batch_size * dp_size
    if global_batch_size % together != 0:
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be a multiple of micro_batch_size ({micro_batch_size}) * "
            f"dp_size ({dp_size}) = {together}; change one of the three"
        )
    return global_batch_size // together
