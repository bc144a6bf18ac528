"""Presets against the models that transformers builds from the same shapes, and the errors of wrong shapes."""

import dataclasses

import pytest
import torch

from course_lib.config import PRESETS, ModelConfig, RopeScaling, preset
from course_lib.model import build

# Model cards. XLM-R: the encoder without pooler and head, which papers round to 0.27, 0.55, 3.5 and 10.7 billion.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "smollm-1.7b": 1_711_376_384,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "xlm-r-base": 277_453_056,
    "xlm-r-large": 558_840_832,
    "xlm-r-xl": 3_475_929_600,
    "xlm-r-xxl": 10_695_954_432,
}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def transformers_model(config):
    """Theirs, of our shape; the class by the preset's name. (Imported here: it takes seconds.)"""
    import transformers as hf

    shape = {"vocab_size": config.vocab_size, "hidden_size": config.d_model, "num_hidden_layers": config.num_layers,
             "num_attention_heads": config.num_heads, "tie_word_embeddings": config.tied}  # fmt: skip
    if config.family == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(**shape, num_key_value_heads=config.num_kv_heads, intermediate_size=config.d_ff)
        )
    if config.family == "gpt":
        return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, n_positions=config.max_seq_len))
    kinds = {
        "xlm-r-xl": (hf.XLMRobertaXLConfig, hf.XLMRobertaXLModel),
        "xlm-r-xxl": (hf.XLMRobertaXLConfig, hf.XLMRobertaXLModel),
    }
    config_class, model_class = kinds.get(config.name, (hf.XLMRobertaConfig, hf.XLMRobertaModel))
    shape |= {"intermediate_size": config.d_ff, "max_position_embeddings": config.max_seq_len + 2, "type_vocab_size": 1}
    return model_class(config_class(**shape), add_pooling_layer=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_transformers_model(name):
    config = PRESETS[name]
    ours = count(build(config, device="meta"))
    assert ours == PUBLISHED.get(name, ours)
    # Layers are alike, so 1 and 2 of them tell the count of all: theirs take a minute for the whole list.
    one, two = (dataclasses.replace(config, num_layers=layers) for layers in (1, 2))
    with torch.device("meta"):
        theirs = [count(transformers_model(config)) for config in (one, two)]
    assert ours == theirs[0] + (config.num_layers - 1) * (theirs[1] - theirs[0])


def test_llama_presets_carry_the_context_and_rope_of_their_model_cards():
    for name, factor in (("llama-3.2-1b", 32), ("llama-3.1-8b", 8), ("llama-3.1-70b", 8), ("llama-3.1-405b", 8)):
        config = preset(name)
        assert (config.max_seq_len, config.rope_theta, config.norm_eps) == (131_072, 500_000, 1e-5)
        assert config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    assert (preset("smollm-1.7b").max_seq_len, preset("gpt3-175b").max_seq_len) == (2048, 2048)


def test_toy_and_mini_are_as_small_as_promised():
    assert 100_000 < count(build(preset("toy"))) < 300_000
    assert 1_000_000 < count(build(preset("mini"))) < 3_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6}, "num_heads .6. must be divisible by num_kv_heads .4."),
        ({"num_heads": 12}, "d_model .64. must be divisible by num_heads .12.; change one of them or give head_dim"),
        ({"family": "gpt"}, "num_kv_heads .4. must equal num_heads .8."),
        ({"dropout": 0.1}, "Llama has none"),
        ({"head_dim": 7}, "head_dim .7. must be even"),
    ],
)
def test_a_wrong_shape_is_refused_with_what_to_do(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**({"name": "x", "num_layers": 1, "d_model": 64, "num_heads": 8, "num_kv_heads": 4, "d_ff": 8,
                        "vocab_size": 8, "max_seq_len": 8} | change))  # fmt: skip


def test_rotations_are_stretched_between_two_different_frequencies():
    with pytest.raises(ValueError, match=r"high_freq_factor \(1.0\) must exceed low_freq_factor \(1.0\)"):
        RopeScaling(8.0, high_freq_factor=1.0)


def test_an_unknown_preset_names_those_that_exist():
    with pytest.raises(ValueError, match="preset is .llama-4.; did you mean .*choose from toy, mini"):
        preset("llama-4")
