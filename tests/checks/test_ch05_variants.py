"""The graders of chapter 05 accept right answers that are arranged otherwise, three of each."""

import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from harness import sampled
from torch import nn

from course_lib.checks import ch05
from course_lib.comm import all_gather, all_reduce, copy_in, join, my_piece, sum_out
from course_lib.minimal.tensor import TensorParallel, part_of
from course_lib.parallel import engine as engines
from course_lib.parallel import tensor as engine_of

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ heads
def _refuse(num_heads, num_kv_heads, tp_size):
    if num_heads % tp_size or (num_kv_heads % tp_size and tp_size % num_kv_heads):
        raise ValueError("these heads do not divide; change tp_size")


def heads_by_chunk(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    queries = torch.arange(num_heads).chunk(tp_size)[tp_rank]
    return queries.tolist(), (queries * num_kv_heads // num_heads).unique().tolist()


def heads_by_filter(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    queries = [head for head in range(num_heads) if head * tp_size // num_heads == tp_rank]
    return queries, list(dict.fromkeys(head // (num_heads // num_kv_heads) for head in queries))


def heads_by_bounds(num_heads, num_kv_heads, tp_size, tp_rank):
    _refuse(num_heads, num_kv_heads, tp_size)
    start, stop = (rank * num_heads // tp_size for rank in (tp_rank, tp_rank + 1))
    reads = num_heads // num_kv_heads
    return list(range(start, stop)), list(range(start // reads, (stop - 1) // reads + 1))


# ------------------------------------------------------------------------------------ share
def share_by_layer(num_layers, d_model, num_parameters, tp, sold_bytes_per_s, flops_per_s):
    all_reduce_s = 2 * (tp - 1) / tp * 2 * d_model / (sold_bytes_per_s / 2)
    return num_layers * 4 * all_reduce_s * flops_per_s * tp / (6 * num_parameters)


def share_in_one_line(num_layers, d_model, num_parameters, tp, sold_bytes_per_s, flops_per_s):
    return 32 * num_layers * d_model * (tp - 1) * flops_per_s / (6 * num_parameters * sold_bytes_per_s)


def share_by_phases(num_layers, d_model, num_parameters, tp, sold_bytes_per_s, flops_per_s):
    phase = 2 * d_model - 2 * d_model / tp
    return (8 * num_layers * phase / (0.5 * sold_bytes_per_s)) / (6 * (num_parameters / tp) / flops_per_s)


# ------------------------------------------------------------------------------------ a row layer with a bias
def row_with_bias_on_rank_0(x_BSf, w_DF, b_D, group):
    w_Df = w_DF.chunk(group.size(), 1)[group.rank()]
    return all_reduce(F.linear(x_BSf, w_Df, b_D if group.rank() == 0 else None), group)


def row_with_shares_of_the_bias(x_BSf, w_DF, b_D, group):
    w_Df = my_piece(w_DF, group.rank(), group.size(), 1)
    return all_reduce(x_BSf @ w_Df.t() + b_D / group.size(), group)


def row_by_sum_out(x_BSf, w_DF, b_D, group):
    return sum_out(x_BSf @ my_piece(w_DF, group.rank(), group.size(), 1).t(), group).add(b_D)


# ------------------------------------------------------------------------------------ gathered features
class GatherAndUnflatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Tf, group):
        ctx.group = group
        parts = all_gather(x_Tf.contiguous(), group).unflatten(0, (group.size(), -1))
        return parts.movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, grad_TF):
        return grad_TF.unflatten(1, (ctx.group.size(), -1))[:, ctx.group.rank()].clone(), None


def gather_and_unflatten(x_Tf, group):
    return GatherAndUnflatten.apply(x_Tf, group)


class GatherAndCat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Tf, group):
        ctx.start, ctx.width = group.rank() * x_Tf.shape[1], x_Tf.shape[1]
        return torch.cat(all_gather(x_Tf, group).chunk(group.size()), dim=1)

    @staticmethod
    def backward(ctx, grad_TF):
        return grad_TF[:, ctx.start : ctx.start + ctx.width], None


def gather_and_cat(x_Tf, group):
    return GatherAndCat.apply(x_Tf, group)


def gather_by_join(x_Tf, group):
    return join(x_Tf, group, dim=-1)


# ------------------------------------------------------------------------------------ backward of a column layer
def column_by_einsum(grad_BSf, x_BSD, w_fD, group):
    grad_x = all_reduce(torch.einsum("bsf,fd->bsd", grad_BSf, w_fD).contiguous(), group)
    return grad_x, torch.einsum("bsf,bsd->fd", grad_BSf, x_BSD), grad_BSf.sum((0, 1))


def column_by_autograd(grad_BSf, x_BSD, w_fD, group):
    x, w = x_BSD.clone().requires_grad_(), w_fD.clone().requires_grad_()
    b = torch.zeros(len(w_fD), dtype=w_fD.dtype, requires_grad=True)
    F.linear(copy_in(x, group), w, b).backward(grad_BSf)
    return x.grad, w.grad, b.grad


def column_weight_first(grad_BSf, x_BSD, w_fD, group):
    rows_Tf, rows_TD = grad_BSf.reshape(-1, len(w_fD)), x_BSD.reshape(-1, w_fD.shape[1])
    grad_w, grad_b = (rows_TD.t() @ rows_Tf).t(), rows_Tf.t().sum(1)
    return all_reduce(rows_Tf @ w_fD, group).view_as(x_BSD), grad_w, grad_b


# ------------------------------------------------------------------------------------ the loss by hand
def _own(y_BS, first, count):
    return (y_BS >= first) & (y_BS < first + count), (y_BS - first).clamp(0, count - 1)


def loss_with_two_sums_in_one_message(logits_BSv, y_BS, first, group):
    v = logits_BSv.shape[-1]
    is_mine_BS, place_BS = _own(y_BS, first, v)
    max_BS = all_reduce(logits_BSv.amax(-1), group, op="max")
    exp_BSv = (logits_BSv - max_BS.unsqueeze(-1)).exp()
    target_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1) * is_mine_BS
    sum_BS, target_BS = all_reduce(torch.stack([exp_BSv.sum(-1), target_BS]), group)
    onehot_BSv = F.one_hot(place_BS, v) * is_mine_BS.unsqueeze(-1)
    return sum_BS.log() + max_BS - target_BS, exp_BSv / sum_BS.unsqueeze(-1) - onehot_BSv


def loss_by_logsumexp(logits_BSv, y_BS, first, group):
    is_mine_BS, place_BS = _own(y_BS, first, logits_BSv.shape[-1])
    own_BS = logits_BSv.logsumexp(-1)
    max_BS = all_reduce(own_BS.clone(), group, op="max")
    total_BS = all_reduce((own_BS - max_BS).exp(), group).log() + max_BS
    target_BS = all_reduce(logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1).where(is_mine_BS, 0), group)
    grad_BSv = (logits_BSv - total_BS.unsqueeze(-1)).exp()
    grad_BSv.scatter_add_(-1, place_BS.unsqueeze(-1), -is_mine_BS.unsqueeze(-1).to(grad_BSv.dtype))
    return total_BS - target_BS, grad_BSv


def loss_by_autograd(logits_BSv, y_BS, first, group):
    z_BSv, (is_mine_BS, place_BS) = logits_BSv.clone().requires_grad_(), _own(y_BS, first, logits_BSv.shape[-1])
    shifted_BSv = z_BSv - all_reduce(logits_BSv.amax(-1), group, op="max").unsqueeze(-1)
    sum_BS = sum_out(shifted_BSv.exp().sum(-1), group)
    target_BS = sum_out(shifted_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1) * is_mine_BS, group)
    loss_BS = sum_BS.log() - target_BS
    loss_BS.sum().backward()
    return loss_BS.detach(), z_BSv.grad


# ------------------------------------------------------------------------------------ a tensor-parallel Llama
class ByTheEngine:
    """The engine of the course, whose all-reduce of f runs beside the weight gradients."""

    same_tokens = True

    def __init__(self, model, make_optimizer, group):
        self.engine = engine_of.build(model, group)
        self.model = self.engine.module
        self.optimizer = make_optimizer(self.model.parameters())

    def backward(self, micro_batches):
        for x_BS, y_BS in micro_batches:
            (engine_of.loss_of(self.engine, x_BS, y_BS) / len(micro_batches)).backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        return engines.full_parameters(self.engine)


class LossOnceForAllMicroBatches(TensorParallel):
    """One backward for the sum of all losses."""

    def backward(self, micro_batches):
        sum(self.loss(x_BS, y_BS) for x_BS, y_BS in micro_batches).div(len(micro_batches)).backward()


class WithoutHooks(TensorParallel):
    """f stands where the products share an input, g in the rows' forward."""

    def __init__(self, model, make_optimizer, group):
        self.full_shapes, self.model, self.group = {n: p.shape for n, p in model.named_parameters()}, model, group
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                dim = 1 if name.endswith((".o", ".down")) else 0
                layer.weight = part_of(layer.weight, group, dim)
                if dim:
                    layer.forward = lambda x, layer=layer: sum_out(F.linear(x, layer.weight), group)
        for block in model.blocks:
            for part in (block.attention, block.mlp):
                part.project = lambda x, layers: [F.linear(x, layer.weight) for layer in layers]
                part.forward = lambda x, *rest, forward=part.forward: forward(copy_in(x, group), *rest)
        model.head.forward = lambda x: F.linear(copy_in(x, group), model.head.weight)
        model.embed.forward = self.look_up
        self.optimizer = make_optimizer(model.parameters())

    def look_up(self, tokens_BS):
        weight = self.model.embed.weight
        is_mine_BS, place_BS = _own(tokens_BS, self.group.rank() * len(weight), len(weight))
        return sum_out(weight[place_BS] * is_mine_BS.unsqueeze(-1), self.group)


RIGHT = {
    "check_heads": (heads_by_chunk, heads_by_filter, heads_by_bounds),
    "check_share": (share_by_layer, share_in_one_line, share_by_phases),
    "check_row": (row_with_bias_on_rank_0, row_with_shares_of_the_bias, row_by_sum_out),
    "check_gather_features": (gather_and_unflatten, gather_and_cat, gather_by_join),
    "check_column_backward": (column_by_einsum, column_by_autograd, column_weight_first),
    "check_vocab_loss": (loss_with_two_sums_in_one_message, loss_by_logsumexp, loss_by_autograd),
    "check_tensor_parallel": (ByTheEngine, LossOnceForAllMicroBatches, WithoutHooks),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), sampled([(check, answer) for check, answers in RIGHT.items() for answer in answers], 7)
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch05, check)(answer)
    assert f"{check}: passed" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_two_sums_in_one_message_pass_with_any_number_of_ranks(seed, capsys):
    ch05.check_vocab_loss(loss_with_two_sums_in_one_message, seed=seed)
    assert "check_vocab_loss: passed" in capsys.readouterr().out
