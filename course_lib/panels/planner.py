"""The planner for a page: a model, or its config.json, GPUs, a batch -> what fits, which layout, its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib.config import MOE_PRESETS, PRESETS
from course_lib.engines import ENGINES
from course_lib.hardware import cluster_of, gpu
from course_lib.memory.states import LoRA, recipe_of, state_bytes
from course_lib.panels.controls import controls, named, powers
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.runs import plan_shown
from course_lib.panels.svg import bars
from course_lib.plan import Job, explain, export, options_table, search
from course_lib.plan.config_files import files_for
from course_lib.plan.search import one_of_each_kind
from course_lib.shapes import Shape, read_model
from course_lib.units import read_tokens, show_bytes

_TUNED = {"all weights": None, "LoRA": LoRA(16), "QLoRA": LoRA(16, four_bits=True)}
_ROWS = 6


@dataclass(frozen=True)
class Planned:
    """What was found: a picture with its words, lines to read, files by name, and why others cannot be written."""

    shown: Shown
    lines: list[str]
    files: dict[str, str]
    refused: dict[str, str]


def job_asked(values: Mapping, shape: Shape) -> Job:
    """Return the job of these values.

    Raises   ValueError for a text that is no number, or what does not go together
    """
    if not values["gpus"].isdigit():
        raise ValueError(f"{values['gpus']!r} is no number of GPUs; give one such as 64")
    lora = _TUNED[values["finetune"]]
    cluster = cluster_of(gpu(values["gpu"]), values["between"])
    tokens = read_tokens(values["batch"])
    how = {"optimizer": values["optimizer"], "lora": lora, "fp8": values["precision"] == "fp8"}
    return Job(shape.config, cluster, int(values["gpus"]), values["seq_len"], tokens, engine=values["engine"], **how)


def shape_asked(values: Mapping, file: str, text: str) -> Shape:
    """Return the model of the file's text, else the chosen preset.

    Raises   ValueError as `read_model`
    """
    if not text:
        return read_model(values["model"], values["seq_len"])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "your-model" / (Path(file).name or "config.json")
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        return read_model(str(path), values["seq_len"])


def planned(values: Mapping, file: str = "", text: str = "") -> Planned:
    """Search the layouts of a job, as `course plan` does.

    Raises   ValueError for what cannot be asked, or where nothing fits: then with the nearest that would
    """
    shape = shape_asked(values, file, text)
    job = job_asked(values, shape)
    found = search(job)
    told = [f"note: {sentence}" for sentence in shape.left_out.values()]
    table = options_table(one_of_each_kind(found.ranked)[:_ROWS], found.best)
    files, refused = export(found.best, job.cluster.gpus_per_node)
    own = files_for(job.engine)
    lines = [*told, *table, "", *explain(found)]
    mine = ({name: each[name] for name in own if name in each} for each in (files, refused))
    return Planned(plan_shown(found), lines, *mine)


def _draw_states(**values) -> Shown:
    """What training holds before any activation: which GPUs there must be at least."""
    job = job_asked(values, shape_asked(values, "", ""))
    states, device = state_bytes(job.config, recipe_of(job.recipe), job.optimizer, job.lora), job.cluster.gpu
    whole = {kind: getattr(states, kind) for kind in ("parameters", "gradients", "optimizer")}
    shared = {kind: size / job.num_gpus for kind, size in whole.items()}
    said = (
        f"{values['model']}: {show_bytes(states.total)} of states, {show_bytes(states.total / job.num_gpus)} for each "
        f"of {job.num_gpus:,} GPUs if all of them are sharded; {device.name} has {show_bytes(device.usable_bytes)}, "
        "for activations too. Press Plan for layouts."
    )
    rows = {"on one GPU": whole, "sharded over all": shared}
    return [bars("States, without activations", rows, marks={device.name: device.usable_bytes})], said


PLANNER = Panel(
    "What fits, and which layout",
    controls(model=("llama-3.1-8b", named([*PRESETS, *MOE_PRESETS])))
    | {"gpus": Control("GPUs", named(("8", "64", "512")), "8", "text")}
    | controls(gpu="h100", between="ib-ndr400", seq_len=(8192, powers(1024, 131_072)))
    | {
        "batch": Control("tokens a step", named(("512K", "1M", "4M")), "512K", "text"),
        "engine": Control("trained by", named(ENGINES), "course"),
        "finetune": Control("what is trained", named(_TUNED), "all weights"),
    }
    | controls(optimizer="adamw")
    | {"precision": Control("products in", named(("bf16", "fp8")), "bf16")},
    _draw_states,
)
