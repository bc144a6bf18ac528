"""Expert parallelism without options: each rank has its own tokens and E / ep of the experts; rows travel.

    count   how many rows I have for each expert; an all-to-all tells each rank what will come
    rows    Exchange to the ranks of the experts; forward x, backward its gradient on the way back
    back    Exchange with the two lists of lengths swapped

All other parameters are on every rank, as in data parallelism. The engine in parallel/expert.py adds ranks that hold
the same experts (ep smaller than dp), ZeRO, tensor parallelism, a way that crosses nodes once, and uneven batches.

Source   Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2, with pieces of uneven lengths in place of a capacity
"""

from functools import partial

import torch
from torch import nn

from course_lib import comm
from course_lib.minimal.moe import MOE_CONFIG, MoE, combine, dispatch, put_experts, run_experts
from course_lib.training import loss_of


class GatheringMoE(MoE):
    """Naive: every rank gets the tokens of all ranks. Forward only."""

    def __init__(self, router, experts, k, group):
        super().__init__(router, experts, k)
        self.experts, self.group = my_experts(experts, group), group

    def run(self, x_TD, expert_Tk, weight_Tk):
        """Gather all tokens, run my experts on those that chose them, sum over ranks."""
        mine = (x_TD, expert_Tk, weight_Tk)
        x_all, expert_all, weight_all = (comm.all_gather(one, self.group) for one in mine)
        y_all = torch.zeros_like(x_all)
        for number, expert in self.experts.items():
            token, slot = (expert_all == int(number)).nonzero(as_tuple=True)
            y_all[token] += expert(x_all[token]) * weight_all[token, slot, None]
        return comm.reduce_scatter(y_all, self.group)


def my_experts(experts, group):
    """Keep the E / ep consecutive experts of this rank, under their numbers."""
    each = len(experts) // group.size()
    if each * group.size() != len(experts):
        raise ValueError(f"{len(experts)} experts do not divide by {group.size()} ranks; change ep")
    first = group.rank() * each
    return nn.ModuleDict({str(e): experts[e] for e in range(first, first + each)})


def by_expert(from_rank):
    """Return the order that sorts rows by expert; they came sorted by source rank, then by expert."""
    ranks, experts = from_rank.shape
    numbers = torch.arange(experts, device=from_rank.device).repeat(ranks)
    expert_R = numbers.repeat_interleave(from_rank.flatten())
    return expert_R.argsort(stable=True)


def send_rows(x_RD, sent, received, group):
    """Send rows to other ranks; autograd does not see it."""
    return comm.all_to_all(x_RD, group, sent, received)


class NaiveExpertParallelMoE(MoE):
    """Rows travel to the ranks of their experts, and the results travel back."""

    move = staticmethod(send_rows)

    def __init__(self, router, experts, k, group):
        super().__init__(router, experts, k)
        self.experts, self.group = my_experts(experts, group), group

    def run(self, x_TD, expert_Tk, weight_Tk):
        """Dispatch, counts, rows, my experts, rows back, combine."""
        x_RD, order_R, rows_E = dispatch(x_TD, expert_Tk, self.router.out_features)
        to_rank = rows_E.view(self.group.size(), -1)  # for each expert of each rank
        from_rank = comm.all_to_all(to_rank, self.group)  # for each of mine, from each rank
        sent, received = to_rank.sum(1).tolist(), from_rank.sum(1).tolist()
        x_RD = self.move(x_RD, sent, received, self.group)
        sort_R = by_expert(from_rank)
        y_RD = run_experts(self.experts.values(), x_RD[sort_R], from_rank.sum(0))
        y_RD = self.move(y_RD[sort_R.argsort()], received, sent, self.group)
        return combine(y_RD, order_R, weight_Tk)


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; backward sends the gradients back."""

    @staticmethod
    def forward(ctx, x_RD, sent, received, group):
        ctx.lengths, ctx.group = (received, sent), group  # swapped for the way back
        return comm.all_to_all(x_RD, group, sent, received)

    @staticmethod
    def backward(ctx, grad_RD):
        grad_RD = comm.all_to_all(grad_RD.contiguous(), ctx.group, *ctx.lengths)
        return grad_RD, None, None, None


class ExpertParallelMoE(NaiveExpertParallelMoE):
    """Rows travel, and so do their gradients."""

    move = staticmethod(Exchange.apply)


def gather_experts(tensors, group):
    """Return the tensors of all ranks by name: of experts each rank's own, of the rest this rank's."""
    full = {}
    for name, tensor in tensors.items():
        before, is_expert, after = name.partition(".experts.")
        if not is_expert:
            full[name] = tensor.detach()
            continue
        number, matrix = after.split(".", 1)
        each = MOE_CONFIG.moe.num_experts // group.size()
        for rank, part in enumerate(comm.all_gather(tensor.detach()[None], group)):
            full[f"{before}.experts.{rank * each + int(number) % each}.{matrix}"] = part
    return full


class ExpertParallel:
    """A Llama with experts on all ranks of a group; each rank brings its own tokens."""

    config, layer = MOE_CONFIG, ExpertParallelMoE

    def __init__(self, model, make_optimizer, group):
        self.group = group
        self.model = put_experts(model, partial(self.layer, group=group))
        self.optimizer = make_optimizer(self.model.parameters())

    def backward(self, micro_batches):
        """Compute the gradients of the mean loss over the tokens of all ranks."""
        for x_BS, y_BS in micro_batches:
            loss = loss_of(self.model, x_BS, y_BS)
            (loss / len(micro_batches) / self.group.size()).backward()
        self.sum_gradients()

    def sum_gradients(self):
        """Sum over ranks what every rank has; an expert has seen all its tokens already."""
        for name, param in self.model.named_parameters():
            if ".experts." not in name:
                param.grad = comm.all_reduce(param.grad, self.group)

    def update(self):
        """Update my experts, and the shared parameters alike on every rank."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        """Return every parameter, with the experts of all ranks."""
        return gather_experts(dict(self.model.named_parameters()), self.group)


class TensorParallelExperts(MoE):
    """The other cut: a slice of every expert on every rank. Forward only."""

    def __init__(self, router, experts, k, group):
        super().__init__(router, experts, k)
        self.group = group
        for one in experts:
            for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
                matrix = getattr(one, name)
                parts = matrix.weight.detach().chunk(group.size(), dim)
                matrix.weight = nn.Parameter(parts[group.rank()].clone())

    def run(self, x_TD, expert_Tk, weight_Tk):
        """Gather all tokens, run all experts with few columns, sum the partial sums."""
        mine = (x_TD, expert_Tk, weight_Tk)
        y_partial = super().run(*(comm.all_gather(one, self.group) for one in mine))
        return comm.reduce_scatter(y_partial, self.group)
