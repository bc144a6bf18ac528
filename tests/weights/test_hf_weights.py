"""Same random weights, same numbers as transformers, both ways."""

import pytest
import torch

from course_lib.weights.hf_weights import config_from_transformers, from_transformers, tensor_in_transformers

pytestmark = pytest.mark.slow
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32, "rope_theta": 500_000.0}  # fmt: skip


def hf():
    """The library: imported when a test runs, since every worker of the quick tests would wait for it."""
    import transformers

    return transformers


def llama(**changes):
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
             "num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 128}  # fmt: skip
    return hf().LlamaForCausalLM(hf().LlamaConfig(**(shape | changes)))


def qwen3(**changes):
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 16,
             "num_key_value_heads": 2, "intermediate_size": 112, "max_position_embeddings": 128}  # fmt: skip
    return hf().Qwen3ForCausalLM(hf().Qwen3Config(**(shape | changes)))


def mistral():
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8,
             "num_key_value_heads": 2, "intermediate_size": 112, "sliding_window": None}  # fmt: skip
    return hf().MistralForCausalLM(hf().MistralConfig(**shape))


def mixtral():
    return hf().MixtralForCausalLM(
        hf().MixtralConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
                           num_key_value_heads=2, intermediate_size=80, max_position_embeddings=128,
                           num_local_experts=6, num_experts_per_tok=3)
    )  # fmt: skip


def deepseek(**changes):
    """Values longer than keys unless changed; routers that reach 2 of 4 groups; the first block dense."""
    shape = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 4, "intermediate_size": 112, "moe_intermediate_size": 24, "n_routed_experts": 16,
             "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2,
             "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 20,
             "max_position_embeddings": 128}  # fmt: skip
    model = hf().DeepseekV3ForCausalLM(hf().DeepseekV3Config(**(shape | changes)))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.arange(16) % 5 * 0.05)
    return model


def gpt2():
    return hf().GPT2LMHeadModel(hf().GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=128))


def xlmr():
    return hf().XLMRobertaXLModel(
        hf().XLMRobertaXLConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=256, max_position_embeddings=130),
        add_pooling_layer=False,
    )  # fmt: skip


MODELS = {
    "grouped heads": llama,
    "as many key/value heads": lambda: llama(num_key_value_heads=8),
    "tied": lambda: llama(tie_word_embeddings=True),
    "wide heads": lambda: llama(head_dim=32),
    "rope scaling": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "norms of heads": qwen3,
    "norms of heads, tied": lambda: qwen3(tie_word_embeddings=True),
    "mistral": mistral,
    "mixtral": mixtral,
    "latent attention": deepseek,
    "latent attention, short values": lambda: deepseek(v_head_dim=8),
    "latent attention, heads all alike": lambda: deepseek(v_head_dim=18),
    "gpt2": gpt2,
    "xlm-r-xl": xlmr,
}


def randomised(model):
    """Theirs with random numbers in every parameter, norms and biases too, so that none can hide."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def outputs(hf_model, x_BS):
    with torch.no_grad():
        out = hf_model(x_BS)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_equal_transformers_with_its_weights(kind):
    theirs = randomised(MODELS[kind]())
    x_BS = torch.randint(2, 97, (2, 100), generator=torch.Generator().manual_seed(5))
    for attention in ("fused", "standard"):
        ours = from_transformers(theirs, attention=attention).eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(x_BS), outputs(theirs, x_BS), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "kind", ["grouped heads", "norms of heads", "mixtral", "latent attention", "latent attention, short values"]
)
def test_gradients_of_experts_router_latents_and_norms_of_heads_equal_transformers(kind):
    theirs = randomised(MODELS[kind]())
    ours = from_transformers(theirs)
    x_BS = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(5))
    theirs(x_BS).logits.square().mean().backward()
    ours(x_BS).square().mean().backward()
    state = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        expected = tensor_in_transformers(state, name, ours.config)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="attention_bias is True"):
        config_from_transformers(hf().Qwen3Config(attention_bias=True))
    with pytest.raises(ValueError, match="model_type is 'bert'; this course has llama, mistral, qwen3, mixtral, deep"):
        config_from_transformers(hf().BertConfig())
