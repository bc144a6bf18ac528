"""Models as their users have them: a preset's name, shapes in a JSON file, or a config.json of transformers.

    read_model("llama-3.1-8b", 8192)            a preset
    read_model("Qwen3-8B/config.json", 8192)    a file of transformers; its folder will do
    read_model("mine.json", 8192)               {"layers": 32, "hidden": 4096, ...}, or that under a name
    read_shapes("models.json", 4096)            several by name: shapes, fields of a config.json, names of presets

A shape says what bytes and FLOPs depend on. Of a config.json it leaves out less than 0.1 % of the parameters, and says
so in `left_out`; what it cannot say beyond that is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.config import MOE_PRESETS, OTHER_NAMES, PRESETS, MlaConfig, ModelConfig, MoeConfig, RopeScaling, preset
from course_lib.validate import read_json, read_toml, show

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")  # every shape has these
LATENT = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")  # of latent attention (MLA): all of them or none
_MORE = ("head_dim", "experts", "top_k", "expert_ffn", "shared_experts", "dense_layers", "expert_every", "qk_norm",
        "family", *LATENT)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, and what its file says that the shape does not: key of the file -> a sentence."""

    config: ModelConfig
    left_out: Mapping[str, str] = field(default_factory=dict)


def read_model(text: str, seq_len: int) -> Shape:
    """Read one model: a preset, a JSON file, a folder with a config.json; raises ValueError saying what it lacks."""
    if not text.endswith(".json") and (is_preset(text) or not text or not Path(text).is_dir()):
        return Shape(preset(text))
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give one, or the name of a preset")
    shapes = read_shapes(path, seq_len)
    if len(shapes) != 1:
        raise ValueError(f"{path} has {len(shapes)} models; required: one")
    return next(iter(shapes.values()))


def read_models(path: str | Path, seq_len: int) -> dict[str, ModelConfig]:
    """Read a file's models by name: `read_shapes` without what they leave out."""
    return {name: shape.config for name, shape in read_shapes(path, seq_len).items()}


def read_shapes(path: str | Path, seq_len: int) -> dict[str, Shape]:
    """Read the shapes of a JSON file by name: {"8B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, ...}}.

    A shape may also be the name of a preset, or the fields of a config.json. A file may also be one shape or one
    config.json alone; the model is then called as the file, or as the folder of a config.json.

    Raises   ValueError that names the model and what it lacks
    """
    path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    told = read_json(path)
    if not isinstance(told, dict):
        raise ValueError(f"{path} holds a {type(told).__name__}; required: an object of shapes by a model's name")
    if "model_type" in told or not all(isinstance(shape, dict | str) for shape in told.values()):
        told = {path.resolve().parent.name if path.stem == "config" else path.stem: told}
    shapes = {}
    for name, shape in told.items():
        try:
            shapes[name] = _shape(name, shape, seq_len)
        except TypeError as error:
            raise ValueError(f"model {name!r}: {error}") from None
    return shapes


def is_preset(text: str) -> bool:
    """Whether a preset has that name."""
    return text in PRESETS or text in MOE_PRESETS or text in OTHER_NAMES


def _shape(name: str, told: object, seq_len: int) -> Shape:
    if isinstance(told, str):
        return Shape(preset(told))
    if isinstance(told, dict) and "model_type" in told:
        return of_transformers(told, name, seq_len)
    if not isinstance(told, dict) or not set(SIZES) <= set(told) <= {*SIZES, *_MORE}:
        got = ", ".join(told) if isinstance(told, dict) else show(told)
        raise ValueError(
            f"model {name!r} has {got}; required: {', '.join(SIZES)}; possible: {', '.join(_MORE)}; or a config.json "
            "of transformers, which has model_type"
        )
    layers, hidden, heads, kv_heads, ffn, vocab, tied = (told[key] for key in SIZES)
    mla = None
    if latent := [key for key in LATENT if key in told]:
        if len(latent) < len(LATENT):
            raise ValueError(f"model {name!r} has {', '.join(latent)}; latent attention has {', '.join(LATENT)}")
        mla = MlaConfig(*(told[key] for key in LATENT))
    moe = None
    if "experts" in told:
        if not {"top_k", "expert_ffn"} <= set(told):
            raise ValueError(f"model {name!r} has experts; required beside: top_k, expert_ffn")
        sizes = (told["experts"], told["top_k"], told["expert_ffn"], told.get("shared_experts", 0))
        where = {"first_dense_layers": told.get("dense_layers", 0), "every": told.get("expert_every", 1)}
        moe = MoeConfig(*sizes, normalise_weights=told["top_k"] != 1, **where)
    more = {key: told[key] for key in ("head_dim", "qk_norm", "family") if key in told}
    sizes = (layers, hidden, heads, kv_heads, ffn, vocab, seq_len)
    return Shape(ModelConfig(name, *sizes, tied=tied, moe=moe, mla=mla, **more))


