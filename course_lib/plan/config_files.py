"""A layout in the words of other programs: configuration files that are ready, or the reason why one cannot do it.

Nothing is left out: a choice that a program does not have is a refusal. Steps, learning rate, data and tokenizer are
for you to add. What each file can say, its words for recipes and schedules, and their sources: engines.toml. Their
texts: course_lib/templates/.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

from course_lib.config import MOE_PRESETS, PRESETS, MoeConfig, RopeScaling
from course_lib.engines import ENGINES, File
from course_lib.estimate import Estimate
from course_lib.hardware import nodes_of
from course_lib.layout.partition import even_layers
from course_lib.run import Offload, Run, recipe_of
from course_lib.validate import Positive, Size, checked


@checked
def export(option: Estimate, gpus_per_node: Size = 8) -> tuple[dict[str, str], dict[str, str]]:
    """Write a layout for each program that can do it; return texts by file name, and reasons by file name."""
    files, refused = {}, {}
    for name, (_, text_of) in WRITERS.items():
        try:
            files[name] = text_of(option.run, gpus_per_node)
        except ValueError as error:
            refused[name] = str(error)
    return files, refused


def files_for(engine: str) -> list[str]:
    """Names of the files that an engine reads; the course's own run can be given to any."""
    return [name for name, (reader, _) in WRITERS.items() if engine in (reader, "course")]


# ---- what a file cannot say


def _need(file: File, run: Run, checks: Mapping[str, bool] | None = None) -> Mapping[str, object]:
    """Return a file's fields for the run's recipe; raise ValueError that names all that the file cannot say.

    checks    what the table of engines has no word for: a key says what, its value whether it is asked
    """
    asked = [what for what, is_asked in (_refusals(file, run) | dict(checks or {})).items() if is_asked]
    if asked:
        raise ValueError(f"{file.program} has no {', no '.join(asked)}; choose a run without")
    return file.recipes[recipe_of(run.recipe).name]


def _refusals(file: File, run: Run) -> dict[str, bool]:
    """What a file may lack, and whether the run asks for it."""
    layout, config, recipe = run.layout, run.config, recipe_of(run.recipe).name
    long = [axis for axis in layout.order if layout.mesh.sizes[axis] > 1]
    its_own = [axis for axis in (file.order or "-".join(layout.order)).split("-") if axis in long]
    stages, where = (file.pipeline_zero, "in") if layout.pp > 1 else (file.zero_stages, "without")
    shares, alone = layout.data_size > 1, layout.dp == layout.world_size and layout.ep == 1
    pieces = layout.cp * (2 if layout.cp > 1 and layout.cp_sharding == "zigzag" else 1)
    pieces *= layout.tp if layout.sequence_parallel else 1
    widths = [config.d_ff, config.moe.d_expert if config.moe else config.d_ff]
    other, cp = file is not ENGINES["course"].file, layout.cp > 1
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
        **{f"{a} in this file": a not in file.axes and getattr(layout, a) > 1 for a in ("tp", "pp", "cp", "ep")},
        f"ZeRO-{layout.zero_stage} {where} a pipeline": shares and layout.zero_stage not in stages,
        "ZeRO-0 beside tp, pp, cp or ep": file.zero_0_alone and shares and layout.zero_stage == 0 and not alone,
        "replicas of shards (HSDP)": layout.dp_replicate > 1 and not file.replicas,
        f"schedule {layout.schedule}": layout.pp > 1 and layout.schedule not in file.schedules,
        f"recomputation {layout.recompute}": layout.recompute not in file.recomputes,
        f"exchange of keys and values by {layout.cp_method}": cp and layout.cp_method not in file.cp_methods,
        f"{layout.cp_sharding} pieces of a sequence": cp and layout.cp_sharding not in file.cp_shardings,
        "regather (it keeps gathered inputs)": layout.regather not in file.regathers,
        f"tp with{'' if layout.sequence_parallel else 'out'} sequence parallelism": layout.tp > 1
        and layout.sequence_parallel not in file.sequence_parallel,
        f"{config.num_layers} layers over {layout.num_stages} equal stages": file.even_stages
        and config.num_layers % layout.num_stages != 0,
        f"whole experts over ep {layout.ep}, no multiple of cp x tp": file.folds_all
        and bool(config.moe and layout.folded and layout.ep % (layout.cp * layout.tp)),
        "layers_of_stage in this file": layout.layers_of_stage is not None and not file.told_stages,
        **{part: part in file.lacks and is_there for part, is_there in _parts_of(run).items()},
        # what the course's engines do, and few others
        f"sequences of {run.seq_len:,} in {pieces} equal pieces": other and run.seq_len % pieces != 0,
        f"matrices that tp {layout.tp} cuts unevenly": other and any(width % layout.tp for width in widths),
        f"rows of experts {layout.expert_method}": other and layout.expert_method != "plain",
    }


