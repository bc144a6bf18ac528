"""Blockwise attention: the same numbers as attention written out, without the score matrix."""

import pytest
import torch
from torch import nn

from course_lib.measure import MemoryTracker
from course_lib.model import standard_attention
from course_lib.model.flash import blockwise_attention


def heads(seq_len, head_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, seq_len, head_dim)
    return [(3 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(3)]


def gradients_of(core, seq_len, **options):
    q, k, v = heads(seq_len)
    out = core(q, k, v, **options)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_len", "block_size"), [(1, 4), (16, 4), (17, 5), (12, 64)])
def test_output_and_gradients_equal_attention_written_out(causal, seq_len, block_size):
    got = gradients_of(blockwise_attention, seq_len, causal=causal, block_size=block_size)
    want = gradients_of(standard_attention, seq_len, causal=causal)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_scores_far_apart_do_not_overflow():
    q, k, v = (x.detach() for x in heads(32))
    out = blockwise_attention(1000 * q, k, v, block_size=8)
    torch.testing.assert_close(out, standard_attention(1000 * q, k, v), rtol=1e-12, atol=1e-12)


def kept_bytes(seq_len):
    """Bytes that are kept between forward and backward, inputs apart."""

    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, q, k, v):
            return blockwise_attention(q * self.factor, k, v, block_size=16)

    model, (q, k, v) = Core(), heads(seq_len)
    with MemoryTracker(model) as tracker:
        out = model(q.detach(), k.detach(), v.detach())
        kept = tracker.current("activations")
        out.sum().backward()
    return kept


def test_memory_grows_linearly_with_the_sequence():
    rows = 2 * 3 * 8
    assert kept_bytes(64) == rows * 64 * (8 + 8 + 1)  # q times the factor, the output, one number a row
    assert kept_bytes(256) == 4 * kept_bytes(64)


def test_bad_arguments_are_refused_with_what_to_do():
    q, k, v = heads(4)
    with pytest.raises(ValueError, match=r"repeat_interleave\(q_heads // k_heads"):
        blockwise_attention(q, k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="block_size is 0"):
        blockwise_attention(q, k, v, block_size=0)
