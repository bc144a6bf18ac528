"""Whole tensors from all ranks of a layout, for tests and for looking: the slow and simple way."""

from functools import lru_cache

import torch
from torch import Tensor

from course_lib import comm
from course_lib.comm.conjugate import Group
from course_lib.config import ModelConfig
from course_lib.model import build as build_whole
from course_lib.parallel.linear import Cut


def put_together(
    config: ModelConfig, mine: dict[str, Tensor | None], cuts: dict[str, Cut], group: Group, tp_rank: int = 0
) -> dict[str, Tensor]:
    """All ranks' parts, gathered, then put together along the dimension that tp has cut.
    mine, cuts   this rank's parts by the model's names, and how tp has cut them
    """
    mine = {name: x for name, x in mine.items() if x is not None}
    first = next(iter(mine.values()), torch.empty(0))
    cut_places = {name: None if cut is None else [cut.dim, cut.copies] for name, cut in cuts.items()}
    told = comm.all_gather_json([tp_rank, {name: cut_places.get(name) for name in mine}], group)
    parts: dict[str, dict[int, Tensor]] = {}  # by name and tp rank
    cut_of: dict[str, list[int] | None] = {}  # dimension and copies
    for (rank, of_rank), tensors in zip(told, comm.all_gather_tensors(mine, group), strict=True):
        for name, x in tensors.items():
            parts.setdefault(name, {})[rank], cut_of[name] = x, of_rank[name]
    whole = {}
    for name in names_of(config):
        if name in parts:
            cut, tensors = cut_of[name], [parts[name][rank] for rank in sorted(parts[name])]
            x = tensors[0] if cut is None else torch.cat(tensors[:: cut[1]], cut[0])
            whole[name] = x.to(first.device)
    return whole


@lru_cache
def names_of(config: ModelConfig) -> tuple[str, ...]:
    return tuple(name for name, _ in build_whole(config, device="meta").named_parameters())