_PLAIN = ("num_shared_experts", "first_dense_layers", "score", "capacity_factor", "routed_scale", "every")


def _parts_of(run: Run) -> dict[str, bool]:
    """Parts of models that files lack, and whether the run's model has them."""
    config, moe, scaled = run.config, run.config.moe, run.config.rope_scaling
    limited = moe is not None and (moe.max_groups < moe.num_groups or moe.balancing == "bias")
    unlike = moe is not None and any(getattr(moe, name) != getattr(MoeConfig, name) for name in _PLAIN)
    return {
        "experts": moe is not None,
        "experts but plain ones": limited or unlike,
        "latent attention": config.mla is not None,
        "norms of queries and keys (QK-norm)": config.qk_norm,
        "tied head": config.tied,
        "heads of another width": config.head_dim * config.num_heads != config.d_model,
        "fewer key/value heads than tp": run.layout.tp > config.num_kv_heads,
        "vocabulary that tp cuts unevenly": config.vocab_size % run.layout.tp != 0,
        "other bounds of scaled RoPE": scaled is not None and scaled != RopeScaling(scaled.factor),
    }


_TEMPLATES = Path(__file__).parents[1] / "templates"
_PLACE = re.compile(r"<(\??)([\w.-]+)>")


def _fill(template: str, run: Run | None = None, **more: object) -> str:
    """Return a template's text for a run: <layout.tp> is a field of the run's layout, <name> one of `more`. A line is
    left out where a value of it is None, and with <?name> unless that is true."""
    known = more | ({"run": run, "layout": run.layout, "config": run.config, "moe": run.config.moe} if run else {})

    def value_of(path: str) -> object:
        value = known
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    def in_words(place: re.Match) -> str:
        value = value_of(place[2])
        text = "" if place[1] else str(value).lower() if isinstance(value, bool) else str(value)
        return re.sub(r"^(\d+)e-", r"\1.0e-", text) if template.endswith(".yaml") else text  # YAML takes 1e-05 for text

    lines = (_TEMPLATES / template).read_text(encoding="utf-8").splitlines(keepends=True)
    values = [[(condition, value_of(path)) for condition, path in _PLACE.findall(line)] for line in lines]
    there = [all(value if condition else value is not None for condition, value in of_line) for of_line in values]
    return "".join(_PLACE.sub(in_words, line) for line, is_there in zip(lines, there, strict=True) if is_there)


def _mapping(template: str, **fields: object) -> dict:
    import yaml  # here and below: a plan needs none

    return yaml.safe_load(_fill(template, **fields))


def _yaml(fields: dict) -> str:
    import yaml

    return yaml.safe_dump(fields, sort_keys=False)


# ---- torchtitan

_TORCHTITAN_MODELS = {"llama-3.1-8b": "8B", "llama-3.1-70b": "70B", "llama-3.1-405b": "405B", "deepseek-v3": "671B"}


