"""GPT: Korthikanti's formula to the byte, dropout and recomputation."""

import pytest
import torch
from kept_bytes import kept_bytes

from course_lib.model import build
from course_lib.model.gpt import Block
from course_lib.model.llama import ModelConfig

LAYERS = 2
SMALL = ModelConfig(
    "small", LAYERS, 64, 8, 8, 256, vocab_size=256, max_seq_len=64, tied=True, family="gpt", dropout=0.1
)


def tokens(rows=2, seq_len=32):
    return torch.randint(256, (rows, seq_len), generator=torch.Generator().manual_seed(1))


def korthikanti_bytes(s, b, h, a):
    """Bytes of one layer in 16 bits (arXiv:2205.05198, equation 1)."""
    return s * b * (34 * h + 5 * a * s)


@pytest.mark.parametrize(("b", "s", "h", "a"), [(2, 32, 64, 8), (1, 64, 64, 4), (3, 16, 128, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_block_keeps_sbh_34_plus_5as_over_h_bytes(b, s, h, a, dtype):
    config = ModelConfig("x", 1, h, a, a, 4 * h, vocab_size=256, max_seq_len=s, family="gpt", dropout=0.1)
    block = Block(config, "standard", "none").to(dtype)
    x_BSD = torch.randn(b, s, h, dtype=dtype, requires_grad=True)
    mean_and_deviation = 2 * b * s * 2 * dtype.itemsize  # of two norms: left out by the paper
    assert kept_bytes(block, lambda: block(x_BSD)) == korthikanti_bytes(s, b, h, a) + mean_and_deviation


@pytest.mark.parametrize(("attention", "recompute", "factor"), [("standard", "selective", 34), ("standard", "full", 2)])
def test_recomputation_keeps_what_the_paper_says(attention, recompute, factor):
    b, s, h = 2, 32, 64
    model = build(SMALL, dtype=torch.bfloat16, attention=attention, recompute=recompute)
    found = kept_bytes(model, lambda: model(tokens(b, s)))
    norms = (2 * LAYERS if recompute == "selective" else 0) + 1
    ends = s * b * h * (1 + 2 + 2) + s * b * 8 + s * 8  # embedding's mask, final norm, head; token and position ids
    random_state = found - LAYERS * factor * s * b * h - ends - norms * 2 * s * b * 2
    # What is left is checkpoint's copy of the random state, so that dropout falls the same way again.
    assert random_state == LAYERS * torch.get_rng_state().numel() or random_state == 0


def test_recomputed_dropout_falls_the_same_way():
    x_BS, expected = tokens(), None
    for recompute in ("none", "selective", "full"):
        model = build(SMALL, dtype=torch.float64, attention="standard", recompute=recompute)
        torch.manual_seed(11)
        model(x_BS).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        expected = expected or gradients
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def test_dropout_drops_in_training_only_and_keeps_the_mean():
    model = build(SMALL, attention="standard")
    with torch.no_grad():
        assert not torch.equal(model(tokens()), model(tokens()))
        model.eval()
        assert torch.equal(model(tokens()), model(tokens()))
        model.dropout.train()
        dropped = model.dropout(torch.ones(10_000))
    assert abs(dropped.mean().item() - 1) < 0.02
    assert abs((dropped == 0).float().mean().item() - 0.1) < 0.02


def test_fused_and_explicit_agree_without_dropout():
    x_BS = tokens()
    models = [build(SMALL, dtype=torch.float64, attention=kind).eval() for kind in ("fused", "standard")]
    with torch.no_grad():
        torch.testing.assert_close(models[0](x_BS), models[1](x_BS), rtol=0, atol=1e-12)


def test_layers_that_write_into_the_residual_start_smaller():
    model = build(ModelConfig("x", 8, 64, 8, 8, 256, 256, 64, family="gpt"))
    assert abs(model.blocks[3].mlp.down.weight.std().item() - 0.02 / 4) < 0.0005
    assert abs(model.blocks[3].mlp.up.weight.std().item() - 0.02) < 0.0005
    assert model.blocks[3].mlp.up.bias.abs().max() == 0
