"""A layout in the words of other frameworks: files that are ready, or the reason why a framework cannot do it.

    files, refused = export(option, gpus_per_node=8)   # {"torchtitan.toml": "...", ...}, {"nanotron.yaml": "why", ...}

Nothing is left out: a choice that a framework does not have is a refusal. Data and tokenizer are for you to fill in.

Sources of the fields: torchtitan, tests/integration_tests/base_config.toml at 2dfaa27 and job_config.py at 6404b93;
nanotron, examples/config_tiny_llama.yaml at 09fd0ec; picotron, template/base_config.json at 59714b1; Megatron-LM,
examples/llama/train_llama3_8b_h100_fp8.sh and megatron/training/arguments.py; Accelerate 1.15, commands/launch.py
"""

from __future__ import annotations

import json
from collections.abc import Callable

from course_lib.config import MOE_PRESETS, PRESETS
from course_lib.plan.option import Option
from course_lib.run import Run
from course_lib.validate import Size, checked

PRECISIONS = ("fp32", "bf16-master", "bf16-master-fp32-grads")  # of the recipes those that the trainer has
TORCHTITAN_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


@checked
def export(option: Option, gpus_per_node: Size = 8) -> tuple[dict[str, str], dict[str, str]]:
    """Write a layout for each framework that can do it; return texts by file name, and reasons by file name."""
    writers: dict[str, Callable[[Run], str]] = {
        "torchtitan.toml": torchtitan,
        "megatron.args": megatron,
        "nanotron.yaml": nanotron,
        "picotron.json": picotron,
        "accelerate_megatron.yaml": accelerate_megatron,
        "course.sh": lambda run: course_command(run, gpus_per_node),
        "course.sbatch": lambda run: sbatch(run, gpus_per_node),
    }
    files, refused = {}, {}
    for name, write in writers.items():
        try:
            files[name] = write(option.run)
        except ValueError as error:
            refused[name] = str(error)
    return files, refused


def _need(framework: str, checks: dict[str, bool]) -> None:
    """Raise ValueError that names all that a framework cannot do; a key says what, its value whether it is asked."""
    asked = [what for what, is_asked in checks.items() if is_asked]
    if asked:
        raise ValueError(f"{framework} has no {', no '.join(asked)}; choose a layout without")


