"""Whole tensors from all ranks of a layout, for tests and for looking: the slow and simple way.

full_parameters(engine), full_gradients(engine)         # by the unsharded model's names, on every rank
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.model import build as build_whole
from course_lib.parallel import zero
from course_lib.parallel.five_d import cuts_of, named_parameters
from course_lib.precision import gradient_of


def full_parameters(engine: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model, on each rank. All ranks must call it."""
    if engine.layout.zero:
        return _together(engine, _from_shards(engine, lambda flat: flat.shard_p.detach()))
    return _together(engine, {name: param.detach() for name, param in named_parameters(engine).items()})


def full_gradients(engine: nn.Module) -> dict[str, Tensor]:
    """Every gradient of the model, on each rank; those that there are. All ranks must call it."""
    if engine.layout.zero:
        return _together(engine, _from_shards(engine, lambda flat: gradient_of(flat.shard_p)))
    grads = {name: gradient_of(param) for name, param in named_parameters(engine).items()}
    return _together(engine, {name: grad for name, grad in grads.items() if grad is not None})


def _from_shards(engine: nn.Module, piece_of) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for sharded in engine.zeros.values():
        found |= zero.whole_tensors(sharded, piece_of)
    if engine.config.tied and "head.weight" in found:
        found["embed.weight"] = found.pop("head.weight")
    return found


def _together(engine: nn.Module, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' parts, pickled and gathered, then put together along the dimension that tp has cut."""
    cuts, tp_rank = cuts_of(engine), engine.groups.tp.rank()
    sent = {name: (tp_rank, cuts.get(name), x.cpu().clone()) for name, x in mine.items()}
    gathered: list[dict | None] = [None] * engine.groups.world.size()
    dist.all_gather_object(gathered, sent, group=engine.groups.world)
    whole = {}
    for name, _ in build_whole(engine.config, device="meta").named_parameters():
        parts = {of_rank[name][0]: of_rank[name][1:] for of_rank in gathered if name in of_rank}
        if not parts:
            continue
        cut = parts[min(parts)][0]
        tensors = [parts[rank][1] for rank in sorted(parts)]
        x = tensors[0] if cut is None else torch.cat(tensors[:: cut.copies], cut.dim)
        whole[name] = x.to(next(engine.parameters()).device)
    return whole
