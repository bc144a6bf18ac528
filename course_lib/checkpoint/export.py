"""A checkpoint as the files that `transformers` loads, and an engine filled from such files: safetensors both ways.

    export_safetensors(checkpoint, out)                     # one process; then from_pretrained(out) reads it
    import_safetensors(engine, folder)                      # any layout: each rank reads its pieces of the files

An import holds nothing but a rank's own pieces, an export the whole model.
"""

import json
import shutil
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from course_lib.checkpoint import files
from course_lib.checkpoint.files import PARTIAL, everywhere
from course_lib.checkpoint.state import wait_for_earlier
from course_lib.checkpoint.storage import parameter_dtype, read, widest
from course_lib.config import ModelConfig, config_from_dict
from course_lib.model import build
from course_lib.parallel.five_d import FiveD
from course_lib.weights.hf_weights import (
    TABLES,
    config_from_transformers,
    name_in_transformers,
    naming_of,
    tensor_in_transformers,
)
from course_lib.weights.loading import Weights
from course_lib.weights.pieces import Piece, parameters_of
from course_lib.weights.tensor_files import SINGLE


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


@torch.no_grad()
def import_safetensors(engine: FiveD, folder: str | Path) -> None:
    """Fills the engine's parameters from files of `transformers`, before its first step. All ranks call it.
    Bytes    read: each rank its own pieces; sent: with zero_stage 1 and 2 an all-gather of the parameters
    Raises   ValueError on every rank if one finds files missing, damaged, pickles, or of another model
    """

    def read_parameters() -> None:
        weights = Weights(folder, engine.config)
        for piece in [piece for holding in parameters_of(engine) for piece in holding.pieces(holding.tensor, "")]:
            ranges = [(low, low + size) for low, size in zip(piece.offsets, piece.tensor.shape, strict=True)]
            weights[piece.name].part(*ranges).read_into(piece.tensor)

    everywhere(wait_for_earlier(engine), read_parameters)
    for sharded in engine.data_engines.values():
        sharded.share_update()


_FIELDS = TABLES["fields"]  # of config.json: what of a ModelConfig stands there
_DENSE, _LATENT = _FIELDS["llama"] | {"head_dim": "head_dim"}, _FIELDS["llama"] | _FIELDS["deepseek"]
_KINDS = {  # model_type -> its class, fields of config.json with what of a ModelConfig stands there, the same in all
    "llama": ("LlamaForCausalLM", _DENSE, {}),
    "qwen3": ("Qwen3ForCausalLM", _DENSE, {}),
    "mixtral": ("MixtralForCausalLM", _DENSE | _FIELDS["mixtral"], {"sliding_window": None}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT, {"rope_interleave": True, "attention_bias": False}),
    "gpt2": ("GPT2LMHeadModel", _FIELDS["gpt"], {}),
}


def config_for_transformers(config: ModelConfig, dtype: torch.dtype) -> dict:
    """What config.json says: the way back of `hf_weights.config_from_transformers`.
    Raises   ValueError for a model whose like `transformers` does not have
    """
    if config.family not in ("llama", "gpt"):
        raise ValueError(f"family is {config.family!r}; exported are llama and gpt, which predict the next token")
    kind = "gpt2" if config.family == "gpt" else "qwen3" if config.qk_norm else "llama"
    if config.moe is not None:
        kind = "mixtral" if config.mla is None else "deepseek_v3"
    architecture, fields, constants = _KINDS[kind]
    said = {"model_type": kind, "architectures": [architecture], "vocab_size": config.vocab_size, "bos_token_id": 0,
            "eos_token_id": 0, "tie_word_embeddings": config.tied,
            "torch_dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    said |= {field: attrgetter(name)(config) for field, name in fields.items()} | constants
    if config.rope_scaling is not None:
        said["rope_scaling"] = asdict(config.rope_scaling) | {"rope_type": "llama3"}
        said["rope_scaling"]["original_max_position_embeddings"] = said["rope_scaling"].pop("original_max_seq_len")
    _check_way_back(config, said)
    return said


def _check_way_back(config: ModelConfig, said: dict) -> None:
    """Raises ValueError unless transformers would compute what this config says."""
    ours, theirs = _deciding(config), _deciding(config_from_transformers(said))
    different = {name: value for name, value in ours.items() if theirs.get(name) != value}
    if config.mla is not None and config.norm_eps != 1e-6:  # theirs of the norms of latents is a constant
        different["norm_eps"] = config.norm_eps
    if different:
        raise ValueError(
            f"{config.name} has {', '.join(f'{name} {value!r}' for name, value in different.items())}, which "
            f"transformers' {said['model_type']} has otherwise; exported are models as Llama, Qwen3, Mixtral, "
            "DeepSeek-V3 and GPT-2"
        )


def _deciding(config: ModelConfig) -> dict[str, object]:
    """What decides the logits: of experts not how they are balanced in training, but for a bias, which stays."""
    fields = asdict(config)
    del fields["name"]
    if (moe := fields.pop("moe")) is not None:
        moe["balancing"] = moe["balancing"] if moe["balancing"] == "bias" else "none"
        del moe["aux_coefficient"], moe["bias_speed"]
        if not moe["first_dense_layers"] and moe["every"] == 1:
            del fields["d_ff"]
        fields |= moe
    return fields
