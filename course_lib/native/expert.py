"""Expert parallelism from parts that PyTorch ships; it has no engine for it. Read beside parallel/expert.py.

    part                                        in place of
    init_device_mesh((expert_dp, ep))           expert_groups: rows of neighbours share the experts
    all_to_all_single_autograd                  exchange: uneven pieces, and the gradients' way home
    F.grouped_mm                                a loop over experts: their matrices stacked, x sorted, one call a matrix
    DistributedDataParallel, experts ignored    the flat all-reduce of everything but experts, here while backward runs

What is left to hand-written code on both sides: the router, sorting, counts, and what each gradient is summed over and
divided by. DDP means over ranks, so the loss is multiplied by their number before: the division is by all tokens.

all_to_all_single_autograd is in torch.distributed._functional_collectives, whose name says private; torchtitan uses it.
grouped_mm takes FP32, BF16 and FP16, and only rows of a multiple of 16 bytes (D and d_expert); otherwise a loop runs.
Not here: once_per_rank and once_per_node, and tensor parallelism.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from course_lib.layout.experts import ExpertLayout, check_expert_parallel
from course_lib.model.moe import MoE, Routing, balance_after_step, combine, count_load, dispatch, moe_layers, moe_losses
from course_lib.parallel.data import MicroBatches

MATRICES = ("gate", "up", "down")


# --- experts of a rank, stacked


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
    if can_group(w_eFD):
        return F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=rows_e.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(part_RD, w_FD) for part_RD, w_FD in zip(x_RD.split(rows_e.tolist()), w_eFD)])


def can_group(w_eFD: Tensor) -> bool:
    """Whether grouped_mm takes these matrices."""
    whole_lines = all(size * w_eFD.element_size() % 16 == 0 for size in w_eFD.shape[1:])
    return whole_lines and w_eFD.dtype in (torch.float32, torch.bfloat16, torch.float16)


# --- build


def build(model: nn.Module, group: dist.ProcessGroup, ep_size: int | None = None) -> DistributedDataParallel:
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
        moe.run_experts = partial(run_grouped, mesh.get_group("ep"))
        moe.sum_load = partial(sum_over, group=group)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    names += [name for name, _ in model.named_buffers()]  # loads are each rank's own, biases equal by the same rule
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    engine = DistributedDataParallel(model, process_group=group)
    engine.mesh, engine.layout = mesh, layout
    return engine


def keep_my_experts(moe: MoE, layout: ExpertLayout, ep_rank: int) -> None:
    """Replaces all experts by this rank's, stacked."""
    width = layout.experts_per_rank
    moe.experts = GroupedExperts(list(moe.experts)[ep_rank * width : (ep_rank + 1) * width])


def run_grouped(group: dist.ProcessGroup, experts: GroupedExperts, x_TD: Tensor, routing: Routing) -> Tensor:
    """`moe.run_experts` over a group: a row for every choice."""
    x_RD, assignment_R, rows_E = dispatch(x_TD, routing)
    to_rank_Ne = rows_E.view(group.size(), -1)
    from_rank_Ne = torch.empty_like(to_rank_Ne)
    dist.all_to_all_single(from_rank_Ne, to_rank_Ne, group=group)
    sent_rows, received_rows = to_rank_Ne.sum(1).tolist(), from_rank_Ne.sum(1).tolist()

    received_RD = all_to_all_single_autograd(x_RD, received_rows, sent_rows, group)
    expert_R = torch.arange(to_rank_Ne.shape[1], device=x_RD.device).repeat(group.size())
    order_R = expert_R.repeat_interleave(from_rank_Ne.flatten()).argsort(stable=True)
    y_RD = experts(received_RD[order_R], from_rank_Ne.sum(0))
    returned_RD = all_to_all_single_autograd(y_RD[order_R.argsort()], sent_rows, received_rows, group)
    return combine(returned_RD, assignment_R, routing)


