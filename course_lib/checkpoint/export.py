"""A checkpoint as the files that `transformers` loads, and an engine filled from such files: safetensors both ways.

    export_safetensors(checkpoint, out)                     # one process; then from_pretrained(out) reads it
    import_safetensors(engine, folder)                      # any layout: each rank reads its pieces of the files

An import holds nothing but a rank's own pieces, an export the whole model.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from course_lib.checkpoint import files
from course_lib.checkpoint.files import PARTIAL, everywhere
from course_lib.checkpoint.manifest import config_from_dict
from course_lib.checkpoint.state import wait_for_earlier
from course_lib.checkpoint.storage import parameter_dtype, read, widest
from course_lib.config import ModelConfig, MoeConfig
from course_lib.model import build
from course_lib.parallel.five_d import FiveD
from course_lib.weights.hf_weights import name_in_transformers, naming_of, tensor_in_transformers
from course_lib.weights.loading import Weights
from course_lib.weights.pieces import Piece, parameters_of
from course_lib.weights.tensor_files import SINGLE

# --- out


@torch.no_grad()
def export_safetensors(checkpoint: str | Path, out: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Writes the model of a checkpoint to the folder `out`, with its config.json. One process; ranks are not needed.

    checkpoint   one, or a folder of them: then the last complete one
    dtype        of the files; by default that of the parameters. In another the master weights, if there are some, are
                 cast

    Bytes        held: the model, in one file
    Raises       ValueError if the checkpoint is torn, `out` is there, or `transformers` has no such architecture
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} is there already; give a folder that is not")
    path = files.find(Path(checkpoint))
    manifest = files.read_manifest(path)
    files.verify(path, manifest)
    config = config_from_dict(manifest["model"])
    dtype = dtype or parameter_dtype(manifest)
    described = config_for_transformers(config, dtype)
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = _tensors_to_write(path, manifest, config, dtype)
    save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
    partial.rename(out)
    return out


def _tensors_to_write(path: Path, manifest: dict, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Their tensors, by their names."""
    ours = {name: tuple(x.shape) for name, x in build(config, device="meta").named_parameters()}
    theirs = {name_in_transformers(name, naming_of(config)): (name, shape) for name, shape in ours.items()}
    tensors = {
        their: torch.empty(_shape_in_transformers(*named, config), dtype=dtype) for their, named in theirs.items()
    }
    for name in ours:
        _read_parameter(path, manifest, name, tensor_in_transformers(tensors, name, config))
    return tensors | _expert_biases(path, manifest, config, tensors)


