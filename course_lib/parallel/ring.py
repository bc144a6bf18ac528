"""Ring attention: keys and values travel around the ring while each rank computes with those that it has.

At any time a rank holds two blocks, one in use and one arriving from its left neighbour. Backward sends keys and values
around once more, and behind them the gradients: each rank adds its share to a block's dk and dv and passes them on,
until they are home. The home rank's own share never travels, so that is cp - 1 ring steps as well.

On the wire, per attention, with cp ranks of s tokens; a block is 2 B K s H numbers, K key/value heads and not N:

    forward    (cp - 1) blocks of k v in their own dtype                           again wherever forward is recomputed
    backward   (cp - 1) blocks of k v, and (cp - 1) of dk dv in the dtype of the sums (float32 for 16-bit numbers)

Under a causal mask the same: a block travels on even if the next rank's queries see nothing of it.

Source   Liu et al. 2023 (arXiv:2310.01889)
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.comm.conjugate import Group
from course_lib.parallel.engine import Trace
from course_lib.parallel.tiles import Block, Tiling, block_attention
from course_lib.span import Span


@dataclass(frozen=True)
class RingStep:
    """A tensor on its way to my right neighbour, and one like it from my left. Neither may be touched before wait()."""

    outgoing: Tensor
    incoming: Tensor
    work: dist.Work
    name: str
    start_s: float
    trace: Trace | None

    def wait(self) -> Tensor:
        self.work.wait()
        if self.trace is not None:  # ends where it is awaited: when it arrived, gloo does not say
            self.trace.append(Span(dist.get_rank(), "communication", self.name, self.start_s, time.perf_counter()))
        return self.incoming


def start_ring_step(outgoing: Tensor, group: Group, name: str = "ring step", trace: Trace | None = None) -> RingStep:
    """Starts to pass a tensor on to the right neighbour; all ranks of the group do, with tensors of one shape.

    An all-to-all in which each rank has rows for one other only. A send and a receive would do the same; on gloo they
    copy in the thread that computes (with two ranks on a CPU a step took a fifth to a third longer), this one does not.
    Bytes    sent per rank: outgoing.nbytes
    """
    rank, size, start_s = group.rank(), group.size(), time.perf_counter()
    incoming = torch.empty_like(outgoing)
    rows = outgoing.shape[0]
    to_right = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    from_left = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    work = dist.all_to_all_single(incoming, outgoing, from_left, to_right, group=group, async_op=True)
    return RingStep(outgoing, incoming, work, name, start_s, trace)


@dataclass(frozen=True)
class Ring:
    """Blocks that come one after the other from the left neighbour (the Exchange of ring attention)."""

    group: Group
    trace: Trace | None = None

    def blocks(self, kv_BKsU: Tensor) -> Iterator[Block]:
        """While the caller works on the block that it was given, the next one is on its way."""
        rank, size = self.group.rank(), self.group.size()
        for step in range(size):
            is_last = step == size - 1
            ring_step = (
                None if is_last else start_ring_step(kv_BKsU, self.group, f"k v of {(rank - step) % size}", self.trace)
            )
            yield (rank - step) % size, kv_BKsU
            if ring_step is not None:
                kv_BKsU = ring_step.wait()

    def dkv_sum(self, kv_BKsU: Tensor) -> "DKVRotation":
        return DKVRotation(self.group, self.trace)


class DKVRotation:
    """dk and dv of each block go from rank to rank behind it, a share added at each, and from the last one home."""

    def __init__(self, group: Group, trace: Trace | None = None):
        self.group, self.trace = group, trace
        self.own_BKsU: Tensor | None = None  # my share of my own block: it stays here
        self.ring_step: RingStep | None = None

    def add(self, key_rank: int, dkv_BKsU: Tensor) -> None:
        if self.own_BKsU is None:
            self.own_BKsU = dkv_BKsU
            return
        if self.ring_step is not None:  # this block's shares of the ranks between its home and me
            dkv_BKsU += self.ring_step.wait()
        self.ring_step = start_ring_step(dkv_BKsU, self.group, f"dk dv of {key_rank}", self.trace)

    def total(self) -> Tensor:
        if self.ring_step is not None:
            self.own_BKsU += self.ring_step.wait()
        return self.own_BKsU


@dataclass(frozen=True)
class Gathered:
    """Blocks that all come at once (the Exchange of the all-gather method), computed in the ring's order, to the bit.

    As many bytes as a ring sends, in three calls in place of 3 (cp - 1): an all-gather of k v forward, again backward
    (kept are my own alone), a reduce-scatter of dk dv. What differs is memory, all keys and values of one layer at once
    where a ring holds two blocks, and overlap: nothing is computed before all have come. With few key/value heads both
    cost little; Llama 3 chose this, for any mask (documents in a batch) is then a matter of the kernel.
    Source   Llama Team 2024 (arXiv:2407.21783), section 3.3.2
    """

    group: Group

    def blocks(self, kv_BKsU: Tensor) -> Iterator[Block]:
        rank, size = self.group.rank(), self.group.size()
        of_ranks = comm.all_gather(kv_BKsU.unsqueeze(0), self.group)
        for step in range(size):
            key_rank = (rank - step) % size
            yield key_rank, of_ranks[key_rank]

    def dkv_sum(self, kv_BKsU: Tensor) -> "SumAtOnce":
        return SumAtOnce(self.group)


class SumAtOnce:
    """Shares of all ranks' dk and dv are put side by side, and summed by one reduce-scatter at the end."""

    def __init__(self, group: Group):
        self.group = group
        self.shares_PBKsU: Tensor | None = None  # P: ranks, each one's place filled when its keys have been seen

    def add(self, key_rank: int, dkv_BKsU: Tensor) -> None:
        if self.shares_PBKsU is None:
            self.shares_PBKsU = dkv_BKsU.new_empty(self.group.size(), *dkv_BKsU.shape)
        self.shares_PBKsU[key_rank] = dkv_BKsU

    def total(self) -> Tensor:
        return comm.reduce_scatter(self.shares_PBKsU, self.group).squeeze(0)


def ring_attention(
    q_BNsH: Tensor,
    k_BKsH: Tensor,
    v_BKsH: Tensor,
    group: Group,
    sequence_sharding: str = "zigzag",
    causal: bool = True,
    merge_dtype: torch.dtype | None = None,
    kernel: str = "fused",
) -> Tensor:
    """Attention over a sequence shared out by `sequence_sharding`: every rank brings equally many tokens.

    Each rank gets the outputs of its own tokens.
    merge_dtype   of outputs and gradients while parts are added up: float32 if not given, float64 for float64 inputs.
                  The log-sum-exp has float32 at least, always
    kernel        "fused" | "standard" (tiles.py)
    Shapes   q_BNsH, k_BKsH, v_BKsH -> out_BNsH            (query head n reads key/value head n // (N / K))
    Bytes    sent per rank: (cp - 1) * 2 B K s H * itemsize forward;
             as many again backward, and (cp - 1) * 2 B K s H * (itemsize of merge_dtype)
    Raises   ValueError for shapes or words that do not fit, before anything is sent
    """
    return block_attention(q_BNsH, k_BKsH, v_BKsH, Ring(group), Tiling(sequence_sharding, causal, kernel, merge_dtype))
