"""`course plan`: the fastest layout of a model on a cluster that fits, and why.

course plan llama-3.1-8b --gpus 64 --seq 8192 --batch 4194304 --gpu h100 --link ib-ndr400
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps as as_json
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from course_lib.config import ModelConfig, preset
from course_lib.hardware import Cluster
from course_lib.hardware import gpu as gpu_named
from course_lib.hardware import link as link_named
from course_lib.layout import Layout
from course_lib.memory.states import recipe_of
from course_lib.plan import Job, Option, Plan, explain, export, search, table
from course_lib.plan.export import in_your_script, need
from course_lib.plan.search import ENOUGH
from course_lib.run import Run
from course_lib.shapes import read_models
from course_lib.validate import whole, writable

if TYPE_CHECKING:
    from course_lib.train.export import Machines


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for."""

    model: Positional[str]
    """a preset, such as llama-3.1-8b, or a JSON file with one model as `course predict` reads it"""
    gpus: int
    """how many, all together"""
    seq: int
    """tokens of a sequence"""
    batch: int
    """tokens of one optimizer step, of all GPUs together"""
    gpu: str = "h100"
    """a GPU, such as h100"""
    link: str = "ib-ndr400"
    """the network between nodes, such as ib-ndr400"""
    per_node: int = 8
    """GPUs of a node"""
    recipe: str = "bf16-master"
    """fp32, bf16-master or bf16-master-fp32-grads"""
    framework: str | None = None
    """rank by what `course predict` knows of a framework, such as nanotron; without it by the course's own models"""
    show: int = 5
    """how many layouts a table has"""
    json: bool = False
    """all of it as JSON"""
    export: Path | None = None
    """a folder for the best layout's files, for each framework that can do it"""


def plan(options: OmitArgPrefixes[PlanOptions]) -> int:
    """Find the layout with most tokens/s that fits, and say why; all figures are modelled."""
    for name in ("gpus", "seq", "batch", "per_node", "show"):
        whole(name, getattr(options, name))
    device = gpu_named(options.gpu)
    cluster = Cluster(device, link_named(device.link), link_named(options.link), options.per_node)
    config = model_of(options.model, options.seq)
    job = Job(config, cluster, options.gpus, options.seq, options.batch, options.recipe, options.framework)
    if options.export is not None:
        writable("export", options.export)
    show = options.show
    found = search(job, max(ENOUGH, show))
    print(as_json(report(found, show), indent=2) if options.json else "\n".join(lines(found, show)))
    if options.export is not None:
        told_of_files = write_files(found.best, options.export, options.per_node, options.framework, found.ranked)
        print("\n".join(told_of_files), file=sys.stderr if options.json else sys.stdout)
    return 0


FILES = {  # of the frameworks that one can ask for
    "torchtitan": ("torchtitan.toml",),
    "nanotron": ("nanotron.yaml",),
    "megatron": ("megatron.args",),
    "fsdp2": ("accelerate_fsdp2.yaml",),
    "deepspeed": ("deepspeed.json", "accelerate_deepspeed.yaml"),
}


def write_files(
    best: Option, folder: Path, per_node: int, framework: str | None = None, ranked: Sequence[Option] = ()
) -> list[str]:
    """Write what frameworks need for a layout; tell each file, and each refusal with its reason.

    If `framework` cannot do the layout, its own files are of the first of `ranked`, fastest first, that it can do.
    """
    from course_lib.train.export import Machines

    writable("export", folder)
    nodes = best.layout.world_size // per_node
    machines = Machines(nodes, 0, "head-node", 29500) if nodes > 1 else Machines()
    of_accelerate = {
        "accelerate_fsdp2.yaml": lambda run: fsdp2(run, machines),
        "deepspeed.json": deepspeed,
        "accelerate_deepspeed.yaml": lambda run: accelerate_deepspeed(run, machines),
    }
    files, refused = export(best, per_node, of_accelerate)
    of_which = dict.fromkeys(files, "")
    for name in [name for name in FILES.get(framework, ()) if name in refused]:
        for option in ranked:
            text = export(option, per_node, of_accelerate)[0].get(name)
            if text is not None:
                files[name], share = text, option.tokens_per_s / best.tokens_per_s
                of_which[name] = f" of {option.layout}, at {share:.1%} of the best's speed: {refused.pop(name)}"
                break
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    wrote = [f"wrote {folder / name}{of_which[name]}" for name in files]
    return ["", *wrote, *(f"no {name}: {why}" for name, why in refused.items())]


FSDP2_RECIPES = {"fp32": "fp32", "bf16-master": "bf16"}  # FP32 shards are the master copy: as many bytes
DEEPSPEED_RECIPES = {  # precision, and what gradients are summed in where that is another
    "fp32": ("fp32", None),
    "bf16-master": ("bf16", None),
    "bf16-master-fp32-grads": ("bf16", "fp32"),
    "fp16-master-fp32-grads": ("fp16", "fp32"),
}


def not_dp_alone(layout: Layout) -> dict[str, bool]:
    """What these files do not say."""
    axes = {f"{axis} in this file": getattr(layout, axis) > 1 for axis in ("tp", "pp", "cp", "ep")}
    return axes | {"replicas (HSDP) in this file": layout.dp_replicate > 1}


