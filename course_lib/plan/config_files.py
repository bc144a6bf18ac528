"""A layout in the words of other programs: configuration files that are ready, or the reason why one cannot do it.

Nothing is left out: a choice that a program does not have is a refusal. Steps, learning rate, data and tokenizer are
for you to add. What each file can say, its words for recipes and schedules, and their sources: engines.toml. Their
texts: course_lib/templates/.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from course_lib.config import MOE_PRESETS, PRESETS
from course_lib.engines import ENGINES, File
from course_lib.estimate import Estimate
from course_lib.hardware import nodes_of
from course_lib.layout.partition import even_layers
from course_lib.run import Offload, Run, recipe_of
from course_lib.validate import Positive, Size, checked

_PRESETS = (PRESETS | MOE_PRESETS).values()


@checked
def export(
    option: Estimate, gpus_per_node: Size = 8, engine: Literal[tuple(ENGINES)] = "course"
) -> tuple[dict[str, str], dict[str, str]]:
    """Write a layout for each program that can do it; return texts by file name, and reasons by file name.

    engine   who trains: then its own files alone; the course's own run can be given to any
    """
    files, refused, run = {}, {}, option.run
    for name, (reader, text_of) in WRITERS.items():
        if engine in (reader, "course"):
            try:
                files[name] = text_of(run, gpus_per_node) if text_of else _fill(name, **_names_of(reader, run))
            except ValueError as error:
                refused[name] = str(error)
    return files, refused


# ---- what a file cannot say


def _names_of(engine: str, run: Run) -> dict[str, object]:
    """Return what an engine's template can name of a run; raise ValueError that tells all that its file cannot say.

    run, layout, config, moe   the run and its parts
    recipe, fields, words      the recipe's name, the file's fields for it, the engine's words for ours
    preset                     the model's name if it is a preset, else None
    modules_of_stages          a function of the run
    """
    file, config, recipe = ENGINES[engine].file, run.config, recipe_of(run.recipe).name
    names = {"run": run, "layout": run.layout, "config": config, "moe": config.moe, "recipe": recipe}
    names |= {"fields": file.recipes.get(recipe, {}), "words": file.words}
    names |= {"preset": config.name if config in _PRESETS else None, "modules_of_stages": _modules_of_stages}
    refusals = _refusals(file, run) | {what.format_map(names): eval(when, names) for what, when in file.refuses.items()}
    if asked := [what for what, is_asked in refusals.items() if is_asked]:
        raise ValueError(f"{file.program} has no {', no '.join(asked)}; choose a run without")
    return names


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
        f"{config.num_layers} layers over {layout.num_stages} equal stages": file.even_stages
        and config.num_layers % layout.num_stages != 0,
        f"whole experts over ep {layout.ep}, no multiple of cp x tp": file.folds_all
        and bool(config.moe and layout.folded and layout.ep % (layout.cp * layout.tp)),
        # what the course's engines do, and few others
        f"sequences of {run.seq_len:,} in {pieces} equal pieces": other and run.seq_len % pieces != 0,
        f"matrices that tp {layout.tp} cuts unevenly": other and any(width % layout.tp for width in widths),
        f"rows of experts {layout.expert_method}": other and layout.expert_method != "plain",
    }


# ---- templates

_TEMPLATES = Path(__file__).parents[1] / "templates"
_PLACE = re.compile(r"\{\{(if )?(.+?)\}\}")


def _fill(template: str, **names: object) -> str:
    """Return a template's text: for {{x}} the value of that expression, a line with {{if x}} only where that holds."""

    def in_words(place: re.Match) -> str:
        value = "" if place[1] else eval(place[2], names)
        return value if isinstance(value, str) else re.sub(r"^(\d+)e-", r"\1.0e-", json.dumps(value))  # YAML's floats

    lines = []
    for line in (_TEMPLATES / template).read_text(encoding="utf-8").splitlines(keepends=True):
        if all(eval(place[2], names) for place in _PLACE.finditer(line) if place[1]):
            lines.append(_PLACE.sub(in_words, line))
    return "".join(lines)


def _mapping(template: str, **names: object) -> dict:
    import yaml  # here and below: a plan needs none

    return yaml.safe_load(_fill(template, **names))


def _yaml(fields: dict) -> str:
    import yaml

    return yaml.safe_dump(fields, sort_keys=False)


