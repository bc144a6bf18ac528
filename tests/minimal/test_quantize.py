"""Block-wise quantization: the published code, the nearest values, AdamW with a fine code."""

from functools import partial

import pytest
import torch
from torch import nn

from course_lib.compare.one_gpu import TINY, OnePass
from course_lib.minimal.quantize import (
    DequantizeAgain,
    EightBitAdamW,
    FourBitLinear,
    FourBitLinearAgain,
    dequantize,
    dynamic_code,
    linear_code,
    normal_code,
    quantize,
)

# Source: Dettmers et al. 2023 (arXiv:2305.14314), appendix E
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def roundtrip(x, code, block_size):
    return dequantize(*quantize(x, code, block_size), code, x.shape)


def test_nf4_is_the_published_code():
    assert normal_code().tolist() == pytest.approx(NF4, abs=1e-6)


@pytest.mark.parametrize("block_size", [4, 7, 64, 10**9])
@pytest.mark.parametrize("make_code", [linear_code, dynamic_code, normal_code])
def test_each_number_becomes_the_nearest_value_of_its_block(make_code, block_size):
    torch.manual_seed(0)
    x, code = torch.randn(5, 13), make_code()
    back = roundtrip(x, code, block_size)
    flat, size = x.flatten(), min(block_size, x.numel())
    for start in range(0, len(flat), size):
        block = flat[start : start + size]
        values = code * block.abs().max()
        nearest = values[(block[:, None] - values).abs().argmin(1)]
        assert torch.allclose(back.flatten()[start : start + size], nearest)


class ManyValues:
    """A code so fine that only the arithmetic of the optimizer is left: 2^20 values."""

    def __call__(self, signed):
        return torch.linspace(-1 if signed else 0, 1, 2**20 + 1)


def test_with_a_code_fine_enough_it_is_adamw(monkeypatch):
    def wide(x, code, block_size):  # the index of 2^20 values needs more than a byte
        padding = -x.numel() % block_size
        blocks = nn.functional.pad(x.flatten().float(), (0, padding)).view(-1, block_size)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
        return torch.bucketize(blocks / scale, (code[1:] + code[:-1]) / 2), scale

    monkeypatch.setattr("course_lib.minimal.quantize.quantize", wide)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    params[1].data.copy_(params[0].data)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [
        torch.optim.AdamW(params[:1], **options),
        EightBitAdamW(params[1:], **options, block_size=1, make_code=ManyValues()),
    ]
    for _ in range(5):
        grad = torch.randn(8, 8)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert torch.allclose(params[0], params[1], atol=1e-6)


def replace_all(model, layer_class):
    model.requires_grad_(False)
    model.embed.requires_grad_(True)  # so that the input of every layer has a gradient
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, layer_class(layer))


@pytest.mark.parametrize("autocast", [False, True])
def test_dequantizing_again_gives_the_same_gradients(autocast):
    torch.manual_seed(0)
    source = nn.Linear(64, 32, bias=False)
    layers, found = [FourBitLinear(source), FourBitLinearAgain(source)], []
    for layer in layers:
        x = torch.arange(128.0).view(2, 64).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_layer_that_keeps_its_weight_saves_nothing():
    class Keeps(DequantizeAgain):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.kept = layer.weight
            return DequantizeAgain.forward(ctx, x, layer)

    class KeepsItsWeight(FourBitLinear):
        def forward(self, x):
            return Keeps.apply(x, self)

    bytes_of = {
        layer_class: OnePass(
            partial(replace_all, layer_class=layer_class), config=TINY, dtype=torch.bfloat16
        ).kept_bytes
        for layer_class in (FourBitLinear, KeepsItsWeight)
    }
    assert bytes_of[KeepsItsWeight] >= 0.98 * bytes_of[FourBitLinear]