def fsdp2(run: Run, machines: "Machines") -> str:
    """Accelerate's YAML for FSDP2, with a comment on what no field says: gradients stay sharded while they add up."""
    from course_lib.train.export import accelerate_fsdp2

    layout, config = run.layout, run.config
    checks = {
        f"ZeRO-{layout.zero_stage} (only 2 and 3)": layout.zero_stage < 2,
        "recomputation of attention alone": layout.recompute == "selective",
    }
    need("Accelerate with FSDP2", run, FSDP2_RECIPES, not_dp_alone(layout) | checks)
    kind = "Qwen3" if config.qk_norm else "Mixtral" if config.moe else "Llama"
    block = "GPT2Block" if config.family == "gpt" else f"{'DeepseekV3' if config.mla else kind}DecoderLayer"
    fields = accelerate_fsdp2(
        [block],
        layout.world_size,
        reshard_after_forward=layout.zero_stage == 3,
        precision=FSDP2_RECIPES[recipe_of(run.recipe).name],
        recompute=layout.recompute == "full",
        machines=machines,
    )
    steps = f"num_steps={layout.micro_batches}, sync_each_batch=True"
    return f"{in_your_script(run)}\n# and GradientAccumulationPlugin({steps})\n{as_yaml(fields)}"


def deepspeed(run: Run) -> str:
    """DeepSpeed's JSON."""
    from course_lib.train import export as of_trainer

    layout = run.layout
    precision, sums = DEEPSPEED_RECIPES.get(recipe_of(run.recipe).name, (None, None))
    checks = {
        f"recomputation {layout.recompute}: the model's code asks for it": layout.recompute != "none",
        "FP32 gradients without ZeRO": sums is not None and layout.zero_stage == 0,
    }
    need("DeepSpeed", run, DEEPSPEED_RECIPES, not_dp_alone(layout) | checks)
    config = of_trainer.deepspeed(layout.zero_stage, layout.micro_batch, layout.micro_batches, precision=precision)
    return as_json(config | ({"data_types": {"grad_accum_dtype": sums}} if sums else {}), indent=2) + "\n"


def accelerate_deepspeed(run: Run, machines: "Machines") -> str:
    """Accelerate's YAML that leaves all to that JSON.

    Raises   ValueError as `deepspeed`
    """
    from course_lib.train.export import accelerate_deepspeed_file

    deepspeed(run)
    fields = accelerate_deepspeed_file("deepspeed.json", run.layout.world_size, machines=machines)
    return f"{in_your_script(run)}\n{as_yaml(fields)}"


def as_yaml(fields: dict) -> str:
    import yaml

    return yaml.safe_dump(fields, sort_keys=False)


def model_of(text: str, seq_len: int) -> ModelConfig:
    """The preset of that name, or the one model of a JSON file.

    Raises   ValueError that says what the file lacks, or which presets there are
    """
    if not text.endswith(".json"):
        return preset(text)
    if not Path(text).is_file():
        raise ValueError(f"there is no file {text}; give one, or the name of a preset")
    models = read_models(text, seq_len)
    if len(models) != 1:
        raise ValueError(f"{text} has {len(models)} models; required: one")
    return next(iter(models.values()))


def lines(found: Plan, show: int) -> list[str]:
    """For reading: the best layouts, why the first is the first, and the front of memory against MFU."""
    job = found.job
    return [
        f"{job.config.name} on {job.num_gpus:,} x {job.cluster.gpu.name}, {job.batch_tokens:,} tokens a step; "
        f"{found.num_tried:,} layouts tried, {len(found.ranked):,} fit",
        f"recipe {job.recipe}; {said_of_rates(job.framework)}",
        "",
        *table(found.ranked[:show]),
        "",
        *explain(found),
        "",
        "Less memory for less throughput: no layout of these beats another in both.",
        *table(found.front[:show]),
    ]


def said_of_rates(framework: str | None) -> str:
    """How far its seconds can be trusted."""
    if framework is None:
        return (
            "seconds assume well tuned kernels and links, and are fitted to no run.\n"
            "Measure the first few layouts, then course calibrate; or name your framework: --framework"
        )
    return f"seconds as {framework}'s runs had them: docs/PREDICTOR.md has the errors"


def report(found: Plan, show: int) -> dict:
    """All that was found, as JSON can hold it."""
    return {
        "model": found.job.config.name,
        "gpus": found.job.num_gpus,
        "tried": found.num_tried,
        "fitting": len(found.ranked),
        "best": told(found.best),
        "ranked": [told(option) for option in found.ranked[:show]],
        "front": [told(option) for option in found.front],
        "rejected": [{"layout": str(one.layout), "reason": one.reason} for one in found.rejected],
        "explanation": explain(found),
    }


def told(option: Option) -> dict:
    return {
        "layout": str(option.layout),
        "memory_bytes": option.memory_bytes,
        "usable_bytes": option.usable_bytes,
        "bytes_by_kind": option.bytes_by_kind,
        "seconds_by_part": option.seconds_by_part,
        "step_s": option.step_s,
        "mfu": option.mfu,
        "tokens_per_s": option.tokens_per_s,
    }
