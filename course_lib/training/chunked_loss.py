"""The loss in chunks of tokens: no tensor ever has the logits of all tokens, and no product runs twice.

Source   Liger Kernel (arXiv:2410.10989), section 3.2; cut cross-entropy (arXiv:2411.09009) goes further, to tiles
"""

import torch
from torch import Tensor, nn

from course_lib.validate import Size, checked


def to_gradient_(logits_cV, y_c1):
    """Turn logits in place into the gradient of their summed cross-entropy, and return that sum.

    The gradient of a row is its softmax, less 1 at the target.
    """
    at_target_c1, largest_c1 = logits_cV.gather(1, y_c1), logits_cV.amax(1, keepdim=True)
    total_c1 = logits_cV.sub_(largest_c1).exp_().sum(1, keepdim=True)
    logits_cV.div_(total_c1).scatter_add_(1, y_c1, torch.full_like(at_target_c1, -1))
    return (largest_c1 + total_c1.log() - at_target_c1).sum()


def add_product_(sum_VD, left_Vc, right_cD):
    """Add a product to a sum, in one operator where dtypes agree."""
    if sum_VD.dtype == left_Vc.dtype:
        sum_VD.addmm_(left_Vc, right_cD)
    else:
        sum_VD += left_Vc @ right_cD


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of x w^T. Forward makes the gradients of x and w too, chunk by chunk; backward scales them."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, y_T, chunk, to_gradient_=to_gradient_):
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        loss, dx_TD = x_TD.new_zeros((), dtype=wide), torch.empty_like(x_TD)
        dw_VD = torch.zeros_like(w_VD, dtype=wide)
        chunks = [whole.split(chunk) for whole in (x_TD, y_T, dx_TD)]
        for x_cD, y_c, dx_cD in zip(*chunks, strict=True):
            p_cV = (x_cD @ w_VD.t()).to(wide)  # logits, and from the next line on their gradient
            loss += to_gradient_(p_cV, y_c[:, None]) / len(y_T)
            p_cV = p_cV.div_(len(y_T)).to(x_TD.dtype)
            torch.mm(p_cV, w_VD, out=dx_cD)
            add_product_(dw_VD, p_cV.t(), x_cD)
            del p_cV  # else it is alive while the next chunk is made
        ctx.save_for_backward(dx_TD, dw_VD)
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD.mul_(grad), dw_VD.mul_(grad), None, None, None  # in place: no second copy


@checked(model=object)
def chunked_loss_of(model: nn.Module, x_BS: Tensor, y_BS: Tensor, chunk: Size) -> Tensor:
    """Return the mean cross-entropy of the next token as `loss_of`, from `chunk` tokens at a time.
    Bytes    at its peak beside x: the logits of a chunk in FP32, 4 V D of the head's gradient and T D of x's.
             Nothing of size T V.
    Raises   ValueError if a target is negative (ignored targets would need another mean)
    """
    if y_BS.min() < 0:
        raise ValueError(f"a target is {y_BS.min().item()}; the loss in chunks counts every token, so use loss_of")
    hidden_TD = model.hidden(x_BS).flatten(0, 1)
    return ChunkedLoss.apply(hidden_TD, model.head.weight, y_BS.flatten(), chunk)
