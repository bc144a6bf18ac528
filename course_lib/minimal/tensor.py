"""Tensor parallelism of a whole Llama without options: two functions with a gradient, three layers, one loss.

    copy_in   Megatron's f    forward nothing      backward all-reduce    in front of column-parallel layers
    sum_out   Megatron's g    forward all-reduce   backward nothing       behind row-parallel layers

All ranks of the group bring the same tokens. The engine in parallel/tensor.py adds shared key/value heads, the sum of
QK-norm's gradients, parts of unequal sizes, tied embeddings, dropout and an all-reduce that overlaps with weight
gradients.

Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3
"""

import torch
import torch.nn.functional as F
from torch import nn

from course_lib import comm


class CopyIn(torch.autograd.Function):
    """Megatron's f: every rank uses x for something else, so backward sums."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # autograd needs a new tensor

    @staticmethod
    def backward(ctx, grad_partial):
        grad_partial = grad_partial.contiguous()  # collectives need dense memory
        return comm.all_reduce(grad_partial, ctx.group), None


class SumOut(torch.autograd.Function):
    """Megatron's g: every rank gets the sum, and already has its full gradient."""

    @staticmethod
    def forward(ctx, x_partial, group):
        return comm.all_reduce(x_partial.contiguous(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_in(x, group):
    """f: forward x itself, backward the sum of the ranks' gradients."""
    return CopyIn.apply(x, group)


def sum_out(x_partial, group):
    """g: forward the sum of the ranks' partial sums, backward the gradient itself."""
    return SumOut.apply(x_partial, group)


def part_of(weight, group, dim):
    """Return this rank's part of a weight, in memory of its own."""
    size, tp = weight.shape[dim], group.size()
    if size % tp:
        raise ValueError(f"{size} does not divide by {tp} ranks; choose another tp")
    part = weight.detach().chunk(tp, dim)[group.rank()]
    return nn.Parameter(part.clone())


class ColumnParallelLinear(nn.Module):
    """Some of the outputs of a linear layer: dimension 0 of the stored weight."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = part_of(linear.weight, group, dim=0)

    def forward(self, x_BSD):
        """Return complete values of some features."""
        return F.linear(x_BSD, self.weight)


class RowParallelLinear(nn.Module):
    """Some of the inputs of a linear layer: dimension 1 of the stored weight."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = part_of(linear.weight, group, dim=1)

    def forward(self, x_BSf):
        """Return a partial sum of every feature."""
        return F.linear(x_BSf, self.weight)


def rows_of(tokens_BS, first, count):
    """Tell which tokens this rank owns, and their rows (0 for all other tokens)."""
    is_mine_BS = (tokens_BS >= first) & (tokens_BS < first + count)
    return is_mine_BS, torch.where(is_mine_BS, tokens_BS - first, 0)


class VocabParallelEmbedding(nn.Module):
    """Some of the rows of an embedding."""

    def __init__(self, embedding, group):
        super().__init__()
        self.weight = part_of(embedding.weight, group, dim=0)
        self.first = group.rank() * len(self.weight)

    def forward(self, tokens_BS):
        """Return the rows of this rank's tokens, and zeros for all other tokens."""
        is_mine_BS, row_BS = rows_of(tokens_BS, self.first, len(self.weight))
        return F.embedding(row_BS, self.weight) * is_mine_BS.unsqueeze(-1)


def vocab_parallel_cross_entropy(logits_BSv, y_BS, group):
    """Return the loss of each token from this rank's logits, with three all-reduces."""
    dtype = torch.promote_types(logits_BSv.dtype, torch.float32)
    logits_BSv = logits_BSv.to(dtype)
    max_BS = comm.all_reduce(logits_BSv.detach().amax(-1), group, op="max")
    shifted_BSv = logits_BSv - max_BS.unsqueeze(-1)
    s_BS = sum_out(shifted_BSv.exp().sum(-1), group)
    v = logits_BSv.shape[-1]
    is_mine_BS, row_BS = rows_of(y_BS, group.rank() * v, v)
    target_BS = shifted_BSv.gather(-1, row_BS.unsqueeze(-1)).squeeze(-1)
    return s_BS.log() - sum_out(target_BS * is_mine_BS, group)


def put_before(part, function, group):
    """Apply a function to the first input of a part of the model."""

    def hook(part, args):
        return function(args[0], group), *args[1:]

    part.register_forward_pre_hook(hook)


def put_behind(part, function, group):
    """Apply a function to the output of a part of the model."""
    part.register_forward_hook(lambda part, args, output: function(output, group))


def cut_block(block, group, enter, leave):
    """Cut attention by heads and the MLP by features, with f before and g behind."""
    kv_heads = block.attention.k.out_features // block.attention.head_dim
    if kv_heads % group.size():
        raise ValueError(f"{kv_heads} key/value heads do not divide by tp; change tp")
    attention = block.attention, ("q", "k", "v"), "o"
    mlp = block.mlp, ("gate", "up"), "down"
    for part, columns, row in (attention, mlp):
        for name in columns:
            setattr(part, name, ColumnParallelLinear(getattr(part, name), group))
        setattr(part, row, RowParallelLinear(getattr(part, row), group))
        put_before(part, enter, group)
        put_behind(part, leave, group)


def tensor_parallel(model, group, enter=copy_in, leave=sum_out):
    """Cut every matrix of a Llama in place; it then returns a part of the logits."""
    if model.config.tied:
        raise ValueError("the head is tied to the embedding; use tied=False")
    for block in model.blocks:
        cut_block(block, group, enter, leave)
    model.embed = VocabParallelEmbedding(model.embed, group)
    put_behind(model.embed, leave, group)
    model.head = ColumnParallelLinear(model.head, group)
    put_before(model.head, enter, group)
    return model


def cut_dim(shape, full_shape):
    """Return the dimension along which a part is shorter than the full tensor; None if it is not cut."""
    pairs = enumerate(zip(shape, full_shape, strict=True))
    return next((dim for dim, (size, full_size) in pairs if size != full_size), None)


def gather_parts(model, full_shapes, group):
    """Return every parameter in full: one that is shorter than its full shape is gathered."""
    full = {}
    for name, param in model.named_parameters():
        dim = cut_dim(param.shape, full_shapes[name])
        full[name] = param.detach() if dim is None else comm.join(param.detach(), group, dim)
    return full


class TensorParallel:
    """A Llama whose matrices are cut; all ranks bring the same tokens."""

    same_tokens = True  # as_trainer gives every rank the whole batch
    enter, leave = staticmethod(copy_in), staticmethod(sum_out)

    def __init__(self, model, make_optimizer, group):
        self.full_shapes = {name: p.shape for name, p in model.named_parameters()}
        self.model = tensor_parallel(model, group, self.enter, self.leave)
        self.group = group
        self.optimizer = make_optimizer(self.model.parameters())

    def loss(self, x_BS, y_BS):
        """Return the mean loss, which is the same on every rank."""
        return vocab_parallel_cross_entropy(self.model(x_BS), y_BS, self.group).mean()

    def backward(self, micro_batches):
        """Accumulate the mean gradient of the micro-batches."""
        for x_BS, y_BS in micro_batches:
            (self.loss(x_BS, y_BS) / len(micro_batches)).backward()

    def update(self):
        """Update this rank's parts; no gradient is sent."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        """Gather the parts of every parameter."""
        return gather_parts(self.model, self.full_shapes, self.group)
