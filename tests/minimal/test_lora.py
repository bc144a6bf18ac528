"""LoRA: the adapter adds alpha / rank times its product."""

import torch

from course_lib.minimal.lora import LoRALinear


def test_an_adapter_adds_alpha_over_rank_times_its_product_and_nothing_at_first():
    layer, x = LoRALinear(torch.nn.Linear(6, 5), rank=2, alpha=6.0), torch.randn(3, 6)
    assert torch.equal(layer(x), layer.base(x))
    torch.nn.init.normal_(layer.lora_b)
    change = 6.0 / 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ (layer.base.weight + change).t() + layer.base.bias)
