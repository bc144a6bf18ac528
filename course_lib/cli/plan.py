"""`course plan`: the fastest layout of a model on a cluster that fits, and why.

course plan llama-3.1-8b --gpus 64 --seq 8192 --batch 4194304 --gpu h100 --link ib-ndr400
"""

import sys
from dataclasses import dataclass
from json import dumps as as_json
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from course_lib.config import ModelConfig, preset
from course_lib.hardware import Cluster
from course_lib.hardware import gpu as gpu_named
from course_lib.hardware import link as link_named
from course_lib.plan import Job, Option, Plan, explain, export, search, table
from course_lib.predict.table import read_models
from course_lib.validate import whole, writable


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
    found = search(Job(config, cluster, options.gpus, options.seq, options.batch, options.recipe, options.framework))
    show = options.show
    print(as_json(report(found, show), indent=2) if options.json else "\n".join(lines(found, show)))
    if options.export is not None:
        told_of_files = write_files(found.best, options.export, options.per_node)
        print("\n".join(told_of_files), file=sys.stderr if options.json else sys.stdout)
    return 0


def write_files(best: Option, folder: Path, per_node: int) -> list[str]:
    """Write what frameworks need for a layout; tell each file, and each refusal with its reason."""
    import yaml

    from course_lib.train import export as of_trainer

    writable("export", folder)
    files, refused = export(best, per_node)
    layout = best.layout
    nodes = layout.world_size // per_node
    world = of_trainer.Machines(nodes, 0, "head-node", 29500) if nodes > 1 else of_trainer.Machines()
    alone = layout.world_size == layout.dp and layout.dp_replicate == 1 and layout.ep == 1
    no_axes = "has no tp, pp, cp, ep or replicas in this file; choose a layout of dp alone"
    if alone and layout.recompute != "selective" and layout.zero_stage in (2, 3):
        fsdp = of_trainer.accelerate_fsdp2(
            ["LlamaDecoderLayer"],
            layout.world_size,
            reshard_after_forward=layout.zero_stage == 3,
            recompute=layout.recompute == "full",
            machines=world,
        )
        files["accelerate_fsdp2.yaml"] = yaml.safe_dump(fsdp, sort_keys=False)
    else:
        why = no_axes if not alone else "has ZeRO-2 and 3, without recomputation of attention alone; choose these"
        refused["accelerate_fsdp2.yaml"] = f"Accelerate with FSDP2 {why}"
    if alone and layout.recompute == "none":
        config = of_trainer.deepspeed(layout.zero_stage, layout.micro_batch, layout.micro_batches)
        files["deepspeed.json"] = as_json(config, indent=2) + "\n"
        file = of_trainer.accelerate_deepspeed_file("deepspeed.json", layout.world_size, machines=world)
        files["accelerate_deepspeed.yaml"] = yaml.safe_dump(file, sort_keys=False)
    else:
        refused["deepspeed.json"] = f"DeepSpeed {no_axes}, without recomputation, which the model's code asks for"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return ["", *(f"wrote {folder / name}" for name in files), *(f"no {name}: {why}" for name, why in refused.items())]


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
