"""Latent attention: what it keeps, to the byte; what it may see; its sizes. (Equal to DeepSeek-V3: test_hf_weights.)"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from course_lib.compare.profile import profile_step
from course_lib.config import MlaConfig, preset
from course_lib.layout import Layout
from course_lib.memory.budget import budgets, saved_for_backward
from course_lib.model import attention as cores
from course_lib.model import build
from course_lib.run import Run
from course_lib.training import loss_of

TOY = replace(preset("toy"), num_layers=1, num_kv_heads=8, head_dim=None, d_ff=8)


def latent(value_dim=24, nope_dim=28, rope_dim=4, **changes):
    mla = MlaConfig(q_rank=20, kv_rank=12, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim)
    return replace(TOY, head_dim=nope_dim + rope_dim, mla=mla, **changes)


def test_every_way_to_attend_and_to_recompute_gives_the_same_loss_and_gradients():
    x_BS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(1))
    for value_dim in (24, 32, 40):
        found = []
        for attention in ("fused", "standard"):
            for recompute in ("none", "selective", "full"):
                model = build(latent(value_dim, num_layers=2), 1, torch.float64, "cpu", attention, recompute)
                loss = loss_of(model, x_BS[:, :-1], x_BS[:, 1:])
                loss.backward()
                found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        assert all(grad.abs().max() > 1e-8 for grad in found[0])
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", [24, 32, 40])  # keys have 32
def test_the_tracker_sees_what_the_formula_says_whatever_is_recomputed(value_dim):
    config = latent(value_dim)
    for attention, seq_len, recompute, recipe in (
        ("fused", 64, "none", "bf16-master"),
        ("fused", 64, "selective", "fp32"),
        ("fused", 64, "full", "fp32"),
        ("standard", 256, "none", "fp32"),
        ("standard", 256, "selective", "bf16-master"),
    ):
        found = profile_step(config, 2, seq_len, recipe, attention=attention, recompute=recompute)
        for kind in ("parameters", "gradients", "optimizer"):
            assert found.row(kind).predicted_bytes == found.row(kind).measured_bytes, kind
        row = found.row("activations")
        left = row.measured_bytes - row.predicted_bytes  # the loss, a few numbers
        # no preset's values are longer than its keys; filled up in the second run they are within 6 %
        is_filled = value_dim > 32 and (attention, recompute) == ("fused", "selective")
        assert 0 <= left < (0.06 * row.measured_bytes if is_filled else 40), (attention, recompute)
    turns = Run(config, Layout(micro_batch=2, recompute="selective"), 256, "fp32", "standard")
    assert budgets(turns)[0].saved > saved_for_backward(turns).total  # so that both moments were seen


def test_values_of_another_length_go_through_one_kernel_padded():
    """No score matrix is kept: the kernel is the flash one, which wants equal lengths."""
    generator = torch.Generator().manual_seed(0)
    q, k, short, long = (torch.randn(1, 2, 9, width, generator=generator) for width in (6, 6, 4, 10))
    for v in (short, long):
        q.requires_grad_()
        out = cores.fused_attention(q, k, v)
        torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=True))
        torch.testing.assert_close(out, cores.standard_attention(q, k, v))
        assert kept_numbers(cores.fused_attention, q, k, v) == 4 * 2 * 9 * max(6, v.shape[-1]) + 2 * 9


def kept_numbers(core, *inputs):
    """How many numbers autograd keeps for backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        core(*inputs)
    return sum(x.numel() for x in kept)


def test_a_token_sees_its_past_alone_and_how_far_away_it_is():
    model = build(latent(num_layers=2), dtype=torch.float64)
    for parameter in model.parameters():  # large enough that positions matter
        parameter.data.mul_(5.0 if parameter.dim() > 1 else 1.0)
    x_BS = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(2))
    changed_BS = x_BS.clone()
    changed_BS[0, 7] += 1
    logits, changed = model(x_BS), model(changed_BS)
    torch.testing.assert_close(logits[:, :7], changed[:, :7])
    assert (logits[:, 7:] - changed[:, 7:]).abs().amax(-1).min() > 1e-6
    positions_S = torch.arange(12)
    torch.testing.assert_close(model(x_BS, positions_S + 5), logits, rtol=1e-5, atol=1e-6)  # RoPE: distances alone
    assert (model(x_BS, positions_S * 2) - logits).abs().max() > 1e-4


def test_sizes_that_do_not_fit_are_refused():
    assert replace(latent(), head_dim=None).head_dim == 32
    for change, message in (
        ({"head_dim": 16}, r"head_dim \(16\) must be nope_dim \+ rope_dim \(32\)"),
        ({"num_kv_heads": 4}, r"num_kv_heads \(4\) must equal num_heads \(8\)"),
        ({"family": "gpt"}, "the gpt family has no latent attention"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(latent(), **change)
    for sizes, message in (((8, 8, 4, 3, 4), r"rope_dim \(3\) must be even"), ((8, 0, 4, 2, 4), "kv_rank is 0")):
        with pytest.raises(ValueError, match=message):
            MlaConfig(*sizes)
