"""LoRA in its smallest form: a frozen linear layer and a trained product of two thin matrices beside it.

Source   Hu et al. 2021 (arXiv:2106.09685)
"""

import torch
from torch import nn


class LoRALinear(nn.Module):
    """y = base(x) + alpha / rank * B A x, where only A and B are trained."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        d_out, d_in, dtype = base.out_features, base.in_features, base.weight.dtype
        self.lora_a = nn.Parameter(torch.randn(rank, d_in, dtype=dtype) / d_in**0.5)
        self.lora_b = nn.Parameter(torch.zeros(d_out, rank, dtype=dtype))
        self.scale = alpha / rank

    def forward(self, x):
        """Add the product of the thin matrices to the output of the frozen layer."""
        return self.base(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)


def replace_linear(model, targets, make):
    """Replace each linear layer whose name is in `targets` by `make(layer)`."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in targets and isinstance(layer, nn.Linear):
                setattr(module, name, make(layer))


def add_lora(model, rank, alpha, targets=("q", "v")):
    """Freeze a model, and put an adapter beside each linear layer that `targets` names."""
    model.requires_grad_(False)
    replace_linear(model, targets, lambda layer: LoRALinear(layer, rank, alpha))
