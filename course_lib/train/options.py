"""The trainer's command line: its options are the fields of records, each checked; tyro reads them."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import tyro
from tyro.conf import OmitArgPrefixes

from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout
from course_lib.train.plan import Checkpoints, TrainPlan
from course_lib.validate import Size, check_fields, checked, writable


@dataclass(frozen=True)
class Options:
    """Train a model on the standard library's text, under any layout."""

    # None may begin one of torchrun's options: it would take `--log`, behind the script's name, for two of its own.
    model: str = "toy"  # a preset, with changes behind it: "toy,num_layers=2"
    layout: str = "dp=1"  # such as "dp=2,tp=2,zero_stage=1"; dp=1 is one process
    batch: Size | None = None  # sequences per step under any layout; sets micro_batches
    plan: OmitArgPrefixes[TrainPlan] = field(default_factory=TrainPlan)
    checkpoint: str | None = None  # the folder of checkpoints, on a disk that all machines see; None: no checkpoints
    every: Size = Checkpoints.every  # steps between two checkpoints
    keep: Size = Checkpoints.keep  # how many checkpoints remain
    resume: str = Checkpoints.resume  # auto: from the last checkpoint if there is one; never: the folder must have none
    in_background: bool = Checkpoints.in_background  # write checkpoints while training goes on
    log_file: str | None = None  # a file that gets a JSON line for each step
    backend: str = "auto"  # auto: NCCL if each rank has a GPU of its own, else gloo on the CPU; nccl, gloo, shared-gpu

    def __post_init__(self):
        check_fields(self)


@checked
def read(
    argv: Sequence[str] | Options | None, aloud: bool = True
) -> tuple[ModelConfig, Layout, TrainPlan, Checkpoints | None, Options]:
    """Return the options as records, each checked.

    aloud    whether this rank says what is wrong: one of them should
    Raises   SystemExit (2) for options that cannot be read, ValueError for what layout and model cannot be together
    """
    options = argv if isinstance(argv, Options) else _parse(argv, aloud)
    checkpoints = None
    if options.checkpoint:
        checkpoints = Checkpoints(
            options.checkpoint, options.every, options.keep, options.resume, options.in_background
        )
    layout, config = layout_for(options.layout, options.batch), model_named(options.model)
    layout.check_model(config, options.plan.seq_len)
    return config, layout, options.plan, checkpoints, options


def _parse(argv: Sequence[str] | None, aloud: bool) -> Options:
    silence = io.StringIO()
    with redirect_stdout(sys.stdout if aloud else silence), redirect_stderr(sys.stderr if aloud else silence):
        return tyro.cli(Options, args=argv, prog="train")


@checked
def check_folders(options: Options) -> None:
    """Raises ValueError if checkpoints or the log cannot be written; called before any rank waits for another."""
    if options.checkpoint:
        writable("checkpoint", Path(options.checkpoint))
    if options.log_file:
        writable("the folder of log_file", Path(options.log_file).parent)


# --- texts that stand for records


@checked
def model_named(text: str) -> ModelConfig:
    """A preset, with changes behind it if need be: "toy", or "toy,num_layers=2,family=gpt,num_kv_heads=8,dropout=0.1".

    Raises   ValueError for a name or a field that is none, or as ModelConfig
    """
    name, *changes = (part.strip() for part in text.split(","))
    config = preset(name)
    simple = {field.name for field in fields(config) if isinstance(getattr(config, field.name), int | float | str)}
    values: dict[str, object] = {}
    for change in changes:
        field, equals, value = (piece.strip() for piece in change.partition("="))
        if not equals or field not in simple:
            raise ValueError(
                f"{change!r} in model {text!r} is not a change; write field=value, of {', '.join(sorted(simple))}"
            )
        values[field] = _like(getattr(config, field), field, value)
    if {"d_model", "num_heads"} & set(values) and "head_dim" not in values:
        values["head_dim"] = None  # to be filled in anew
    return replace(config, **values)


def _like(default: object, field: str, text: str) -> object:
    kind = type(default)
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{field} is {text!r}; it must be like {default!r}") from None


@checked
def layout_for(text: str, batch_size: int | None) -> Layout:
    """The layout that the text describes; with a batch size it accumulates until a step has so many sequences.

    Raises   ValueError if the layout's own numbers give another batch, or no micro_batches gives this one
    """
    if batch_size is None:
        return Layout.parse(text)
    at_once = [part for part in text.split(",") if part.partition("=")[0].strip() in ("dp", "micro_batch")]
    together = Layout.parse(",".join(at_once) or "dp=1").sequences_per_step
    if batch_size < 1 or batch_size % together:
        low = max(batch_size, 0) // together * together
        nearest = f"{low} or {low + together}" if low else together
        raise ValueError(f"batch ({batch_size}) must be a multiple of dp x micro_batch ({together}); choose {nearest}")
    if "micro_batches" not in text:
        return Layout.parse(f"{text},micro_batches={batch_size // together}")
    layout = Layout.parse(text)
    if layout.sequences_per_step != batch_size:
        raise ValueError(
            f"batch is {batch_size}, but layout {text} has {layout.sequences_per_step} sequences a step; "
            "leave out micro_batches, or batch"
        )
    return layout


STARTS = {  # how each engine starts that many ranks
    "torchrun": "torchrun --nproc-per-node {ranks}",
    "accelerate": "accelerate launch --multi_gpu --num_processes {ranks} (without GPUs too; --cpu starts one process)",
    "srun": "srun --ntasks {ranks}",
    "launch": "launch(train, {ranks}, ...)",
}


@checked
def check_world(layout: Layout, world_size: Size, engine: str = "torchrun") -> None:
    """Raises ValueError unless there are as many ranks as the layout has, with commands that start as many."""
    ranks = layout.world_size
    if world_size == ranks:
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.sizes.items() if size > 1) or "one process"
    commands = [STARTS[name].format(ranks=ranks) for name in dict.fromkeys(("torchrun", engine)) if name in STARTS]
    machines = next((count for count in (2, 3, 5, 7) if ranks > count and ranks % count == 0), None)
    if machines:
        each = ranks // machines
        commands.insert(1, f"torchrun --nnodes {machines} --nproc-per-node {each} on each of {machines} machines")
    raise ValueError(
        f"layout {layout} needs {ranks} rank{'s' * (ranks > 1)} ({sizes}), but there "
        f"{'is 1' if world_size == 1 else f'are {world_size}'}; use {', or '.join(commands)}"
    )
