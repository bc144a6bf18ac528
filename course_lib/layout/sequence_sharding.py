"""Which tokens each rank of a context-parallel group has, and what of the attention mask falls to whom.

    sharding       tokens of rank r of 4, 16 in all         causal work of the ranks
    contiguous     r 0: 0 1 2 3       r 3: 12 13 14 15      the last has most: its queries see all keys
    zigzag         r 0: 0 1 14 15     r 3: 6 7 8 9          equal: an early and a late chunk, at every step of a ring
    striped        r 0: 0 4 8 12      r 3: 3 7 11 15        nearly equal: ranks differ by the diagonal alone

In each of them a rank's tokens ascend. So what a rank's queries may see of another rank's keys is always one tile: all
of it, its lower triangle, or nothing, of some rows and columns. `tile` says which; nothing outside it is computed.

Source   Liu et al. 2023 (arXiv:2310.01889), ring attention; Brandon et al. 2023 (arXiv:2311.09431), striped;
         Llama Team 2024 (arXiv:2407.21783), section 3.3.2: 2 cp chunks, of which rank r has r and 2 cp - 1 - r
"""

from dataclasses import dataclass
from typing import Literal

from course_lib.validate import Index, Size, checked

SEQUENCE_SHARDINGS = ("contiguous", "zigzag", "striped")


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
