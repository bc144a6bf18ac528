"""Shapes from config.json of transformers against published parameter counts, from flat files, and what is refused."""

import json

import pytest

from course_lib.config import MlaConfig, ModelConfig, MoeConfig, preset
from course_lib.flops import matmul_parameters
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.run import Run
from course_lib.shapes import KINDS, of_transformers, read_model, read_models, read_shapes
from course_lib.tensors import count_parameters, parameter_shapes


def fields(model_type, layers, hidden, heads, kv_heads, ffn, vocab, **more):
    """A config.json with the keys that all of them have."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 32_768,
    } | more


YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = LATENT | {
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True,
    "moe_layer_freq": 1, "rope_scaling": YARN, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN_MOE = {
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "sliding_window": None,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rope_scaling": YARN, "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
LLAMA_4 = {
    "head_dim": 128, "intermediate_size_mlp": 16_384, "num_experts_per_tok": 1, "attention_chunk_size": 8192,
}  # fmt: skip

# The config.json of each model card, the keys that a shape reads. Counts: the presets of keras-hub (their "params" are
# those of the checkpoints); Qwen2.5-7B, Phi-4: the safetensors index on the model card; DeepSeek-V3: arXiv:2412.19437.
PUBLISHED = {
    "Llama 3.1 8B": (fields("llama", 32, 4096, 32, 8, 14_336, 128_256), 8_030_261_248),
    "Mistral 7B": (fields("mistral", 32, 4096, 32, 8, 14_336, 32_000, sliding_window=4096), 7_241_732_096),
    "Qwen2.5 7B": (fields("qwen2", 28, 3584, 28, 4, 18_944, 152_064), 7_615_616_512),
    "Qwen2.5 32B": (fields("qwen2", 64, 5120, 40, 8, 27_648, 152_064), 32_763_876_352),
    "Qwen2.5 72B": (fields("qwen2", 80, 8192, 64, 8, 29_568, 152_064), 72_706_203_648),
    "Qwen3 8B": (fields("qwen3", 36, 4096, 32, 8, 12_288, 151_936, head_dim=128), 8_190_735_360),
    "Qwen3 32B": (fields("qwen3", 64, 5120, 64, 8, 25_600, 151_936, head_dim=128), 32_762_123_264),
    "Qwen3 30B-A3B": (
        fields("qwen3_moe", 48, 2048, 32, 4, 6144, 151_936, moe_intermediate_size=768, **QWEN_MOE), 30_532_122_624,
    ),
    "Qwen3 235B-A22B": (
        fields("qwen3_moe", 94, 4096, 64, 4, 12_288, 151_936, moe_intermediate_size=1536, **QWEN_MOE), 235_093_634_560,
    ),
    "Mixtral 8x7B": (
        fields("mixtral", 32, 4096, 32, 8, 14_336, 32_000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704,
    ),
    "Gemma 2 9B": (fields("gemma2", 42, 3584, 16, 8, 14_336, 256_000, head_dim=256), 9_241_705_984),
    "Gemma 2 27B": (fields("gemma2", 46, 4608, 32, 16, 36_864, 256_000, head_dim=128), 27_227_128_320),
    "Gemma 3 4B, text": (
        {"model_type": "gemma3", "vision_config": {}, "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        }}, 3_880_099_328,
    ),
    "Gemma 3 27B, text": (fields("gemma3_text", 62, 5376, 32, 16, 21_504, 262_208, head_dim=128), 27_009_002_240),
    "Phi-3 mini": (fields("phi3", 32, 3072, 32, 32, 8192, 32_064), 3_821_079_552),
    "Phi-4": (fields("phi3", 40, 5120, 40, 10, 17_920, 100_352), 14_659_507_200),
    "gpt-oss 20B": (fields("gpt_oss", 24, 2880, 64, 8, 2880, 201_088, num_local_experts=32, **GPT_OSS), 20_914_757_184),
    "gpt-oss 120B": (
        fields("gpt_oss", 36, 2880, 64, 8, 2880, 201_088, num_local_experts=128, **GPT_OSS), 116_829_156_672,
    ),
    "DeepSeek-V3": (
        fields("deepseek_v3", 61, 7168, 128, 128, 18_432, 129_280, n_routed_experts=256, n_group=8, topk_group=4,
               first_k_dense_replace=3, routed_scaling_factor=2.5, **DEEPSEEK), 671_000_000_000,
    ),
}  # fmt: skip
KIMI_K2 = fields("kimi_k2", 61, 7168, 64, 64, 18_432, 163_840, n_routed_experts=384, n_group=1, topk_group=1,
                 first_k_dense_replace=1, routed_scaling_factor=2.827,
                 **DEEPSEEK | {"num_nextn_predict_layers": 0})  # fmt: skip
MAVERICK = {"model_type": "llama4", "vision_config": {}, "text_config": fields(
    "llama4_text", 48, 5120, 40, 8, 8192, 202_048, num_local_experts=128, interleave_moe_layer_step=2, **LLAMA_4,
)}  # fmt: skip
SCOUT = fields("llama4_text", 48, 5120, 40, 8, 8192, 202_048, num_local_experts=16, **LLAMA_4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_has_the_published_number_of_parameters(name):
    told, published = PUBLISHED[name]
    assert count_parameters(of_transformers(told).config) == pytest.approx(published, rel=1e-3)


def active(told) -> float:
    """Billions of parameters that a token uses, the row of the embedding table counted as the table."""
    config = of_transformers(told).config
    return (matmul_parameters(config) + config.vocab_size * config.d_model) / 1e9


def test_models_of_which_only_rounded_counts_are_published():
    """Kimi K2: 1 trillion and 32 billion (its model card); Llama 4: 400 and 109, 17 active, with 0.9 of vision."""
    assert count_parameters(of_transformers(KIMI_K2).config) == pytest.approx(1.026e12, rel=1e-3)
    assert active(KIMI_K2) == pytest.approx(32.8, abs=0.1)
    assert count_parameters(of_transformers(MAVERICK).config) == pytest.approx(400.7e9, rel=1e-3)
    assert count_parameters(of_transformers(SCOUT).config) == pytest.approx((109 - 0.9) * 1e9, rel=5e-3)
    assert active(MAVERICK) == pytest.approx(17.2, abs=0.1) and active(SCOUT) == pytest.approx(17.2, abs=0.1)
    assert active(PUBLISHED["DeepSeek-V3"][0]) == pytest.approx(37.5, abs=0.1)  # 37 without the embedding
    assert active(PUBLISHED["Qwen3 235B-A22B"][0]) == pytest.approx(22.2, abs=0.1)
    assert active(PUBLISHED["gpt-oss 120B"][0]) - 0.58 == pytest.approx(5.1, abs=0.05)  # its card: 5.1, embedding apart


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_counts_as_transformers_does(kind):
    """The class of transformers with its own defaults, on the meta device, where these can be built."""
    import torch
    import transformers

    if kind == "kimi_k2":
        assert KINDS[kind] == KINDS["deepseek_v3"]
        return
    changes = {
        "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        "llama4_text": {"interleave_moe_layer_step": 2},
        "qwen3_moe": {"decoder_sparse_step": 2, "norm_topk_prob": True},
        "glm4_moe": {"head_dim": 128, "first_k_dense_replace": 3},
    }
    config = transformers.AutoConfig.for_model(kind, **changes.get(kind, {}))
    with torch.device("meta"):
        theirs = sum(tensor.numel() for tensor in transformers.AutoModelForCausalLM.from_config(config).parameters())
    shape = of_transformers(config.to_dict())
    ours = count_parameters(shape.config)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours == theirs or "model_type" in shape.left_out or kind == "llama4_text"  # whose norms have no weights


def test_experts_in_every_second_layer_are_where_llama_4_has_them():
    config = of_transformers(MAVERICK).config
    assert [layer for layer in range(48) if config.has_experts(layer)] == list(range(1, 48, 2))
    assert config.num_moe_layers == 24 and parameter_shapes(config)["mlp.gate"] == ((16_384, 5120), 24)
    with pytest.raises(ValueError, match="no block has experts"):
        of_transformers(MAVERICK["text_config"] | {"interleave_moe_layer_step": 49})


def test_what_a_shape_leaves_out_is_told():
    left_out = {name: of_transformers(told).left_out for name, (told, _) in PUBLISHED.items()}
    assert left_out["Llama 3.1 8B"] == left_out["Qwen3 8B"] == left_out["Mixtral 8x7B"] == {}
    assert "sliding_window is 4096: attention is counted over the whole" in left_out["Mistral 7B"]["sliding_window"]
    assert "biases" in left_out["Qwen2.5 7B"]["model_type"]
    assert "vision" in left_out["Gemma 3 4B, text"]["vision_config"]
    assert set(left_out["DeepSeek-V3"]) == {"rope_scaling", "num_nextn_predict_layers"}
    assert "mxfp4" in left_out["gpt-oss 20B"]["quantization_config"]
    assert "sliding_window" not in of_transformers(PUBLISHED["Mistral 7B"][0], seq_len=4096).left_out  # it sees all


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"model_type": "starcoder2"}, "model_type is 'starcoder2', of which no shape is known; known: .*llama"),
        ({"model_type": 3}, "model_type is 3"),
        ({"model_type": "llama"}, "a config.json of model_type 'llama' has num_attention_heads; this one does not"),
        (LATENT | KIMI_K2 | {"q_lora_rank": None}, "q_lora_rank is null"),
        (PUBLISHED["Qwen3 30B-A3B"][0] | {"mlp_only_layers": [5]}, r"mlp_only_layers is \[5\]"),
        (SCOUT | {"moe_layers": [3, 4]}, r"moe_layers is \[3, 4\]"),
        (KIMI_K2 | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            fields("qwen2_moe", 24, 2048, 16, 16, 5632, 151_936, num_experts=60, num_experts_per_tok=4,
                   moe_intermediate_size=1408, shared_expert_intermediate_size=2000),
            "shared_expert_intermediate_size is 2000",
        ),
    ],
)  # fmt: skip
def test_what_a_shape_cannot_say_is_refused_by_name(told, said):
    with pytest.raises(ValueError, match=said):
        of_transformers(told)


FLAT = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256, "tied": False}


def written(path, told):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told))
    return path


def test_one_reader_takes_presets_flat_files_and_config_json(tmp_path):
    assert read_model("llama-3-405b", 8192).config == preset("llama-3.1-405b")
    flat = read_model(str(written(tmp_path / "mine.json", FLAT)), 512).config
    assert (flat.name, flat.num_layers, flat.max_seq_len) == ("mine", 4, 512)
    assert read_model(str(written(tmp_path / "named.json", {"mine": FLAT})), 512).config == flat
    file = written(tmp_path / "Qwen3-8B" / "config.json", PUBLISHED["Qwen3 8B"][0])
    config = read_model(str(file), 4096).config
    assert config.name == "Qwen3-8B" and config.qk_norm and config.max_seq_len == 32_768
    assert read_model(str(file.parent), 40_960).config.max_seq_len == 40_960  # no parameter depends on it
    several = {"a": FLAT, "b": "toy", "c": KIMI_K2}
    models = read_models(written(tmp_path / "models.json", several), 512)
    assert models["b"] == preset("toy") and models["c"].mla.q_rank == 1536
    assert read_shapes(tmp_path / "models.json", 512)["c"].left_out


def test_a_flat_file_has_words_for_experts_and_latent_attention(tmp_path):
    words = {"q_rank": 32, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    experts = {"experts": 8, "top_k": 1, "expert_ffn": 32, "shared_experts": 1, "dense_layers": 1, "expert_every": 2}
    told = FLAT | {"kv_heads": 4} | words | experts
    config = read_model(str(written(tmp_path / "mine.json", told)), 512).config
    assert config.mla == MlaConfig(32, 16, 8, 4, 8) and config.head_dim == 12
    assert config.moe == MoeConfig(8, 1, 32, 1, normalise_weights=False, first_dense_layers=1, every=2)
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (FLAT | {"width": 3}, "model 'mine' has layers, hidden, .*; required: layers, .*; or a config.json"),
        ({"layers": 4}, "model 'mine' has layers; required: layers, hidden"),
        (FLAT | {"q_rank": 8}, "model 'mine' has q_rank; latent attention has q_rank, kv_rank"),
        (FLAT | {"experts": 8}, "model 'mine' has experts; required beside: top_k, expert_ffn"),
        (FLAT | {"layers": "x"}, "model 'mine': num_layers is 'x'"),
        ({}, "has 0 models; required: one"),
    ],
)
def test_mistakes_of_a_flat_file_are_named(tmp_path, told, said):
    with pytest.raises(ValueError, match=said):
        read_model(str(written(tmp_path / "mine.json", told)), 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["dp=4,ep=4,zero_stage=1", "pp=2,micro_batches=4", "pp=3,micro_batches=3", "dp=2,ep=2,tp=2,recompute=full"],
)
def test_the_engine_holds_what_is_told_of_experts_in_every_second_layer(layout):
    from course_lib.simulate.cluster import simulate_ranks

    experts = MoeConfig(8, 1, 256, 1, score="sigmoid", normalise_weights=False, every=2)
    config = ModelConfig("every second", 6, 256, 8, 4, d_ff=1024, vocab_size=1024, max_seq_len=512, moe=experts)
    run = Run(config, Layout.parse(layout), 256)
    for simulated, told in zip(simulate_ranks(run), budgets(run), strict=True):
        assert simulated.states["parameters"] == told.parameters and simulated.states["optimizer"] == told.optimizer
        assert sum(told.at_peak.values()) == pytest.approx(simulated.peak_bytes, rel=0.03)
