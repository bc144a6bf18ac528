"""A layout in the words of other frameworks: files that are ready, or the reason why a framework cannot do it.

    files, refused = export(option, gpus_per_node=8)   # {"torchtitan.toml": "...", ...}, {"nanotron.yaml": "why", ...}

Nothing is left out: a choice that a framework does not have is a refusal. Steps, learning rate, data and tokenizer are
for you to add; nanotron and picotron do not start without them.

Sources of the fields: torchtitan 0.2.1, config/job_config.py; nanotron at 2411b02, config/parallelism_config.py,
config.py and models_config.py; picotron at 59714b1, template/base_config.json and train.py; Megatron-LM at d98e8a6,
megatron/training/arguments.py and core/transformer/transformer_config.py; Accelerate 1.15, commands/launch.py and
MegatronLMPlugin in utils/dataclasses.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate

from course_lib.config import MOE_PRESETS, PRESETS, RopeScaling
from course_lib.engines import ENGINES, File
from course_lib.layout.partition import even_layers
from course_lib.memory.states import recipe_of
from course_lib.memory.zero import Offload
from course_lib.plan.option import Option
from course_lib.run import Run
from course_lib.validate import Size, checked

Writer = Callable[[Run], str]


@checked
def export(
    option: Option, gpus_per_node: Size = 8, more: Mapping[str, Writer] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Write a layout for each framework that can do it; return texts by file name, and reasons by file name.

    more    writers of other files, by file name; one raises ValueError for what its framework cannot do
    """
    writers: dict[str, Writer] = {
        "torchtitan.toml": torchtitan,
        "megatron.args": megatron,
        "nanotron.yaml": nanotron,
        "picotron.json": picotron,
        "accelerate_megatron.yaml": lambda run: accelerate_megatron(run, gpus_per_node),
        "course.sh": lambda run: course_command(run, gpus_per_node),
        "course.sbatch": lambda run: sbatch(run, gpus_per_node),
        **(more or {}),
    }
    files, refused = {}, {}
    for name, write in writers.items():
        try:
            files[name] = write(option.run)
        except ValueError as error:
            refused[name] = str(error)
    return files, refused


def need(file: File, run: Run, checks: Mapping[str, bool] | None = None) -> None:
    """Raise ValueError that names all that a file cannot say.

    checks    what the table of engines has no word for: a key says what, its value whether it is asked
    """
    asked = [what for what, is_asked in (refusals(file, run) | dict(checks or {})).items() if is_asked]
    if asked:
        raise ValueError(f"{file.program} has no {', no '.join(asked)}; choose a run without")


