"""Checkpoints as files of transformers, which computes the same logits from them; engines filled from such files."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from course_lib import checkpoint
from course_lib.checkpoint.export import config_for_transformers, export_safetensors, import_safetensors
from course_lib.config import MlaConfig, ModelConfig, MoeConfig, RopeScaling, preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.model import build
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.parallel.engine import full_parameters
from course_lib.weights.hf_weights import config_from_transformers

pytestmark = pytest.mark.exhaustive

LLAMA = ModelConfig("llama", 2, 32, 4, 2, 52, 97, 64, rope_scaling=RopeScaling(8.0, original_max_seq_len=32))
DEEPSEEK = MoeConfig(4, 2, 24, num_shared_experts=1, score="sigmoid", balancing="bias", routed_scale=2.5,
                     num_groups=2, first_dense_layers=1, bias_speed=0.05)  # fmt: skip
LATENT = ModelConfig("latent", 2, 32, 4, 4, 52, 97, 64, norm_eps=1e-6, mla=MlaConfig(20, 12, 6, 4, 8))
MODELS = {
    "llama": (LLAMA, "tp=2"),
    "tied": (replace(LLAMA, tied=True, head_dim=16, rope_scaling=None), "pp=2,micro_batches=2"),
    "qwen3": (replace(LLAMA, qk_norm=True, head_dim=16, rope_scaling=None), "tp=2"),
    "gpt": (ModelConfig("gpt", 2, 32, 4, 4, 64, 97, 64, family="gpt", tied=True), "dp=2,zero_stage=3"),
    "mixtral": (replace(LLAMA, d_ff=24, rope_scaling=None, moe=MoeConfig(4, 2, 24)), "dp=2,ep=2,zero_stage=1"),
    "deepseek": (replace(LATENT, moe=DEEPSEEK), "dp=2,ep=2"),
}  # fmt: skip


def trained(config, text, folder):
    engine = five_d.build(config, Layout.parse(text))
    optimizer = engines.make_optimizer(engine)
    chance = torch.Generator().manual_seed(engine.groups.coordinates["dp"])
    for _ in range(3):
        tokens = torch.randint(97, (engine.layout.micro_batches, 2, 1, 16), generator=chance)
        engines.step(engine, list(tokens.unbind(0)), optimizer)
    checkpoint.save(engine, optimizer, folder, 3)
    biases = {name: x for stage in engine.stages.values() for name, x in stage.named_buffers() if "bias_steps" in name}
    return full_parameters(engine) | biases


def save_all(folder):
    return {name: trained(config, text, folder / name) for name, (config, text) in MODELS.items()}


def import_some(folder, wanted):
    """Files of a model saved by two ranks, under layouts of two ranks."""
    for name, text in [
        ("llama", "dp=2,zero_stage=3"),
        ("gpt", "tp=2"),
        ("tied", "dp=2,zero_stage=1"),
        ("qwen3", "pp=2,micro_batches=2"),
        ("mixtral", "tp=2"),
    ]:
        engine = five_d.build(MODELS[name][0], Layout.parse(text), seed=1)
        import_safetensors(engine, folder / f"{name}.hf")
        for key, x in full_parameters(engine).items():
            assert torch.equal(x, wanted[name][key]), (name, key)
    engine = five_d.build(LLAMA, Layout.parse("dp=2,zero_stage=1"), seed=1)
    missing = folder / ("none" if engine.groups.world.rank() else "llama.hf")
    with pytest.raises(ValueError, match="none"):  # on both ranks, before one waits for the other
        import_safetensors(engine, missing)


def save_in_bf16(folder):
    """The model and its master weights."""
    engine = five_d.build(MODELS["gpt"][0], Layout.parse("dp=1"), dtype=torch.bfloat16)
    optimizer = engines.make_optimizer(engine)
    engines.step(engine, [tuple(torch.randint(97, (2, 1, 16)).unbind(0))], optimizer)
    checkpoint.save(engine, optimizer, folder, 1)
    names = five_d.named_parameters(engine)
    return full_parameters(engine), {name: optimizer.state[param]["master"] for name, param in names.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, name -> whole parameters): each model saved by two ranks, and exported by this process."""
    folder = tmp_path_factory.mktemp("exports")
    parameters = launch(save_all, 2, folder)[0]
    for name in MODELS:
        export_safetensors(folder / name, folder / f"{name}.hf")
    return folder, parameters


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(saved, name):
    from transformers import AutoModelForCausalLM

    (folder, parameters), config = saved, MODELS[name][0]
    theirs = AutoModelForCausalLM.from_pretrained(folder / f"{name}.hf").eval()
    tokens_BS = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    assert config_from_transformers(theirs.config) == replace(
        config, name=theirs.config.model_type, dropout=0.0, moe=config.moe and replace(config.moe, bias_speed=0.001)
    )
    ours = build(config)
    missing = ours.load_state_dict(parameters[name], strict=False)
    assert missing == ([] if not config.tied else ["head.weight"], [])
    if name == "deepseek":
        assert parameters[name]["blocks.1.mlp.router.bias_steps_E"].any()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BS).logits, ours(tokens_BS), rtol=0, atol=2e-5)


def test_an_engine_of_any_layout_is_filled_from_such_files(saved):
    launch(import_some, 2, *saved)


def test_in_another_dtype_and_refusals(saved, tmp_path):
    folder, parameters = saved
    export_safetensors(folder / "gpt" / "step-00000003", tmp_path / "bf16", torch.bfloat16)
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.equal(found["transformer.wte.weight"], parameters["gpt"]["embed.weight"].bfloat16())
    parameters, masters = launch(save_in_bf16, 1, tmp_path / "saved")[0]
    for dtype, wanted in ((None, parameters), (torch.float32, masters)):
        out = export_safetensors(tmp_path / "saved", tmp_path / str(dtype), dtype)
        found = load_file(out / "model.safetensors")["transformer.h.1.mlp.c_proj.weight"]
        assert torch.equal(found, wanted["blocks.1.mlp.down.weight"].t())
    assert not torch.equal(found, parameters["blocks.1.mlp.down.weight"].t())
    with pytest.raises(ValueError, match="bf16 is there already"):
        export_safetensors(folder / "gpt", tmp_path / "bf16")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        export_safetensors(tmp_path / "none", tmp_path / "out")
    for wrong, said in [
        (preset("xlm-r-base"), "family is 'xlmr'"),
        (replace(LLAMA, moe=MoeConfig(4, 2, 24), qk_norm=True), "has qk_norm True, which transformers' mixtral has"),
        (replace(LLAMA, moe=DEEPSEEK), "num_shared_experts 1, score 'sigmoid', balancing 'bias'"),
        (replace(MODELS["deepseek"][0], moe=replace(DEEPSEEK, balancing="none")), "has balancing 'none', which"),
        (replace(MODELS["deepseek"][0], norm_eps=1e-5), "norm_eps 1e-05"),
        (LATENT, "has mla"),
    ]:
        with pytest.raises(ValueError, match=said):
            config_for_transformers(wrong, torch.float32)
