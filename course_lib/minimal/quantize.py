"""Block-wise quantization in its smallest form: 8-bit moments of Adam, and 4-bit frozen weights.

A number is stored as the index of the nearest value of a code. Each block of numbers has one FP32 scale.

Source   Dettmers et al. 2021 (arXiv:2110.02861), blocks of 2,048 (256 in bitsandbytes since 0.44) and the dynamic code;
         Dettmers et al. 2023 (arXiv:2305.14314), NF4 and blocks of 64
"""

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.minimal.recompute import autocast_as_now


def quantize(x, code, block_size):
    """Return the index of the nearest code value for each number, and a scale per block."""
    block_size = min(block_size, x.numel())
    padding = -x.numel() % block_size
    blocks = F.pad(x.flatten().float(), (0, padding)).view(-1, block_size)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    middles = (code[1:] + code[:-1]) / 2
    index = torch.bucketize(blocks / scale, middles)
    return index.to(torch.uint8), scale


def dequantize(index, scale, code, shape):
    """Return the numbers that the indices and scales stand for."""
    values = (code[index.long()] * scale).flatten()
    return values[: shape.numel()].view(shape)


def linear_code(signed=True):
    """Return equally spaced values, 0 among them."""
    return torch.arange(-127, 128) / 127 if signed else torch.arange(256) / 255


def dynamic_code(signed=True):
    """Return 256 values: seven decades, and finer steps the nearer a decade is to 1."""
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def normal_code():
    """Return NF4: 16 quantiles of a normal distribution; met equally often only at a scale of 1.85 sigma."""
    offset = 0.9677083
    above = torch.special.ndtri(torch.linspace(offset, 0.5, 9)[:-1])
    below = -torch.special.ndtri(torch.linspace(offset, 0.5, 8)[:-1])
    values = torch.cat([above, torch.zeros(1), below])
    return (values / values.max()).sort().values


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW that stores both moments in 8 bits, with a scale for each block."""

    def __init__(self, params, lr, betas, weight_decay, block_size=256, make_code=dynamic_code):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.block_size = block_size
        self.codes = {"exp_avg": make_code(True), "exp_avg_sq": make_code(False)}

    def move_moment(self, param, name, target, beta):
        """Dequantize a moment, move it towards the target, keep it in 8 bits."""
        moment = torch.zeros_like(target)  # at first
        if name in self.state[param]:
            moment = dequantize(*self.state[param][name], self.codes[name], param.shape)
        moment = moment.lerp(target, 1 - beta)
        self.state[param][name] = quantize(moment, self.codes[name], self.block_size)
        return moment

    @torch.no_grad()
    def step(self):
        """Dequantize the moments of one tensor at a time, update, quantize."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = param.grad.float()
                m = self.move_moment(param, "exp_avg", grad, beta1)
                v = self.move_moment(param, "exp_avg_sq", grad**2, beta2)
                m_hat = m / (1 - beta1 ** group["step"])
                v_hat = v / (1 - beta2 ** group["step"])
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(-lr * m_hat / (v_hat.sqrt() + 1e-8))


class FourBitLinear(nn.Module):
    """A frozen linear layer whose weight is stored in 4 bits: two indices per byte."""

    def __init__(self, layer, block_size=64):
        super().__init__()
        self.shape, self.dtype = layer.weight.shape, layer.weight.dtype
        self.out_features, self.in_features = self.shape
        index, scale = quantize(layer.weight.detach(), normal_code(), block_size)
        self.register_buffer("packed", index[:, ::2] * 16 + index[:, 1::2])
        self.register_buffer("scale", scale)

    @property
    def weight(self):
        """Make the weight from its indices and scales, in the dtype of the model."""
        index = torch.stack([self.packed // 16, self.packed % 16], dim=-1).flatten(1)
        return dequantize(index, self.scale, normal_code(), self.shape).to(self.dtype)

    def forward(self, x):
        """Multiply by the dequantized weight."""
        return F.linear(x, self.weight)


class DequantizeAgain(torch.autograd.Function):
    """x W^T, where backward dequantizes the weight again."""

    @staticmethod
    def forward(ctx, x, layer):
        """Save the layer, not its dequantized weight."""
        ctx.layer, ctx.autocast = layer, autocast_as_now(x)
        return F.linear(x, layer.weight)

    @staticmethod
    def backward(ctx, grad_y):
        """Return the gradient of x; the weight is frozen and needs none."""
        with ctx.autocast:  # the weight of forward, in the same dtype
            return grad_y @ ctx.layer.weight, None


class FourBitLinearAgain(FourBitLinear):
    """A FourBitLinear that saves no dequantized weight for backward."""

    def forward(self, x):
        """Multiply by the dequantized weight, and drop it."""
        return DequantizeAgain.apply(x, self)
