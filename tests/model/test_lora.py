"""LoRA: what trains, what stays, what merging gives."""

import copy

import pytest
import torch

from course_lib.model import LoRALinear, apply_lora, build, merge_lora, trainable_parameters
from course_lib.model.llama import preset
from course_lib.training import make_optimizer, train_step

TOY = preset("toy")


def rows():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (2, 16), generator=generator), torch.randint(256, (2, 16), generator=generator)


def test_at_first_adapters_change_nothing():
    model = build(TOY)
    with torch.no_grad():
        before = model(rows()[0])
        apply_lora(model, rank=4)
        assert torch.equal(model(rows()[0]), before)


def test_trainable_parameters_are_rank_times_in_plus_out():
    model = build(TOY)
    total = sum(p.numel() for p in model.parameters())
    names = apply_lora(model, rank=4, targets=("q", "v"))
    assert names[:2] == ["blocks.0.attention.q", "blocks.0.attention.v"]
    assert trainable_parameters(model) == 4 * 4 * ((64 + 64) + (64 + 32))
    assert sum(p.numel() for p in model.parameters()) == total + trainable_parameters(model)  # the base stays


def test_xlm_r_xl_trains_0_34_percent_by_q_and_v_and_1_5_percent_by_all_at_rank_32():
    for targets, percent in ((("q", "v"), 0.34), (("q", "k", "v", "o", "up", "down"), 1.5)):
        model = build(preset("xlm-r-xl"), device="meta")
        total = sum(p.numel() for p in model.parameters())
        apply_lora(model, rank=32, targets=targets)
        assert 100 * trainable_parameters(model) / total == pytest.approx(percent, abs=0.06)


def test_training_moves_the_adapters_only_and_merging_keeps_the_outputs():
    model = build(TOY, dtype=torch.float64)
    base = copy.deepcopy(model.state_dict())
    apply_lora(model, rank=4, targets=("q", "v", "down"))
    optimizer = make_optimizer(model, learning_rate=1e-2)
    losses = [train_step(model, optimizer, *rows()) for _ in range(10)]
    assert losses[-1] < losses[0] - 0.01
    assert len(optimizer.state) == 2 * 3 * 4
    for name, tensor in model.state_dict().items():
        if "lora" not in name:
            assert torch.equal(tensor, base[name.replace(".base", "")])
    with torch.no_grad():
        before = model(rows()[0])
        assert len(merge_lora(model)) == 12
        torch.testing.assert_close(model(rows()[0]), before)
    assert not any(isinstance(module, LoRALinear) for module in model.modules())
    assert list(model.state_dict()) == list(base)


def test_an_adapter_adds_alpha_over_rank_times_its_product():
    layer = LoRALinear(torch.nn.Linear(6, 5, bias=False), rank=2, alpha=6.0)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6)
    expected = x @ (layer.base.weight + 6.0 / 2 * layer.lora_b @ layer.lora_a).t()
    torch.testing.assert_close(layer(x), expected)


def test_wrong_targets_and_ranks_are_refused():
    with pytest.raises(ValueError, match=r"targets \['query'\] are no linear layers of this model; choose from"):
        apply_lora(build(TOY), targets=("query",))
    with pytest.raises(ValueError, match="rank is 0"):
        apply_lora(build(TOY), rank=0)
