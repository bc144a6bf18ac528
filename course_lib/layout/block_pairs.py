"""How much of the attention mask each rank computes under context parallelism, at each step of a ring.

Work is counted in (query, key) pairs that the mask allows: each costs the same FLOPs. At step t of a ring a rank meets
the keys of rank r - t, and no rank can go on before the next keys are there: the group goes at the pace of its busiest.

    causal, 4 ranks, share of the ideal speed     a ring waits at each step     keys gathered first, wait at the end
    contiguous                                    4 / 7  (cp / (2 cp - 1))      4 / 7
    striped                                       nearly 1                      nearly 1
    zigzag                                        1                             1

These shares are arithmetic: no kernel, no network, no merging is in them. Measured speeds, of which all that is part,
stand in `hardware.PUBLISHED_RING_SHARE`: not the same thing. Over 8 ranks 53.3 % are counted and 53.9 % measured for
contiguous (against another kernel's speed, so a little more is possible), 100 % and 90.2 % for zigzag.
"""

from collections.abc import Sequence

from course_lib.layout.sequence_sharding import check_context, tile
from course_lib.validate import Size, checked

Table = Sequence[Sequence[int]]  # [rank][step] -> pairs


@checked
def pairs(sequence_sharding: str, seq_len: Size, cp_size: Size, causal: bool = True) -> list[list[int]]:
    """Count the pairs that each rank computes at each step of a ring, for one head of a sequence: table[rank][step]."""
    check_context(seq_len, cp_size, sequence_sharding)
    shard_len = seq_len // cp_size

    def met(rank: int, step: int) -> int:
        seen = tile(sequence_sharding, shard_len, rank, (rank - step) % cp_size, causal)
        return seen.pairs if seen else 0

    return [[met(rank, step) for step in range(cp_size)] for rank in range(cp_size)]


def all_pairs(seq_len: Size, causal: bool = True) -> int:
    """Pairs of the whole mask: S (S + 1) / 2 if causal, else S^2."""
    return seq_len * (seq_len + 1) // 2 if causal else seq_len**2


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


def idle_pairs(table: Table) -> list[list[int]]:
    """What each rank could have computed at each step while it waited for the busiest: table[rank][step]."""
    return [[most - done for most, done in zip(step_pairs(table), row, strict=True)] for row in table]
