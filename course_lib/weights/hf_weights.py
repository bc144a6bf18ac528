"""Weights to and from the models of the `transformers` library, which the tests hold ours against.

One function knows where each of our tensors lies in theirs: `tensor_in_transformers` returns a view, and copying goes
from it or into it. Known: LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM,
DeepseekV3ForCausalLM (without YaRN and multi-token prediction), GPT2LMHeadModel, XLMRobertaXLModel (without pooler).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from course_lib.config import ModelConfig
from course_lib.model import build
from course_lib.model.moe import moe_layers
from course_lib.shapes import of_transformers
from course_lib.validate import read_toml

_MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}  # a matrix of one expert, as files have it
TABLES = read_toml(Path(__file__).with_name("names.toml"))
_TENSORS = TABLES["tensors"]
NAMES = {  # ours -> theirs: outside of blocks, the prefix of blocks, inside of them
    naming: (of["top"], of["prefix"], _TENSORS[of.get("like", naming)]["block"] | of["block"])
    for naming, of in _TENSORS.items()
}


def naming_of(config: ModelConfig) -> str:
    """Which of NAMES a model follows: its family, or with latent attention "deepseek"."""
    return "deepseek" if config.mla else config.family


def name_in_transformers(name: str, naming: str) -> str:
    """Their name of one of our parameters: blocks.3.attention.q.weight -> model.layers.3.self_attn.q_proj.weight."""
    top, prefix, block = NAMES[naming]
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, index, inner = module.split(".", 2)
        if inner.startswith("mlp.experts."):
            _, _, expert, matrix = inner.split(".")
            if naming == "deepseek":
                return f"{prefix}.{index}.mlp.experts.{expert}.{matrix}_proj.{kind}"
            return f"{prefix}.{index}.block_sparse_moe.experts.{expert}.{_MIXTRAL_EXPERT[matrix]}.{kind}"
        return f"{prefix}.{index}.{block[inner]}.{kind}"
    return f"{top[module]}.{kind}"


def tensor_in_transformers(state: Mapping[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """A view of their tensor, in our shape. GPT-2 stores its matrices as (in, out), and q, k, v as one.

    Experts lie one by one in files and in transformers 4; in memory transformers 5 holds them as one tensor.
    """
    theirs = name_in_transformers(name, naming_of(config))
    if (".block_sparse_moe." in theirs or ".experts." in theirs) and theirs not in state:
        return _joined_expert(state, name)
    tensor = state[theirs]
    if config.family != "gpt" or not name.startswith("blocks.") or "norm" in name:
        return tensor
    tensor = tensor.t() if tensor.dim() == 2 else tensor
    for index, part in enumerate(("attention.q.", "attention.k.", "attention.v.")):
        if part in name:
            return tensor.chunk(3)[index]
    return tensor


def _joined_expert(state: Mapping[str, Tensor], name: str) -> Tensor:
    """The router, or one matrix of one expert out of those of all: gate_up_proj (E, 2 F, D), down_proj (E, D, F)."""
    _, index, _, *inner = name.split(".")
    layer = f"model.layers.{index}.mlp"
    if inner[0] == "router":
        return state[f"{layer}.gate.weight"]
    _, expert, matrix, _ = inner
    if matrix == "down":
        return state[f"{layer}.experts.down_proj"][int(expert)]
    return state[f"{layer}.experts.gate_up_proj"][int(expert)].chunk(2)[matrix == "up"]


LOADED = ("llama", "mistral", "qwen3", "mixtral", "deepseek_v3", "gpt2", "xlm-roberta-xl")  # whose tensors NAMES has
_NO_TENSOR = ("num_nextn_predict_layers",)  # of which transformers builds nothing


def config_from_transformers(hf_config) -> ModelConfig:
    """The same shape as a ModelConfig. How Mixtral is balanced in training is not carried over: balancing is "none".
    hf_config   a configuration of transformers, or the fields of a config.json
    Raises      ValueError if the model is none that this course has, or differs from it in what it computes
    """
    fields = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
    kind = fields.get("model_type")
    if kind not in LOADED:
        raise ValueError(f"model_type is {kind!r}; this course has {', '.join(LOADED[:-1])} and {LOADED[-1]}")
    shape = of_transformers(fields, kind)
    if differs := [sentence for key, sentence in shape.left_out.items() if key not in _NO_TENSOR]:
        raise ValueError(f"{'; '.join(differs)}; weights of such a model cannot be read into this course's")
    return shape.config


@torch.no_grad()
def from_transformers(hf_model: nn.Module, attention: str = "fused") -> nn.Module:
    """Our model with the weights of theirs, in the same dtype, on the same device."""
    config, theirs = config_from_transformers(hf_model.config), hf_model.state_dict()
    example = next(hf_model.parameters())
    model = build(config, 0, example.dtype, example.device, attention)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensor_in_transformers(theirs, name, config))
    for layer, moe in enumerate(moe_layers(model), config.num_layers - config.num_moe_layers):
        bias_E = theirs.get(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        if bias_E is not None:  # DeepSeek's: a multiple of bias_speed, which ours counts
            moe.router.bias_steps_E.copy_((bias_E / moe.config.bias_speed).round())
    return model
