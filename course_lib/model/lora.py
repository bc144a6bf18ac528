"""LoRA: the weights stay frozen and resident; beside some of them a product of two thin matrices is trained.

What it saves is gradients and optimizer states. What it does not save is the base weights, and most activations.

Source   Hu et al. 2021 (arXiv:2106.09685)
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from course_lib.validate import Index, Seed, checked


class LoRALinear(nn.Module):
    """y = base(x) + alpha / rank * lora_b(lora_a(x)); `lora_b` starts at zero, so at first nothing changes.

    Shapes   lora_a: rank x d_in, lora_b: d_out x rank        (beside the frozen d_out x d_in)
    Raises   ValueError if rank is below 1
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator | None = None):
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        weight = base.weight
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(weight.new_zeros(base.out_features, rank))
        if not weight.is_meta:
            start = torch.randn(self.lora_a.shape, generator=generator) / math.sqrt(base.in_features)
            self.lora_a.data.copy_(start)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * ((x @ self.lora_a.t()) @ self.lora_b.t())

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The base layer with the product added into its weight: the same outputs, no extra work when it runs."""
        self.base.weight += self.scale * (self.lora_b @ self.lora_a)
        return self.base


@checked
def apply_lora(
    model: nn.Module, rank: Index = 8, alpha: float = 16.0, targets: Iterable[str] = ("q", "v"), seed: Seed = 0
) -> list[str]:
    """Freezes the model and puts adapters beside the linear layers that `targets` name. Returns their full names.

    Raises   ValueError if a target is the name of no linear layer
    """
    generator = torch.Generator().manual_seed(seed)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = {name.rpartition(".")[2] for name in linear}
    if missing := set(targets) - known:
        raise ValueError(f"targets {sorted(missing)} are no linear layers of this model; choose from {sorted(known)}")
    model.requires_grad_(False)
    chosen = [name for name in linear if name.rpartition(".")[2] in set(targets)]
    for name in chosen:
        layer = model.get_submodule(name)
        _replace(model, name, LoRALinear(layer, rank, alpha, generator))
    return chosen


def merge_lora(model: nn.Module) -> list[str]:
    """Adds every adapter into its base layer and takes it away. Parameters stay frozen. Returns the layers' names."""
    names = [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    for name in names:
        _replace(model, name, model.get_submodule(name).merged())
    return names


def trainable_parameters(model: nn.Module) -> int:
    """Number of parameters that get a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
