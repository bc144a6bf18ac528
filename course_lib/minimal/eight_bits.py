"""Training with eight-bit numbers in its smallest form: formats, scales, products, saved inputs, a gather.

Products are those of tensor cores but for the order of their sums: numbers are rounded to a format, and multiplied and
summed in the dtype that they come in. A recipe says how the three roles are rounded: inputs, weights, gradients.

Source   Micikevicius et al. 2022 (arXiv:2209.05433), E4M3 and E5M2; OCP Microscaling formats (MX) 1.0, section 6.3;
         DeepSeek-AI 2024 (arXiv:2412.19437), section 3.3, blocks; NVIDIA 2025 (arXiv:2509.25149), NVFP4
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from course_lib import comm
from course_lib.float_formats import FORMATS
from course_lib.minimal.zero import Zero3

E4M3, E5M2, E2M1 = FORMATS["fp8 e4m3"], FORMATS["fp8 e5m2"], FORMATS["fp4 e2m1"]
EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF << 52)}


def number_of(code, fmt):
    """Return the number that a code stands for: sign, exponent and mantissa, from the highest bit down."""
    rest, mantissa = divmod(code, 2**fmt.mantissa_bits)
    sign, exponent = divmod(rest, 2**fmt.exponent_bits)
    fraction = mantissa / 2**fmt.mantissa_bits
    if exponent == 0:  # subnormal: no leading 1
        return (-1) ** sign * fraction * 2.0 ** (1 - fmt.bias)
    return (-1) ** sign * (1 + fraction) * 2.0 ** (exponent - fmt.bias)


def power_of_two(x):
    """Return the power of two at or below each |x|: its exponent bits alone."""
    ints, exponent_bits = EXPONENT_BITS[x.dtype]
    return (x.view(ints) & exponent_bits).view(x.dtype)


def rounded(x, fmt):
    """Return the nearest numbers of a format, of two the even one; too large ones become the largest."""
    x = x.clamp(-fmt.largest, fmt.largest)
    step = power_of_two(x).clamp(min=fmt.smallest_normal) * fmt.epsilon
    return (x / step).round() * step


def fp32_scale(largest, fmt):
    """Return the scale that makes the largest number of a block the largest of the format."""
    return largest / fmt.largest


def mx_scale(largest, fmt):
    """Return a power of two (E8M0), which puts the largest number into the format's last power of two."""
    return power_of_two(largest) / power_of_two(torch.tensor(fmt.largest))


def nvfp4_scale(largest, fmt):
    """Return scales in E4M3, times one FP32 scale for the whole tensor that makes the largest of them 448."""
    scale = largest / fmt.largest
    tensor_scale = scale.max() / E4M3.largest
    return rounded(scale / tensor_scale, E4M3).clamp(min=E4M3.smallest) * tensor_scale


def quantized(x, fmt, rows=None, columns=None, scale_of=fp32_scale):
    """Return a matrix as its rounded numbers times their scales: one scale for each block of rows x columns.

    Raises   ValueError if blocks do not divide the matrix
    """
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    if x.shape[0] % rows or x.shape[1] % columns:
        sizes = f"blocks are {rows} x {columns}, the matrix {tuple(x.shape)}"
        raise ValueError(f"{sizes}; choose sizes that divide it")
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    scale = scale_of(largest, fmt)
    return (rounded(blocks / scale, fmt) * scale).view(x.shape)


# ---- products
@dataclass
class Recipe:
    """How a linear layer rounds what it multiplies: functions of a matrix whose columns are summed over."""

    input: Callable
    weight: Callable
    grad: Callable


class Linear8(torch.autograd.Function):
    """x W^T: one product forward and two backward, each of two rounded matrices."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        """Sum over the width of the input."""
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return recipe.input(x) @ recipe.weight(w).T

    @staticmethod
    def backward(ctx, grad_y):
        """Sum over the width of the output, and over tokens: other blocks than in forward."""
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        grad_x = recipe.grad(grad_y) @ recipe.weight(w.T).T
        grad_w = recipe.grad(grad_y.T) @ recipe.input(x.T).T
        return grad_x, grad_w, None


def multiply_in_8(model, make_recipe):
    """Let each linear layer of the blocks multiply by a recipe of its own; embedding and head stay as they are."""

    def forward(x_BSD, layer, recipe):
        return Linear8.apply(x_BSD.flatten(0, 1), layer.weight, recipe).unflatten(0, x_BSD.shape[:2])

    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(forward, layer=layer, recipe=make_recipe())


class Delayed:
    """Rounding by a scale known before the tensor is there: from the largest numbers of the last steps."""

    def __init__(self, fmt, steps=16):
        self.fmt, self.steps, self.history = fmt, steps, []

    def __call__(self, x):
        """Round by the history, then add this tensor's largest number to it."""
        largest = x.abs().max().clamp(min=1e-30)
        scale = max(self.history, default=largest) / self.fmt.largest
        self.history = [*self.history, largest][-self.steps :]
        return rounded(x / scale, self.fmt) * scale


# ---- bytes
class SavedIn8(torch.autograd.Function):
    """x W^T for layers with one input, which is saved in one byte per element, with a scale."""

    @staticmethod
    def forward(ctx, x, *weights):
        """Round the input to E4M3, save it, and multiply what was saved."""
        scale = x.abs().max().float().clamp(min=1e-30) / E4M3.largest
        x8 = (x / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, scale, *weights)
        x = (x8.float() * scale).to(x.dtype)
        return tuple(x @ w.T for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        """Make the input again from its bytes."""
        x8, scale, *weights = ctx.saved_tensors
        x = (x8.float() * scale).to(weights[0].dtype).flatten(0, -2)
        grad_x = sum(grad @ w for grad, w in zip(grads, weights, strict=True))
        return grad_x, *(grad.flatten(0, -2).T @ x for grad in grads)


def save_in_8(model, o_too=False):
    """Save the inputs of q, k, v, of gate and up, and of down in 8 bits."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            part.project = lambda x, layers: SavedIn8.apply(x, *(one.weight for one in layers))
        for last in (block.mlp.down, block.attention.o)[: 1 + o_too]:
            last.forward = lambda x, last=last: SavedIn8.apply(x, last.weight)[0]


def all_gather_8(shard_p, group):
    """Gather the shards of all ranks in E4M3 by one common scale.

    Shapes   shard_p -> full_P
    Bytes    sent per rank: (G - 1) / G * P, and on average 8 (G - 1) / G for the scale; G ranks
    """
    largest = comm.all_reduce(shard_p.abs().max().float(), group, op="max")
    scale = largest.clamp(min=1e-30) / E4M3.largest
    codes = (shard_p / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    full_P = comm.all_gather(codes, group).view(torch.float8_e4m3fn)
    return (full_P.float() * scale).to(shard_p.dtype)


class Zero3In8(Zero3):
    """ZeRO-3 that gathers the blocks' parameters in 8 bits; each rank's own shard is never rounded."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for flat in self.flats[1:-2]:  # neither embedding nor final norm and head
            flat.all_gather = partial(self.fill, flat)

    @staticmethod
    def fill(flat):
        """Fill flat_P with rounded parameters."""
        flat.flat_P.copy_(all_gather_8(flat.shard_p.detach(), flat.group))

    def full_parameters(self):
        """Gather every parameter as it is: a checkpoint holds nothing rounded."""
        for flat in self.flats[1:-2]:
            del flat.all_gather
        return super().full_parameters()
