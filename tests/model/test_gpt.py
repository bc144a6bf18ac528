"""GPT: dropout and recomputation. (What a block keeps: test_memory_formulas.)"""

import torch

from course_lib.config import ModelConfig
from course_lib.model import build

LAYERS = 2
SMALL = ModelConfig(
    "small", LAYERS, 64, 8, 8, 256, vocab_size=256, max_seq_len=64, tied=True, family="gpt", dropout=0.1
)


def tokens(rows=2, seq_len=32):
    return torch.randint(256, (rows, seq_len), generator=torch.Generator().manual_seed(1))


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
