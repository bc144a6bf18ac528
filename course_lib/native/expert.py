"""Expert parallelism from parts that PyTorch ships; it has no engine for it. Read beside parallel/expert.py.

    part                                        in place of
    init_device_mesh((expert_dp, ep))           expert_groups: rows of neighbours share the experts
    all_to_all_single_autograd                  exchange: uneven pieces, and the gradients' way home
    F.grouped_mm                                a loop over experts: their matrices stacked, x sorted, one call a matrix
    DistributedDataParallel, experts ignored    the flat all-reduce of everything but experts, here while backward runs

DDP means over ranks, so the loss is multiplied by their number before: the division is by all tokens. grouped_mm takes
FP32, BF16 and FP16, and only rows of a multiple of 16 bytes (D and d_expert); otherwise a loop runs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm
from course_lib.layout.experts import ExpertLayout, check_expert_parallel
from course_lib.model.moe import MoE, Routing, combine, dispatch, moe_layers
from course_lib.parallel.engine import Engine, MicroBatches, trainable

MATRICES = ("gate", "up", "down")


class GroupedExperts(nn.Module):
    """Neighbouring experts, each kind of matrix in one tensor.
    Shapes   gate_eFD, up_eFD, down_eDF; x_RD sorted by expert, rows_e -> y_RD
    """

    def __init__(self, experts: list[nn.Module]):
        super().__init__()
        for name in MATRICES:
            weights = [getattr(expert, name).weight for expert in experts]
            stacked = torch.stack([weight.detach() for weight in weights])
            setattr(self, name, nn.Parameter(stacked, requires_grad=weights[0].requires_grad))

    def forward(self, x_RD: Tensor, rows_e: Tensor) -> Tensor:
        hidden_RF = F.silu(products(x_RD, self.gate, rows_e)) * products(x_RD, self.up, rows_e)
        return products(hidden_RF, self.down, rows_e)


def products(x_RD: Tensor, w_eFD: Tensor, rows_e: Tensor) -> Tensor:
    """Each expert's matrix times its own rows."""
    whole_lines = all(size * w_eFD.element_size() % 16 == 0 for size in w_eFD.shape[1:])
    if whole_lines and w_eFD.dtype in (torch.float32, torch.bfloat16, torch.float16):  # what grouped_mm takes
        return F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=rows_e.cumsum(0, dtype=torch.int32))
    return torch.cat(
        [F.linear(part_RD, w_FD) for part_RD, w_FD in zip(x_RD.split(rows_e.tolist()), w_eFD, strict=True)]
    )


class ExpertDDP(DistributedDataParallel, Engine):
    """DDP for all but experts, of which each rank has its own. Each rank brings equally many micro-batches."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, mesh: DeviceMesh, layout: ExpertLayout) -> None:
        super().__init__(module, process_group=group)
        self.mesh, self.layout, self.norm_groups = mesh, layout, (mesh.get_group("ep"),)
        self.loss_group, self.loss_op = group, "mean"

    def count_tokens(self, micro_batches: MicroBatches) -> float:
        """A rank's in the mean: DDP divides by the number of ranks."""
        total = torch.tensor(super().count_tokens(micro_batches), device=self.device)
        return comm.all_reduce(total, self.process_group).item() / self.process_group.size()

    def finish(self) -> None:
        """What DDP does not sum: experts', over the ranks that have the same, divided by ALL ranks as the rest is."""
        group = self.mesh.get_group("expert_dp")
        for param in [param for moe in moe_layers(self) for param in moe.experts.parameters()]:
            if param.grad is not None:
                param.grad /= self.process_group.size()
                if group.size() > 1:
                    dist.all_reduce(param.grad, group=group)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        for name, param in trainable(self.module):
            yield param, 1 if ".experts." in name else self.layout.ep_size

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        whole = {}
        for name, x in super().whole(tensor_of).items():
            before, is_expert, matrix = name.partition(".experts.")
            if not is_expert:
                whole[name] = x
                continue
            of_ranks = comm.all_gather(x.contiguous(), self.mesh.get_group("ep"))
            for number, of_expert in enumerate(of_ranks):
                whole[f"{before}.experts.{number}.{matrix}.weight"] = of_expert
        return whole


def build(model: nn.Module, group: dist.ProcessGroup, ep_size: int | None = None) -> ExpertDDP:
    """Spreads experts over ep neighbours and wraps the rest in DDP; every rank must bring the same weights.
    Bytes    DDP sends the first rank's parameters to all, but not experts
    Raises   ValueError if sizes do not fit, or `group` is not the whole world, of which the mesh is made
    """
    layout = check_expert_parallel(model.config, group.size(), ep_size or group.size())
    if group.size() != dist.get_world_size():
        raise ValueError(f"the group has {group.size()} of {dist.get_world_size()} ranks; give dist.group.WORLD")
    device = model.embed.weight.device.type
    mesh = init_device_mesh(
        device, (group.size() // layout.ep_size, layout.ep_size), mesh_dim_names=("expert_dp", "ep")
    )
    for moe in moe_layers(model):
        keep_my_experts(moe, layout, mesh.get_local_rank("ep"))
        moe.run_experts = partial(_run_grouped, mesh.get_group("ep"))
        moe.sum_load = partial(comm.all_reduce, group=group)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    names += [name for name, _ in model.named_buffers()]  # loads are each rank's own, biases equal by the same rule
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return ExpertDDP(model, group, mesh, layout)


def keep_my_experts(moe: MoE, layout: ExpertLayout, ep_rank: int) -> None:
    width = layout.experts_per_rank
    moe.experts = GroupedExperts(list(moe.experts)[ep_rank * width : (ep_rank + 1) * width])


def _run_grouped(group: dist.ProcessGroup, experts: GroupedExperts, x_TD: Tensor, routing: Routing) -> Tensor:
    """`moe.run_experts` over a group: a row for every choice."""
    x_RD, assignment_R, rows_E = dispatch(x_TD, routing)
    to_rank = rows_E.view(group.size(), -1)
    from_rank = torch.empty_like(to_rank)
    dist.all_to_all_single(from_rank, to_rank, group=group)
    sent_rows, received_rows = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()

    received_RD = all_to_all_single_autograd(x_RD, received_rows, sent_rows, group)
    expert_R = torch.arange(to_rank.shape[1], device=x_RD.device).repeat(group.size())
    order_R = expert_R.repeat_interleave(from_rank.flatten()).argsort(stable=True)
    y_RD = experts(received_RD[order_R], from_rank.sum(0))
    returned_RD = all_to_all_single_autograd(y_RD[order_R.argsort()], sent_rows, received_rows, group)
    return combine(returned_RD, assignment_R, routing)
