"""What rounding does to a sum that grows block by block: ring attention's error by ranks and by dtype of its sums.

A kernel adds up in float32 and rounds its output once. A ring of cp ranks merges up to cp such outputs: if what it has
so far is held in 16 bits, each merging rounds it again, and so for dq, dk and dv. Here all ranks run in one process,
tile by tile in the order in which a ring has them, so the numbers are those of real ranks, to the bit.

Source   Liu et al. 2023 (arXiv:2310.01889); the error itself is measured here
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from course_lib.parallel.positions import positions
from course_lib.parallel.tiles import Tiling, backward_over, forward_over


@dataclass(frozen=True)
class MergeError:
    """Distance from float64 as a share of its length, for sums held in merge_dtype on that many ranks."""

    ranks: int
    merge_dtype: torch.dtype
    out: float
    dq: float
    dk: float
    dv: float


@dataclass
class _Shares:
    """Keeps my shares of all ranks' gradients (the Home of a ring that never leaves its process)."""

    of_rank: dict[int, Tensor] = field(default_factory=dict)

    def add(self, key_rank: int, dkv_BKsU: Tensor) -> None:
        self.of_rank[key_rank] = dkv_BKsU

    def total(self) -> None:
        return None


def _ring_in_one_process(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, grad_BNSH: Tensor, ranks: int, tiling: Tiling
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the ranks of a ring compute, one after the other.

    Shapes   -> out_BNSH, dq_BNSH, dk_BKSH, dv_BKSH in the dtype of the inputs, in the sequence's order
    """
    where = [positions(tiling.sequence_sharding, q_BNSH.shape[2], ranks, rank) for rank in range(ranks)]
    kv = [torch.cat([k_BKSH[:, :, at], v_BKSH[:, :, at]], -1) for at in where]
    results, shares = [torch.empty_like(x) for x in (q_BNSH, q_BNSH, k_BKSH, v_BKSH)], []
    for rank, at in enumerate(where):
        blocks = [((rank - step) % ranks, kv[(rank - step) % ranks]) for step in range(ranks)]
        out_BNsH, lse_BNs = forward_over(q_BNSH[:, :, at], blocks, rank, tiling)
        results[0][:, :, at] = out_BNsH.to(q_BNSH.dtype)
        shares.append(_Shares())
        saved = q_BNSH[:, :, at], results[0][:, :, at], lse_BNs
        dq_BNsH, _ = backward_over(saved, grad_BNSH[:, :, at], blocks, rank, tiling, shares[-1])
        results[1][:, :, at] = dq_BNsH.to(q_BNSH.dtype)
    for home, at in enumerate(where):
        travelling = [shares[(home + step) % ranks].of_rank[home] for step in range(ranks)]
        dkv_BKsU = travelling[0] + sum(travelling[2:], travelling[1]) if ranks > 1 else travelling[0]
        results[2][:, :, at], results[3][:, :, at] = dkv_BKsU.to(k_BKSH.dtype).chunk(2, -1)
    return tuple(results)


def _inputs_of(seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normal numbers: queries and a gradient of 4 heads, keys and values of 2, 64 wide."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return tuple(torch.randn(1, count, seq_len, 64, generator=generator).to(dtype) for count in heads)


def merge_errors(ranks: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8), seq_len: int = 840) -> list[MergeError]:
    """The error of bfloat16 attention on rings of several sizes, merged in float32 and in bfloat16.

    Without a mask, in contiguous blocks, by the standard kernel, which rounds nothing but its results. One rank is the
    kernel alone, nothing merged. seq_len is a multiple of each number of ranks.
    Raises   ValueError if seq_len does not divide
    """
    inputs = _inputs_of(seq_len, torch.bfloat16)
    exact = _ring_in_one_process(*(x.double() for x in inputs), 1, Tiling("contiguous", False))
    found = []
    for size in ranks:
        for merge_dtype in (torch.float32, torch.bfloat16):
            got = _ring_in_one_process(*inputs, size, Tiling("contiguous", False, "standard", merge_dtype))
            shares = (((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True))
            found.append(MergeError(size, merge_dtype, *shares))
    return found
