"""Experts and tensor parallelism together: attention and every matrix of an expert are cut over tp.

All ranks of a tp_group have the same tokens, route them alike, and each sends whole rows to its parts of the experts:
works for few large experts, keeps one process's routing, and sends each row tp times. The other way, tokens split over
tp and whole experts, sends it once; it needs experts enough for ep = dp x tp.

What a rank computes of an expert's output is one term of a sum over tp. So is its part of all outputs combined: one
sum, after combine, serves all experts. The router is whole on each rank, as norms are.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from course_lib.conjugate import InFlight, copy_in, sum_out
from course_lib.moe import MoE, Routing
from course_lib.parallel import tensor
from course_lib.parallel.linear import ColumnLinear, WholeStream
from course_lib.parallel.vocabulary import VocabEmbedding


@dataclass(frozen=True)
class PartialStream(WholeStream):
    """Inside an expert nothing is summed: what comes out is a part of a sum, and stays so until after combine."""

    def leave(self, x_partial: Tensor) -> Tensor:
        return x_partial

    def start_sum(self, grad_partial: Tensor) -> InFlight:
        return InFlight(None, lambda: grad_partial)


def cut_over_tp(model: nn.Module, stream: WholeStream) -> None:
    """`tensor.shard_model`, with experts for MLPs. The router stays whole on each rank, as norms do."""
    model.embed = VocabEmbedding(model.embed, stream)
    for block in model.blocks:
        tensor.shard_attention(block.attention, stream, model.config)
        if isinstance(block.mlp, MoE):
            cut_experts(block.mlp, stream)
        else:
            tensor.shard_mlp(block.mlp, stream)
    model.head = ColumnLinear(model.head, stream)
    model.tie()
    model.stream, model.replica_group = stream, tensor.replica_group_of(model.config, stream.group)


def cut_experts(moe: MoE, stream: WholeStream) -> None:
    """One sum of inputs' gradients and one of outputs for all experts together, outside of dispatch and combine."""
    for expert in moe.experts.values():
        tensor.shard_mlp(expert, PartialStream(stream.group))
    if moe.shared is not None:
        tensor.shard_mlp(moe.shared, stream)
    run, tp_group = moe.run_experts, stream.group

    def run_parts(experts: nn.Module, x_TD: Tensor, routing: Routing) -> Tensor:
        """The weights enter as x does: each rank's gradient of them comes from its part of the outputs."""
        routing = replace(routing, weight_Tk=copy_in(routing.weight_Tk, tp_group))
        return sum_out(run(experts, copy_in(x_TD, tp_group), routing), tp_group)

    moe.run_experts = run_parts
