"""Sequence parallelism as PyTorch ships it: native/tensor.py's plan, with the residual stream in pieces along S.

Read beside parallel/sequence.py. Each all-reduce of B S D becomes a reduce-scatter and an all-gather. The gradients of
norms stay Partial until `finish` sums each: forgotten, it stays right, and AdamW sums a norm's gradient three times.
The residual stream stays a DTensor of the whole shape. Uneven S are cut as torch.chunk cuts; below torch 2.13 they are
refused: there DTensor hands the next layer a strided tensor, and the layer fails. In the gpt family the table of
positions is cut along its rows like the embedding, for its output has to be cut along S.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from course_lib.compat import DTENSOR_GATHERS_UNEVEN
from course_lib.native.tensor import (
    Plan,
    TensorParallel,
    check_shardable,
    columns,
    keep_own_part,
    norms_of_heads,
    one_input,
)
from course_lib.parallel.engine import MicroBatches

ALONG_S = Shard(1)  # of x_BSD
ALONG_LAST = Shard(-1)  # what a row's columns left


class TensorSequenceParallel(TensorParallel):
    """Tensor parallelism whose hidden states between layers are cut along the sequence.
    Bytes    a micro-batch, L layers: (4 L + 2) reduce-scatters and as many all-gathers of B S D elements, 3 all-reduces
             of B S; a step: 2 L + 1 all-reduces of D
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(model, group, sequence_plan(model))
        if hasattr(model, "positions"):
            model.positions.weight.register_post_accumulate_grad_hook(keep_own_part)

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Raises ValueError if S does not divide, below torch 2.13, before anything is sent."""
        tp_size = self.mesh.size()
        for seq_len in (x_BS.shape[1] for x_BS, _ in micro_batches):
            if seq_len < tp_size:
                raise ValueError(f"seq_len ({seq_len}) must be at least tp ({tp_size}): each rank needs a position")
            if seq_len % tp_size and not DTENSOR_GATHERS_UNEVEN:
                raise ValueError(
                    f"seq_len ({seq_len}) must be divisible by tp ({tp_size}) with torch {torch.__version__}; "
                    "choose such a length, install torch 2.13, or use parallel/sequence.py"
                )
        return super().run(micro_batches)


def build(model: nn.Module, group: dist.ProcessGroup) -> TensorSequenceParallel:
    """Shards `model` over `group` in place, weights and sequence; all ranks bring the same weights.
    Bytes    none
    Raises   what native/tensor.py's build raises
    """
    check_shardable(model.config, group.size())
    return TensorSequenceParallel(model, group)


def sequence_plan(model: nn.Module) -> Plan:
    """Norms and residual stream in pieces along S; gathered before columns, reduce-scattered after rows."""
    plan = {
        "embed": row_to_pieces(Replicate()),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=ALONG_S, output_layouts=Shard(-1), use_local_output=False),
    }
    if hasattr(model, "positions"):  # a table of S rows: no B in its output
        plan["positions"] = row_to_pieces(Replicate(), Shard(0))
    for index, block in enumerate(model.blocks):
        attention, mlp = f"blocks.{index}.attention", f"blocks.{index}.mlp"
        plan |= {f"blocks.{index}.{norm}": SequenceParallel() for norm in ("attention_norm", "mlp_norm")}
        plan[attention] = one_input(model.config, ALONG_S)
        plan |= {f"{attention}.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= norms_of_heads(model.config, attention)
        plan[f"{attention}.o"] = row_to_pieces()
        plan[mlp] = PrepareModuleInput(input_layouts=ALONG_S, desired_input_layouts=Replicate())
        plan |= {f"{mlp}.{name}": ColwiseParallel(use_local_output=False) for name in columns(block.mlp)}
        plan[f"{mlp}.down"] = row_to_pieces()
    return plan


def row_to_pieces(input_layout: Replicate | Shard = ALONG_LAST, pieces: Shard = ALONG_S) -> RowwiseParallel:
    """A row whose partial sums end up in pieces along S, still as a DTensor."""
    return RowwiseParallel(input_layouts=input_layout, output_layouts=pieces, use_local_output=False)