def _torchtitan(run: Run, gpus_per_node: int) -> str:
    """Return torchtitan's TOML, for 0.2.1: 0.2.2 heeds no method of context parallelism, 0.3 reads Python. Sequence
    parallelism comes with its tensor parallelism. FP32 parameters are the master copy, of which BF16 casts are
    gathered: 16 bytes a parameter, as bf16-master has them. In a pipeline gradients are summed in FP32, and stay whole
    to the end of a step, parameters too: its FSDP is then ZeRO-1."""
    config, layout, file = run.config, run.layout, ENGINES["torchtitan"].file
    piped, recipe = layout.pp > 1, recipe_of(run.recipe).name
    known = config == (PRESETS | MOE_PRESETS).get(config.name) and config.name in _TORCHTITAN_MODELS
    checks = {
        "mixed precision beside tp or pp without dp or cp": layout.data_size == 1 < layout.tp * layout.pp
        and recipe.startswith("bf16-master"),
        "BF16 gradients in a pipeline (recipe bf16-master-fp32-grads)": piped and recipe == "bf16-master",
        "replicas that cut through cp": layout.dp % layout.dp_replicate != 0,
        "recomputation in DualPipeV with ep": (layout.schedule, layout.ep > 1, layout.recompute == "none")
        == ("dualpipe_v", True, False),
        "latent attention over cp": layout.cp > 1 and config.mla is not None,
        f"{config.name} among its models": not known
        and bool(config.family != "llama" or config.tied or config.moe or config.mla or config.qk_norm),
    }
    replicas = layout.dp if layout.zero_stage == 0 else layout.dp_replicate
    return _fill(
        "torchtitan.toml",
        run,
        precision=_need(file, run, checks),
        name="deepseek_v3" if known and config.mla else "llama3",
        flavor=_TORCHTITAN_MODELS[config.name] if known else config.name,
        added=not known,
        local_batch=layout.micro_batch * (layout.micro_batches if piped else 1),
        replicas=replicas,
        shards=layout.dp // replicas,
        reshard="always" if layout.zero_stage == 3 else "never",
        expert_tp=layout.tp if layout.ep > 1 and not layout.folded else 1,
        schedule=file.words[layout.schedule] if piped else None,
        modules=json.dumps(_modules_of_stages(run)) if piped else None,
        rotate=file.words[layout.cp_method] if layout.cp > 1 else None,
    )


