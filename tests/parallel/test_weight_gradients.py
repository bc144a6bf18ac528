"""Backward in two parts where layers are cut over tp: I leaves the weights of matrices alone, W gives them theirs.

(Whole layers, in a pipeline: test_parallel_pipeline.)
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import model
from course_lib.comm import my_piece
from course_lib.config import ModelConfig, MoeConfig
from course_lib.launch import launch
from course_lib.model import moe
from course_lib.parallel import expert_tensor
from course_lib.parallel.linear import ColumnLinear, ReplicatedResidual, column_linears
from course_lib.parallel.sequence import ShardedResidual
from course_lib.parallel.vocabulary import VocabEmbedding, vocab_cross_entropy
from course_lib.parallel.weight_gradients import DelayedWeightGradients, WeightGradientStore

LLAMA = ModelConfig("llama", 2, d_model=16, num_heads=4, num_kv_heads=1, d_ff=27, vocab_size=39, max_seq_len=32)
GPT = replace(LLAMA, name="gpt", family="gpt", num_kv_heads=4, tied=True)
EXPERTS = replace(LLAMA, moe=MoeConfig(4, 2, d_expert=9, num_shared_experts=1, balancing="aux_loss"))
CASES = {
    "whole residual stream, shared keys": (LLAMA, ReplicatedResidual, {}, "none"),
    "biases, tied": (GPT, ReplicatedResidual, {}, "none"),
    "a frozen matrix, recomputed": (LLAMA, ReplicatedResidual, {}, "full"),
    "sequence parallel": (LLAMA, ShardedResidual, {}, "selective"),
    "sequence parallel, gathered again": (LLAMA, ShardedResidual, {"regather": True}, "none"),
    "experts": (EXPERTS, ReplicatedResidual, {}, "none"),
    "experts, sequence parallel, recomputed": (EXPERTS, ShardedResidual, {}, "full"),
}


def engine_of(name):
    config, residual, options, recompute = CASES[name]
    whole = model.build(config, 1, torch.float64, recompute=recompute)
    if "frozen" in name:
        for block in whole.blocks:
            block.attention.k.weight.requires_grad_(False)
            block.mlp.down.weight.requires_grad_(False)
    delayed = DelayedWeightGradients(whole)  # before its layers are cut, as a pipeline makes it
    stream = residual(dist.group.WORLD, **options)
    whole.embed, whole.head = VocabEmbedding(whole.embed, stream), ColumnLinear(whole.head, stream)
    whole.tie()
    for block in whole.blocks:
        expert_tensor.cut_block(block, stream, config)
    return whole, delayed


def backward(engine, queue=None, delayed=None):
    """Loss and, by name, the gradients that there are after it."""
    x_BS, y_BS = torch.randint(39, (2, 2, 7), generator=torch.Generator().manual_seed(0))

    def forward():
        loss = vocab_cross_entropy(engine(x_BS), y_BS, engine.embed.first, dist.group.WORLD).mean()
        return moe.add_balancing(engine, loss)

    if queue is None:
        forward().backward()
    else:
        with delayed.into(queue):
            loss = forward()
        with delayed.into(WeightGradientStore()):  # as in a pipeline: recomputation does again what forward did
            loss.backward()
    return {name: param.grad.clone() for name, param in engine.named_parameters() if param.grad is not None}


def in_two_parts(name):
    (engine, delayed), queue = engine_of(name), WeightGradientStore()
    expected = backward(engine_of(name)[0])
    after_input = backward(engine, queue, delayed)
    queue.run()
    after_weights = {name: param.grad for name, param in engine.named_parameters() if param.grad is not None}
    assert after_weights.keys() == expected.keys(), after_weights.keys() ^ expected.keys()
    waited = {name for name in expected if name not in after_input}
    if engine.config.tied and not torch.equal(after_input["embed.weight"], expected["embed.weight"]):
        waited.add("embed.weight")  # the embedding's part is there after I, the head's comes with W
    apart = max((after_weights[name] - grad).abs().max().item() for name, grad in expected.items())
    early = max((after_input[name] - expected[name]).abs().max().item() for name in expected.keys() - waited)
    engine.zero_grad()  # outside of `into` all is as before
    again = backward(engine)
    apart = max(apart, *((again[name] - grad).abs().max().item() for name, grad in expected.items()))
    matrices = {name for name, param in engine.named_parameters() if param.requires_grad and waits(name)}
    matrices |= {"embed.weight"} if engine.config.tied else set()
    return waited == matrices, apart, early, max(grad.abs().max().item() for grad in expected.values())


def waits(name):
    """A matrix or its bias; rows' biases are added after the sum, and not with the product."""
    layer, kind = name.split(".")[-2:]
    return layer in ("q", "k", "v", "gate", "up", "head") or (layer in ("o", "down") and kind == "weight")


