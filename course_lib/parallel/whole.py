"""Whole tensors from all ranks of a layout, for tests and for looking: the slow and simple way."""

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.conjugate import Group
from course_lib.config import ModelConfig
from course_lib.model import build as build_whole
from course_lib.parallel.engine import full_gradients, full_parameters
from course_lib.parallel.linear import Cut

__all__ = ["full_gradients", "full_parameters", "names_of", "put_together"]


def put_together(
    config: ModelConfig, mine: dict[str, Tensor], cuts: dict[str, Cut], group: Group, tp_rank: int
) -> dict[str, Tensor]:
    """All ranks' parts, pickled and gathered, then put together along the dimension that tp has cut.

    mine, cuts   this rank's parts by the model's names, and how tp has cut them
    """
    first = next(iter(mine.values()), torch.empty(0))
    places = [(name, tp_rank, cuts.get(name), x.shape) for name, x in mine.items()]
    flat_P = torch.cat([torch.empty(0, dtype=first.dtype, device="cpu"), *(x.cpu().flatten() for x in mine.values())])
    gathered: list[tuple | None] = [None] * group.size()
    dist.all_gather_object(gathered, (places, flat_P), group=group)
    parts: dict[str, dict[int, Tensor]] = {}  # by name and tp rank
    cut_of: dict[str, Cut | None] = {}
    for places, flat_P in gathered:
        pieces = flat_P.split([shape.numel() for *_, shape in places])
        for (name, rank, cut, shape), piece in zip(places, pieces, strict=True):
            parts.setdefault(name, {})[rank], cut_of[name] = piece.view(shape), cut
    whole = {}
    for name in names_of(config):
        if name in parts:
            cut, tensors = cut_of[name], [parts[name][rank] for rank in sorted(parts[name])]
            x = tensors[0] if cut is None else torch.cat(tensors[:: cut.copies], cut.dim)
            whole[name] = x.to(first.device)
    return whole


@lru_cache
def names_of(config: ModelConfig) -> tuple[str, ...]:
    """Of all parameters of the model, in its order."""
    return tuple(name for name, _ in build_whole(config, device="meta").named_parameters())
