"""ZeRO as PyTorch ships it: FSDP2. Read beside parallel/zero.py.

`fully_shard` is called on each unit (embedding, every block, norm with head) and makes its parameters DTensors: shards
along dimension 0. One API, and every stage is a choice of what to keep until the end of a step (m micro-batches):

                stage 1                stage 2                   stage 3
    parameters  gathered once, kept    gathered once, kept       gathered for each forward and each backward pass
    gradients   whole, reduced once    reduced m times           reduced m times
    bytes       P + P                  P + m P                   2 m P + m P            (times (dp - 1) / dp)
    settings    reshard_after_forward and _backward: False       reshard_after_forward: True
                gradient sync at the last micro-batch alone

Between steps a rank holds 1 / dp of the parameters in every stage here; Rajbhandari's stages 1 and 2 keep them whole.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from course_lib.native.dtensor import DTensorEngine


class FSDP(DTensorEngine):
    """A model that `fully_shard` has cut, whose ranks bring different tokens: FSDP2 means gradients over them."""

    def __init__(self, module: FSDPModule, group: dist.ProcessGroup, mesh: DeviceMesh, stage: int) -> None:
        super().__init__(module, mesh)
        self.loss_group, self.loss_op, self.stage = group, "mean", stage

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a micro-batch that is not the last: stage 1 reduces nothing, stages 1 and 2 free no parameters.

        set_is_last_backward(False) is not for this: FSDP2 then takes the units of all micro-batches for one sequence,
        and at the end of the last backward pass gathers once more what the first forward pass ended with.
        """
        self.module.set_requires_gradient_sync(self.stage > 1)
        self.module.set_reshard_after_backward(self.stage == 3)
        yield
        self.module.set_requires_gradient_sync(True)
        self.module.set_reshard_after_backward(True)


def build(model: nn.Module, group: dist.ProcessGroup, stage: int = 3, shard_size: int | None = None) -> FSDP:
    """Shards `model` in place over `group` with fully_shard; every rank must hold the same weights.
    shard_size    ranks that share one copy of the model (HSDP); None: all of the group
    Shapes   a parameter of rows x ... -> its DTensor's local part of ceil(rows / dp) x ...; the last ranks' are shorter
    Bytes    see the table above; P counts each parameter's rows rounded up to a multiple of dp. An all-reduce of one
             element for the loss
    Raises   ValueError for another stage
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage is {stage}; choose from 1, 2, 3 (stage 0 is native/data.py)")
    device_type = next(model.parameters()).device.type
    if shard_size is None:
        mesh = DeviceMesh.from_group(group, device_type)
    else:
        shape = (group.size() // shard_size, shard_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    parts = units(model)
    for unit in (*parts, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
    for unit, following in itertools.pairwise(parts):  # has each unit gather the next one before it computes itself
        unit[0].set_modules_to_forward_prefetch([following[0]])
    return FSDP(model, group, mesh, stage)


def units(model: nn.Module) -> list[list[nn.Module]]:
    """What is gathered and freed together, in order of use: what precedes the blocks, each block, what follows them.

    A tied head is in the embedding's unit, so that the shared tensor has one place.
    """
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    position = children.index(model.blocks)
    before, after = children[:position], children[position + 1 :]
    blocks = [[block] for block in model.blocks]
    if {p for child in before for p in child.parameters()} & {p for child in after for p in child.parameters()}:
        return [before + after, *blocks]
    return [unit for unit in [before, *blocks, after] if unit]