def columns_under_autocast(regather):
    """Outputs and gradients of two columns of one input: by `column_linears`, then by `F.linear` and autograd.

    Backward runs outside of autocast, as a trainer's does.
    """
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(3)
    whole_BSD = torch.randn(2, 6, 16, generator=generator)
    linears = [nn.Linear(16, width, bias=width > 8) for width in (8, 12)]
    for parameter in (parameter for linear in linears for parameter in linear.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    found = []
    for by_hand in (True, False):
        residual = ShardedResidual(group, regather=regather, seq_len=6)
        layers = [ColumnLinear(linear, residual) for linear in linears]
        x_BsD = my_piece(whole_BSD, group.rank(), 2, dim=1).clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if by_hand:
                outputs = column_linears(x_BsD, layers, residual)
            else:
                x_BSD = residual.enter(x_BsD.to(torch.bfloat16))
                outputs = [F.linear(x_BSD, layer.weight, layer.bias) for layer in layers]
        sum(y_BSf.float().square().sum() for y_BSf in outputs).backward()
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        found.append(
            [*(y_BSf.detach() for y_BSf in outputs), x_BsD.grad, *(parameter.grad for parameter in parameters)]
        )
    return found


def all_cases():
    return {name: in_two_parts(name) for name in CASES} | {
        regather: columns_under_autocast(regather) for regather in (False, True)
    }


@pytest.fixture(scope="module")
def ranks():
    return launch(all_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_weights_of_cut_layers_wait_for_w_and_all_gradients_are_those_of_one_backward(ranks, name):
    for rank in ranks:
        waited, apart, early, size = rank[name]
        assert waited and apart < 1e-14 < size and early < 1e-14, (waited, apart, early)


@pytest.mark.parametrize("regather", [False, True])
def test_under_autocast_columns_give_what_autograd_gives_whether_their_input_is_gathered_again_or_not(ranks, regather):
    for rank in ranks:
        by_hand, by_autograd = rank[regather]
        for ours, theirs in zip(by_hand, by_autograd, strict=True):
            assert ours.dtype == theirs.dtype and theirs.abs().max() > 0
            assert torch.allclose(ours, theirs, rtol=2**-7, atol=2**-7 * theirs.abs().max().item())
        assert by_hand[0].dtype == torch.bfloat16 and by_hand[2].dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_a_linear_whose_weight_gradient_waits_is_f_linear_to_the_bit(bias):
    """Backward runs outside of autocast: a product of FP32 numbers there would be another."""
    generator, found = torch.Generator().manual_seed(4), []
    numbers = [torch.randn(shape, generator=generator) for shape in ((3, 5, 16), (12, 16), (12,), (3, 5, 12))]
    for delayed in (True, False):
        x_BSD, w_FD, b_F = (x.clone().requires_grad_() for x in numbers[:3])
        store = WeightGradientStore()
        with torch.autocast("cpu", torch.bfloat16):
            y_BSF = (store.linear if delayed else F.linear)(x_BSD, w_FD, b_F if bias else None)
        y_BSF.backward(numbers[3].to(y_BSF.dtype))
        assert (w_FD.grad is None) == delayed
        store.run()
        found.append([y_BSF.detach(), x_BSD.grad, w_FD.grad, *([b_F.grad] if bias else [])])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert found[0][0].dtype == torch.bfloat16 and found[0][2].dtype == torch.float32
