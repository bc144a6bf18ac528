"""Llama: its numbers, what it keeps in memory, how it is built. (Equal to transformers: test_hf_weights.)"""

import dataclasses

import pytest
import torch
from kept_bytes import kept_bytes

from course_lib.config import RopeScaling, preset
from course_lib.model import RMSNorm, build, rope_frequencies, rope_tables

TOY = preset("toy")
SMALL = dataclasses.replace(TOY, num_layers=2)


def tokens(rows=2, seq_len=24):
    return torch.randint(256, (rows, seq_len), generator=torch.Generator().manual_seed(1))


def gradients(model, x_BS):
    model.zero_grad()
    model(x_BS).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_every_way_to_attend_and_to_recompute_gives_the_same_logits_and_gradients():
    x_BS, expected = tokens(), None
    for attention in ("fused", "standard"):
        for recompute in ("none", "selective", "full"):
            model = build(SMALL, dtype=torch.float64, attention=attention, recompute=recompute)
            with torch.no_grad():
                logits_BSV = model(x_BS)
            found = [logits_BSV, *gradients(model, x_BS)]
            expected = expected or found
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_rms_norm_equals_pytorchs_and_keeps_only_its_input():
    norm = RMSNorm(48, eps=1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.gradcheck(lambda w: torch.func.functional_call(norm, {"weight": w}, (x,)), (norm.weight,))
    x16 = torch.randn(2, 5, 48, dtype=torch.bfloat16, requires_grad=True)
    half = RMSNorm(48, eps=1e-5).bfloat16()
    assert half(x16).dtype == torch.bfloat16
    assert kept_bytes(half, lambda: half(x16)) == x16.numel() * 2 + 10 * 4


def test_weights_depend_on_the_seed_alone():
    state = torch.random.get_rng_state()
    first, again, other = build(TOY, seed=3), build(TOY, seed=3), build(TOY, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state), "building must not disturb anybody's random numbers"
    half = build(TOY, seed=3, dtype=torch.bfloat16)
    for a, b, c, d in zip(*(m.parameters() for m in (first, again, other, half)), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.bfloat16(), d)
        assert a.dim() < 2 or not torch.equal(a, c)
    assert abs(first.embed.weight.std().item() - 0.02) < 0.001


def test_a_tied_head_is_the_embedding():
    tied = build(dataclasses.replace(TOY, tied=True))
    assert tied.head.weight is tied.embed.weight
    assert sum(p.numel() for p in tied.parameters()) == sum(p.numel() for p in build(TOY).parameters()) - 256 * 64


def test_positions_can_be_given():
    model, x_BS = build(SMALL), tokens(1, 24)
    config = model.config
    cos_SH, sin_SH = rope_tables(config, torch.tensor([5, 9]), torch.float64)
    expected = torch.outer(torch.tensor([5.0, 9.0]), rope_frequencies(config)).repeat(1, 2)
    torch.testing.assert_close(cos_SH, expected.cos().double())
    torch.testing.assert_close(sin_SH, expected.sin().double())
    with torch.no_grad():
        torch.testing.assert_close(model(x_BS), model(x_BS, torch.arange(24)))
        torch.testing.assert_close(model(x_BS), model(x_BS, torch.arange(24) + 100), atol=1e-5, rtol=0)  # relative


def test_rope_scaling_slows_slow_pairs_and_leaves_fast_ones():
    plain = dataclasses.replace(preset("llama-3.1-8b"), rope_scaling=None)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(8.0))
    ratio = rope_frequencies(plain) / rope_frequencies(scaled)
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert ((ratio[1:] - ratio[:-1]) >= 0).all()


def test_unknown_words_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="attention is 'flash'; choose from fused, standard"):
        build(TOY, attention="flash")
    with pytest.raises(ValueError, match="recompute is 'all'; choose from none, selective, full"):
        build(TOY, recompute="all")


def test_weights_are_drawn_on_the_cpu_also_where_a_gpu_is_the_default_device():
    with torch.device("meta"):  # stands for a GPU, as in ranks that use NCCL
        model = build(preset("toy"))
    for got, want in zip(model.parameters(), build(preset("toy")).parameters(), strict=True):
        assert torch.equal(got, want)
