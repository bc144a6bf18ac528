"""Context parallelism by all-gather: every rank gathers all keys and values, and computes for its own queries.

    forward    all-gather of k v
    backward   all-gather of k v once more (kept are my own alone), then a reduce-scatter of dk dv

As many bytes as a ring sends, in three calls in place of 3 (cp - 1). What differs is memory, all keys and values of one
layer at once where a ring holds two blocks, and overlap: nothing is computed before all have come. With few key/value
heads both cost little; Llama 3 chose this, for any mask (documents in a batch) is then a matter of the kernel.

Here tiles are computed block by block, in the ring's order and with the ring's merging: the same numbers to the bit
forward.

Source   Llama Team 2024 (arXiv:2407.21783), section 3.3.2
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from course_lib import comm
from course_lib.comm.conjugate import Group
from course_lib.parallel.tiles import Block


@dataclass(frozen=True)
class Gathered:
    """Blocks that all come at once (the Exchange of the all-gather method)."""

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
