"""ZeRO as PyTorch ships it: FSDP2, ZeroRedundancyOptimizer, and Accelerate on top. Read beside parallel/zero.py.

`fully_shard` is called on each unit (embedding, every block, norm with head) and makes its parameters DTensors: shards
along dimension 0. One API, and every stage is a choice of what to keep until the end of a step (m micro-batches):

                stage 1                stage 2                   stage 3
    parameters  gathered once, kept    gathered once, kept       gathered for each forward and each backward pass
    gradients   whole, reduced once    reduced m times           reduced m times
    bytes       P + P                  P + m P                   2 m P + m P            (times (dp - 1) / dp)
    settings    reshard_after_forward and _backward: False       reshard_after_forward: True
                gradient sync at the last micro-batch alone

Between steps a rank holds 1 / dp of the parameters in every stage here; Rajbhandari's stages 1 and 2 keep them whole.

What FSDP2's options are in the from-scratch engine:

    a module given to fully_shard    a unit: gathered, used and freed together. Here each parameter is cut by itself,
                                     its rows rounded up to dp equal pieces; from scratch the unit is flattened first.
    reshard_after_forward            True: stage 3. False: stage 2. An int k: after forward, groups of k neighbours
                                     keep a copy among them, and backward gathers inside these: inside a node, say.
    a mesh of two dimensions         HSDP, here `shard_size`: shards inside groups, copies across them. Less to gather
                                     over slow links; a rank holds 1 / shard_size instead of 1 / dp.
    set_requires_gradient_sync       what no_sync() is to DDP. Gradients then add up whole, not sharded.
    set_modules_to_forward_prefetch  the next unit is gathered while this one computes; in backward that is the default.
    MixedPrecisionPolicy             param_dtype is gathered and computed with, reduce_dtype reduced. Shards keep the
                                     model's dtype: they are the FP32 master weights, and there is no second copy.
    CPUOffloadPolicy                 shards, gradients and optimizer states on the host, moved unit by unit.
    meta device                      fully_shard first, then `fill`: no rank ever holds the whole model.

DistributedDataParallel with ZeroRedundancyOptimizer (`build_ddp`) shares out the optimizer's states alone, as stage 1
does, but by whole parameters, so that shares differ in size. DDP's all-reduce costs 2 P, although a rank needs only the
gradients of what it updates; then each owner broadcasts the parameters it updated: P more. Times (dp - 1) / dp that is
3 P where stage 1 needs 2 P: as much as stage 3, for the memory of stage 1.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor

from course_lib import comm
from course_lib.devices import rank_device
from course_lib.native.data import DDP
from course_lib.native.dtensor import DTensorEngine
from course_lib.parallel.engine import (
    MicroBatches,
    accumulate_gradients,
    clip_gradients,
    full_gradients,
    full_parameters,
    step,
    trainable,
)
from course_lib.parallel.engine import make_optimizer as make_adamw
from course_lib.training import loss_of

__all__ = [
    "FSDP", "STAGES", "accelerated_step", "accumulate_gradients", "build", "build_accelerated", "build_ddp",
    "check_sharded", "clip_gradients", "fill", "full_gradients", "full_parameters", "make_optimizer", "step", "units",
    "unsharded_parameters",
]  # fmt: skip

STAGES = (1, 2, 3)


# --- FSDP2


class FSDP(DTensorEngine):
    """A model that `fully_shard` has cut, whose ranks bring different tokens: FSDP2 means gradients over them."""

    def __init__(self, module: FSDPModule, group: dist.ProcessGroup, mesh: DeviceMesh, stage: int) -> None:
        super().__init__(module, mesh)
        self.group, self.stage = group, stage

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

    def mean_loss(self, share: Tensor) -> Tensor:
        return comm.all_reduce(share, self.group, op="mean")


def build(
    model: nn.Module,
    group: dist.ProcessGroup,
    stage: int = 3,
    shard_size: int | None = None,
    reshard_after_forward: bool | int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: bool = True,
) -> FSDP:
    """Shards `model` in place over `group` with fully_shard; every rank must hold the same weights.

    shard_size               ranks that share one copy of the model (HSDP); None: all of the group
    reshard_after_forward    what fully_shard calls so; None: as the stage says. An int: size of the groups

    Shapes   a parameter of rows x ... -> its DTensor's local part of ceil(rows / dp) x ...; the last ranks' are shorter
    Bytes    see the table above; P counts each parameter's rows rounded up to a multiple of dp. An all-reduce of one
             element for the loss
    Raises   ValueError for another stage, or a shard_size that does not divide the group
    """
    if stage not in STAGES:
        raise ValueError(f"stage is {stage}; choose from {STAGES} (stage 0 is native/data.py)")
    if reshard_after_forward is None:
        reshard_after_forward = stage == 3
    mesh = mesh_of(group, shard_size, next(model.parameters()).device)
    options = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    parts = units(model)
    for unit in parts:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if prefetch:
        prefetch_forward(parts)
    return FSDP(model, group, mesh, stage)


def mesh_of(group: dist.ProcessGroup, shard_size: int | None, device: torch.device) -> DeviceMesh:
    """One dimension over the group; with shard_size two: copies, and shards inside each copy."""
    device_type = device.type
    if device_type == "meta":
        device_type = rank_device().type
    if shard_size is None or shard_size == group.size():
        return DeviceMesh.from_group(group, device_type)
    if shard_size < 1 or group.size() % shard_size != 0:
        divisors = [size for size in range(1, group.size() + 1) if group.size() % size == 0]
        raise ValueError(
            f"shard_size ({shard_size}) must divide the group's {group.size()} ranks; choose from {divisors}"
        )
    if group.size() != dist.get_world_size():
        raise ValueError(
            f"shard_size ({shard_size}) needs the group of all {dist.get_world_size()} ranks, not of {group.size()}; "
            "leave shard_size out, or pass dist.group.WORLD"
        )
    shape = (group.size() // shard_size, shard_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def units(model: nn.Module) -> list[list[nn.Module]]:
    """What is gathered and freed together, in order of use: what precedes the blocks, each block, what follows them.

    A tied head is in the embedding's unit, so that the shared tensor has one place; a model without blocks is its root.
    """
    if not hasattr(model, "blocks"):
        return []
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    position = children.index(model.blocks)
    before, after = children[:position], children[position + 1 :]
    blocks = [[block] for block in model.blocks]
    if {p for child in before for p in child.parameters()} & {p for child in after for p in child.parameters()}:
        return [before + after, *blocks]
    return [unit for unit in [before, *blocks, after] if unit]


def prefetch_forward(parts: list[list[nn.Module]]) -> None:
    """Has each unit start to gather the next one, before it computes itself."""
    for unit, following in itertools.pairwise(parts):
        unit[0].set_modules_to_forward_prefetch([following[0]])


# --- DDP with ZeroRedundancyOptimizer


def build_ddp(model: nn.Module, group: dist.ProcessGroup) -> DDP:
    """Makes `model` data parallel with DDP; make_optimizer then shares out the optimizer's states alone.

    Bytes    sent per rank and step: 2 (dp - 1) / dp P of gradients, and P (dp - 1) / dp of parameters on average
    """
    return DDP(model, process_group=group, gradient_as_bucket_view=True)


def make_optimizer(
    engine: FSDP | DDP, lr: float = 3e-3, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.Optimizer:
    """AdamW over the shards of this rank; for a DDP engine a ZeroRedundancyOptimizer around AdamW."""
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    if not isinstance(engine, DDP):
        return make_adamw(engine, **options)
    parameters = [param for _, param in trainable(engine)]
    return ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, process_group=engine.process_group, parameters_as_bucket_view=True, **options
    )


# --- to start from


@torch.no_grad()
def fill(engine: FSDP, whole_of: Callable[[str], Tensor]) -> None:
    """Gives an engine built on the meta device its storage, and each shard its part of `whole_of(name)`.

    Bytes    at most one whole parameter beside the shards; nothing is sent
    """
    device_type = engine.mesh.device_type
    engine.to_empty(device=device_type)
    if hasattr(engine.module, "tie"):
        engine.module.tie()
    for name, param in engine.named_parameters():
        source = whole_of(name).to(device_type)
        part = distribute_tensor(source, param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(part.to_local())


def unsharded_parameters(engine: nn.Module) -> list[str]:
    """Names of parameters that are not DTensors cut along dimension 0: empty if all is as it should be."""
    return [
        name
        for name, param in engine.named_parameters()
        if not (isinstance(param, DTensor) and any(placement.is_shard(0) for placement in param.placements))
    ]


# --- the same with Accelerate


def build_accelerated(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_micro_batches: int, reshard_after_forward: bool = True
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Lets an Accelerator shard model and optimizer with its FSDP2 plugin, over all ranks.

    On a CPU Accelerator ignores the plugin without a word and takes DDP. The two assignments below are what its own
    constructor does on a GPU; all that follows is Accelerate's own code.

    Raises   RuntimeError if a parameter is not sharded afterwards
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.blocks[0]).__name__],
        cpu_ram_efficient_loading=False,
    )
    on_cpu = next(model.parameters()).device.type == "cpu"
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin, gradient_accumulation_steps=num_micro_batches)
    if on_cpu:
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    engine, optimizer = accelerator.prepare(model, optimizer)
    check_sharded(engine)
    return accelerator, engine, optimizer


def check_sharded(engine: nn.Module) -> None:
    """Raises   RuntimeError if any parameter is whole on this rank: then nothing was saved, and nothing said so"""
    missing = unsharded_parameters(engine)
    if missing or not isinstance(engine, FSDPModule):
        raise RuntimeError(
            f"{len(missing)} parameters are whole on this rank ({', '.join(missing[:3])}), and the engine is a "
            f"{type(engine).__name__}; shard it with `build`, or on a CPU with `build_accelerated`"
        )


def accelerated_step(
    accelerator: Accelerator,
    engine: nn.Module,
    micro_batches: MicroBatches,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None = None,
) -> Tensor:
    """One training step; `accumulate` holds reductions back, `backward` divides by the number of micro-batches.

    Micro-batches must hold equally many tokens: here the mean over them is of their means.
    """
    losses = []
    for x_BS, y_BS in micro_batches:
        with accelerator.accumulate(engine):
            loss = loss_of(engine, x_BS, y_BS)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip_norm is not None:
                accelerator.clip_grad_norm_(engine.parameters(), clip_norm)
            optimizer.step()  # does nothing but after the last micro-batch
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).mean()
