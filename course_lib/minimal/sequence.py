"""Sequence parallelism on top of tensor parallelism without options: two functions with a gradient, and one sum.

    gather_in     Korthikanti's g       forward all-gather       backward reduce-scatter   in place of copy_in
    scatter_sum   g with a bar          forward reduce-scatter   backward all-gather       in place of sum_out

Between a row-parallel and the next column-parallel layer a rank has the hidden states of its own tokens, x_BsD. All
ranks of the group bring the same tokens, and they must divide by the ranks. The engine in parallel/sequence.py adds
uneven lengths, dropout, GPT's biases and positions, overlap, and columns that gather their input again in backward.

Source   Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2
"""

import torch

from course_lib import comm
from course_lib.minimal.tensor import TensorParallel


def gather_tokens(x_BsD, group):
    """Put the tokens of all ranks together; the collective itself joins dimension 0."""
    x_sBD = x_BsD.transpose(0, 1).contiguous()
    return comm.all_gather(x_sBD, group).transpose(0, 1).contiguous()


def reduce_scatter_tokens(x_BSD_partial, group):
    """Sum over the ranks and keep my tokens of the sum."""
    x_SBD_partial = x_BSD_partial.transpose(0, 1).contiguous()
    return comm.reduce_scatter(x_SBD_partial, group).transpose(0, 1).contiguous()


class GatherIn(torch.autograd.Function):
    """Every rank uses all tokens for something else, so backward sums."""

    @staticmethod
    def forward(ctx, x_BsD, group):
        ctx.group = group
        return gather_tokens(x_BsD, group)

    @staticmethod
    def backward(ctx, grad_BSD_partial):
        return reduce_scatter_tokens(grad_BSD_partial, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """Every rank's partial sum reached the tokens of all ranks."""

    @staticmethod
    def forward(ctx, x_BSD_partial, group):
        ctx.group = group
        return reduce_scatter_tokens(x_BSD_partial, group)

    @staticmethod
    def backward(ctx, grad_BsD):
        return gather_tokens(grad_BsD, ctx.group), None


def gather_in(x_BsD, group):
    """Forward all tokens, backward my tokens of the summed gradient."""
    return GatherIn.apply(x_BsD, group)


def scatter_sum(x_BSD_partial, group):
    """Forward my tokens of the sum, backward the gradient of all tokens."""
    return ScatterSum.apply(x_BSD_partial, group)


def norms_of(model):
    """Return the weights that a rank uses for its own tokens alone."""
    return [param for name, param in model.named_parameters() if "norm" in name]


def sum_norm_gradients(model, group):
    """Sum the norms' gradients over the ranks, all of them in one message."""
    params = norms_of(model)
    flat_P = comm.all_reduce(torch.cat([param.grad for param in params]), group)
    grads = flat_P.split([param.numel() for param in params])
    for param, grad in zip(params, grads, strict=True):
        param.grad.copy_(grad)


class TensorSequenceParallel(TensorParallel):
    """Tensor parallelism whose hidden states between layers are cut by tokens."""

    enter, leave = staticmethod(gather_in), staticmethod(scatter_sum)

    def backward(self, micro_batches):
        """Accumulate the micro-batches' gradients, then complete those of the norms."""
        super().backward(micro_batches)
        sum_norm_gradients(self.model, self.group)