def sum_over(tokens_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The load of all ranks."""
    total_E = tokens_E.clone()
    dist.all_reduce(total_E, group=group)
    return total_E


# --- step


def accumulate_gradients(engine: DistributedDataParallel, micro_batches: MicroBatches) -> Tensor:
    """Leaves the gradient of all ranks' tokens in `.grad`; returns their mean loss. Equally many parts on each rank."""
    group, num_ranks = engine.process_group, engine.process_group.size()
    total = torch.tensor(sum(y_BS.numel() for _, y_BS in micro_batches), device=engine.device)
    dist.all_reduce(total, group=group)
    losses = []
    for index, (x_BS, y_BS) in enumerate(micro_batches):
        engine.require_backward_grad_sync = index == len(micro_batches) - 1  # what no_sync() sets
        loss = share_of_loss(engine, x_BS, y_BS, int(total))
        (loss * num_ranks).backward()
        losses.append(loss.detach())
    mean_expert_gradients(engine)
    mean_loss = torch.stack(losses).sum()
    dist.all_reduce(mean_loss, group=group)
    return mean_loss


def share_of_loss(engine: DistributedDataParallel, x_BS: Tensor, y_BS: Tensor, total_tokens: int) -> Tensor:
    """What this micro-batch adds to the mean loss of all tokens of all ranks, balancing included."""
    logits_BSV = engine(x_BS)
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    share = F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten(), reduction="sum") / total_tokens
    auxiliary = moe_losses(engine)
    count_load(engine)
    return share if auxiliary is None or not y_BS.numel() else share + auxiliary * (y_BS.numel() / total_tokens)


def mean_expert_gradients(engine: DistributedDataParallel) -> None:
    """Summed over the ranks that have the same experts, divided by the number of ALL ranks, as DDP divides the rest."""
    group = engine.mesh.get_group("expert_dp")
    for moe in moe_layers(engine):
        for param in moe.experts.parameters():
            if param.grad is not None:
                param.grad /= engine.process_group.size()
                if group.size() > 1:
                    dist.all_reduce(param.grad, group=group)


def make_optimizer(engine: nn.Module, lr: float = 3e-3, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW over what this rank has."""
    params = [param for param in engine.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def clip_gradients(engine: DistributedDataParallel, max_norm: float) -> Tensor:
    """Scales all gradients so that the norm of the whole model's does not exceed max_norm; returns the norm before."""
    experts = [param for name, param in engine.named_parameters() if ".experts." in name]
    rest = [param for name, param in engine.named_parameters() if ".experts." not in name]
    norms = [nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]) for params in (experts, rest)]
    square = norms[0].square()
    dist.all_reduce(square, group=engine.mesh.get_group("ep"))
    norm = (square + norms[1].square()).sqrt()
    nn.utils.clip_grads_with_norm_([*experts, *rest], max_norm, norm)
    return norm


def step(
    engine: DistributedDataParallel,
    micro_batches: MicroBatches,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None = None,
) -> Tensor:
    """One training step; returns the mean loss of all ranks."""
    loss = accumulate_gradients(engine, micro_batches)
    if clip_norm is not None:
        clip_gradients(engine, clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    balance_after_step(engine)
    return loss


# --- whole tensors, for tests and for looking


def full_parameters(engine: DistributedDataParallel) -> dict[str, Tensor]:
    """Every parameter whole, on each rank, by the unsharded model's names."""
    return _whole(engine, {name: param.detach() for name, param in engine.module.named_parameters()})


def full_gradients(engine: DistributedDataParallel) -> dict[str, Tensor]:
    """Every gradient whole, on each rank, by the unsharded model's names."""
    grads = {name: param.grad for name, param in engine.module.named_parameters()}
    return _whole(engine, {name: grad for name, grad in grads.items() if grad is not None})


def _whole(engine: DistributedDataParallel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    whole = {}
    for name, x in tensors.items():
        before, is_expert, matrix = name.partition(".experts.")
        if not is_expert:
            whole[name] = x.clone()
            continue
        parts = [torch.empty_like(x) for _ in range(engine.layout.ep_size)]
        dist.all_gather(parts, x.contiguous(), group=engine.mesh.get_group("ep"))
        for number, of_expert in enumerate(torch.cat(parts)):
            whole[f"{before}.experts.{number}.{matrix}.weight"] = of_expert
    return whole
