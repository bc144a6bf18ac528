"""Time of context parallelism: what its messages cost, and from which length on computing hides them.

What a ring needs in order to hide is a matter of one proportion:

    computing with a block    4 s^2 N H FLOPs, half of them under a causal mask shared out evenly
    handing it on             2 s K H numbers

The first grows with the square of a rank's tokens s, the second with s: from some s on each ring step hides, whatever
the number of ranks. With K = N and no mask this is Ring Attention's condition: bytes a number times s at least
FLOPs / bandwidth. Grouped queries hand on N / K times less, and so hide that much sooner.

Source   Liu et al. 2023 (arXiv:2310.01889), section 3.1
"""

from dataclasses import dataclass, replace

from course_lib.flops import attention_flops_per_token
from course_lib.hardware import Cluster, Link
from course_lib.layout.sequence_sharding import pairs, pairs_of_ranks, step_pairs
from course_lib.run import Run
from course_lib.timing.collectives import calls_s, ring_link
from course_lib.timing.rates import Utilisation
from course_lib.timing.tensor import FUSED_BACKWARD
from course_lib.timing.timelines import ring_spans
from course_lib.traffic import attention_calls
from course_lib.validate import Amount, Positive, checked

KV_BYTES, GRAD_BYTES = 2, 4  # of an element: keys and values travel in BF16, their gradients are summed in FP32


@checked
def tokens_that_hide_a_hop(
    flops_per_s: Amount, link: Link, queries_per_key: Positive = 1, backward: bool = False, causal: bool = True
) -> float:
    """Return the tokens of a rank from which on a ring step of a ring takes no longer than computing with a block.

    Latency is left out, and so the number of ranks, of heads and of features cancels.

    flops_per_s       what attention's kernel reaches
    queries_per_key   N / K of grouped queries
    backward          a block's gradients travel too, in FP32, beside 2.5 times the FLOPs
    causal            half of each block's pairs, as zigzag and nearly striped have it at every step
    """
    flops = 4 * (0.5 if causal else 1.0) * queries_per_key * (FUSED_BACKWARD if backward else 1)
    return 2 * (KV_BYTES + backward * GRAD_BYTES) / link.achieved_bytes_per_s * flops_per_s / flops


@dataclass(frozen=True)
class AttentionTime:
    """One layer's attention on cp ranks, forward and backward: the busiest rank's computing, and communication."""

    compute_s: float  # as if work were divided evenly and nothing had to be sent
    waiting_s: float  # beyond it, for the busiest rank
    comm_s: float
    exposed_s: float  # of comm_s, what no computing hides


def attention_time(run: Run, cluster: Cluster, utilisation: Utilisation = Utilisation()) -> AttentionTime:
    """Model forward and backward of one layer's attention core, its projections and recomputation left out.

    A ring hides each ring step behind the step that computes meanwhile, as far as that takes; the last step has no ring
    step, and the last gradients travel home uncovered. Gathered keys and exchanged heads hide behind nothing.
    """
    layout, once = run.layout, replace(run, layout=replace(run.layout, recompute="none"))
    pair_flops = layout.micro_batch * attention_flops_per_token(replace(run.config, num_layers=1, moe=None), 1)
    pair_s = pair_flops / layout.tp / utilisation.attention_flops_per_s(cluster)
    table = pairs(layout.cp_sharding, run.seq_len, layout.cp, utilisation.causal)
    ideal_s = pair_s * (1 + FUSED_BACKWARD) * sum(pairs_of_ranks(table)) / layout.cp
    listed = attention_calls(once)
    comm_s = calls_s(listed, layout, cluster, "cp")
    if layout.cp_method == "ulysses":  # heads are equal
        return AttentionTime(ideal_s, 0.0, comm_s, comm_s)
    if layout.cp_method == "all_gather" or not listed:
        busiest_s = pair_s * (1 + FUSED_BACKWARD) * max(pairs_of_ranks(table))
        return AttentionTime(ideal_s, busiest_s - ideal_s, comm_s, comm_s)
    forward_s = [pair_s * count for count in step_pairs(table)]
    backward_s = [FUSED_BACKWARD * seconds for seconds in forward_s]
    kv_bytes, grad_bytes = listed[0].payload_bytes, listed[-1].payload_bytes
    spans = ring_spans(forward_s, backward_s, kv_bytes, grad_bytes, ring_link(layout, cluster, "cp", layout.cp))
    busy_s = sum(forward_s) + sum(backward_s)
    return AttentionTime(ideal_s, busy_s - ideal_s, comm_s, max(0.0, max(span.stop_s for span in spans) - busy_s))
