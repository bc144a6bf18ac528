"""MasterAdamW, FP32 gradients, clipping and loss scaling: against torch's own and by bytes."""

import copy

import pytest
import torch
from torch import nn

from course_lib.training import LossScaler, MasterAdamW, accumulate_gradients, make_optimizer, precision_named
from course_lib.training.precision import PRECISIONS, accumulate_in_fp32, clip_gradients, gradient_of, zero_gradients

BYTES_PER_PARAMETER = {"fp32": 16, "autocast": 16, "bf16": 8, "bf16-master": 16, "bf16-master-fp32-grads": 18,
                       "bf16-master-both-grads": 20, "fp16-master-fp32-grads": 18}  # fmt: skip


class Bigram(nn.Module):
    """The smallest model that has a loss."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(256, 256)
        torch.nn.init.normal_(self.table.weight, std=0.02, generator=torch.Generator().manual_seed(0))
        self.to(dtype)

    def forward(self, tokens_BS):
        return self.table(tokens_BS)


def rows(count=4):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(256, (count, 16), generator=generator), torch.randint(256, (count, 16), generator=generator)


@pytest.mark.parametrize("name", PRECISIONS)
def test_each_precision_costs_its_bytes_per_parameter(name):
    chosen = precision_named(name)
    model = Bigram(chosen.param_dtype)
    optimizer = make_optimizer(model, name)
    for _ in range(2):
        zero_gradients(model.parameters())
        accumulate_gradients(model, *rows(), count=2, precision=chosen)
        optimizer.step()
    weight = model.table.weight
    gradients = [g for g in (weight.grad, getattr(weight, "main_grad", None)) if g is not None]
    state = [v for v in optimizer.state[weight].values() if torch.is_tensor(v) and v.dim() == 2]
    found = sum(tensor.element_size() for tensor in [weight, *gradients, *state])
    assert found == BYTES_PER_PARAMETER[name]


def test_on_fp32_parameters_masters_change_nothing():
    torch.manual_seed(0)
    ours = nn.Linear(7, 5)
    theirs = copy.deepcopy(ours)
    arguments = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [MasterAdamW(ours.parameters(), **arguments), torch.optim.AdamW(theirs.parameters(), **arguments)]
    for _ in range(5):
        x = torch.randn(3, 7)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)


def test_bf16_swallows_small_updates_and_a_master_keeps_them():
    def trained(optimizer_class):
        weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        optimizer = optimizer_class([weight], lr=1e-4, weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight

    assert (trained(torch.optim.AdamW) == 1.0).all()  # 1 - 0.0001 rounds to 1 in bf16, a hundred times
    assert (trained(MasterAdamW) - 0.99).abs().max() < 0.004


def test_fp32_gradients_lose_nothing_over_many_micro_batches():
    def accumulated(fp32):
        weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        handles = accumulate_in_fp32([weight]) if fp32 else []
        for _ in range(512):
            (weight * 1.0).sum().backward()
        for handle in handles:
            handle.remove()
        return gradient_of(weight)

    assert (accumulated(fp32=True) == 512).all()
    assert (accumulated(fp32=False) == 256).all()  # 256 + 1 rounds to 256 in bf16


def test_both_gradients_start_afresh_each_step():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accumulate_in_fp32([weight], keep_low=True)
    for _ in range(2):
        zero_gradients([weight])
        for _ in range(3):
            (2 * weight).sum().backward()
        assert (weight.main_grad == 6).all()
        assert weight.grad is not None


def test_master_state_comes_back_from_a_checkpoint_in_fp32():
    def step(model, optimizer):
        model.weight.grad = torch.full_like(model.weight, 0.3)
        optimizer.step()

    first = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = MasterAdamW(first.parameters(), lr=1e-3)
    step(first, optimizer)
    second = copy.deepcopy(first)
    resumed = MasterAdamW(second.parameters(), lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(first, optimizer)
        step(second, resumed)
    masters = [o.state[m.weight]["master"] for o, m in ((optimizer, first), (resumed, second))]
    assert masters[1].dtype == torch.float32
    assert torch.equal(*masters)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_torchs(max_norm):
    torch.manual_seed(0)
    ours = nn.Linear(7, 5)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model(torch.ones(2, 7)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(clip_gradients(ours.parameters(), max_norm), expected)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_fp16_gradients_underflow_and_loss_scaling_saves_them():
    def gradient(scale):
        weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        accumulate_in_fp32([weight])
        ((weight.float() * 1e-9).sum() * scale).backward()
        finite = LossScaler(scale).unscale([weight])
        return weight.main_grad, finite

    assert (gradient(1.0)[0] == 0).all()
    scaled, finite = gradient(2.0**16)
    assert finite
    torch.testing.assert_close(scaled, torch.full((4,), 1e-9), rtol=1e-2, atol=0)


def test_an_overflow_halves_the_scale_and_good_steps_double_it():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, float("inf")])
    finite = scaler.unscale([weight])
    assert not finite
    scaler.update(finite)
    assert (scaler.scale, scaler.skipped_steps) == (4.0, 1)
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 8.0


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="precision is 'fp8'; choose from fp32, autocast"):
        precision_named("fp8")
    with pytest.raises(ValueError, match="call backward"):
        clip_gradients([nn.Parameter(torch.ones(1))], 1.0)
