"""ZeRO by DeepSpeed, stages 0 to 3, behind the calls of native/zero.py. `make test-deepspeed` installs it and tests it.

    engine = build(model, group, config)                    # config: course_lib.plan.config_files.deepspeed
    optimizer = make_optimizer(engine)                      # DeepSpeed's engine itself: the optimizer is inside
    loss = step(engine, micro_batches, optimizer)

DeepSpeed wraps the optimizer too, as it flattens parameters and updates flat partitions. What belongs to a step is in
the config: stage, accumulation, clipping, precision, offload. Its terms are mapped in course_lib/plan/config_files.py.

In stages 1 and 2 it all-reduces gradients (0.19.8: `use_multi_rank_bucket_allreduce`, on by default), keeps its part of
the sum and gathers parameters: 2 P + P where reduce-scatter and gather would be P + P. With that option off each part
is reduced to its owner alone, which is P + P again, in more calls. Stage 3 reduce-scatters.

Without a GPU: DS_ACCELERATOR=cpu, and torch's AdamW, since DeepSpeed's own would have to be compiled. Master weights
are FP32 here whatever the model is: float64 gradients are rounded to it.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import Tensor, nn

from course_lib import comm
from course_lib.parallel.engine import MicroBatches, ModelEngine, accumulate_gradients, step, trainable

__all__ = [
    "DeepSpeed", "accumulate_gradients", "build", "build_accelerated", "full_gradients", "full_parameters", "load",
    "make_optimizer", "partition_numel", "step",
]  # fmt: skip


def load():
    """DeepSpeed, told before it is imported that there is no GPU, where there is none.

    Raises   ImportError that says how to install it
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError(
            "DeepSpeed is not installed; `make test-deepspeed` does it, and so does pip install 'course-lib[deepspeed]'"
        ) from error
    return deepspeed


class DeepSpeed(ModelEngine):
    """A model inside DeepSpeed's engine, which has the optimizer and clips as its config says."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__(engine.module)
        self.engine = engine

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.engine(*inputs)

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of all micro-batches; DeepSpeed reduces gradients and means them over ranks."""
        num_tokens, losses = self.count_tokens(micro_batches), []
        for index, (x_BS, y_BS) in enumerate(micro_batches):
            self.engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = self.share_of_loss(x_BS, y_BS, num_tokens)
            self.engine.backward(loss, scale_wrt_gas=False)  # the share of tokens is the scale
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def mean_loss(self, share: Tensor) -> Tensor:
        return comm.all_reduce(share, dist.group.WORLD, op="mean")


def build(
    model: nn.Module,
    group: dist.ProcessGroup,
    config: dict,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
) -> DeepSpeed:
    """Lets DeepSpeed shard model and AdamW's states over all ranks, as `config` says.

    Bytes    a rank holds: stage 1 its share of master weights and moments, 2 of gradients too, 3 of parameters too
    Raises   ValueError if the group is not all ranks
    """
    if group.size() != dist.get_world_size():
        raise ValueError(
            f"group has {group.size()} ranks, DeepSpeed takes all {dist.get_world_size()}: dist.group.WORLD"
        )
    parameters = [param for _, param in trainable(model)]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay)
    config = config | {"zero_force_ds_cpu_optimizer": False}  # offload with torch's AdamW instead of a compiled one
    engine, *_ = load().initialize(model=model, optimizer=optimizer, config=config)
    return DeepSpeed(engine)


def make_optimizer(engine: DeepSpeed) -> nn.Module:
    """DeepSpeed's engine, whose `step` clips, updates and forgets the gradients; its options were `build`'s."""
    return engine.engine


def full_parameters(engine: DeepSpeed) -> dict[str, Tensor]:
    """Name -> whole parameter in FP32, on every rank. All ranks must call it."""
    load()
    from deepspeed.utils import safe_get_full_fp32_param

    is_sharded = engine.engine.zero_optimization_stage() > 0
    return whole(engine, lambda param: safe_get_full_fp32_param(param) if is_sharded else param.detach())


def full_gradients(engine: DeepSpeed) -> dict[str, Tensor]:
    """Name -> whole gradient, on every rank; before the optimizer's step. All ranks must call it."""
    load()
    from deepspeed.utils import safe_get_full_grad

    return whole(engine, safe_get_full_grad)


def whole(engine: DeepSpeed, tensor_of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    return {name: tensor_of(param).clone() for name, param in trainable(engine.module)}


def partition_numel(optimizer) -> int:
    """How many elements of master weights, and of each moment, DeepSpeed's optimizer holds on this rank.

    Raises   RuntimeError if DeepSpeed's optimizer has no partitions: then nothing was sharded
    """
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return sum(partition.numel() for partition in getattr(optimizer, name))
    raise RuntimeError(f"{type(optimizer).__name__} has no partitions; choose stage 1, 2 or 3")


# --- the same with Accelerate


def build_accelerated(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Lets an Accelerator hand model and optimizer to DeepSpeed, over all ranks.

    On a CPU `Accelerator(cpu=True)` would ignore the plugin without a word and take DDP; without it, and without the
    backend named, Accelerate would count one process where DeepSpeed has all.

    Raises   RuntimeError if what comes back is not DeepSpeed's engine on every rank
    """
    load()
    config = config | {"zero_force_ds_cpu_optimizer": False}
    handlers = [InitProcessGroupKwargs(backend=dist.get_backend())]
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=handlers)
    engine, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.num_processes != dist.get_world_size() or not hasattr(engine, "zero_optimization_stage"):
        raise RuntimeError(
            f"Accelerator made a {type(engine).__name__} over {accelerator.num_processes} of {dist.get_world_size()} "
            "ranks; leave cpu=True out, and create no other Accelerator before"
        )
    return accelerator, engine, optimizer
