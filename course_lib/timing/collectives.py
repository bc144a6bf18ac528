"""Seconds of a collective: latency and bytes over bandwidth, for each way in which NCCL can do it; the fastest counts.

NCCL chooses among algorithms and protocols for each call, by a model of its own; this is that model, for what the
course needs of it. An algorithm says which way the bytes go: around a ring, up and down a tree, or through a switch
that sums (NVLink SHARP, "nvls"). A protocol says how they are sent: LL flags every 4 bytes and costs half of the
bandwidth, LL128 flags every 120, Simple waits for whole pieces.

Left out: corrections for measured dips (trees of medium messages, rings of several nodes), PAT, CollNet, and NVLS for
all-gathers and reduce-scatters, which NCCL's own model has behind the ring at every size.

Source   NCCL, src/graph/tuning.cc: baseLatencies, hwLatencies, and how steps between nodes are charged
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from course_lib.hardware import MEASURED_PER_NODE, Cluster, Link, measured_bus_bandwidth
from course_lib.layout import Layout, Mesh
from course_lib.traffic import Call
from course_lib.validate import Amount, Positive, Size, checked, one_of


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
_PROTOCOLS = ("LL", "LL128", "Simple")
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
    def is_plain(self) -> bool:
        """Whether a link has no numbers of NCCL's: then its own latency and bandwidth count."""
        return "plain" in (self.inside.kind, self.between.kind)

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
    if isinstance(network, Link):
        alone = network.kind == "network"  # a network joins nodes, so each of its ranks is in one of its own
        return _Group(world_size, 1 if alone else world_size, network, network)
    here = min(per_node or network.gpus_per_node, world_size)
    if world_size % here:
        raise ValueError(f"world_size ({world_size}) must be a multiple of the ranks in a node ({here})")
    return _Group(world_size, here, network.inside, network.between)


def collective_steps(name: str, world_size: Size) -> int:
    """How many messages follow one another in a ring of world_size ranks."""
    if name in ("all_reduce", "ring_all_reduce"):
        return 2 * (world_size - 1)
    if name == "send":
        return 1
    if name in (*_RINGS, *_CHAINS, *_MESSAGES):
        return world_size - 1
    raise ValueError(f"collective {name!r} is unknown; choose all_reduce, reduce_scatter, all_gather, all_to_all, ...")


def bus_factor(name: str, world_size: Size) -> float:
    """Payloads that cross one link: 2 (G - 1) / G for all_reduce, (G - 1) / G for its phases, 1 for a chain."""
    steps = collective_steps(name, world_size)
    if name in (*_CHAINS, "send"):  # a chain passes the whole payload on, in small pieces at once
        return 1.0 if steps else 0.0
    return steps / world_size


@checked
def collective_costs(name: str, world_size: Size, network: Link | Cluster, per_node: Size | None = None) -> list[Cost]:
    """Every way to do a collective on these ranks, with what it costs.

    network    a link that joins all ranks (a network link: one rank in each node), or a cluster
    per_node   ranks of the group in each node of the cluster, as many as fit unless given
    """
    group, steps = _group(world_size, network, per_node), collective_steps(name, world_size)
    if not steps or world_size == 1:
        return [Cost("none", "none", 0.0, inf)]
    if name in _MESSAGES:
        return [_messages(name, group)]
    costs = [_ring(name, group, protocol) for protocol in (["plain"] if group.is_plain else _PROTOCOLS)]
    if name == "all_reduce" and not group.is_plain:
        costs += [*(_tree(group, protocol) for protocol in _PROTOCOLS), *_in_the_switch(group)]
    if group.nodes == 1 or not group.between.measured or name in _CHAINS:
        return costs
    # measured over as many whole nodes; each GPU has a port, so fewer of a node get a share
    bus = measured_bus_bandwidth(group.nodes, name.removeprefix("ring_"), group.between.curve)
    most = bus * group.per_node / MEASURED_PER_NODE / bus_factor(name, world_size)
    return [replace(cost, payload_bytes_per_s=min(cost.payload_bytes_per_s, most)) for cost in costs]


@checked
def fastest(
    name: str, payload_bytes: Amount, world_size: Size, network: Link | Cluster, per_node: Size | None = None
) -> Cost:
    """The way to do a collective that takes least time for this payload, as NCCL chooses it."""
    return min(collective_costs(name, world_size, network, per_node), key=lambda cost: cost.seconds(payload_bytes))


@checked
@lru_cache(maxsize=8192)  # layers call the same
def collective_s(
    name: str, payload_bytes: Amount, world_size: Size, network: Link | Cluster, per_node: Size | None = None
) -> float:
    """Seconds of a collective by the fastest algorithm and protocol; arguments as `collective_costs` has them."""
    return fastest(name, payload_bytes, world_size, network, per_node).seconds(payload_bytes)


def _step_s(group: _Group, link: Link, algorithm: str, protocol: str) -> float:
    if protocol == "plain":
        return link.latency_s
    step_us = getattr(TUNING[algorithm, protocol], f"{link.kind}_us")
    return (max(step_us, _NETWORK_CALL_US[protocol]) if group.nodes > 1 else step_us) * 1e-6


