"""Modelled time of context parallelism: what its messages cost, and from which length on computing hides them.

As in `sharded_timing` nothing is measured: computing runs at one share of the peak, a message takes a latency and its
bytes at the rate that a link achieves, and the two do not slow each other down. What a ring needs in order to hide is a
matter of one proportion:

    computing with a block    4 s^2 N H FLOPs, half of them under a causal mask shared out evenly
    handing it on             2 s K H numbers

The first grows with the square of a rank's tokens s, the second with s: from some s on each ring step hides, whatever
the number of ranks. With K = N and no mask this is Ring Attention's condition: bytes a number times s at least
FLOPs / bandwidth. Grouped queries hand on N / K times less, and so hide that much sooner.

Source   Liu et al. 2023 (arXiv:2310.01889), section 3.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from course_lib.config import ModelConfig
from course_lib.hardware import GPU, Cluster, Link, peak_flops
from course_lib.layout import Layout
from course_lib.layout.block_pairs import pairs, pairs_of_ranks, step_pairs
from course_lib.layout.partition import check_method
from course_lib.memory.context import for_length, kv_block_bytes
from course_lib.memory.tensor import narrow
from course_lib.run import Run
from course_lib.span import Span
from course_lib.timing import collective_s
from course_lib.traffic import Call, attention_calls

BACKWARD_FLOPS = 2.5  # a flash kernel's backward, of its forward: five products in place of two, the scores made again


# ------------------------------------------------------------------------------- from which length on a ring step hides
def tokens_that_hide_a_hop(
    gpu: GPU,
    link: Link,
    utilisation: float,
    queries_per_key: float = 1,
    backward: bool = False,
    causal: bool = True,
    itemsize: int = 2,
    sum_itemsize: int = 4,
    head_numbers: float | None = None,
) -> float:
    """Tokens of a rank from which on a ring step of a ring takes no longer than computing with a block; times cp, in
    all.

    queries_per_key   N / K of grouped queries
    backward          a block's gradients travel too, in sum_itemsize, beside 2.5 times the FLOPs
    causal            half of each block's pairs, as zigzag and nearly striped have it at every step
    head_numbers      B K H, to take the latency of a ring step into account; without it only bandwidth counts
    """
    pair_share = 0.5 if causal else 1.0
    flops = 4 * pair_share * queries_per_key * (BACKWARD_FLOPS if backward else 1)
    per_pair_s = flops / (utilisation * peak_flops(gpu))
    per_token_s = 2 * (itemsize + (sum_itemsize if backward else 0)) / link.achieved_bytes_per_s
    latency_s = link.latency_s / head_numbers if head_numbers else 0.0
    return (per_token_s + sqrt(per_token_s**2 + 4 * per_pair_s * latency_s)) / (2 * per_pair_s)


def pair_s(config: ModelConfig, batch_size: int, cluster: Cluster, utilisation: float, tp: int = 1) -> float:
    """Seconds of one (query, key) pair of every head of one layer: two products of H numbers each."""
    local = narrow(config, tp)
    return 4 * batch_size * local.num_heads * local.head_dim / (utilisation * peak_flops(cluster.gpu))


def ring_link(cp: int, cluster: Cluster, per_node: int | None = None) -> Link:
    """The slowest link of a ring of cp ranks, `per_node` of them in a node: all wait for the ring step that crosses
    nodes.
    """
    return cluster.inside if cp <= (per_node or cluster.gpus_per_node) else cluster.between


# ------------------------------------------------------------------------------------ one layer's attention
@dataclass(frozen=True)
class AttentionTime:
    """One layer's attention on cp ranks, forward and backward: the busiest rank's computing, and communication."""

    compute_s: float  # as if work were divided evenly and nothing had to be sent
    waiting_s: float  # beyond it, for the busiest rank
    comm_s: float
    exposed_s: float  # of comm_s, what no computing hides

    @property
    def total_s(self) -> float:
        return self.compute_s + self.waiting_s + self.exposed_s


def attention_time(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    cp: int,
    cluster: Cluster,
    utilisation: float,
    method: str = "ring",
    sequence_sharding: str = "zigzag",
    causal: bool = True,
    per_node: int | None = None,
    tp: int = 1,
    itemsize: int = 2,
) -> AttentionTime:
    """Model forward and backward of one layer's attention core, its projections left out.

    A ring hides each ring step behind the step that computes meanwhile, as far as that takes; the last step has no ring
    step, and the last gradients travel home uncovered. Gathered keys and exchanged heads hide behind nothing.

    per_node   ranks of the cp group in one node, as many as fit unless given (with tp = 8 inside a node: 1)
    Raises     ValueError as `traffic.attention_calls` and `block_pairs.pairs`
    """
    check_method(method)
    each_s = pair_s(config, batch_size, cluster, utilisation, tp)
    table = pairs(sequence_sharding, seq_len, cp, causal)
    ideal_s = each_s * (1 + BACKWARD_FLOPS) * sum(pairs_of_ranks(table)) / cp
    layout = Layout(cp=cp, tp=tp, micro_batch=batch_size, cp_method=method, cp_sharding=sequence_sharding)
    run = Run(for_length(config, seq_len), layout, seq_len, {2: "bf16-master", 4: "fp32"}[itemsize])
    comm_s = sum(_call_s(call, cp, cluster, per_node) for call in attention_calls(run))
    if method == "ulysses":  # heads are equal
        return AttentionTime(ideal_s, 0.0, comm_s, comm_s)
    if method == "all_gather":
        busiest_s = each_s * (1 + BACKWARD_FLOPS) * max(pairs_of_ranks(table))
        return AttentionTime(ideal_s, busiest_s - ideal_s, comm_s, comm_s)
    steps_s = [each_s * count for count in step_pairs(table)]
    busy_s = sum(steps_s) * (1 + BACKWARD_FLOPS)
    block = kv_block_bytes(config, batch_size, seq_len, cp, itemsize, tp)
    whole_s = _ring_s(steps_s, block, block // itemsize * max(4, itemsize), ring_link(cp, cluster, per_node))
    return AttentionTime(ideal_s, busy_s - ideal_s, comm_s, max(0.0, whole_s - busy_s))


def _ring_s(steps_s: Sequence[float], kv_bytes: int, grad_bytes: int, link: Link) -> float:
    """Seconds of forward and backward around a ring: each step as long as its computing or its messages."""
    spans = ring_spans(steps_s, [step * BACKWARD_FLOPS for step in steps_s], kv_bytes, grad_bytes, link)
    return max(span.stop_s for span in spans)


def ring_spans(
    forward_s: Sequence[float], backward_s: Sequence[float], kv_bytes: int, grad_bytes: int, link: Link
) -> list[Span]:
    """One layer's ring on one rank, forward then backward, on the lanes "compute" and "communication".

    While a step computes, the next keys and values arrive; backward also the gradients of the block before. All ranks
    are taken to be as far as this one, with the seconds of the busiest at each step. Messages leave one after the
    other, so the gradients that a step adds to have come before the keys that the next one needs. kv1 is the first ring
    step of keys and values, dkv1 that of their gradients.
    """
    spans: list[Span] = []

    def add(lane: str, name: str, start_s: float, seconds: float) -> float:
        spans.append(Span(0, lane, name, start_s, start_s + seconds))
        return start_s + seconds

    hop_s, grad_hop_s = (collective_s("send", size, 2, link) for size in (kv_bytes, grad_bytes))
    now_s, last = 0.0, len(forward_s) - 1
    for step, seconds in enumerate(forward_s):
        arrived_s = add("communication", f"kv{step + 1}", now_s, hop_s) if step < last else 0.0
        now_s = max(add("compute", f"forward {step}", now_s, seconds), arrived_s)
    network_s = now_s
    for step, seconds in enumerate(backward_s):
        if step < last:
            network_s = add("communication", f"kv{step + 1}", max(network_s, now_s), hop_s)
        arrived_s = network_s
        now_s = add("compute", f"backward {step}", now_s, seconds)
        if step:  # this step's share is added, and all goes on
            network_s = add("communication", f"dkv{step}", max(network_s, now_s), grad_hop_s)
        if step < last:
            now_s = max(now_s, arrived_s)
    return spans


def _call_s(call: Call, cp: int, cluster: Cluster, per_node: int | None) -> float:
    if call.to_one:
        return call.count * collective_s("send", call.payload_bytes, 2, ring_link(cp, cluster, per_node))
    return call.count * collective_s(call.collective, call.payload_bytes, call.group_size, cluster, per_node)
