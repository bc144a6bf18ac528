"""The two ends of a model whose vocabulary is cut over the ranks: rows of the embedding, and the loss.

A rank has v of the V rows, those of the tokens first .. first + v - 1. What it cannot answer it answers with zero, and
the sum over the ranks fills that in: in the embedding with other ranks' rows, in the loss with their target's logit.
The logits stay in pieces, logits_BSv. Three numbers a token cross the wire in place of V.

Source   Shoeybi et al. 2019 (arXiv:1909.08053), section 3
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.conjugate import Group, check_group
from course_lib.parallel.linear import Cut, ReplicatedResidual, cut_parameter


def place_among_mine(tokens_BS: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Whether each token is one of mine, and its place among mine (0 where it is not: any place that exists)."""
    is_mine_BS = (tokens_BS >= first) & (tokens_BS < first + count)
    return is_mine_BS, torch.where(is_mine_BS, tokens_BS - first, 0)


def embed_mine(tokens_BS: Tensor, w_vD: Tensor, first: int) -> Tensor:
    """The rows of my tokens, zeros for all others: a part of a sum.
    Shapes   tokens_BS, w_vD -> x_BSD
    """
    is_mine_BS, place_BS = place_among_mine(tokens_BS, first, len(w_vD))
    return F.embedding(place_BS, w_vD) * is_mine_BS.unsqueeze(-1)


class VocabEmbedding(nn.Module):
    """Some of the rows of an embedding; the sum over the ranks puts them together.

    Every token must be in 0 .. V - 1. One outside belongs to no rank: its row is zeros, without an error, which
    `nn.Embedding` would raise.
    Shapes   weight w_vD; tokens_BS -> x_BSD
    """

    def __init__(self, embedding: nn.Embedding, residual: ReplicatedResidual):
        super().__init__()
        self.residual = residual
        cut = Cut(0, embedding.num_embeddings, residual.group.size())
        self.weight = cut_parameter(embedding.weight, cut, residual.group)
        self.first, _ = cut.start_and_length(residual.group.rank())
        self.cuts = {"weight": cut}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.residual.leave(embed_mine(tokens_BS, self.weight, self.first))


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_BSv, y_BS, first, group):
        ctx.logits_dtype = logits_BSv.dtype
        logits_BSv = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32))
        max_BS = comm.all_reduce(logits_BSv.amax(-1), group, op="max")
        is_mine_BS, place_BS = place_among_mine(y_BS, first, logits_BSv.shape[-1])
        my_target_BS = logits_BSv.gather(-1, place_BS.unsqueeze(-1)).squeeze(-1) - max_BS
        target_BS = comm.all_reduce(my_target_BS * is_mine_BS, group)
        exp_BSv = (logits_BSv - max_BS.unsqueeze(-1)).exp_()
        sum_BS = comm.all_reduce(exp_BSv.sum(-1), group)
        ctx.save_for_backward(exp_BSv.div_(sum_BS.unsqueeze(-1)), is_mine_BS, place_BS)
        return sum_BS.log() - target_BS

    @staticmethod
    def backward(ctx, grad_BS):
        probability_BSv, is_mine_BS, place_BS = ctx.saved_tensors
        grad_BSv = probability_BSv * grad_BS.unsqueeze(-1)
        grad_BSv.scatter_add_(-1, place_BS.unsqueeze(-1), -(grad_BS * is_mine_BS).unsqueeze(-1))
        return grad_BSv.to(ctx.logits_dtype), None, None, None


def vocab_cross_entropy(logits_BSv: Tensor, y_BS: Tensor, first: int, group: Group) -> Tensor:
    """Cross-entropy of each token from logits in pieces, in float32 at least; its gradient is in pieces as well.

    Every target must be in 0 .. V - 1: none is ignored, not -100 either, and one outside counts as a logit of the
    maximum. To leave tokens out, multiply their losses by zero.
    Shapes   logits_BSv, y_BS -> loss_BS           (equal on all ranks)
    Bytes    sent per rank: three all-reduces of B S numbers; kept for backward: 4 v per token (the softmax)
    """
    return _VocabCrossEntropy.apply(logits_BSv, y_BS, first, check_group(group, "vocab_cross_entropy"))


def vocab_to_gradient_(logits_cv: Tensor, y_c1: Tensor, first: int, group: Group) -> Tensor:
    """Turn logits in pieces in place into the gradient of their summed cross-entropy, and return that sum.

    With it the loss in chunks (training/chunked_loss.py) is that of a vocabulary over ranks: the gradient of the weight
    is this rank's piece, that of the input a part of a sum.
    Shapes   logits_cv (in float32 at least), y_c1 -> a sum, equal on all ranks
    Bytes    sent per rank: three all-reduces of c numbers
    """
    is_mine_c1, place_c1 = place_among_mine(y_c1, first, logits_cv.shape[1])
    largest_c1 = comm.all_reduce(logits_cv.amax(1, keepdim=True), group, op="max")
    at_target_c1 = comm.all_reduce(logits_cv.gather(1, place_c1) * is_mine_c1, group)
    total_c1 = comm.all_reduce(logits_cv.sub_(largest_c1).exp_().sum(1, keepdim=True), group)
    logits_cv.div_(total_c1).scatter_add_(1, place_c1, -is_mine_c1.to(logits_cv.dtype))
    return (largest_c1 + total_c1.log() - at_target_c1).sum()
