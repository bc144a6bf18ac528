"""The graders of chapter 06 accept right answers that are arranged otherwise, three of each."""

import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import sampled

from course_lib import comm
from course_lib.checks import ch06
from course_lib.layout import piece_sizes
from course_lib.minimal.sequence import TensorSequenceParallel, norms_of
from course_lib.minimal.tensor import TensorParallel

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ shapes
def shape_by_table(region, sp, config, B, S, t, rank):
    tokens = piece_sizes(S, t)[rank] if sp else S
    return {
        "residual": (B, tokens, config.d_model),
        "column input": (B, S, config.d_model),
        "queries": (B, S, config.num_heads * config.head_dim // t),
        "features": (B, S, config.d_ff // t),
        "row output": (B, S, config.d_model),
    }[region]


def shape_from_a_tensor(region, sp, config, B, S, t, rank):
    widths = {"queries": config.num_heads * config.head_dim, "features": config.d_ff}
    x = torch.empty(B, S, widths.get(region, config.d_model), device="meta")
    if region in widths:
        x = x.chunk(t, dim=2)[rank]
    elif region == "residual" and sp:
        x = x.chunk(t, dim=1)[rank]
    return tuple(x.shape)


def shape_in_a_list(region, sp, config, B, S, t, rank):
    each = math.ceil(S / t)
    mine = min(S, (rank + 1) * each) - min(S, rank * each)
    width = {"queries": config.num_heads // t * config.head_dim, "features": config.d_ff // t}
    return [B, mine if sp and region == "residual" else S, width.get(region, config.d_model)]


# ------------------------------------------------------------------------------------ bytes kept
def kept_by_table(mode, recompute, t, scores):
    if recompute == "full":
        return {"tp": 2, "tp+sp": 2 / t, "regather": 2 / t}[mode]
    base = {"tp": 10 + 24 / t, "tp+sp": 4 + 30 / t, "regather": 34 / t}[mode]
    return base if recompute == "selective" else base + scores / t


def kept_by_tensor(mode, recompute, t, scores):
    norms, columns, masks, inside = 4, 4, 2, 24
    if recompute == "full":
        return 2 / (1 if mode == "tp" else t)
    total = (norms + masks) / (1 if mode == "tp" else t) + columns / (t if mode == "regather" else 1)
    return total + (inside + (recompute == "none") * scores) / t


def kept_from_one_gpu(mode, recompute, t, scores):
    whole = {"full": 2, "selective": 34, "none": 34 + scores}[recompute]
    copies = {"tp": 2 if recompute == "full" else 10, "tp+sp": 0 if recompute == "full" else 4, "regather": 0}[mode]
    return copies + (whole - copies) / t


# ------------------------------------------------------------------------------------ gather_in of any length
def pad(x, length):
    return F.pad(x, (0, 0, 0, length - x.shape[1]))


class PadsAndNarrows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group, ctx.mine, ctx.each = group, x_BsD.shape[1], -(-S // group.size())
        x_sBD = pad(x_BsD, ctx.each).transpose(0, 1).contiguous()
        return comm.all_gather(x_sBD, group).transpose(0, 1)[:, :S].contiguous()

    @staticmethod
    def backward(ctx, grad_BSD):
        grad_SBD = pad(grad_BSD, ctx.each * ctx.group.size()).transpose(0, 1).contiguous()
        return comm.reduce_scatter(grad_SBD, ctx.group).transpose(0, 1)[:, : ctx.mine].contiguous(), None, None


class ByTheEngine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group = group
        return comm.join(x_BsD, group, 1, S)

    @staticmethod
    def backward(ctx, grad_BSD):
        return comm.scatter_sum(grad_BSD, ctx.group, 1), None, None


class WithLists(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group, ctx.sizes = group, piece_sizes(S, group.size())
        pieces = [x_BsD.new_empty(pad(x_BsD, ctx.sizes[0]).shape) for _ in ctx.sizes]
        dist.all_gather(pieces, pad(x_BsD, ctx.sizes[0]).contiguous(), group=group)
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, ctx.sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, grad_BSD):
        pieces = torch.stack([pad(piece, ctx.sizes[0]) for piece in grad_BSD.split(ctx.sizes, dim=1)])
        mine = comm.reduce_scatter(pieces, ctx.group)[0]
        return mine[:, : ctx.sizes[ctx.group.rank()]].contiguous(), None, None


# ------------------------------------------------------------------------------------ the forgotten sum
def sums_in_name_order(gradients, cut, group):
    names = sorted(gradients.keys() - cut)
    flat_P = comm.all_reduce(torch.cat([gradients[name].reshape(-1) for name in names]), group)
    start = 0
    for name in names:
        gradients[name].view(-1).copy_(flat_P[start : start + gradients[name].numel()])
        start += gradients[name].numel()


def sums_with_dist(gradients, cut, group):
    mine = [grad for name, grad in gradients.items() if name not in cut]
    flat_P = torch.cat([grad.flatten() for grad in mine])
    dist.all_reduce(flat_P, group=group)
    for grad, part in zip(mine, flat_P.split([grad.numel() for grad in mine]), strict=True):
        grad.set_(part.view_as(grad).clone())


def adds_what_others_have(gradients, cut, group):
    mine = [grad for name, grad in gradients.items() if name not in cut]
    own_P = torch.cat([grad.flatten() for grad in mine])
    others_P = comm.all_reduce(own_P, group) - own_P
    for grad, part in zip(mine, others_P.split([grad.numel() for grad in mine]), strict=True):
        grad += part.view_as(grad)


# ------------------------------------------------------------------------------------ half a block
def bias_with_the_residual(x_BsD, norm, up_fD, down_Df, bias_D, group):
    hidden_BSf = F.gelu(comm.gather_in(norm(x_BsD), group, 1) @ up_fD.t())
    return (x_BsD + bias_D) + comm.scatter_sum(hidden_BSf @ down_Df.t(), group, 1)


def residual_last(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD_partial = F.linear(F.gelu(F.linear(comm.gather_in(norm(x_BsD), group, 1), up_fD)), down_Df)
    y_BsD = comm.scatter_sum(y_BSD_partial, group, dim=1) + bias_D
    return y_BsD + x_BsD


def bias_on_one_rank(x_BsD, norm, up_fD, down_Df, bias_D, group):
    """Right: added to one of the partial sums, the bias is in the sum once."""
    bias = bias_D if group.rank() == 0 else torch.zeros_like(bias_D)
    y_BSD_partial = F.linear(F.gelu(F.linear(comm.gather_in(norm(x_BsD), group, 1), up_fD)), down_Df)
    return x_BsD + comm.scatter_sum(y_BSD_partial + bias, group, 1)


# ------------------------------------------------------------------------------------ the cheapest way that fits
def choice_by_cases(free_bytes, s, b, h, layers, t):
    sbh = s * b * h
    if layers * sbh * (4 + 30 / t) <= free_bytes:
        return "keep"
    if layers * sbh * 34 / t <= free_bytes:
        return "regather"
    if (2 * layers + 32) * sbh / t <= free_bytes:
        return "full"
    raise ValueError("nothing fits")


def choice_in_whole_numbers(free_bytes, s, b, h, layers, t):
    room = free_bytes * t
    for way, factor in (("keep", layers * (30 + 4 * t)), ("regather", 34 * layers), ("full", 2 * layers + 32)):
        if factor * s * b * h <= room:
            return way
    raise ValueError(f"even full recomputation needs more than {free_bytes} bytes")


def choice_from_the_end(free_bytes, s, b, h, layers, t):
    found = None
    for way, per_token in (
        ("full", (2 * layers + 32) / t),
        ("regather", layers * 34 / t),
        ("keep", layers * (4 + 30 / t)),
    ):
        if per_token * s * b * h <= free_bytes:
            found = way
    if found is None:
        raise ValueError("too little memory")
    return found


# ------------------------------------------------------------------------------------ TP + SP from an empty cell
class SumsBeforeTheStep(TensorParallel):
    """The package's functions; the sum belongs to the update."""

    enter = staticmethod(lambda x_BsD, group: comm.gather_in(x_BsD, group, 1))
    leave = staticmethod(lambda x_BSD, group: comm.scatter_sum(x_BSD, group, 1))

    def update(self):
        for param in norms_of(self.model):
            param.grad = comm.all_reduce(param.grad, self.group)
        super().update()


class OneMessagePerNorm(TensorSequenceParallel):
    def backward(self, micro_batches):
        TensorParallel.backward(self, micro_batches)
        for module in self.model.modules():
            if type(module).__name__ == "RMSNorm":
                dist.all_reduce(module.weight.grad, group=self.group)


class GathersLists(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group):
        ctx.group = group
        pieces = [torch.empty_like(x_BsD) for _ in range(group.size())]
        dist.all_gather(pieces, x_BsD.contiguous(), group=group)
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx, grad_BSD):
        return comm.reduce_scatter(torch.cat(grad_BSD.chunk(ctx.group.size(), 1)), ctx.group), None


class FromItsParts(TensorParallel):
    """Its own gather; norms are marked when the model is built, and summed once their gradients are complete."""

    enter = staticmethod(GathersLists.apply)
    leave = staticmethod(lambda x_BSD, group: comm.scatter_sum(x_BSD, group, 1))

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.marked = [param for param in self.model.parameters() if param.dim() == 1]

    def backward(self, micro_batches):
        super().backward(micro_batches)
        summed = comm.all_reduce(torch.stack([param.grad for param in self.marked]), self.group)
        for param, grad in zip(self.marked, summed, strict=True):
            param.grad = grad.clone()


RIGHT = {
    "check_shape": (shape_by_table, shape_from_a_tensor, shape_in_a_list),
    "check_kept": (kept_by_table, kept_by_tensor, kept_from_one_gpu),
    "check_gather_in": (PadsAndNarrows, ByTheEngine, WithLists),
    "check_sum_of_my_tokens": (sums_in_name_order, sums_with_dist, adds_what_others_have),
    "check_mlp_block": (bias_with_the_residual, residual_last, bias_on_one_rank),
    "check_choice": (choice_by_cases, choice_in_whole_numbers, choice_from_the_end),
    "check_sequence_parallel": (SumsBeforeTheStep, OneMessagePerNorm, FromItsParts),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 6)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch06, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out
