"""Where a rank's tokens stand in the whole sequence, as tensors; sequence_sharding.py has the arithmetic."""

import torch
from torch import Tensor

from course_lib.layout.sequence_sharding import check_context
from course_lib.validate import Index, Size, checked


@checked(seq_len=Size, cp_size=Size, cp_rank=Index)
def positions(sequence_sharding: str, seq_len: int, cp_size: int, cp_rank: int) -> Tensor:
    """Where this rank's tokens stand in the whole sequence, in ascending order.
    Shapes   -> positions_s, int64               (s = seq_len / cp_size)
    Raises   ValueError as check_context, and for a rank that the group does not have
    """
    check_context(seq_len, cp_size, sequence_sharding)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}; a group of {cp_size} has ranks 0 to {cp_size - 1}")
    all_S = torch.arange(seq_len)
    if sequence_sharding == "striped":
        return all_S[cp_rank::cp_size].clone()
    if sequence_sharding == "contiguous":
        return all_S.chunk(cp_size)[cp_rank].clone()
    chunks = all_S.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


@checked
def order(sequence_sharding: str, seq_len: Size, cp_size: Size) -> Tensor:
    """All ranks' positions one after the other: where each row of what an all-gather gives stands in the sequence.
    Shapes   -> positions_S; its argsort puts gathered rows back into the sequence's order
    """
    return torch.cat([positions(sequence_sharding, seq_len, cp_size, rank) for rank in range(cp_size)])
