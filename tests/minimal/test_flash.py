"""FlashAttention in blocks: exact for uneven blocks, large scores and under autocast."""

import pytest
import torch

from course_lib.minimal import flash
from course_lib.model import fused_attention, standard_attention


def drawn(seq_len, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, seq_len, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize("seq_len", [1, 16, 33])
def test_output_and_gradients_are_those_of_other_attentions(seq_len, block_size):
    q, k, v, grad = drawn(seq_len)
    out = flash.FlashAttention.apply(q, k, v, block_size)
    got = torch.autograd.grad(out, (q, k, v), grad.detach())
    for other in (standard_attention, fused_attention):
        expected = other(q, k, v)
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)
        for ours, theirs in zip(got, torch.autograd.grad(expected, (q, k, v), grad.detach()), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_scores_that_overflow_without_the_running_maximum():
    q, k, v, _ = (400 * x.detach() for x in drawn(33))
    assert flash.flash_forward(q, k, v, 8)[0].isfinite().all()


def error_under_autocast(attention, scale=3):
    """Return the distance of the gradients under bf16 autocast, backward outside, from those in float64."""
    found = []
    for dtype, enabled in ((torch.float64, False), (torch.float32, True)):
        q, k, v, grad = ((scale * x.detach()).to(dtype).requires_grad_() for x in drawn(33))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), grad.detach().to(out.dtype))
        found.append(torch.cat([x.double().flatten() for x in grads]))
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def test_under_autocast_backward_makes_the_scores_of_forward_again():
    class ScoresInFloat32(flash.FlashAttention):
        @staticmethod
        def backward(ctx, grad_BNSH):
            return *flash.flash_backward(grad_BNSH, ctx.saved_tensors, ctx.block_size), None

    right = error_under_autocast(standard_attention)
    assert error_under_autocast(lambda *qkv: flash.FlashAttention.apply(*qkv, 8)) < 1.2 * right
    assert error_under_autocast(lambda *qkv: ScoresInFloat32.apply(*qkv, 8)) > 1.2 * right
