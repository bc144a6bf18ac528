"""`course plan`: the fastest layout of a model on a cluster that fits, and why.

course plan llama-3.1-8b --gpus 64 --seq 8192 --batch 4194304 --gpu h100 --link ib-ndr400
"""

import sys
from dataclasses import dataclass
from json import dumps as as_json
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from course_lib.cli.asked import Nodes, Techniques, Tokens, cluster_asked, model_asked
from course_lib.engines import ENGINES
from course_lib.estimate import Estimate
from course_lib.hardware import gpu_for
from course_lib.plan import Job, Plan, explain, export, options_table, search
from course_lib.plan.search import ENOUGH, one_of_each_kind
from course_lib.validate import one_of, whole, writable


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is of."""

    model: Positional[str]
    """a preset, such as llama-3.1-8b; a config.json of transformers or its folder; or a JSON file with one shape"""
    gpus: int
    """how many, all together"""
    seq: Tokens
    """tokens of a sequence: 8192 or 8K"""
    batch: Tokens
    """tokens of one optimizer step, of all GPUs together: 4194304 or 4M (M is 2^20)"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Techniques, Nodes, Question):
    """What a plan is asked for."""

    link: str = "ib-ndr400"
    """the network between nodes, such as ib-ndr400, with one port a GPU; or GB/s for each GPU"""
    framework: str | None = None
    """rank by what `course predict` knows of a framework, such as nanotron; without it by the course's own models"""
    show: int = 5
    """how many layouts a table has"""
    json: bool = False
    """all of it as JSON"""
    export: Path | None = None
    """a folder for the best layout's files, for each framework that can do it"""


def plan_layout(options: OmitArgPrefixes[PlanOptions]) -> int:
    """Find the layout with most tokens/s that fits, and say why; all figures are modelled."""
    for name in ("gpus", "seq", "batch", "show"):
        whole(name, getattr(options, name))
    job = job_of(options)
    if options.export is not None:
        writable("export", options.export)
    show, per_node = options.show, job.cluster.gpus_per_node
    found = search(job, max(ENOUGH, show))
    print(as_json(report(found, show), indent=2) if options.json else "\n".join(lines(found, show)))
    if options.export is not None:
        told_of_files = write_files(found.best, options.export, per_node, job.engine)
        print("\n".join(told_of_files), file=sys.stderr if options.json else sys.stdout)
    return 0


def job_of(options: PlanOptions) -> Job:
    """The job that the options ask for.

    Raises   ValueError for a word or a number that cannot be meant, or what the framework cannot have
    """
    name, device = options.framework or "course", options.record()
    one_of("framework", name, tuple(ENGINES))
    recipe = options.recipe_on(device, ENGINES[name].recipe)
    one_of(f"recipe of {name}", recipe, ENGINES[name].recipes)
    cluster = cluster_asked(gpu_for(device, recipe), options.link, options.inside, options.per_node)
    sizes = (options.gpus, options.seq, options.batch)
    config = model_asked(options.model, options.seq)
    return Job(config, cluster, *sizes, recipe, name, **options.run_fields())


def write_files(best: Estimate, folder: Path, per_node: int, engine: str = "course") -> list[str]:
    """Write what frameworks need for a layout, as `export`; tell each file, and each refusal with its reason."""
    writable("export", folder)
    files, refused = export(best, per_node, engine)
    folder.mkdir(parents=True, exist_ok=True)
    wrote = []
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        wrote.append(f"wrote {folder / name}")
    if best.layout.recompute == "full" and "deepspeed.json" in files:
        wrote.append("in your script: model.gradient_checkpointing_enable(), DeepSpeed's file cannot ask for it")
    return ["", *wrote, *(f"no {name}: {why}" for name, why in refused.items())]


def lines(found: Plan, show: int) -> list[str]:
    """For reading: the fastest layouts, the chosen one among them, why it is chosen, and less memory for less speed."""
    job = found.job
    return [
        f"{job.config.name} on {job.num_gpus:,} x {job.cluster.gpu.name}, {job.batch_tokens:,} tokens a step; "
        f"{found.num_tried:,} layouts tried, none that fits is faster than these {len(found.ranked):,}",
        f"recipe {job.recipe}; engine {job.engine}; seconds are modelled, docs/PREDICTOR.md has the errors",
        *dict.fromkeys(option.note for option in found.ranked[:1] if option.note),
        "",
        *options_table(one_of_each_kind(found.ranked)[:show], found.best),
        "",
        *explain(found),
        "",
        "Less memory for less throughput, of these: none beats another in both.",
        *options_table(found.front[:show]),
    ]


def report(found: Plan, show: int) -> dict:
    """All that was found, as JSON can hold it."""
    return {
        "model": found.job.config.name,
        "gpus": found.job.num_gpus,
        "tried": found.num_tried,
        "listed": len(found.ranked),
        "best": told(found.best),
        "ranked": [told(option) for option in found.ranked[:show]],
        "front": [told(option) for option in found.front],
        "rejected": [{"layout": str(layout), "reason": reason} for layout, reason in found.rejected],
        "explanation": explain(found),
    }


def told(option: Estimate) -> dict:
    return {
        "layout": str(option.layout),
        "memory_bytes": option.memory_bytes,
        "usable_bytes": option.usable_bytes,
        "room": option.room,
        "bytes_by_kind": option.bytes_by_kind,
        "seconds_by_part": option.seconds_by_part,
        "step_s": option.step_s,
        "mfu": option.mfu,
        "tokens_per_s": option.tokens_per_s,
    }
