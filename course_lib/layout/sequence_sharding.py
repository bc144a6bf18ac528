"""Which tokens each rank of a context-parallel group has, and what of the attention mask falls to whom.

    sharding       tokens of rank r of 4, 16 in all         causal work of the ranks
    contiguous     r 0: 0 1 2 3       r 3: 12 13 14 15      the last has most: its queries see all keys
    zigzag         r 0: 0 1 14 15     r 3: 6 7 8 9          equal: an early and a late chunk, at every step of a ring
    striped        r 0: 0 4 8 12      r 3: 3 7 11 15        nearly equal: ranks differ by the diagonal alone

In each of them a rank's tokens ascend. So what a rank's queries may see of another rank's keys is always one tile: all
of it, its lower triangle, or nothing, of some rows and columns. `tile` says which; nothing outside it is computed.

Work is counted in (query, key) pairs that the mask allows: each costs the same FLOPs. At step t of a ring a rank meets
the keys of rank r - t, and no rank can go on before the next keys are there: the group goes at the pace of its busiest.

    causal, 4 ranks, share of the ideal speed     a ring waits at each step     keys gathered first, wait at the end
    contiguous                                    4 / 7  (cp / (2 cp - 1))      4 / 7
    striped                                       nearly 1                      nearly 1
    zigzag                                        1                             1

These shares are arithmetic: no kernel, no network, no merging is in them. Measured speeds, of which all that is part,
stand in `hardware.PUBLISHED_RING_SHARE`: not the same thing. Over 8 ranks 53.3 % are counted and 53.9 % measured for
contiguous (against another kernel's speed, so a little more is possible), 100 % and 90.2 % for zigzag.

Source   Liu et al. 2023 (arXiv:2310.01889), ring attention; Brandon et al. 2023 (arXiv:2311.09431), striped;
         Llama Team 2024 (arXiv:2407.21783), section 3.3.2: 2 cp chunks, of which rank r has r and 2 cp - 1 - r
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from course_lib.validate import Index, Size, checked

SEQUENCE_SHARDINGS = ("contiguous", "zigzag", "striped")
Table = Sequence[Sequence[int]]  # [rank][step] -> pairs


@checked
def check_context(seq_len: Size, cp_size: Size, sequence_sharding: Literal[SEQUENCE_SHARDINGS]) -> None:
    """Raises ValueError unless every rank gets equally many tokens: seq_len a multiple of cp, for zigzag of 2 cp."""
    parts = 2 * cp_size if sequence_sharding == "zigzag" else cp_size
    if seq_len % parts:
        below, above = seq_len // parts * parts, (seq_len // parts + 1) * parts
        nearest = f"nearest lengths are {below} or {above}" if below > 0 else f"nearest length is {above}"
        why = f"2 x cp ({parts}), two chunks a rank" if sequence_sharding == "zigzag" else f"cp ({cp_size})"
        raise ValueError(f"seq_len ({seq_len}) must be a multiple of {why}; the {nearest}")


@dataclass(frozen=True)
class Tile:
    """Rows and columns, counted on their ranks, in which queries see keys: all, or those of the lower triangle."""

    queries: slice
    keys: slice
    causal: bool  # query i of the tile sees keys 0 .. i of the tile, which is square then

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs it computes."""
        rows, columns = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@checked(sequence_sharding=Literal[SEQUENCE_SHARDINGS], shard_len=Size, query_rank=Index, key_rank=Index)
def tile(sequence_sharding: str, shard_len: int, query_rank: int, key_rank: int, causal: bool = True) -> Tile | None:
    """What of one rank's keys another rank's queries see; None if nothing. shard_len: tokens a rank.

    Zigzag: earlier ranks' late chunks are the later ones, so an earlier rank's keys count with their first half for all
    my queries, a later rank's with both halves, for the second half of my queries.
    Striped: key j of rank k stands at j cp + k, so it is seen by query i if j <= i, for a later rank only if j < i.
    """
    whole, half = slice(0, shard_len), shard_len // 2
    if not causal:
        return Tile(whole, whole, False)
    if query_rank == key_rank:
        return Tile(whole, whole, True)
    earlier = key_rank < query_rank
    if sequence_sharding == "contiguous":
        return Tile(whole, whole, False) if earlier else None
    if sequence_sharding == "zigzag":
        return Tile(whole, slice(0, half), False) if earlier else Tile(slice(half, shard_len), whole, False)
    if earlier:
        return Tile(whole, whole, True)
    return Tile(slice(1, shard_len), slice(0, shard_len - 1), True) if shard_len > 1 else None


@checked
def pairs(sequence_sharding: str, seq_len: Size, cp_size: Size, causal: bool = True) -> list[list[int]]:
    """Count the pairs that each rank computes at each step of a ring, for one head of a sequence: table[rank][step]."""
    check_context(seq_len, cp_size, sequence_sharding)
    shard_len = seq_len // cp_size

    def met(rank: int, step: int) -> int:
        seen = tile(sequence_sharding, shard_len, rank, (rank - step) % cp_size, causal)
        return seen.pairs if seen else 0

    return [[met(rank, step) for step in range(cp_size)] for rank in range(cp_size)]


@checked
def pairs_of_ranks(table: Table) -> list[int]:
    """Pairs of each rank, all steps together."""
    return [sum(row) for row in table]


def step_pairs(table: Table) -> list[int]:
    """Pairs of the busiest rank at each step: how long the step takes."""
    return [max(row[step] for row in table) for step in range(len(table[0]))]


@checked
def share_of_ideal(table: Table) -> float:
    """Share of an even division's speed (0 to 1) that a ring has, whose step ends with its slowest rank."""
    return sum(pairs_of_ranks(table)) / len(table) / sum(step_pairs(table))
