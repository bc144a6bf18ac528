"""Engines tell a model's modules what they must know in fields that these declare, and hang nothing else on them."""

import pytest
import torch
import torch.distributed as dist
from five_d_cases import CONFIGS, micro_batches
from torch import nn

from course_lib import model
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.native import context as native_context
from course_lib.native import expert as native_expert
from course_lib.parallel import context, data, expert, five_d, sequence, tensor, zero
from course_lib.parallel import engine as engines

BUILDS = {
    "tensor": ("llama", lambda whole: tensor.build(whole, dist.group.WORLD)),
    "tensor, latent": ("latent", lambda whole: tensor.build(whole, dist.group.WORLD)),
    "tensor, norms of heads": ("head norms", lambda whole: tensor.build(whole, dist.group.WORLD)),
    "sequence": ("gpt", lambda whole: sequence.build(whole, dist.group.WORLD)),
    "context": ("gpt", lambda whole: context.build(whole, dist.group.WORLD)),
    "context, PyTorch's": ("llama", lambda whole: native_context.build(whole, dist.group.WORLD)),
    "expert": ("experts", lambda whole: expert.build(whole, dist.group.WORLD)),
    "expert, PyTorch's": ("experts", lambda whole: native_expert.build(whole, dist.group.WORLD)),
    "data": ("experts", lambda whole: data.BucketedDP(whole, dist.group.WORLD)),
    "zero": ("tied", lambda whole: zero.ZeroUnits(whole, dist.group.WORLD)),
    "backward in two parts": ("tied", lambda whole: after_a_step("tied", pp=2, schedule="zb_h1", micro_batches=3)),
    "experts over tp": ("experts", lambda whole: after_a_step("experts", tp=2, sequence_parallel=True)),
}  # fmt: skip
BY_PYTORCH = {"_ddp_params_and_buffers_to_ignore"}  # what DDP itself notes of a model


def after_a_step(name, **axes):
    config, layout = CONFIGS[name], Layout(**axes)
    engine = five_d.build(config, layout, dtype=torch.float64)
    engines.step(engine, micro_batches(layout, 0, config), engines.make_optimizer(engine))
    return engine


def undeclared(engine: nn.Module, plain: nn.Module) -> set[str]:
    """Attributes of modules of the plain model's classes that its own modules do not have."""
    fields = {}
    for module in plain.modules():
        fields.setdefault(type(module), set()).update(vars(module))
    return {
        f"{type(module).__name__}.{name}"
        for module in engine.modules()
        for name in vars(module).keys() - fields.get(type(module), vars(module).keys()) - BY_PYTORCH
    }


def all_builds():
    return {
        name: undeclared(build(model.build(CONFIGS[config], dtype=torch.float64)), model.build(CONFIGS[config]))
        for name, (config, build) in BUILDS.items()
    }


@pytest.fixture(scope="module")
def ranks():
    return launch(all_builds, 2)


@pytest.mark.parametrize("name", BUILDS)
def test_an_engine_sets_only_fields_that_the_models_modules_declare(ranks, name):
    for rank in ranks:
        assert rank[name] == set()


def test_what_is_hung_on_a_layer_is_found():
    whole = model.build(CONFIGS["llama"])
    whole.blocks[0].attention.q.forward = whole.blocks[0].mlp.norm = abs
    assert undeclared(whole, model.build(CONFIGS["llama"])) == {"Linear.forward", "MLP.norm"}