def refusals(file: File, run: Run) -> dict[str, bool]:
    """What a file may lack, and whether the run asks for it."""
    layout, config, recipe = run.layout, run.config, recipe_of(run.recipe).name
    long = [axis for axis in layout.order if layout.mesh.sizes[axis] > 1]
    its_own = [axis for axis in (file.order or "-".join(layout.order)).split("-") if axis in long]
    stages, where = (file.pipeline_zero, "in") if layout.pp > 1 else (file.zero_stages, "without")
    shares, alone = layout.data_size > 1, layout.dp == layout.world_size
    pieces = layout.cp * (2 if layout.cp > 1 and layout.cp_sharding == "zigzag" else 1)
    pieces *= layout.tp if layout.sequence_parallel else 1
    widths = [config.d_ff, config.moe.d_expert if config.moe else config.d_ff]
    is_course = file is ENGINES["course"].file
    return {
        f"recipe {recipe} (it has {', '.join(file.recipes)})": recipe not in file.recipes,
        f"order {'-'.join(long)} of ranks (it has {'-'.join(its_own)})": long != its_own,
        f"models of the {config.family} family": config.family not in file.families,
        "LoRA in this file": run.lora is not None,
        f"optimizer {run.optimizer} in this file": run.optimizer != "adamw",
        f"{run.optimizer_implementation} optimizer in this file": run.optimizer_implementation is not None,
        "offload in this file": run.offload != Offload(),
        "attention that is not fused": run.attention != "fused",
        "CPUs in this file": run.device != "cuda",
        **{f"{axis} in this file": axis not in file.axes and getattr(layout, axis) > 1 for axis in AXES},
        f"ZeRO-{layout.zero_stage} {where} a pipeline": shares and layout.zero_stage not in stages,
        "ZeRO-0 beside tp, pp, cp or ep": file.zero_0_alone
        and shares
        and layout.zero_stage == 0
        and not (alone and layout.ep == 1),
        "replicas of shards (HSDP)": layout.dp_replicate > 1 and not file.replicas,
        f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule not in file.schedules,
        f"recomputation {layout.recompute}": layout.recompute not in file.recomputes,
        f"exchange of keys and values by {layout.cp_method}": layout.cp > 1 and layout.cp_method not in file.cp_methods,
        f"{layout.cp_sharding} pieces of a sequence": layout.cp > 1 and layout.cp_sharding not in file.cp_shardings,
        "regather (it keeps gathered inputs)": layout.regather not in file.regathers,
        f"tp with{'' if layout.sequence_parallel else 'out'} sequence parallelism": layout.tp > 1
        and layout.sequence_parallel not in file.sequence_parallel,
        f"{config.num_layers} layers over {layout.num_stages} equal stages": file.even_stages
        and config.num_layers % layout.num_stages != 0,
        "layers_of_stage in this file": layout.layers_of_stage is not None and not file.told_stages,
        **{part: part in file.lacks and is_there for part, is_there in parts_of(run).items()},
        # what the course's engines do, and few others
        f"sequences of {run.seq_len:,} in {pieces} equal pieces": not is_course and run.seq_len % pieces != 0,
        f"matrices that tp {layout.tp} cuts unevenly": not is_course and any(width % layout.tp for width in widths),
        f"rows of experts {layout.expert_method}": not is_course and layout.expert_method != "plain",
    }


AXES = ("tp", "pp", "cp", "ep")


def parts_of(run: Run) -> dict[str, bool]:
    """Parts of models that files lack, and whether the run's model has them."""
    config, moe = run.config, run.config.moe
    other_experts = moe is not None and (
        moe.num_shared_experts
        or moe.first_dense_layers
        or moe.score != "softmax"
        or moe.balancing == "bias"
        or moe.capacity_factor
        or moe.max_groups < moe.num_groups
        or moe.routed_scale != 1
        or moe.every != 1
    )
    scaled = config.rope_scaling
    return {
        "experts": moe is not None,
        "experts but plain ones": bool(other_experts),
        "latent attention": config.mla is not None,
        "norms of queries and keys (QK-norm)": config.qk_norm,
        "tied head": config.tied,
        "heads of another width": config.head_dim * config.num_heads != config.d_model,
        "fewer key/value heads than tp": run.layout.tp > config.num_kv_heads,
        "vocabulary that tp cuts unevenly": config.vocab_size % run.layout.tp != 0,
        "other bounds of scaled RoPE": scaled is not None and scaled != RopeScaling(scaled.factor),
    }


# ---- torchtitan

