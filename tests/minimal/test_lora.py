"""LoRA: the adapter adds alpha / rank times its product, nothing else trains, the formula counts what trains."""

import pytest
import torch

from course_lib.config import preset
from course_lib.memory.states import LoRA, lora_parameters
from course_lib.minimal.lora import LoRALinear, add_lora
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.training.data import batch, tokens


def test_an_adapter_adds_alpha_over_rank_times_its_product_and_nothing_at_first():
    layer, x = LoRALinear(torch.nn.Linear(6, 5), rank=2, alpha=6.0), torch.randn(3, 6)
    assert torch.equal(layer(x), layer.base(x))
    torch.nn.init.normal_(layer.lora_b)
    change = 6.0 / 2 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ (layer.base.weight + change).t() + layer.base.bias)


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_adapters_get_gradients_and_the_base_none(targets):
    model = build(preset("toy"), dtype=torch.float64)
    add_lora(model, rank=4, alpha=8, targets=targets)
    loss_of(model, *batch(tokens(2000), 0, 2, 16)).backward()
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.grad is not None} == {
        "lora_a", "lora_b"
    }  # fmt: skip
    trained = [param for param in model.parameters() if param.requires_grad]
    assert sum(param.numel() for param in trained) == lora_parameters(preset("toy"), LoRA(4, targets))
