"""Wrong answers to the exercises of chapter 06, each with what its grader must say about it."""

import torch
import torch.nn.functional as F

from course_lib.checks.ch06 import (
    check_choice,
    check_gather_in,
    check_kept,
    check_mlp_block,
    check_sequence_parallel,
    check_shape,
    check_sum_of_my_tokens,
)
from course_lib.comm import (
    all_gather,
    all_reduce,
    all_reduce_,
    gather_in,
    join,
    my_piece,
    reduce_scatter,
    scatter_sum,
    split,
    sum_out,
)
from course_lib.layout import piece_sizes
from course_lib.minimal.sequence import TensorSequenceParallel, sum_norm_gradients
from course_lib.minimal.tensor import TensorParallel


# ------------------------------------------------------------------------------------ 1. shapes of regions
def _shapes(config, B, S, t, residual, column_input=None, row_output=None):
    D = config.d_model
    return {
        "residual": residual,
        "column input": column_input or (B, S, D),
        "queries": (B, S, config.num_heads // t * config.head_dim),
        "features": (B, S, config.d_ff // t),
        "row output": row_output or (B, S, D),
    }


def _shard(config, B, S, t, rank):
    return B, piece_sizes(S, t)[rank], config.d_model


def stream_cut_by_tensor_parallelism(region, sp, config, B, S, t, rank):
    return _shapes(config, B, S, t, _shard(config, B, S, t, rank))[region]


def stream_never_cut(region, sp, config, B, S, t, rank):
    return _shapes(config, B, S, t, (B, S, config.d_model))[region]


def columns_read_shards(region, sp, config, B, S, t, rank):
    shard = _shard(config, B, S, t, rank)
    return _shapes(config, B, S, t, shard if sp else (B, S, config.d_model), shard if sp else None)[region]


def rows_give_shards(region, sp, config, B, S, t, rank):
    shard = _shard(config, B, S, t, rank)
    return _shapes(config, B, S, t, shard if sp else (B, S, config.d_model), None, shard if sp else None)[region]


def tokens_rounded_down(region, sp, config, B, S, t, rank):
    residual = (B, S // t, config.d_model) if sp else (B, S, config.d_model)
    return _shapes(config, B, S, t, residual)[region]


def cut_both_ways(region, sp, config, B, S, t, rank):
    residual = _shard(config, B, S, t, rank) if sp else (B, S, config.d_model)
    shape = _shapes(config, B, S, t, residual)[region]
    return (B, piece_sizes(S, t)[rank], shape[2]) if sp and region in ("queries", "features") else shape


def stream_cut_by_features(region, sp, config, B, S, t, rank):
    residual = (B, S, config.d_model // t if sp else config.d_model)
    return _shapes(config, B, S, t, residual)[region]


# ------------------------------------------------------------------------------------ 2. bytes kept
def _kept(mode, recompute, t, scores):
    if recompute == "full":
        return 2 if mode == "tp" else 2 / t
    return (
        {"tp": 10, "tp+sp": 4 + 6 / t, "regather": 10 / t}[mode] + 24 / t + (scores / t if recompute == "none" else 0)
    )


def everything_divided(mode, recompute, t, scores):
    return _kept("regather" if recompute != "full" else mode, recompute, t, scores)


def tensor_parallelism_divided_again(mode, recompute, t, scores):
    kept = _kept("tp" if recompute != "full" else mode, recompute, t, scores)
    return kept if mode == "tp" or recompute == "full" else kept / t


def tensor_parallelism_divided_again_but_not_the_scores(mode, recompute, t, scores):
    """Scores divided once, the rest of TP's share twice."""
    if recompute == "none" and mode != "tp":
        return _kept("tp", "selective", t, scores) / t + scores / t
    return _kept(mode, recompute, t, scores)


def always_regathered(mode, recompute, t, scores):
    return _kept("regather" if mode == "tp+sp" else mode, recompute, t, scores)


def never_regathered(mode, recompute, t, scores):
    return _kept("tp+sp" if mode == "regather" else mode, recompute, t, scores)


def scores_whole(mode, recompute, t, scores):
    return _kept(mode, recompute, t, scores * t)


def scores_kept(mode, recompute, t, scores):
    return _kept(mode, "none" if recompute == "selective" else recompute, t, scores)


def full_divided_by_tensor_parallelism(mode, recompute, t, scores):
    return 2 / t if recompute == "full" else _kept(mode, recompute, t, scores)


def full_never_divided(mode, recompute, t, scores):
    return 2 if recompute == "full" else _kept(mode, recompute, t, scores)


# ------------------------------------------------------------------------------------ 3. gather_in
def _gather(x_BsD, group):
    return all_gather(x_BsD.transpose(0, 1).contiguous(), group).transpose(0, 1).contiguous()


def _scatter(grad_BSD, group, op="sum"):
    return reduce_scatter(grad_BSD.transpose(0, 1).contiguous(), group, op).transpose(0, 1).contiguous()


class KeepsMySlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group = group
        return _gather(x_BsD, group)

    @staticmethod
    def backward(ctx, grad_BSD_partial):
        return my_piece(grad_BSD_partial, ctx.group.rank(), ctx.group.size(), 1).contiguous(), None, None


class GathersAndReshapes(KeepsMySlice):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group = group
        return all_gather(x_BsD, group).reshape(len(x_BsD), S, -1)


class ScattersAndReshapes(KeepsMySlice):
    @staticmethod
    def backward(ctx, grad_BSD_partial):
        B, _, D = grad_BSD_partial.shape
        mine = reduce_scatter(grad_BSD_partial.reshape(ctx.group.size(), -1).contiguous(), ctx.group)
        return mine.view(B, -1, D), None, None


class Averages(KeepsMySlice):
    @staticmethod
    def backward(ctx, grad_BSD_partial):
        return _scatter(grad_BSD_partial, ctx.group) / ctx.group.size(), None, None


class SumsEverything(KeepsMySlice):
    @staticmethod
    def backward(ctx, grad_BSD_partial):
        whole = all_reduce(grad_BSD_partial.contiguous(), ctx.group)
        return my_piece(whole, ctx.group.rank(), ctx.group.size(), 1).contiguous(), None, None


class FirstTokens(KeepsMySlice):
    @staticmethod
    def backward(ctx, grad_BSD_partial):
        whole = all_reduce(grad_BSD_partial.contiguous(), ctx.group)
        return my_piece(whole, 0, ctx.group.size(), 1).contiguous(), None, None


class AlongTheBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        ctx.group = group
        return all_gather(x_BsD.contiguous(), group)

    @staticmethod
    def backward(ctx, grad_BSD_partial):
        return reduce_scatter(grad_BSD_partial.contiguous(), ctx.group), None, None


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsD, group, S):
        return _gather(x_BsD, group)

    @staticmethod
    def backward(ctx, grad_BSD_partial):
        return None, None, None


# ------------------------------------------------------------------------------------ 4. the forgotten sum
def _sum_together(grads, group):
    flat_P = all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
    for grad, summed in zip(grads, flat_P.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def norms_only(gradients, cut, group):
    _sum_together([grad for name, grad in gradients.items() if "norm" in name], group)


def sums_everything(gradients, cut, group):
    _sum_together(list(gradients.values()), group)


def averages(gradients, cut, group):
    mine = [grad for name, grad in gradients.items() if name not in cut]
    _sum_together(mine, group)
    for grad in mine:
        grad /= group.size()


def one_message_each(gradients, cut, group):
    for name in sorted(gradients):
        if name not in cut:
            all_reduce_(gradients[name], group)


def new_tensors(gradients, cut, group):
    for name in gradients:
        if name not in cut:
            gradients[name] = all_reduce(gradients[name], group)


# ------------------------------------------------------------------------------------ 5. half a block
def _mlp(x_BSD, up_fD, down_Df):
    return F.linear(F.gelu(F.linear(x_BSD, up_fD)), down_Df)


def bias_before_the_sum(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD_partial = _mlp(gather_in(norm(x_BsD), group, 1), up_fD, down_Df) + bias_D
    return x_BsD + scatter_sum(y_BSD_partial, group, 1)


def residual_before_the_sum(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD_partial = gather_in(x_BsD, group, 1) + _mlp(gather_in(norm(x_BsD), group, 1), up_fD, down_Df)
    return scatter_sum(y_BSD_partial, group, 1) + bias_D


def no_residual(x_BsD, norm, up_fD, down_Df, bias_D, group):
    return scatter_sum(_mlp(gather_in(norm(x_BsD), group, 1), up_fD, down_Df), group, 1) + bias_D


def norm_after_the_gather(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD_partial = _mlp(norm(gather_in(x_BsD, group, 1)), up_fD, down_Df)
    return x_BsD + scatter_sum(y_BSD_partial, group, 1) + bias_D


def joins(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD_partial = _mlp(join(norm(x_BsD), group, 1), up_fD, down_Df)
    return x_BsD + scatter_sum(y_BSD_partial, group, 1) + bias_D


def all_reduces_and_splits(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD = sum_out(_mlp(gather_in(norm(x_BsD), group, 1), up_fD, down_Df), group)
    return x_BsD + split(y_BSD, group, 1) + bias_D


def stays_whole(x_BsD, norm, up_fD, down_Df, bias_D, group):
    y_BSD = sum_out(_mlp(gather_in(norm(x_BsD), group, 1), up_fD, down_Df), group)
    return gather_in(x_BsD, group, 1) + y_BSD + bias_D


# ------------------------------------------------------------------------------------ 6. the cheapest way that fits
def _choose(needed, free_bytes):
    for way, way_bytes in needed.items():
        if way_bytes <= free_bytes:
            return way
    raise ValueError("nothing fits")


def _needed(s, b, h, layers, t):
    unit = s * b * h // t
    return {"keep": layers * (30 + 4 * t) * unit, "regather": layers * 34 * unit, "full": (2 * layers + 32) * unit}


def no_working_set(free_bytes, s, b, h, layers, t):
    return _choose(_needed(s, b, h, layers, t) | {"full": 2 * layers * s * b * h // t}, free_bytes)


def keeps_34_over_t(free_bytes, s, b, h, layers, t):
    needed = _needed(s, b, h, layers, t)
    return _choose(needed | {"keep": needed["regather"]}, free_bytes)


def always_the_smallest(free_bytes, s, b, h, layers, t):
    return _choose({"full": _needed(s, b, h, layers, t)["full"]}, free_bytes)


def full_not_divided(free_bytes, s, b, h, layers, t):
    needed = _needed(s, b, h, layers, t)
    return _choose(needed | {"full": needed["full"] * t}, free_bytes)


def gathers_a_single_layer(free_bytes, s, b, h, layers, t):
    needed, unit = _needed(s, b, h, layers, t), s * b * h // t
    return _choose(needed | {"regather": 34 * unit}, free_bytes)


# ------------------------------------------------------------------------------------ 7. TP + SP from an empty cell
class WithoutTheSum(TensorSequenceParallel):
    backward = TensorParallel.backward


class AveragesNorms(TensorSequenceParallel):
    def update(self):
        for name, param in self.model.named_parameters():
            if "norm" in name:
                param.grad /= self.group.size()
        super().update()


class OnlyTheBlocksNorms(WithoutTheSum):
    def backward(self, micro_batches):
        super().backward(micro_batches)
        _sum_together([p.grad for name, p in self.model.named_parameters() if "_norm" in name], self.group)


class SumsMatricesToo(WithoutTheSum):
    def backward(self, micro_batches):
        super().backward(micro_batches)
        _sum_together([p.grad for p in self.model.parameters()], self.group)


class SumsAfterEachMicroBatch(WithoutTheSum):
    def backward(self, micro_batches):
        for x_BS, y_BS in micro_batches:
            (self.loss(x_BS, y_BS) / len(micro_batches)).backward()
            sum_norm_gradients(self.model, self.group)


class JoinsInFront(TensorSequenceParallel):
    enter = staticmethod(lambda x_BsD, group: join(x_BsD, group, 1))


class AllReducesAndSlices(TensorSequenceParallel):
    leave = staticmethod(lambda x_BSD, group: split(sum_out(x_BSD, group), group, 1))


class CutsTheBatch(TensorSequenceParallel):
    enter = staticmethod(lambda x_bSD, group: gather_in(x_bSD, group, 0))
    leave = staticmethod(lambda x_BSD, group: scatter_sum(x_BSD, group, 0))


WRONG = {
    "my_shape": {
        "check": check_shape,
        "answers": [
            (stream_cut_by_tensor_parallelism, "tensor parallelism alone leaves the residual stream whole"),
            (stream_never_cut, "with sp the residual stream is in shards"),
            (columns_read_shards, "a column's input is gathered first"),
            (rows_give_shards, "is cut when it leaves"),
            (tokens_rounded_down, "tokens that do not divide"),
            (cut_both_ways, "along the sequence or along features, never both"),
            (stream_cut_by_features, "cut along the sequence, not along features"),
        ],
    },
    "my_kept": {
        "check": check_kept,
        "answers": [
            (everything_divided, "divides only 24 of the 34"),
            (tensor_parallelism_divided_again, "inside attention and MLP, cut already"),
            (tensor_parallelism_divided_again_but_not_the_scores, "24/t, like the scores, is cut already"),
            (always_regathered, "the columns keep their gathered inputs"),
            (never_regathered, "the inputs of columns are kept as shards"),
            (scores_whole, "scores belong to heads"),
            (scores_kept, "selective recomputation keeps no scores"),
            (full_divided_by_tensor_parallelism, "the whole input of a layer"),
            (full_never_divided, "a layer's input is in shards"),
        ],
    },
    "MyGatherIn": {
        "check": check_gather_in,
        "answers": [
            (KeepsMySlice, "each token met the columns of every rank"),
            (GathersAndReshapes, "and were reshaped: that mixes sequences and tokens"),
            (ScattersAndReshapes, "backward cut the sum along the batch and reshaped it"),
            (Averages, "averaged over the ranks"),
            (SumsEverything, "half an all-reduce"),
            (FirstTokens, "these are the first rank's tokens"),
            (AlongTheBatch, "put together along the batch"),
            (NoGradient, "no gradient arrived"),
        ],
    },
    "my_sum": {
        "check": check_sum_of_my_tokens,
        "answers": [
            (norms_only, "not norms only"),
            (sums_everything, "every rank has another part of this tensor"),
            (averages, "averaged"),
            (one_message_each, "send one all-reduce"),
            (new_tensors, "write into the old one"),
        ],
    },
    "my_mlp_block": {
        "check": check_mlp_block,
        "answers": [
            (bias_before_the_sum, "the bias is in it once for every rank"),
            (residual_before_the_sum, "the residual is in it once for every rank"),
            (no_residual, "the residual is missing"),
            (norm_after_the_gather, "normalise before the gather"),
            (joins, "the gradient of x is not"),
            (all_reduces_and_splits, "forward and backward, and"),
            (stays_whole, "a rank returns its own tokens"),
        ],
    },
    "my_choice": {
        "check": check_choice,
        "answers": [
            (no_working_set, "one layer at a time is whole again"),
            (keeps_34_over_t, "30/t + 4 for each layer"),
            (always_the_smallest, "fits as well, and is cheaper"),
            (full_not_divided, "it raised ValueError, but"),
            (gathers_a_single_layer, "34/t for each layer"),
        ],
    },
    "MySequenceParallel": {
        "check": check_sequence_parallel,
        "answers": [
            (TensorParallel, "the first norm was given all"),
            (CutsTheBatch, "cut the tokens, dimension 1, not the batch"),
            (WithoutTheSum, "the gradient of every norm is not"),
            (OnlyTheBlocksNorms, "the gradients of 1 of 9 norms are not summed"),
            (AveragesNorms, "times too small: averaged"),
            (SumsMatricesToo, "only what is replicated is to be summed"),
            (SumsAfterEachMicroBatch, "sum once per step, after the last"),
            (JoinsInFront, "the backward of a gather sums"),
            (AllReducesAndSlices, "an all-reduce followed by a slice"),
        ],
    },
}
