"""Eight bits: formats and scales by formula and beside torch's, products, saved inputs."""

from functools import partial

import pytest
import torch

from course_lib.compare.trials import CONFIG, global_batches
from course_lib.float_formats import FORMATS
from course_lib.minimal.eight_bits import (
    E2M1,
    E4M3,
    E5M2,
    Delayed,
    Linear8,
    Recipe,
    mx_scale,
    number_of,
    nvfp4_scale,
    power_of_two,
    quantized,
    rounded,
    save_in_8,
)
from course_lib.model import build
from course_lib.training import loss_of

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
INT8 = FORMATS["int8"]


def wide(*shape, dtype=torch.float64):
    """Numbers of many sizes, with zeros, ties and powers of two among them."""
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=dtype) * 2.0 ** torch.randint(-24, 18, shape)
    x.view(-1)[:6] = torch.tensor([0.0, 1.0, 1.0625, 1.1875, -464.0, 2.5])
    return x


# ---- formats


@pytest.mark.parametrize("fmt", DTYPES, ids=lambda fmt: fmt.name)
def test_each_code_is_the_number_that_torch_reads(fmt):
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt]).float()
    finite = [code for code in range(256) if numbers[code].isfinite()]
    assert [number_of(code, fmt) for code in finite] == numbers[finite].tolist()
    assert fmt.largest == torch.finfo(DTYPES[fmt]).max == max(number_of(code, fmt) for code in finite)


def test_four_bits_and_int8_have_the_published_numbers():
    assert [number_of(code, E2M1) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, table 5
    assert E2M1.largest == 6
    assert [number_of(code, INT8) * 32 for code in range(128)] == list(range(128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", DTYPES, ids=lambda fmt: fmt.name)
def test_rounding_is_torchs_which_saturates(fmt, dtype):
    x = wide(4000, dtype=dtype)
    assert torch.equal(rounded(x, fmt), x.clamp(-fmt.largest, fmt.largest).float().to(DTYPES[fmt]).to(dtype))


@pytest.mark.parametrize("fmt", [E2M1, INT8], ids=lambda fmt: fmt.name)
def test_other_formats_take_the_nearest_number_of_two_the_even_one(fmt):
    codes = torch.tensor([number_of(code, fmt) for code in range(2 ** (fmt.bits - 1))], dtype=torch.float64)
    x = torch.cat([wide(4000).abs(), (codes[1:] + codes[:-1]) / 2]).clamp(max=fmt.largest)
    distance = (x[:, None] - codes).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(len(codes)) % 2 == 0
    chosen = torch.where(nearest.sum(1, keepdim=True) == 2, nearest & even, nearest)
    assert torch.equal(rounded(x, fmt), codes[chosen.int().argmax(1)])


# ---- scales


@pytest.mark.parametrize("block", [(None, None), (1, None), (4, 4), (1, 8)])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, INT8], ids=lambda fmt: fmt.name)
def test_an_error_is_at_most_half_a_step_of_the_format_at_the_blocks_scale(fmt, block):
    x = wide(8, 16)
    rows, columns = block[0] or 8, block[1] or 16
    scale = x.view(8 // rows, rows, 16 // columns, columns).abs().amax((1, 3), keepdim=True) / fmt.largest
    scale = scale.expand(-1, rows, -1, columns).reshape(8, 16)
    step = torch.maximum(x.abs() * fmt.epsilon, scale * fmt.smallest)
    error = (quantized(x, fmt, *block) - x).abs()
    assert (error <= step / 2 * (1 + 1e-12)).all() and error.max() > 0


def test_scales_of_mx_and_nvfp4_are_numbers_of_their_formats():
    largest = wide(500, dtype=torch.float32).abs().clamp(min=2.0**-30)
    for fmt in (E4M3, E5M2, E2M1):
        scale = mx_scale(largest, fmt)
        assert torch.equal(scale, scale.to(torch.float8_e8m0fnu).float())
        assert ((largest / scale).log2().floor() == power_of_two(torch.tensor(fmt.largest)).log2()).all()
    scale = nvfp4_scale(largest, E2M1)
    of_tensor = largest.max() / 6 / 448
    codes = scale / of_tensor
    assert codes.max() == pytest.approx(448) and torch.allclose(codes, rounded(codes, E4M3), rtol=1e-6)


def test_a_block_of_zeros_stays_zero_and_blocks_must_divide():
    for scale_of in (mx_scale, nvfp4_scale):
        assert not quantized(torch.zeros(4, 32), E2M1, 1, 16, scale_of).any()
    with pytest.raises(ValueError, match="blocks are 1 x 24.*choose sizes that divide"):
        quantized(torch.ones(4, 32), E4M3, 1, 24)


# ---- products


def test_each_product_rounds_its_two_matrices_along_the_sum():
    torch.manual_seed(0)
    x, w = (torch.randn(8, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64))
    x.requires_grad_(), w.requires_grad_()
    rows = partial(quantized, fmt=E4M3, rows=1)
    y = Linear8.apply(x, w, Recipe(rows, rows, partial(quantized, fmt=E5M2, rows=1)))
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    grads = partial(quantized, fmt=E5M2, rows=1)
    with torch.no_grad():
        right = rows(x) @ rows(w).T, grads(grad_y) @ rows(w.T).T, grads(grad_y.T) @ rows(x.T).T
        forwards_weight = grads(grad_y) @ rows(w)  # scales of forward's sum
    for got, want in zip((y, x.grad, w.grad), right, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=0)
    assert not torch.allclose(x.grad, forwards_weight)


def test_products_of_unrounded_numbers_are_those_of_a_linear_layer():
    same = Recipe(lambda x: x, lambda x: x, lambda x: x)
    x, w = (torch.randn(size, 4, dtype=torch.float64, requires_grad=True) for size in (8, 12))
    assert torch.autograd.gradcheck(lambda x, w: Linear8.apply(x, w, same), (x, w))


def test_a_delayed_scale_clips_what_grows_and_forgets():
    delayed, ones = Delayed(E4M3, steps=2), torch.ones(4)
    assert torch.equal(delayed(ones), ones)
    assert torch.equal(delayed(8 * ones), ones)  # the scale is that of the step before
    assert torch.equal(delayed(8 * ones), 8 * ones)
    assert [float(size) for size in delayed.history] == [8, 8]


# ---- saved inputs


def test_gradients_of_saved_inputs_are_those_of_the_rounded_ones():
    model, right = (build(CONFIG, dtype=torch.float64) for _ in range(2))
    save_in_8(model)
    x_BS, y_BS = global_batches(1)[0][0]
    loss_of(model, x_BS, y_BS).backward()

    def rounded_input(module, inputs):
        (x,) = inputs
        scale = x.detach().abs().max().float() / 448
        return (x + ((x / scale).to(torch.float8_e4m3fn).float() * scale - x).detach(),)

    for block in right.blocks:
        attention, mlp = block.attention, block.mlp
        for layer in (attention.q, attention.k, attention.v, mlp.gate, mlp.up, mlp.down):
            layer.register_forward_pre_hook(rounded_input)
    loss_of(right, x_BS, y_BS).backward()
    for got, want in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.allclose(got.grad, want.grad, rtol=1e-9, atol=1e-12)