TORCHTITAN_MODELS = {
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
TORCHTITAN_SCHEDULES = {
    "afab": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
_FP32_SHARDS = {"dtype": "float32", "mixed_precision_param": "bfloat16"}  # they are the master copy; gradients FP32
TORCHTITAN_RECIPES = {
    "fp32": {"dtype": "float32", "mixed_precision_param": "float32"},
    "bf16-master": _FP32_SHARDS,
    "bf16-master-fp32-grads": _FP32_SHARDS,
    "bf16": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
}


@checked
def torchtitan(run: Run) -> str:
    """Return torchtitan's TOML, for 0.2.1: 0.2.2 heeds no method of context parallelism, 0.3 reads Python.

    Sequence parallelism comes with its tensor parallelism. FP32 parameters are the master copy, of which BF16 casts
    are gathered: 16 bytes a parameter, as bf16-master has them. In a pipeline gradients are summed in FP32, and stay
    whole to the end of a step, parameters too: its FSDP is then ZeRO-1.
    """
    config, layout, recipe = run.config, run.layout, recipe_of(run.recipe).name
    piped = layout.pp > 1
    known = config == (PRESETS | MOE_PRESETS).get(config.name) and config.name in TORCHTITAN_MODELS
    cast = layout.tp * layout.pp > 1 and layout.data_size == 1 and TORCHTITAN_RECIPES.get(recipe) is _FP32_SHARDS
    other = config.family != "llama" or config.tied or config.moe or config.mla or config.qk_norm
    checks = {
        "mixed precision beside tp or pp without dp or cp": cast,
        "BF16 gradients in a pipeline (recipe bf16-master-fp32-grads)": piped and recipe == "bf16-master",
        "replicas that cut through cp": layout.dp % layout.dp_replicate != 0,
        "recomputation in DualPipeV with ep": layout.schedule == "dualpipe_v"
        and layout.ep > 1
        and layout.recompute != "none",
        f"whole experts over ep {layout.ep}, no multiple of cp x tp": config.moe is not None
        and layout.folded
        and layout.ep % (layout.cp * layout.tp) != 0,  # torchtitan 0.2.1, distributed/parallel_dims.py, _validate
        "latent attention over cp": layout.cp > 1 and config.mla is not None,
        f"{config.name} among its models": not known and bool(other),
    }
    need(ENGINES["torchtitan"].file, run, checks)
    model, flavor = TORCHTITAN_MODELS[config.name] if known else ("llama3", config.name)
    replicas = layout.dp if layout.zero_stage == 0 else layout.dp_replicate
    parallelism = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": layout.dp // replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.tp if layout.ep > 1 and not layout.folded else 1,
    }
    if piped:
        parallelism["pipeline_parallel_schedule"] = TORCHTITAN_SCHEDULES[layout.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
        parallelism["module_fqns_per_model_part"] = _modules_of_stages(run)
    if layout.cp > 1:
        parallelism["context_parallel_rotate_method"] = "alltoall" if layout.cp_method == "ring" else "allgather"
    training = {
        "local_batch_size": layout.micro_batch * (layout.micro_batches if piped else 1),
        "global_batch_size": layout.sequences_per_step,
        "seq_len": run.seq_len,
        **TORCHTITAN_RECIPES[recipe],
    }
    tables = {
        "model": {"name": model, "flavor": flavor},
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": layout.recompute},
    }
    head = "# torchtitan 0.2.1: 0.2.2 heeds no method of context parallelism, and 0.3 reads no TOML\n"
    if not known:
        head += f"# add the flavor {flavor} to torchtitan/models/llama3/__init__.py\n"
    return head + "\n".join(_toml_table(name, values) for name, values in tables.items())


def _modules_of_stages(run: Run) -> list[list[str]]:
    """The modules of each stage: by itself torchtitan gives the first and the last stage a layer less."""
    layers = run.layout.layers_of_stage or even_layers(run.config.num_layers, run.layout.num_stages)
    ends = accumulate(layers)
    stages = [[f"layers.{index}" for index in range(end - own, end)] for own, end in zip(layers, ends, strict=True)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _toml_table(name: str, values: dict) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


# ---- Megatron-LM

MEGATRON_RECIPES = {
    "fp32": {},
    "bf16-master": {"bf16": True, "grad-reduce-in-bf16": True},
    "bf16-master-fp32-grads": {"bf16": True},
    "fp16-master-fp32-grads": {"fp16": True, "accumulate-allreduce-grads-in-fp32": True},
}
MEGATRON_EXCHANGES = {"ring": "p2p", "all_gather": "allgather", "ulysses": "a2a"}


def _check_megatron(run: Run, file: File, more: Mapping[str, bool] | None = None) -> None:
    layout, is_fp32 = run.layout, recipe_of(run.recipe).name == "fp32"
    whole_rows = run.config.moe is not None and layout.tp > 1 and not layout.sequence_parallel
    checks = {
        "context parallelism in fp32": layout.cp > 1 and is_fp32,
        "experts beside tp without sequence parallelism": whole_rows,
    }
    need(file, run, checks | dict(more or {}))


@checked
def megatron(run: Run) -> str:
    """Return Megatron-LM's arguments, one to a line.

    Its sequence parallelism always gathers again in backward. It pads the vocabulary to a multiple of 128 x tp. It
    wants CUDA_DEVICE_MAX_CONNECTIONS=1 beside tp and cp, but not with its FSDP, which is ZeRO-2 and 3.
    """
    config, layout, moe = run.config, run.layout, run.config.moe
    llama, fsdp = config.family == "llama", layout.zero_stage > 1
    _check_megatron(run, ENGINES["megatron"].file)
    values: dict[str, object] = {
        "num-layers": config.num_layers,
        "hidden-size": config.d_model,
        "ffn-hidden-size": config.d_ff,
        "num-attention-heads": config.num_heads,
        "group-query-attention": config.num_kv_heads < config.num_heads or None,
        "num-query-groups": config.num_kv_heads if config.num_kv_heads < config.num_heads else None,
        "kv-channels": config.head_dim,
        "seq-length": run.seq_len,
        "max-position-embeddings": max(config.max_seq_len, run.seq_len),
        "swiglu": llama or None,
        "disable-bias-linear": llama or None,
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "norm-epsilon": config.norm_eps,
        "qk-layernorm": config.qk_norm or None,
        "attention-dropout": config.dropout,
        "hidden-dropout": config.dropout,
        "position-embedding-type": "rope" if llama else "learned_absolute",
        "rotary-base": int(config.rope_theta) if llama else None,
        "use-rope-scaling": config.rope_scaling is not None or None,
        "rope-scaling-factor": config.rope_scaling.factor if config.rope_scaling else None,
        "untie-embeddings-and-output-weights": not config.tied or None,
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": layout.sequence_parallel or None,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "cp-comm-type": MEGATRON_EXCHANGES[layout.cp_method] if layout.cp > 1 else None,
        "use-distributed-optimizer": layout.zero_stage > 0 or None,
        "num-distributed-optimizer-instances": layout.dp_replicate if layout.dp_replicate > 1 else None,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.sequences_per_step,
        **MEGATRON_RECIPES[recipe_of(run.recipe).name],
    }
    if moe:
        values |= {
            "num-experts": moe.num_experts,
            "moe-ffn-hidden-size": moe.d_expert,
            "moe-router-topk": moe.top_k,
            "moe-router-pre-softmax": not moe.normalise_weights or None,
            "moe-router-load-balancing-type": moe.balancing,
            "moe-aux-loss-coeff": moe.aux_coefficient if moe.balancing == "aux_loss" else None,
            "moe-token-dispatcher-type": "alltoall",
            "expert-model-parallel-size": layout.ep,
            "expert-tensor-parallel-size": 1 if layout.folded else layout.tp,
        }
    if fsdp:
        values |= {
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": "optim_grads" if layout.zero_stage == 2 else "optim_grads_params",
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "fsdp_dtensor",
        }
    if layout.schedule == "interleaved" and layout.pp > 1:
        values["num-layers-per-virtual-pipeline-stage"] = config.num_layers // layout.num_stages
    if layout.recompute != "none":
        values["recompute-granularity"] = layout.recompute
    if layout.recompute == "full":
        values |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    given = {name: value for name, value in values.items() if value is not None}
    return "".join(f"--{name}\n" if value is True else f"--{name} {value}\n" for name, value in given.items())


# ---- nanotron, picotron

NANOTRON_RECIPES = {"bf16-master-fp32-grads": True, "bf16": False}  # whether gradients, and with them a copy, are FP32


@checked
def nanotron(run: Run) -> str:
    """Return nanotron's YAML: the sections that lay out a run."""
    config, layout = run.config, run.layout
    need(ENGINES["nanotron"].file, run)
    sections = {
        "model": {
            "dtype": "bfloat16",
            "model_config": {
                "hidden_size": config.d_model,
                "intermediate_size": config.d_ff,
                "is_llama_config": True,
                "max_position_embeddings": max(config.max_seq_len, run.seq_len),
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_layers,
                "num_key_value_heads": config.num_kv_heads,
                "rms_norm_eps": config.norm_eps,
                "rope_theta": config.rope_theta,
                "tie_word_embeddings": config.tied,
                "vocab_size": config.vocab_size,
            },
        },
        "optimizer": {
            "accumulate_grad_in_fp32": NANOTRON_RECIPES[recipe_of(run.recipe).name],
            "zero_stage": layout.zero_stage,
        },
        "parallelism": {
            "dp": layout.dp,
            "expert_parallel_size": 1,
            "pp": layout.pp,
            "pp_engine": layout.schedule if layout.pp > 1 else "1f1b",
            "recompute_layer": layout.recompute == "full",
            "tp": layout.tp,
            "tp_linear_async_communication": layout.sequence_parallel,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            "tp_recompute_allgather": layout.regather,
        },
        "tokens": {
            "batch_accumulation_per_replica": layout.micro_batches,
            "micro_batch_size": layout.micro_batch,
            "sequence_length": run.seq_len,
        },
    }
    head = "# nanotron cuts layers into stages by their cost, not evenly\n" if layout.pp > 1 else ""
    if config.rope_scaling is not None:
        head += "# nanotron's Llama does not scale RoPE\n"
    return head + _yaml(sections)


PICOTRON = File(
    "picotron",
    ("bf16",),
    axes=("tp", "pp", "cp"),
    order="dp-pp-cp-tp",
    zero_stages=(0,),
    pipeline_zero=(0,),
    replicas=False,
    schedules=("1f1b", "afab"),
    recomputes=("none",),
    cp_methods=("ring",),
    cp_shardings=("contiguous",),
    sequence_parallel=(False,),
    told_stages=False,
    families=("llama",),
    lacks=(
        "latent attention",
        "norms of queries and keys (QK-norm)",
        "tied head",
        "heads of another width",
        "fewer key/value heads than tp",
        "vocabulary that tp cuts unevenly",
    ),
)


@checked
def picotron(run: Run) -> str:
    """Return picotron's JSON: the sections that lay out a run.

    All other sizes of the model come from the Hugging Face config that you name in model.name. There is no master
    copy; with dp, gradients are summed in FP32, 4 bytes a parameter more than recipe bf16 has.
    """
    config, layout = run.config, run.layout
    need(PICOTRON, run, {"cp without dp (it then sums no gradients)": layout.cp > 1 and layout.dp == 1})
    sections = {
        "distributed": {
            "tp_size": layout.tp,
            "cp_size": layout.cp,
            "pp_size": layout.pp,
            "dp_size": layout.dp,
            "pp_engine": layout.schedule if layout.pp > 1 else "1f1b",
            "backend": "nccl",
            "use_cpu": False,
        },
        "model": {
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "dtype": "bfloat16",
            "use_flash_attention": True,
        },
        "training": {
            "seq_length": run.seq_len,
            "micro_batch_size": layout.micro_batch,
            "gradient_accumulation_steps": layout.micro_batches,
        },
    }
    return json.dumps(sections, indent=2) + "\n"


# ---- Accelerate's plugin for Megatron-LM

ACCELERATE_MEGATRON_RECIPES = {"fp32": "no", "bf16-master-fp32-grads": "bf16"}
ACCELERATE_MEGATRON = replace(
    ENGINES["megatron"].file,
    program="Accelerate's Megatron-LM plugin",
    recipes=tuple(ACCELERATE_MEGATRON_RECIPES),
    axes=("tp", "pp"),  # it counts cp's ranks as data
    zero_stages=(0, 1),
    replicas=False,
    schedules=("1f1b",),
    recomputes=("full",),  # what it does unasked
    lacks=(*ENGINES["megatron"].file.lacks, "experts", "norms of queries and keys (QK-norm)"),
)


@checked
def accelerate_megatron(run: Run, gpus_per_node: Size) -> str:
    """Return Accelerate's YAML for its Megatron-LM plugin.

    Its plugin recomputes layers where a file says nothing, and divides the batch by all ranks but tp and pp: a layout
    with cp would have cp times the batch.
    """
    layout = run.layout
    _check_megatron(run, ACCELERATE_MEGATRON)
    nodes = _nodes(layout.world_size, gpus_per_node)
    rendezvous = {
        "main_process_ip": "head-node",
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "same_network": True,
    }
    sections = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MEGATRON_LM",
        "mixed_precision": ACCELERATE_MEGATRON_RECIPES[recipe_of(run.recipe).name],
        "num_processes": layout.world_size,
        "num_machines": nodes,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
        **(rendezvous if nodes > 1 else {}),
        "megatron_lm_config": {
            "megatron_lm_tp_degree": layout.tp,
            "megatron_lm_pp_degree": layout.pp,
            "megatron_lm_num_micro_batches": layout.micro_batches,
            "megatron_lm_sequence_parallelism": layout.sequence_parallel,
            "megatron_lm_context_parallel_size": 1,
            "megatron_lm_expert_model_parallel_size": 1,
            "megatron_lm_use_distributed_optimizer": layout.zero_stage == 1,
            "megatron_lm_gradient_clipping": 1.0,
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "uniform",
            "megatron_lm_recompute_num_layers": 1,
        },
    }
    return (
        f"{in_your_script(run)}\n"
        "# of a Llama the plugin reads layers, width and heads alone: give the rest in other_megatron_args\n"
        f"{_yaml(sections)}"
    )


def in_your_script(run: Run) -> str:
    """What no field of Accelerate's says, as a comment."""
    return f"# in your script: batches of {run.layout.micro_batch} x {run.seq_len:,} tokens for each rank"


def _yaml(sections: dict, indent: str = "") -> str:
    """Sections of plain values as YAML; JSON's words for them are YAML's too."""
    text = ""
    for name, value in sections.items():
        if isinstance(value, dict):
            text += f"{indent}{name}:\n{_yaml(value, indent + '  ')}"
        else:
            plain = json.dumps(value)
            if isinstance(value, float) and "." not in plain:
                plain = plain.replace("e", ".0e")  # YAML 1.1 takes 1e-05 for a text
            text += f"{indent}{name}: {plain}\n"
    return text


# ---- the course's own trainer


def _nodes(world_size: int, gpus_per_node: int) -> int:
    if world_size > gpus_per_node and world_size % gpus_per_node:
        low = world_size // gpus_per_node * gpus_per_node
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {gpus_per_node} GPUs; choose {low} or {low + gpus_per_node}"
        )
    return max(1, world_size // gpus_per_node)


def _trainer(run: Run) -> str:
    if run.config not in (PRESETS | MOE_PRESETS).values():
        raise ValueError(f"the course's trainer has presets alone, and {run.config.name} is none; choose a preset")
    need(ENGINES["course"].file, run)
    precision = recipe_of(run.recipe).name
    options = f"--model {run.config.name} --layout {run.layout} --seq-len {run.seq_len} --precision {precision}"
    return f"-m course_lib.train {options}"


@checked
def course_command(run: Run, gpus_per_node: Size) -> str:
    """Return the command that starts the course's own trainer, the same on every node."""
    nodes = _nodes(run.layout.world_size, gpus_per_node)
    several = '--rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500" ' if nodes > 1 else ""
    each = run.layout.world_size // nodes
    return f"torchrun --nnodes {nodes} --nproc-per-node {each} {several}{_trainer(run)}\n"


@checked
def sbatch(run: Run, gpus_per_node: Size) -> str:
    """Return a batch script for Slurm: one torchrun a node, with 8 cores for each GPU."""
    nodes = _nodes(run.layout.world_size, gpus_per_node)
    each = run.layout.world_size // nodes
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=course",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --cpus-per-task={8 * each}",
            f"#SBATCH --gpus-per-node={each}",
            'export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 ' + course_command(run, gpus_per_node),
        ]
    )