def _modules_of_stages(run: Run) -> list[list[str]]:
    """The modules of each stage: by itself torchtitan gives the first and the last stage a layer less."""
    layers = run.layout.layers_of_stage or even_layers(run.config.num_layers, run.layout.num_stages)
    names = (f"layers.{index}" for index in range(run.config.num_layers))
    stages = [list(islice(names, own)) for own in layers]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


# ---- DeepSpeed

Stage, Precision = Literal[0, 1, 2, 3], Literal["fp32", "bf16", "fp16"]


def _check_offload(stage: Stage, offload: Offload, nvme_path: str) -> None:
    """Raise ValueError where DeepSpeed would fail, or leave the data where it is without a word."""
    if offload.parameters != "device" and stage != 3:
        raise ValueError(f"offloading parameters moves their shards, which only stage 3 has, got stage {stage}")
    if offload.optimizer != "device" and stage == 0:
        raise ValueError("offloading the optimizer moves sharded states, got stage 0; choose stage 1, 2 or 3")
    if offload.optimizer == "disk" and stage != 3:
        raise ValueError(f'an optimizer on "disk" needs stage 3, got stage {stage}; choose "host", or stage 3')
    if ("disk" in (offload.optimizer, offload.parameters)) != bool(nvme_path):
        raise ValueError(f"nvme_path is {nvme_path!r}; give a folder on the local disk where something waits on disk")


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
    _check_offload(stage, offload, nvme_path)
    names = {"stage": stage, "precision": precision, "clip_norm": clip_norm, "micro_batch": micro_batch_size}
    names |= {"micro_batches": accumulation_steps, "offload": offload, "folder": json.dumps(nvme_path)}
    config = _mapping("deepspeed.yaml", **names)
    config["zero_optimization"] |= sizes or {}
    return config


def _deepspeed_json(run: Run, gpus_per_node: int) -> str:
    layout, fields = run.layout, dict(_names_of("deepspeed", run)["fields"])
    precision = fields.pop("precision")
    config = deepspeed(layout.zero_stage, layout.micro_batch, layout.micro_batches, precision=precision)
    return json.dumps(config | fields, indent=2) + "\n"


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
    how = {"reshard_after_forward": reshard_after_forward, "precision": precision, "recompute": recompute}
    return _accelerate(num_processes, machines, wrap=",".join(wrap), **how)


@checked
def accelerate_deepspeed_file(
    deepspeed_json: str | Path, num_processes: Size, zero3_init: bool = False, machines: Size = 1
) -> dict:
    """Accelerate's YAML that leaves everything to a JSON file of `deepspeed`: it refuses to be told twice.

    On several machines each runs the command itself, as with torchrun ("standard"); otherwise DeepSpeed uses pdsh.
    """
    named = json.dumps(str(deepspeed_json))
    return _accelerate(num_processes, machines, wrap="", deepspeed_json=named, zero3_init=zero3_init)


def _accelerate(num_processes: int, machines: int, **fields: object) -> dict:
    """Accelerate's YAML: processes, where machines meet, the fields of FSDP2 or DeepSpeed. Each machine sets its own
    machine_rank, all of them the address of machine 0 and a port free on it."""
    if num_processes % machines != 0:
        raise ValueError(f"num_processes ({num_processes}) is that of all {machines} machines; make it divisible by it")
    return _mapping("accelerate.yaml", num_processes=num_processes, machines=machines, **fields)


def _fsdp2_yaml(run: Run, gpus_per_node: int) -> str:
    """Accelerate's YAML for FSDP2, with a comment on what no field says: gradients stay sharded while they add up."""
    layout, config, precision = run.layout, run.config, _names_of("fsdp2", run)["fields"]["precision"]
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


def _course(template: str, run: Run, gpus_per_node: int) -> str:
    """Return the command that starts the course's own trainer, the same on every node, or a batch script for Slurm: one
    torchrun a node, with 8 cores for each GPU."""
    nodes = nodes_of(run.layout.world_size, gpus_per_node)
    if run.config not in _PRESETS:
        raise ValueError(f"the course's trainer has presets alone, and {run.config.name} is none; choose a preset")
    return _fill(template, **_names_of("course", run), nodes=nodes, gpus=run.layout.world_size // nodes)


WRITERS = {  # of each file the engine that reads it, and its text of a run on nodes of so many GPUs; None: a template
    "torchtitan.toml": ("torchtitan", None),
    "megatron.args": ("megatron", None),
    "nanotron.yaml": ("nanotron", None),
    "course.sh": ("course", partial(_course, "course.sh")),
    "course.sbatch": ("course", partial(_course, "course.sbatch")),
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
