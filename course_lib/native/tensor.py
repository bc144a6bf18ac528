"""Tensor parallelism as PyTorch ships it: a plan for `parallelize_module`, on DTensors. Read beside parallel/tensor.py.

A DTensor is a local tensor, a mesh of ranks, and placements: Shard(dim), Replicate(), Partial() (a sum not yet taken).
Each operator derives the placement of its result from those of its inputs; communication happens where a placement is
changed. Lesson 05 in depth says what each entry of the plan is from scratch. What the plan cannot say:

    src_data_rank=None    each rank cuts its shards from the weights that it has; otherwise rank 0 sends its own
    model.tie()           the plan makes a new parameter of each entry: embedding and head must be tied again
    embedding             its gradient is computed whole on each rank, V D numbers, and then cut: keep_own_part
    QK-norm               its input is cut by heads, so its weight's gradient is Partial, and `finish` sums it
    refused               key/value heads that do not divide (one mesh axis holds one placement a tensor); dropout (each
                          rank would drop the same places of different heads)
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from course_lib.config import ModelConfig
from course_lib.native.dtensor import DTensorEngine
from course_lib.parallel.engine import MicroBatches, one_after_another, trainable

Plan = dict[str, ParallelStyle]


class TensorParallel(DTensorEngine):
    """A model cut over the ranks of one group as a plan says; all of them bring the same tokens.
    Bytes    a micro-batch, L layers: (4 L + 2) all-reduces of B S D elements, 3 of B S; with QK-norm a step: 2 L of H
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, plan: Plan) -> None:
        """Turns the parameters that the plan names into DTensors, and hooks the redistributions around their modules.
        Raises   RuntimeError if a matrix was left whole
        """
        mesh = DeviceMesh.from_group(group, model.embed.weight.device.type, mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan, src_data_rank=None)
        model.tie()
        model.embed.weight.register_post_accumulate_grad_hook(keep_own_part)
        _check_sharded(model, group.size())
        super().__init__(model, mesh)

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of all micro-batches; the gradient of the logits is in pieces as well."""
        with loss_parallel():
            return one_after_another(self, micro_batches).full_tensor()

    def finish(self) -> None:
        """Makes Partial gradients whole: those of what is Replicate and saw only this rank's heads or positions."""
        for _, param in trainable(self.module):
            if isinstance(param, DTensor) and param.grad is not None and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)


def build(model: nn.Module, group: dist.ProcessGroup) -> TensorParallel:
    """Shards `model` over `group` in place; every rank must bring the same weights.

    Families llama and gpt. Uneven sizes: d_ff and the vocabulary are cut as torch.chunk cuts, heads must divide.
    Bytes    none
    Raises   ValueError where heads do not divide, or dropout is above 0; RuntimeError if a matrix was left whole
    """
    check_shardable(model.config, group.size())
    return TensorParallel(model, group, tensor_plan(model))


def tensor_plan(model: nn.Module) -> Plan:
    """Columns, then rows: one sum behind attention, one behind the MLP."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index, block in enumerate(model.blocks):
        attention, mlp = f"blocks.{index}.attention", f"blocks.{index}.mlp"
        plan[attention] = one_input(model.config, Replicate())
        plan |= {f"{attention}.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= norms_of_heads(model.config, attention)
        plan[f"{attention}.o"] = RowwiseParallel()
        plan[mlp] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        plan |= {f"{mlp}.{name}": ColwiseParallel(use_local_output=False) for name in columns(block.mlp)}
        plan[f"{mlp}.down"] = RowwiseParallel()
    return plan


def norms_of_heads(config: ModelConfig, attention: str) -> Plan:
    """QK-norm's entries: each rank has some heads of q_BNSH and k_BKSH, and the whole weight."""
    names = ("q_norm", "k_norm") if config.qk_norm else ()
    return {f"{attention}.{name}": SequenceParallel(sequence_dim=1, use_local_output=True) for name in names}


def one_input(config: ModelConfig, placement: Replicate | Shard) -> PrepareModuleInput:
    """Attention's input x becomes one Replicate DTensor for q, k and v; Llama's RoPE tables stay as they are."""
    tables = (None, None) if config.family == "llama" else ()
    return PrepareModuleInput(input_layouts=(placement, *tables), desired_input_layouts=(Replicate(), *tables))


def columns(mlp: nn.Module) -> list[str]:
    """The matrices of an MLP that share its input: gate and up, or up alone."""
    return [name for name, _ in mlp.named_children() if name != "down"]


def check_shardable(config: ModelConfig, tp_size: int) -> None:
    """Raises ValueError for what this plan cannot shard, before anything is changed."""
    if config.family not in ("llama", "gpt") or config.mla is not None or config.dropout > 0:
        raise ValueError(f"this plan takes llama and gpt without mla or dropout; {config.name} is another")
    for field in ("num_heads", "num_kv_heads"):
        if getattr(config, field) % tp_size:
            raise ValueError(f"{field} ({getattr(config, field)}) must be divisible by tp ({tp_size}); change tp")


def _check_sharded(model: nn.Module, tp_size: int) -> None:
    """Raises RuntimeError unless embedding and linear layers are all cut: PyTorch only warns of an idle entry."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) and module is not model.embed:
            continue
        weight = module.weight
        placements = weight.placements if isinstance(weight, DTensor) else ("not a DTensor",)
        if not isinstance(placements[0], Shard) or weight.device_mesh.size() != tp_size:
            raise RuntimeError(f"{name}.weight was not sharded over {tp_size} ranks ({placements[0]}); see the plan")
        if tp_size > 1 and weight.to_local().shape == weight.shape:
            raise RuntimeError(f"{name}.weight is whole on this rank: {tuple(weight.shape)}")


def keep_own_part(param: nn.Parameter) -> None:
    """Cuts a gradient that is whole on each rank to this rank's part, at once: no communication."""
    if all(placement.is_replicate() for placement in param.grad.placements):
        param.grad = param.grad.redistribute(placements=param.placements)