def _modules_of_stages(run: Run) -> list[list[str]]:
    """The modules of each stage: by itself torchtitan gives the first and the last stage a layer less."""
    layers = run.layout.layers_of_stage or even_layers(run.config.num_layers, run.layout.num_stages)
    ends = accumulate(layers)
    stages = [[f"layers.{index}" for index in range(end - own, end)] for own, end in zip(layers, ends, strict=True)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


# ---- Megatron-LM, nanotron


def _megatron(run: Run, gpus_per_node: int) -> str:
    """Return Megatron-LM's arguments, one to a line. Its sequence parallelism always gathers again in backward. It pads
    the vocabulary to a multiple of 128 x tp. It wants CUDA_DEVICE_MAX_CONNECTIONS=1 beside tp and cp, but not with its
    FSDP, which is ZeRO-2 and 3."""
    config, layout, moe, file = run.config, run.layout, run.config.moe, ENGINES["megatron"].file
    checks = {
        "context parallelism in fp32": layout.cp > 1 and recipe_of(run.recipe).name == "fp32",
        "experts beside tp without sequence parallelism": bool(moe) and layout.tp > 1 and not layout.sequence_parallel,
    }
    is_virtual, llama = layout.schedule == "interleaved" and layout.pp > 1, config.family == "llama"
    return _fill(
        "megatron.args",
        run,
        precision=_need(file, run, checks),
        llama=llama,
        gpt=not llama,
        groups=config.num_kv_heads if config.num_kv_heads < config.num_heads else None,
        positions=max(config.max_seq_len, run.seq_len),
        rotary_base=int(config.rope_theta) if llama else None,
        untied=not config.tied,
        cp_comm_type=file.words[layout.cp_method] if layout.cp > 1 else None,
        instances=layout.dp_replicate if layout.dp_replicate > 1 else None,
        pre_softmax=moe and not moe.normalise_weights,
        aux_coefficient=moe.aux_coefficient if moe and moe.balancing == "aux_loss" else None,
        expert_tp=1 if layout.folded else layout.tp,
        sharding={2: "optim_grads", 3: "optim_grads_params"}.get(layout.zero_stage),
        virtual_stage=config.num_layers // layout.num_stages if is_virtual else None,
        recompute=None if layout.recompute == "none" else layout.recompute,
        full=layout.recompute == "full",
    )


def _nanotron(run: Run, gpus_per_node: int) -> str:
    """Return nanotron's YAML: the sections that lay out a run."""
    layout, piped = run.layout, run.layout.pp > 1
    return _fill(
        "nanotron.yaml",
        run,
        gradients=_need(ENGINES["nanotron"].file, run),
        piped=piped,
        positions=max(run.config.max_seq_len, run.seq_len),
        pp_engine=layout.schedule if piped else "1f1b",
        full=layout.recompute == "full",
        tp_mode="REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
    )


# ---- DeepSpeed

Stage, Precision = Literal[0, 1, 2, 3], Literal["fp32", "bf16", "fp16"]


def _offloaded(stage: Stage, offload: Offload, nvme_path: str) -> dict:
    """DeepSpeed's fields, where it would not fail, or leave the data where it is without a word."""
    if offload.parameters != "device" and stage != 3:
        raise ValueError(f"offloading parameters moves their shards, which only stage 3 has, got stage {stage}")
    if offload.optimizer != "device" and stage == 0:
        raise ValueError("offloading the optimizer moves sharded states, got stage 0; choose stage 1, 2 or 3")
    if offload.optimizer == "disk" and stage != 3:
        raise ValueError(f'an optimizer on "disk" needs stage 3, got stage {stage}; choose "host", or stage 3')
    places = {"offload_optimizer": offload.optimizer, "offload_param": offload.parameters}
    if ("disk" in places.values()) != bool(nvme_path):
        raise ValueError(f"nvme_path is {nvme_path!r}; give a folder on the local disk where something waits on disk")
    words = {"host": {"device": "cpu", "pin_memory": True}}
    words["disk"] = {"device": "nvme", "pin_memory": True, "nvme_path": nvme_path}
    return {key: words[place] for key, place in places.items() if place != "device"}


@checked
def deepspeed(
    stage: Stage,
    micro_batch_size: Size,
    accumulation_steps: Size = 1,
    clip_norm: Positive | None = 1.0,
    precision: Precision = "bf16",
    offload: Offload = Offload(),
    nvme_path: str = "",
    sizes: Mapping[str, int] | None = None,
) -> dict:
    """DeepSpeed's JSON. In 16 bits it keeps FP32 master weights by itself; fp16 gets a loss scale that adapts (0).

    micro_batch_size    sequences a rank works on at once; the global batch is this x accumulation_steps x ranks
    nvme_path           a folder on the local disk, where something waits on disk
    sizes               of messages, in elements, by DeepSpeed's names, in place of its own defaults
    Source              DeepSpeed's configuration reference, "ZeRO Optimizations for FP16 Training"
    """
    numbers = {"micro_batch": micro_batch_size, "micro_batches": accumulation_steps, "clip_norm": clip_norm}
    is_16 = {"fp16": precision == "fp16", "bf16": precision == "bf16", "in_16_bits": precision != "fp32"}
    is_stage = {"sharded": stage > 0, "optimizer_alone": stage in (1, 2), "parameters": stage == 3}
    config = _mapping("deepspeed.yaml", stage=stage, not_fp16=precision != "fp16", **numbers, **is_16, **is_stage)
    config["zero_optimization"] |= dict(sizes or {}) | _offloaded(stage, offload, nvme_path)
    return config


def _deepspeed_json(run: Run, gpus_per_node: int) -> str:
    layout, file = run.layout, ENGINES["deepspeed"].file
    summed_apart = "grad_accum_dtype" in file.recipes.get(recipe_of(run.recipe).name, {})
    fields = _need(file, run, {"FP32 gradients without ZeRO": summed_apart and layout.zero_stage == 0})
    config = deepspeed(layout.zero_stage, layout.micro_batch, layout.micro_batches, precision=fields["precision"])
    sums = {"data_types": {"grad_accum_dtype": fields["grad_accum_dtype"]}} if summed_apart else {}
    return json.dumps(config | sums, indent=2) + "\n"


# ---- Accelerate


@checked
def accelerate_fsdp2(
    wrap: Sequence[str],
    num_processes: Size,
    reshard_after_forward: bool = True,
    precision: Precision = "bf16",
    recompute: bool = False,
    machines: Size = 1,
) -> dict:
    """Accelerate's YAML for FSDP2; `wrap` names the classes whose instances are units and are recomputed."""
    if not wrap or any("," in name for name in wrap):
        raise ValueError(f'wrap is {wrap!r}; it must be a list of class names, such as ["LlamaDecoderLayer"]')
    fields = {"reshard_after_forward": reshard_after_forward, "recompute": recompute, "wrap": ",".join(wrap)}
    return _accelerate("FSDP", precision, num_processes, machines, **fields)


@checked
def accelerate_deepspeed_file(
    deepspeed_json: str | Path, num_processes: Size, zero3_init: bool = False, machines: Size = 1
) -> dict:
    """Accelerate's YAML that leaves everything to a JSON file of `deepspeed`: it refuses to be told twice.

    On several machines each runs the command itself, as with torchrun ("standard"); otherwise DeepSpeed uses pdsh.
    """
    named = json.dumps(str(deepspeed_json))
    return _accelerate("DEEPSPEED", None, num_processes, machines, json=named, zero3_init=zero3_init)


def _accelerate(kind: str, precision: str | None, num_processes: int, machines: int, **fields: object) -> dict:
    """Accelerate's YAML: precision, processes, where machines meet, and the fields of FSDP2. Each machine sets its own
    machine_rank, all of them the address of machine 0 and a port free on it."""
    if num_processes % machines != 0:
        raise ValueError(f"num_processes ({num_processes}) is that of all {machines} machines; make it divisible by it")
    named = "no" if precision == "fp32" else precision
    world = {"kind": kind, "precision": named, "num_processes": num_processes, "machines": machines}
    return _mapping("accelerate.yaml", **world, several=machines > 1, **fields)


def _fsdp2_yaml(run: Run, gpus_per_node: int) -> str:
    """Accelerate's YAML for FSDP2, with a comment on what no field says: gradients stay sharded while they add up."""
    layout, config, precision = run.layout, run.config, _need(ENGINES["fsdp2"].file, run)["precision"]
    kind = "DeepseekV3" if config.mla else "Qwen3" if config.qk_norm else "Mixtral" if config.moe else "Llama"
    wrap = ["GPT2Block" if config.family == "gpt" else f"{kind}DecoderLayer"]
    how = {"reshard_after_forward": layout.zero_stage == 3, "recompute": layout.recompute == "full"}
    machines = nodes_of(layout.world_size, gpus_per_node)
    fields = accelerate_fsdp2(wrap, layout.world_size, precision=precision, machines=machines, **how)
    steps = f"# and GradientAccumulationPlugin(num_steps={layout.micro_batches}, sync_each_batch=True)\n"
    return _in_your_script(run) + steps + _yaml(fields)


def _accelerate_deepspeed(run: Run, gpus_per_node: int) -> str:
    _deepspeed_json(run, gpus_per_node)  # what it refuses
    machines, layout = nodes_of(run.layout.world_size, gpus_per_node), run.layout
    fields = accelerate_deepspeed_file("deepspeed.json", layout.world_size, layout.zero_stage == 3, machines)
    return _in_your_script(run) + _yaml(fields)


def _in_your_script(run: Run) -> str:
    """What no field of Accelerate's says, as a comment."""
    return f"# in your script: batches of {run.layout.micro_batch} x {run.seq_len:,} tokens for each rank\n"


# ---- the course's own trainer


def _course_command(run: Run, gpus_per_node: int) -> str:
    """Return the command that starts the course's own trainer, the same on every node."""
    nodes = nodes_of(run.layout.world_size, gpus_per_node)
    if run.config not in (PRESETS | MOE_PRESETS).values():
        raise ValueError(f"the course's trainer has presets alone, and {run.config.name} is none; choose a preset")
    _need(ENGINES["course"].file, run)
    several = '--rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500" ' if nodes > 1 else ""
    trainer = f"--model {run.config.name} --layout {run.layout} --seq-len {run.seq_len}"
    precision = f"--precision {recipe_of(run.recipe).name}"
    start = f"torchrun --nnodes {nodes} --nproc-per-node {run.layout.world_size // nodes}"
    return f"{start} {several}-m course_lib.train {trainer} {precision}\n"


def _sbatch(run: Run, gpus_per_node: int) -> str:
    """Return a batch script for Slurm: one torchrun a node, with 8 cores for each GPU."""
    nodes, command = nodes_of(run.layout.world_size, gpus_per_node), _course_command(run, gpus_per_node)
    gpus = run.layout.world_size // nodes
    return _fill("course.sbatch", run, nodes=nodes, cores=8 * gpus, gpus=gpus, command=command.rstrip())


WRITERS = {  # of each file the engine that reads it, and its text of a run on nodes of so many GPUs
    "torchtitan.toml": ("torchtitan", _torchtitan),
    "megatron.args": ("megatron", _megatron),
    "nanotron.yaml": ("nanotron", _nanotron),
    "course.sh": ("course", _course_command),
    "course.sbatch": ("course", _sbatch),
    "accelerate_fsdp2.yaml": ("fsdp2", _fsdp2_yaml),
    "deepspeed.json": ("deepspeed", _deepspeed_json),
    "accelerate_deepspeed.yaml": ("deepspeed", _accelerate_deepspeed),
}


def write(config: dict, path: str | Path) -> Path:
    """Writes .json or .yaml, by the name's ending; returns the path."""
    if (path := Path(path)).suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path.name} ends in {path.suffix!r}; choose .json (DeepSpeed) or .yaml (Accelerate)")
    path.write_text(json.dumps(config, indent=2) + "\n" if path.suffix == ".json" else _yaml(config), encoding="utf-8")
    return path