def _shape_in_transformers(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of their tensor that holds ours: GPT-2's are transposed, with q, k and v side by side."""
    if config.family != "gpt" or not name.startswith("blocks.") or "norm" in name:
        return shape
    *before, last = reversed(shape)
    return (*before, 3 * last if any(part in name for part in (".q.", ".k.", ".v.")) else last)


def _read_parameter(path: Path, manifest: dict, name: str, into: Tensor) -> None:
    piece = Piece(f"model.{name}", tuple(into.shape), (0,) * into.dim(), into)
    read(path, manifest, widest([piece], manifest))


def _expert_biases(path: Path, manifest: dict, config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DeepSeek's biases that balance experts, beside the routers that are in this file."""
    biases = {}
    for layer in range(config.num_layers):
        router = f"model.layers.{layer}.mlp.gate.weight"
        if config.mla is not None and router in tensors:
            steps_E = torch.empty(config.moe.num_experts, dtype=torch.int64)
            _read_parameter(path, manifest, f"blocks.{layer}.mlp.router.bias_steps_E", steps_E)
            name = router.replace("gate.weight", "gate.e_score_correction_bias")
            biases[name] = (steps_E * config.moe.bias_speed).float()
    return biases


# --- in


@torch.no_grad()
def import_safetensors(engine: FiveD, folder: str | Path) -> None:
    """Fills the engine's parameters from files of `transformers`, before its first step. All ranks call it.

    Bytes    read: each rank its own pieces; sent: with zero_stage 1 and 2 an all-gather of the parameters
    Raises   ValueError on every rank if one finds files missing, damaged, pickles, or of another model
    """
    everywhere(wait_for_earlier(engine), lambda: _read_parameters(engine, folder))
    for sharded in engine.data_engines.values():
        sharded.share_update()


def _read_parameters(engine: FiveD, folder: str | Path) -> None:
    """Fills what this rank holds."""
    weights = Weights(folder, engine.config)
    for holding in parameters_of(engine):
        for piece in holding.pieces(holding.tensor, ""):
            ranges = [(low, low + size) for low, size in zip(piece.offsets, piece.tensor.shape, strict=True)]
            weights[piece.name].part(*ranges).read_into(piece.tensor)


# --- configs


def config_for_transformers(config: ModelConfig, dtype: torch.dtype) -> dict:
    """What config.json says: the way back of `hf_weights.config_from_transformers`.

    Raises   ValueError for a model whose like `transformers` does not have
    """
    common = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tied, "bos_token_id": 0,
              "eos_token_id": 0, "torch_dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    if config.family == "gpt":
        return common | _gpt_fields(config)
    if config.family != "llama":
        raise ValueError(f"family is {config.family!r}; exported are llama and gpt, which predict the next token")
    if config.qk_norm and config.moe is not None:
        raise ValueError(f"{config.name} has qk_norm and experts; exported with qk_norm are dense models, as qwen3")
    if config.mla is not None and config.moe is not None:
        kind, special = "deepseek_v3", _deepseek_fields(config)
    elif config.moe is not None:
        kind, special = "mixtral", _mixtral_fields(config)
    else:
        kind, special = "qwen3" if config.qk_norm else "llama", {"head_dim": config.head_dim}
    architecture = {"deepseek_v3": "DeepseekV3"}.get(kind, kind.capitalize()) + "ForCausalLM"
    return common | _llama_fields(config) | special | {"model_type": kind, "architectures": [architecture]}


def _llama_fields(config: ModelConfig) -> dict:
    scaling = None
    if config.rope_scaling is not None:
        scaling = asdict(config.rope_scaling) | {"rope_type": "llama3"}
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
    }


def _mixtral_fields(config: ModelConfig) -> dict:
    """Raises ValueError for routers other than Mixtral's."""
    moe = config.moe
    plain = MoeConfig(moe.num_experts, moe.top_k, moe.d_expert)
    decides = ("num_shared_experts", "score", "normalise_weights", "num_groups", "routed_scale", "first_dense_layers",
               "every", "capacity_factor")  # fmt: skip
    different = {name: getattr(moe, name) for name in decides if getattr(moe, name) != getattr(plain, name)}
    if different or moe.balancing == "bias":
        raise ValueError(
            f"{config.name} routes with {different or 'a balancing bias'}; transformers has such experts with latent "
            "attention (mla) as DeepSeek-V3, and without it only Mixtral's"
        )
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.d_expert,
        "head_dim": config.head_dim,
        "sliding_window": None,
    }


def _deepseek_fields(config: ModelConfig) -> dict:
    """Raises ValueError for what is otherwise than DeepSeek-V3's, such as norms of latents, whose eps is a constant."""
    moe, mla = config.moe, config.mla
    if (moe.score, moe.balancing, moe.capacity_factor, config.norm_eps, moe.every) != (
        "sigmoid",
        "bias",
        None,
        1e-6,
        1,
    ):
        raise ValueError(
            f"{config.name} has score {moe.score!r}, balancing {moe.balancing!r}, capacity_factor "
            f"{moe.capacity_factor}, norm_eps {config.norm_eps}, every {moe.every}; DeepSeek-V3 has 'sigmoid', 'bias', "
            "None, 1e-06, 1"
        )
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_expert,
        "n_shared_experts": moe.num_shared_experts,
        "norm_topk_prob": moe.normalise_weights,
        "n_group": moe.num_groups,
        "topk_group": moe.max_groups,
        "routed_scaling_factor": moe.routed_scale,
        "first_k_dense_replace": moe.first_dense_layers,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_interleave": True,
        "attention_bias": False,
    }


def _gpt_fields(config: ModelConfig) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.num_layers,
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