USUAL = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}  # where a file has no such key


@dataclass(frozen=True)
class Kind:
    """What a model_type means that its fields do not say; model_types.toml says what each is."""

    usual: Mapping[str, object] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    qk_norm: bool = False
    latent: bool = False
    sigmoid: bool = False
    normalised: bool = True
    balancing: str = "none"
    note: str = ""


KINDS = {name: Kind(**fields) for name, fields in read_toml(Path(__file__).with_name("model_types.toml")).items()}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of RoPE, llama3
_TOWERS = {"gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral"}  # with a text_config inside
_FAMILIES_OF_BLOCKS = {"gpt2": "gpt", "xlm-roberta-xl": "xlmr"}


def of_transformers(fields: Mapping[str, object], name: str | None = None, seq_len: int = 0) -> Shape:
    """The shape of a config.json, for seq_len even beyond its positions; raises ValueError naming what none can say."""
    kind_name, left_out = fields.get("model_type"), {}
    if kind_name in _TOWERS and isinstance(fields.get("text_config"), Mapping):
        kind_name, fields = _TOWERS[kind_name], fields["text_config"]
        left_out["vision_config"] = "the vision tower is left out: this is the language model alone"
    if kind_name in _FAMILIES_OF_BLOCKS:
        return Shape(_transformer(fields, name or kind_name, _FAMILIES_OF_BLOCKS[kind_name]), left_out)
    if not isinstance(kind_name, str) or kind_name not in KINDS:
        known = sorted({*KINDS, *_TOWERS, *_FAMILIES_OF_BLOCKS} - set(_TOWERS.values()) | {"mistral"})
        raise ValueError(f"model_type is {show(kind_name)}, of which no shape is known; known: {', '.join(known)}")
    kind = KINDS[kind_name]
    fields = USUAL | kind.usual | {key: value for key, value in fields.items() if value is not None}
    if kind.note:
        left_out["model_type"] = kind.note
    left_out |= _differences(fields, seq_len)
    rope = _rope(fields)
    heads = _required(fields, "num_attention_heads")
    moe = _experts(fields, kind) if kind.experts else None
    config = ModelConfig(
        name=name or kind_name,
        num_layers=_required(fields, "num_hidden_layers"),
        d_model=_required(fields, "hidden_size"),
        num_heads=heads,
        num_kv_heads=heads if kind.latent else fields.get("num_key_value_heads", heads),
        d_ff=fields.get("intermediate_size_mlp") or _required(fields, "intermediate_size"),
        vocab_size=_required(fields, "vocab_size"),
        max_seq_len=max(fields.get("max_position_embeddings", 0), seq_len),
        tied=fields["tie_word_embeddings"],
        head_dim=None if kind.latent else fields.get("head_dim"),
        rope_theta=rope.get("rope_theta", fields["rope_theta"]),
        rope_scaling=RopeScaling(*(rope[key] for key in _SCALING)) if _rope_type(rope) == "llama3" else None,
        norm_eps=fields["rms_norm_eps"],
        moe=moe,
        mla=_latent(fields) if kind.latent else None,
        qk_norm=kind.qk_norm or bool(fields.get("use_qk_norm")),
    )
    return Shape(config, left_out)


def _required(fields: Mapping[str, object], *keys: str) -> object:
    for key in keys:
        if fields.get(key) is not None:
            return fields[key]
    raise ValueError(f"a config.json of model_type {show(fields.get('model_type'))} has {keys[0]}; this one does not")


