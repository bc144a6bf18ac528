"""Tensor parallelism as PyTorch ships it: a plan for `parallelize_module`, on DTensors. Read beside parallel/tensor.py.

A DTensor is a local tensor, a mesh of ranks, and placements: Shard(dim), Replicate(), Partial() (a sum not yet taken).
Each operator derives the placement of its result from those of its inputs; communication happens where a placement is
changed. What the plan's entries are in the from-scratch code:

    ColwiseParallel()             ColumnLinear: weight w_fD, Shard(0); the result is Shard(-1)
    RowwiseParallel()             RowLinear: weight w_Df, Shard(1); the result is Partial, then Replicate: sum_out
    PrepareModuleInput            column_linears: one copy_in for all columns that share an input. Its gradient is
                                  Partial; the sum of q's, k's and v's stays so, and is all-reduced once. Without this
                                  entry each column wraps the input for itself: 5 all-reduces a layer in backward, not 2
    use_local_output              True: the next operator gets a plain tensor, as everything from scratch does. q, k, v:
                                  attention reads head counts from them. False: it gets the DTensor, which knows its
                                  whole size; a local tensor is taken for a tp-th of the whole, so d_ff that tp does not
                                  divide needs gate, up, and what follows, as DTensors
    RowwiseParallel on embed      VocabEmbedding: rows of others give zeros, and the sum fills them in
    ColwiseParallel on head,      vocab_cross_entropy: logits_BSv stay in pieces, and loss_parallel() gives PyTorch's
    with loss_parallel()          own cross_entropy its three all-reduces (maximum, sum of exponentials, target)
    src_data_rank=None            each rank cuts its shards from the weights that it has; otherwise rank 0 sends its own
    model.tie()                   the plan makes a new parameter of each entry: embedding and head must be tied again
    (nothing)                     norms stay plain tensors: input and gradient are whole on each rank
    SequenceParallel(             QK-norm: its input is cut by heads, dimension 1 of q_BNSH, so its weight's gradient is
    sequence_dim=1)               Partial, and `finish` sums it: sum_replicas. As a plain tensor it would stay a part

On the wire, per micro-batch, as from scratch: 2 all-reduces of B S D a layer forward and 2 backward, 1 for the
embedding, 1 for the head's input gradient, 3 of B S numbers for the loss. Recomputation repeats what its part of
forward sends. What differs from scratch:

    backward            the all-reduce starts when the weight gradients of q, k and v are done: no overlap with them.
                        (Async tensor parallelism of PyTorch is in torch.compile, and needs GPUs.)
    embedding           its gradient is computed whole on each rank, V D numbers, and then cut: zeros are not left out
    clipping            one all-reduce too, of a number for each sharded tensor
    key/value heads     fewer than ranks: refused. One mesh axis holds one placement a tensor, and "a head to every two
                        ranks" is Shard on one axis and Replicate on another
    dropout             refused: each rank would drop the same places of different heads
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
from course_lib.parallel.engine import (
    MicroBatches,
    accumulate_gradients,
    clip_gradients,
    full_gradients,
    full_parameters,
    make_optimizer,
    one_after_another,
    step,
    trainable,
)

__all__ = [
    "Plan", "TensorParallel", "accumulate_gradients", "build", "check_shardable", "clip_gradients", "columns",
    "full_gradients", "full_parameters", "keep_own_part", "make_optimizer", "one_input", "step", "tensor_plan",
]  # fmt: skip

Plan = dict[str, ParallelStyle]


# --- build


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
        check_sharded(model, group.size())
        super().__init__(model, mesh)

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of all micro-batches; the gradient of the logits is in pieces as well."""
        with loss_parallel():
            return one_after_another(self, micro_batches)

    def finish(self) -> None:
        """Makes Partial gradients whole: those of what is Replicate and saw only this rank's heads or positions."""
        for _, param in trainable(self.module):
            if isinstance(param, DTensor) and param.grad is not None and param.grad.placements != param.placements:
                param.grad = param.grad.redistribute(placements=param.placements)

    def mean_loss(self, share: Tensor) -> Tensor:
        return share.full_tensor()


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
    if config.family not in ("llama", "gpt"):
        raise ValueError(f"family is {config.family!r}; this plan knows llama and gpt")
    if config.mla is not None:
        raise ValueError(f"{config.name} has latent attention (mla), which this plan does not shard; use another model")
    for field in ("num_heads", "num_kv_heads"):
        heads = getattr(config, field)
        if heads % tp_size:
            fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            raise ValueError(f"{field} ({heads}) must be divisible by tp ({tp_size}); choose tp from {fitting}")
    if config.dropout > 0:
        raise ValueError(f"dropout is {config.dropout}: ranks would share one mask; use 0, or parallel/tensor.py")


def check_sharded(model: nn.Module, tp_size: int) -> None:
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
