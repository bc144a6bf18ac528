"""Whole tensors from all ranks of a layout, for tests and for looking: the slow and simple way.

full_parameters(engine), full_gradients(engine)         # by the unsharded model's names, on every rank
"""

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.config import ModelConfig
from course_lib.model import build as build_whole
from course_lib.parallel import zero
from course_lib.parallel.five_d import cuts_of, named_parameters
from course_lib.parallel.linear import Cut
from course_lib.training.precision import gradient_of


def full_parameters(engine: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model, on each rank. All ranks must call it."""
    mine = {name: param.detach() for name, param in named_parameters(engine).items()}
    if engine.layout.zero:  # below stage 3 what is frozen is in no flat
        mine |= _from_shards(engine, lambda flat: flat.shard_p.detach())
    return _together(engine, mine)


def full_gradients(engine: nn.Module) -> dict[str, Tensor]:
    """Every gradient of the model, on each rank; those that there are. All ranks must call it."""
    if engine.layout.zero:
        return _together(engine, _from_shards(engine, lambda flat: gradient_of(flat.shard_p)))
    grads = {name: gradient_of(param) for name, param in named_parameters(engine).items()}
    return _together(engine, {name: grad for name, grad in grads.items() if grad is not None})


def _from_shards(engine: nn.Module, piece_of) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for sharded in engine.data_engines.values():
        found |= zero.whole_tensors(sharded, piece_of)
    if engine.config.tied and "head.weight" in found:
        found["embed.weight"] = found.pop("head.weight")
    return found


def _together(engine: nn.Module, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' parts, pickled and gathered, then put together along the dimension that tp has cut."""
    cuts, tp_rank = cuts_of(engine), engine.groups.tp.rank()
    places = [(name, tp_rank, cuts.get(name), x.shape) for name, x in mine.items()]
    flat_P = torch.cat([torch.empty(0, dtype=engine.pipeline.dtype), *(x.cpu().flatten() for x in mine.values())])
    gathered: list[tuple | None] = [None] * engine.groups.world.size()
    dist.all_gather_object(gathered, (places, flat_P), group=engine.groups.world)
    parts: dict[str, dict[int, Tensor]] = {}  # by name and tp rank
    cut_of: dict[str, Cut | None] = {}
    for places, flat_P in gathered:
        pieces = flat_P.split([shape.numel() for *_, shape in places])
        for (name, rank, cut, shape), piece in zip(places, pieces):
            parts.setdefault(name, {})[rank], cut_of[name] = piece.view(shape), cut
    whole, device = {}, next(engine.parameters()).device
    for name in names_of(engine.config):
        if name in parts:
            cut, tensors = cut_of[name], [parts[name][rank] for rank in sorted(parts[name])]
            x = tensors[0] if cut is None else torch.cat(tensors[:: cut.copies], cut.dim)
            whole[name] = x.to(device)
    return whole


@lru_cache
def names_of(config: ModelConfig) -> tuple[str, ...]:
    """Of all parameters of the model, in its order."""
    return tuple(name for name, _ in build_whole(config, device="meta").named_parameters())