@checked
def torchtitan(run: Run) -> str:
    """Return torchtitan's TOML; sequence parallelism comes with its tensor parallelism."""
    layout = run.layout
    several = layout.tp * layout.pp * layout.cp > 1
    _need(
        "torchtitan",
        {
            "ZeRO-1 (it shards all states or none)": layout.zero_stage == 1,
            "ZeRO-0 beside tp, pp or cp": layout.zero_stage == 0 and several,
            f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule not in TORCHTITAN_SCHEDULES,
            "recomputation of attention alone (its selective mode repeats other operators)": layout.recompute
            == "selective",
            "tp without sequence parallelism in this file": layout.tp > 1 and not layout.sequence_parallel,
            "layers_of_stage in this file": layout.layers_of_stage is not None,
            "exchange of keys and values by heads (Ulysses)": layout.cp > 1 and layout.cp_method == "ulysses",
        },
    )
    replicas = layout.dp if layout.zero_stage == 0 else layout.dp_replicate
    at_once = layout.micro_batch * (layout.micro_batches if layout.pp > 1 else 1)
    parallelism = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": layout.dp // replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.pp > 1:
        parallelism["pipeline_parallel_schedule"] = TORCHTITAN_SCHEDULES[layout.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
    if layout.cp > 1:
        parallelism["context_parallel_rotate_method"] = "alltoall" if layout.cp_method == "ring" else "allgather"
    training = {
        "local_batch_size": at_once,
        "global_batch_size": layout.sequences_per_step,
        "seq_len": run.seq_len,
    }
    tables = {"training": training, "parallelism": parallelism, "activation_checkpoint": {"mode": layout.recompute}}
    return "\n".join(_toml_table(name, values) for name, values in tables.items())


def _toml_table(name: str, values: dict) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


def _check_megatron(run: Run, framework: str) -> None:
    layout, layers = run.layout, run.config.num_layers
    _need(
        framework,
        {
            f"ZeRO-{layout.zero_stage} (its distributed optimizer is ZeRO-1)": layout.zero_stage > 1,
            "replicas of shards (HSDP) in these arguments": layout.dp_replicate > 1,
            f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"),
            f"{layers} layers over {layout.num_stages} equal stages": layers % layout.num_stages != 0,
            "layers_of_stage in these arguments": layout.layers_of_stage is not None,
            "latent attention in these arguments": run.config.mla is not None,
            "first dense layers in these arguments": bool(run.config.moe and run.config.moe.first_dense_layers),
        },
    )


@checked
def megatron(run: Run) -> str:
    """Return Megatron-LM's arguments, one to a line; its sequence parallelism always gathers again in backward."""
    config, layout = run.config, run.layout
    _check_megatron(run, "Megatron-LM")
    _need("Megatron-LM", {"exchange of keys and values by heads here": layout.cp > 1 and layout.cp_method == "ulysses"})
    values: dict[str, object] = {
        "num-layers": config.num_layers,
        "hidden-size": config.d_model,
        "ffn-hidden-size": config.d_ff,
        "num-attention-heads": config.num_heads,
        "group-query-attention": config.num_kv_heads < config.num_heads or None,
        "num-query-groups": config.num_kv_heads if config.num_kv_heads < config.num_heads else None,
        "kv-channels": config.head_dim,
        "seq-length": run.seq_len,
        "max-position-embeddings": config.max_seq_len,
        "swiglu": config.family == "llama" or None,
        "normalization": "RMSNorm" if config.family == "llama" else "LayerNorm",
        "position-embedding-type": "rope" if config.family == "llama" else "learned_absolute",
        "untie-embeddings-and-output-weights": not config.tied or None,
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": layout.sequence_parallel or None,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep if config.moe else None,
        "num-experts": config.moe.num_experts if config.moe else None,
        "moe-router-topk": config.moe.top_k if config.moe else None,
        "moe-ffn-hidden-size": config.moe.d_expert if config.moe else None,
        "use-distributed-optimizer": layout.zero_stage == 1 or None,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": layout.sequences_per_step,
        "bf16": True,
    }
    if layout.schedule == "interleaved" and layout.pp > 1:
        values["num-layers-per-virtual-pipeline-stage"] = config.num_layers // layout.num_stages
    if layout.recompute != "none":
        values["recompute-granularity"] = layout.recompute
    if layout.recompute == "full":
        values |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    given = {name: value for name, value in values.items() if value is not None}
    return "".join(f"--{name}\n" if value is True else f"--{name} {value}\n" for name, value in given.items())


@checked
def nanotron(run: Run) -> str:
    """Return nanotron's YAML: the sections that lay out a run."""
    layout = run.layout
    _need(
        "nanotron",
        {
            f"ZeRO-{layout.zero_stage}": layout.zero_stage > 1,
            "context parallelism in this file": layout.cp > 1,
            "expert parallelism in this file": layout.ep > 1 or run.config.moe is not None,
            "latent attention": run.config.mla is not None,
            f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule != "1f1b",
            f"recomputation {layout.recompute} in this file": layout.recompute != "none",
            "layers_of_stage": layout.layers_of_stage is not None,
        },
    )
    config = run.config
    sections = {
        "model": {
            "dtype": "bfloat16",
            "model_config": {
                "hidden_size": config.d_model,
                "intermediate_size": config.d_ff,
                "is_llama_config": True,
                "max_position_embeddings": config.max_seq_len,
                "num_attention_heads": config.num_heads,
                "num_hidden_layers": config.num_layers,
                "num_key_value_heads": config.num_kv_heads,
                "tie_word_embeddings": config.tied,
                "vocab_size": config.vocab_size,
            },
        },
        "optimizer": {"accumulate_grad_in_fp32": True, "zero_stage": layout.zero_stage},
        "parallelism": {
            "dp": layout.dp,
            "expert_parallel_size": 1,
            "pp": layout.pp,
            "pp_engine": "1f1b",
            "tp": layout.tp,
            "tp_linear_async_communication": layout.sequence_parallel,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        },
        "tokens": {
            "batch_accumulation_per_replica": layout.micro_batches,
            "micro_batch_size": layout.micro_batch,
            "sequence_length": run.seq_len,
        },
    }
    return _yaml(sections)


@checked
def picotron(run: Run) -> str:
    """Return picotron's JSON: the sections that lay out a run."""
    config, layout = run.config, run.layout
    _need(
        "picotron",
        {
            "ZeRO": layout.zero_stage > 0,
            "sequence parallelism": layout.sequence_parallel,
            "experts": config.moe is not None,
            "latent attention": config.mla is not None,
            "exchange of keys and values but a ring": layout.cp > 1 and layout.cp_method != "ring",
            f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule != "1f1b",
            "recomputation": layout.recompute != "none",
            "layers_of_stage": layout.layers_of_stage is not None,
        },
    )
    sections = {
        "distributed": {
            "tp_size": layout.tp,
            "cp_size": layout.cp,
            "pp_size": layout.pp,
            "dp_size": layout.dp,
            "pp_engine": "1f1b",
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


@checked
def accelerate_megatron(run: Run) -> str:
    """Return Accelerate's YAML for its Megatron-LM plugin."""
    layout = run.layout
    _check_megatron(run, "Accelerate's Megatron-LM plugin")
    _need(
        "Accelerate's Megatron-LM file",
        {
            "interleaved stages": layout.pp > 1 and layout.schedule == "interleaved",
        },
    )
    again = {} if layout.recompute == "none" else {"megatron_lm_recompute_granularity": layout.recompute}
    if layout.recompute == "full":
        again |= {"megatron_lm_recompute_method": "uniform", "megatron_lm_recompute_num_layers": 1}
    return _yaml(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MEGATRON_LM",
            "mixed_precision": "bf16",
            "num_processes": layout.world_size,
            "use_cpu": False,
            "debug": False,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": layout.tp,
                "megatron_lm_pp_degree": layout.pp,
                "megatron_lm_num_micro_batches": layout.micro_batches,
                "megatron_lm_sequence_parallelism": layout.sequence_parallel,
                "megatron_lm_context_parallel_size": layout.cp,
                "megatron_lm_expert_model_parallel_size": layout.ep,
                "megatron_lm_use_distributed_optimizer": layout.zero_stage == 1,
                "megatron_lm_gradient_clipping": 1.0,
                **again,
            },
        }
    )


def _yaml(sections: dict, indent: str = "") -> str:
    """Sections of plain values as YAML; JSON's words for them are YAML's too."""
    text = ""
    for name, value in sections.items():
        if isinstance(value, dict):
            text += f"{indent}{name}:\n{_yaml(value, indent + '  ')}"
        else:
            text += f"{indent}{name}: {json.dumps(value)}\n"
    return text


def _trainer(run: Run) -> str:
    if run.config not in (PRESETS | MOE_PRESETS).values():
        raise ValueError(f"the course's trainer has presets alone, and {run.config.name} is none; choose a preset")
    if run.recipe not in PRECISIONS:
        raise ValueError(f"the course's trainer has no recipe {run.recipe}; choose from {', '.join(PRECISIONS)}")
    options = f"--model {run.config.name} --layout {run.layout} --seq-len {run.seq_len} --precision {run.recipe}"
    return f"-m course_lib.train {options}"


@checked
def course_command(run: Run, gpus_per_node: Size) -> str:
    """Return the command that starts the course's own trainer, the same on every node."""
    nodes = max(1, run.layout.world_size // gpus_per_node)
    several = '--rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500" ' if nodes > 1 else ""
    each = run.layout.world_size // nodes
    return f"torchrun --nnodes {nodes} --nproc-per-node {each} {several}{_trainer(run)}\n"


@checked
def sbatch(run: Run, gpus_per_node: Size) -> str:
    """Return a batch script for Slurm: one torchrun a node."""
    nodes = max(1, run.layout.world_size // gpus_per_node)
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=course",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={run.layout.world_size // nodes}",
            'export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"srun {course_command(run, gpus_per_node)}",
        ]
    )