def _rope(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Transformers 5 has rope_parameters, by sort of attention where there are two; before that rope_scaling."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return rope.get("full_attention", rope)


def _rope_type(rope: Mapping[str, object]) -> object:
    return rope.get("rope_type") or rope.get("type") or "default"


def _differences(fields: Mapping[str, object], seq_len: int) -> Iterator[tuple[str, str]]:
    """What no parameter, or less than 0.1 % of them, depends on: the key and a sentence."""
    for key in ("attention_bias", "mlp_bias"):
        if fields.get(key):
            yield key, f"{key} is True: these biases are left out"
    for key in ("sliding_window", "attention_chunk_size"):
        window = fields.get(key)
        if window and fields.get("use_sliding_window") is not False and not 0 < seq_len <= window:
            yield key, f"{key} is {window}: attention is counted over the whole sequence in every layer"
    rope = _rope(fields)
    if _rope_type(rope) not in ("default", "llama3"):
        yield (
            "rope_scaling",
            f"rope_type is {_rope_type(rope)!r}, counted as default: no byte and no FLOP depends on it",
        )
    if (share := rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1))) != 1:
        yield "partial_rotary_factor", f"partial_rotary_factor is {share}: all of a head is counted as rotated"
    if fields.get("attn_logit_softcapping") or fields.get("final_logit_softcapping"):
        yield "attn_logit_softcapping", "its soft caps on scores and logits are left out"
    if layers := fields.get("num_nextn_predict_layers"):
        yield "num_nextn_predict_layers", f"{layers} layer of multi-token prediction is left out"
    if stored := fields.get("quantization_config"):
        word = stored.get("quant_method", "another format") if isinstance(stored, Mapping) else "another format"
        yield "quantization_config", f"its file stores weights in {word}; training is counted in the recipe's bytes"
    if not fields.get("rope_interleave", True):
        yield "rope_interleave", "rope_interleave is False: pairs of RoPE lie otherwise, which changes no byte"


def _experts(fields: Mapping[str, object], kind: Kind) -> MoeConfig:
    keys, layers = kind.experts, _required(fields, "num_hidden_layers")
    top_k, width = _required(fields, "num_experts_per_tok", "experts_per_token"), _required(fields, keys["width"])
    every = fields.get(keys.get("every"), 1)
    dense = fields.get(keys.get("dense"), 0)
    if alone := fields.get("mlp_only_layers"):
        dense = len(alone)
        if list(alone) != list(range(dense)):
            raise ValueError(f"mlp_only_layers is {alone}; a shape has dense layers at the front, or every n-th sparse")
    if (frequency := fields.get("moe_layer_freq", 1)) != 1:
        raise ValueError(
            f"moe_layer_freq is {show(frequency)}; a shape has experts in all layers behind the dense ones"
        )
    if "moe_layers" in fields and list(fields["moe_layers"]) != list(range(every - 1, layers, every)):
        raise ValueError(f"moe_layers is {fields['moe_layers']}; a shape has experts in every n-th layer")
    shared, wide = fields.get(keys.get("shared"), 0), fields.get("shared_expert_intermediate_size")
    if "intermediate_size_mlp" in fields:  # Llama 4: one beside the routed ones, as wide
        shared = 1
    elif wide:
        if wide % width:
            raise ValueError(
                f"shared_expert_intermediate_size is {wide}; a shape's shared experts are as wide as the rest ({width})"
            )
        shared = wide // width
    return MoeConfig(
        _required(fields, keys["experts"], "num_experts", "num_local_experts"),
        top_k,
        d_expert=width,
        num_shared_experts=shared,
        score="sigmoid" if kind.sigmoid else "softmax",
        normalise_weights=top_k != 1 and fields.get("norm_topk_prob", kind.normalised),
        balancing=kind.balancing,
        num_groups=fields.get("n_group", 1),
        max_groups=fields.get("topk_group"),
        routed_scale=fields.get("routed_scaling_factor", 1.0),
        first_dense_layers=dense,
        every=every,
    )


def _latent(fields: Mapping[str, object]) -> MlaConfig:
    if fields.get("q_lora_rank") is None:
        raise ValueError("q_lora_rank is null; a shape's latent attention has narrow queries, as DeepSeek-V3's")
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MlaConfig(*(_required(fields, key) for key in keys))


def _transformer(fields: Mapping[str, object], name: str, family: str) -> ModelConfig:
    """GPT-2 and XLM-R, whose blocks have biases and two matrices in the MLP."""
    is_gpt, D = family == "gpt", _required(fields, "hidden_size", "n_embd")
    heads = _required(fields, "num_attention_heads", "n_head")
    positions = _required(fields, "max_position_embeddings", "n_positions")
    return ModelConfig(
        name=name,
        num_layers=_required(fields, "num_hidden_layers", "n_layer"),
        d_model=D,
        num_heads=heads,
        num_kv_heads=heads,
        d_ff=(fields.get("n_inner") or 4 * D) if is_gpt else _required(fields, "intermediate_size"),
        vocab_size=_required(fields, "vocab_size"),
        max_seq_len=positions - (0 if is_gpt else 2),
        tied=fields.get("tie_word_embeddings", True),
        family=family,
        norm_eps=fields.get("layer_norm_epsilon" if is_gpt else "layer_norm_eps", 1e-5),
        dropout=fields.get("resid_pdrop" if is_gpt else "hidden_dropout_prob", 0.1),
    )
