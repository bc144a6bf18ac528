"""The ring's attention to blocks of keys in one process: what a mask forbids has no weight, a row without a key too."""

import torch
import torch.nn.functional as F

from course_lib.minimal.ring_attention import attend, merge


def test_blocks_of_keys_merge_to_causal_attention_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    q_BNSH, k_BKSH, v_BKSH = (torch.randn(2, n, 6, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    allowed_SS = torch.ones(6, 6, dtype=torch.bool).tril()
    early, late = (attend(q_BNSH, k_BKSH[:, :, b], v_BKSH[:, :, b], allowed_SS[:, b]) for b in (slice(3), slice(3, 6)))
    out_BNSH, _ = merge(*early, *late)
    whole_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out_BNSH, whole_BNSH, rtol=0, atol=1e-12)