def _rate(group: _Group, algorithm: str, protocol: str) -> float:
    """Bus bandwidth: a share of the ring's, with LL at most what the link allows it."""
    if protocol == "plain":
        return group.ring_bytes_per_s
    in_one_node = (algorithm, protocol, group.nodes) == ("tree", "LL128", 1)
    share = 0.92 * 7 / 9 if in_one_node else TUNING[algorithm, protocol].bandwidth_share
    most = group.outermost.low_latency_bytes_per_s if protocol == "LL" else None
    return min(share * group.ring_bytes_per_s, most or inf)


def _ring(name: str, group: _Group, protocol: str) -> Cost:
    """A ring of G ranks crosses from node to node once a node; every other step stays inside. With one rank in each
    node nothing else hides a step between nodes, and NCCL charges what a tree's costs."""
    steps = collective_steps(name, group.size)
    crossing = 0 if group.nodes == 1 else steps * (group.nodes - 1) // (group.size - 1)
    exposed = "tree" if group.per_node == 1 and protocol != "plain" else "ring"
    launch_s = 0.0 if protocol == "plain" else TUNING["ring", protocol].launch_us * 1e-6
    latency_s = launch_s + (steps - crossing) * _step_s(group, group.inside, "ring", protocol)
    latency_s += crossing * _step_s(group, group.between, exposed, protocol)
    return Cost("ring", protocol, latency_s, _rate(group, "ring", protocol) / bus_factor(name, group.size))


def _tree(group: _Group, protocol: str) -> Cost:
    """Up a tree of nodes and down again, and through each node as a chain; every rank passes the payload on twice."""
    inside_s = (group.per_node - 1) * _step_s(group, group.inside, "tree", protocol)
    between_s = (group.nodes.bit_length() - 1) * _step_s(group, group.between, "tree", protocol)
    latency_s = TUNING["tree", protocol].launch_us * 1e-6 + 2 * (inside_s + between_s)
    return Cost("tree", protocol, latency_s, _rate(group, "tree", protocol) / 2)


def _in_the_switch(group: _Group) -> list[Cost]:
    """An all-reduce that the NVSwitch of each node sums and hands out, over nodes with a tree between them. A GPU gives
    its own payload to the switch and 1 / G of the sum, so no group of two gains. Two nodes exchange both ways at
    once."""
    link, ranks = group.inside, group.per_node
    if link.switch_share is None or ranks == 1:
        return []
    rate = min(link.switch_share * link.bytes_per_s, link.achieved_bytes_per_s * 2 * (ranks - 1) / (ranks + 1))
    latency_s = _step_s(group, link, "nvls", "Simple")
    if group.nodes > 1:
        rate = min(rate, ranks * group.between.achieved_bytes_per_s * (2 if group.nodes == 2 else 1))
        latency_s += 2 * (group.nodes.bit_length() - 1) * _step_s(group, group.between, "nvls", "Simple")
    return [Cost("nvls", "Simple", latency_s, rate / bus_factor("all_reduce", group.size))]


def _messages(name: str, group: _Group) -> Cost:
    """Messages from each to each, one after the other; those inside a node pass while others leave by the port. NCCL's
    model has no numbers for them: each is charged one step of a ring and the rate that a ring achieves."""
    link, others = group.outermost, group.size - (1 if group.nodes == 1 else group.per_node)
    if name == "send":
        return Cost("message", "Simple", link.latency_s, link.achieved_bytes_per_s)
    return Cost("message", "Simple", others * link.latency_s, link.achieved_bytes_per_s * group.size / others)


@checked
def bus_bandwidth(name: str, payload_bytes: Amount, seconds: Positive, world_size: Size) -> float:
    """Bytes per second over one link, as nccl-tests prints it: comparable with the link, whatever the world size."""
    return bus_factor(name, world_size) * payload_bytes / seconds


@lru_cache(maxsize=8192)
def ranks_in_a_node(layout: Layout, cluster: Cluster, axis: str) -> int:
    """Count the ranks of rank 0's group along `axis` that share its node; in a pipeline its slowest message counts.

    It is 1 where nodes would have unequal numbers.
    """
    groups = _groups_of_rank_0(layout.mesh, layout.ep, layout.dp_replicate, layout.folded)
    one_of("axis", axis, tuple(groups))
    members = groups[axis]
    here = bisect_left(members, cluster.gpus_per_node)  # they ascend from rank 0
    apart = axis == "pp" and here < len(members)
    return 1 if apart or len(members) % here else here


def ring_link(layout: Layout, cluster: Cluster, axis: str, ranks: int) -> Link:
    """Return the slowest link of a ring of all `ranks` along `axis`: they wait for the step that crosses nodes."""
    return cluster.inside if ranks_in_a_node(layout, cluster, axis) == ranks else cluster.between


@lru_cache(maxsize=1024)  # layouts that differ in their batch, in ZeRO or in recomputation have the same
def _groups_of_rank_0(mesh: Mesh, ep: int, replicas: int, folded: bool) -> dict[str, list[int]]:
    return mesh.members(0, ep, replicas, folded)


def calls_s(calls: Iterable[Call], layout: Layout, cluster: Cluster, axis: str) -> float:
    """Return the seconds of all these calls along an axis, one after the other."""
    seconds = 0.0
    for call in calls:
        where = (call.collective, call.payload_bytes, call.group_size, cluster, ranks_in_a_node(layout, cluster, axis))
        if call.to_one:
            where = ("send", call.payload_bytes, 2, ring_link(layout, cluster, axis, call.group_size))
        seconds += call.count * collective_s(*where)
    return seconds
