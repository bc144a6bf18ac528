"""The trainer's command line: its options are the fields of records, each checked; tyro reads them."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import tyro
from tyro.conf import OmitArgPrefixes

from course_lib.config import ModelConfig, preset, require_bytes
from course_lib.layout import Layout
from course_lib.train.plan import Checkpoints, Logs, TrainPlan
from course_lib.validate import Size, check_fields, checked, writable


@dataclass(frozen=True)
class Options:
    """Train a model on the standard library's text, under any layout; `--model speaks` is trained and goes on."""

    # None may begin one of torchrun's options: it would take `--log`, behind the script's name, for two of its own.
    model: str = "toy"  # a preset, with changes behind it: "toy,num_layers=2"
    layout: str = "dp=1"  # such as "dp=2,tp=2,zero_stage=1"; dp=auto takes all ranks, with batch; dp=1 is one process
    batch: Size | None = None  # sequences per step under any layout; sets micro_batches
    plan: OmitArgPrefixes[TrainPlan] = field(default_factory=TrainPlan)
    checkpoint: str | None = None  # folder of checkpoints that all machines see; a run goes on from its last one
    every: Size = Checkpoints.every  # steps between two checkpoints
    keep: Size = Checkpoints.keep  # how many checkpoints remain
    in_background: bool = Checkpoints.in_background  # write checkpoints while training goes on
    log_folder: str | None = None  # gets log/rank0.jsonl and so on, a JSON line for each step: `course watch` reads it
    trace: Size | None = None  # this step, counted from 0, is recorded: log_folder/trace/rank0.json.gz for Perfetto
    backend: str = "auto"  # auto: NCCL if each rank has a GPU of its own, else gloo on the CPU; nccl, gloo, shared-gpu

    def __post_init__(self):
        check_fields(self)
        if self.trace and not self.log_folder:
            raise ValueError("trace says more of a log, and there is none; give log_folder")
        if self.trace is not None and self.trace >= self.plan.steps:
            raise ValueError(
                f"trace is step {self.trace}, and steps is {self.plan.steps}; give 1 to {self.plan.steps - 1}"
            )

    @property
    def logs(self) -> Logs | None:
        return Logs(self.log_folder, self.trace) if self.log_folder else None


_OF_CHECKPOINTS = ("every", "keep", "in_background")


@checked
def read(
    argv: Sequence[str] | Options | None, aloud: bool = True, world_size: Size = 1
) -> tuple[ModelConfig, Layout, TrainPlan, Checkpoints | None, Options]:
    """Return the options as records, each checked.
    aloud         whether this rank says what is wrong: one of them should
    world_size    ranks that there are, for a layout with dp=auto
    Raises   SystemExit (2) for options that cannot be read, ValueError for what layout and model cannot be together
    """
    options, checkpoints, silence = argv, None, io.StringIO()
    if not isinstance(options, Options):
        with redirect_stdout(sys.stdout if aloud else silence), redirect_stderr(sys.stderr if aloud else silence):
            options = tyro.cli(Options, args=argv, prog="train")
    for name in ("checkpoint", "log_folder"):
        if getattr(options, name) == "":
            raise ValueError(f"{name} is ''; give a folder, or leave it out")
    if not options.checkpoint and any(getattr(options, name) != getattr(Options, name) for name in _OF_CHECKPOINTS):
        raise ValueError(f"{', '.join(_OF_CHECKPOINTS)} say more of checkpoints, and there are none; give checkpoint")
    if options.checkpoint:
        checkpoints = Checkpoints(options.checkpoint, options.every, options.keep, options.in_background)
    layout, config = layout_for(options.layout, options.batch, world_size), model_named(options.model)
    require_bytes(config)
    layout.check_model(config, options.plan.seq_len)
    return config, layout, options.plan, checkpoints, options


def check_folders(options: Options) -> None:
    """Raises ValueError if checkpoints or logs cannot be written or sent; called before any rank waits for another."""
    if options.checkpoint:
        writable("checkpoint", Path(options.checkpoint))
    if options.logs:
        writable("log_folder", Path(options.log_folder))


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
def layout_for(text: str, batch_size: int | None, world_size: Size = 1) -> Layout:
    """The layout that the text describes; with a batch size it accumulates until a step has so many sequences.

    dp=auto in the text stands for as many as the ranks allow: a run that lost half of them and is started again on the
    rest has the same sequences in each step, with twice the micro_batches.
    Raises   ValueError if the layout's own numbers give another batch, or no micro_batches gives this one
    """
    if is_auto := _AUTO_DP in _parts(text):
        text = _with_dp(text, batch_size, world_size)
    if batch_size is None:
        return Layout.parse(text)
    together = _some(text, "dp", "micro_batch").sequences_per_step
    if batch_size < 1 or batch_size % together:
        low = max(batch_size, 0) // together * together
        nearest = f"choose {low} or {low + together}" if low else f"choose {together}"
        advice = _ranks_for(text, batch_size) if is_auto else nearest
        raise ValueError(f"batch ({batch_size}) must be a multiple of dp x micro_batch ({together}); {advice}")
    if "micro_batches" not in text:
        return Layout.parse(f"{text},micro_batches={batch_size // together}")
    layout = Layout.parse(text)
    if layout.sequences_per_step != batch_size:
        raise ValueError(
            f"batch is {batch_size}, but layout {text} has {layout.sequences_per_step} sequences a step; "
            "leave out micro_batches, or batch"
        )
    return layout


_AUTO_DP = "dp=auto"


def _parts(text: str) -> list[str]:
    return ["=".join(piece.strip() for piece in part.split("=")) for part in text.split(",")]


def _some(text: str, *names: str) -> Layout:
    """A layout of these parts of the text alone."""
    return Layout.parse(",".join(part for part in _parts(text) if part.partition("=")[0] in names) or "dp=1")


def _with_dp(text: str, batch_size: int | None, world_size: int) -> str:
    """The text with the dp that takes all ranks in place of dp=auto."""
    if batch_size is None:
        raise ValueError(
            f"layout {text} takes all ranks, and there is no batch to share; give --batch, sequences of a step"
        )
    ranks = _some(text, "cp", "tp", "pp").world_size
    if world_size % ranks:
        raise ValueError(
            f"layout {text} takes all ranks in groups of cp x tp x pp ({ranks}), but there {_are(world_size)}; start "
            f"{ranks} ranks or a multiple"
        )
    return ",".join(f"dp={world_size // ranks}" if part == _AUTO_DP else part for part in _parts(text))


def _ranks_for(text: str, batch_size: int) -> str:
    """Which numbers of ranks dp=auto can take: a run that goes on must keep its batch."""
    at_once, ranks = _some(text, "micro_batch").micro_batch, _some(text, "cp", "tp", "pp").world_size
    fits = [str(dp * ranks) for dp in range(1, batch_size // at_once + 1) if batch_size % (dp * at_once) == 0]
    return f"start {', '.join(fits)} ranks" if fits else f"give a multiple of micro_batch ({at_once})"


STARTS = {  # how each engine starts that many ranks
    "torchrun": "torchrun --nproc-per-node {ranks}",
    "accelerate": "accelerate launch --multi_gpu --num_processes {ranks} (without GPUs too; --cpu starts one process)",
    "srun": "srun --ntasks {ranks}",
    "launch": "launch(train, {ranks}, ...)",
}


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
        f"{_are(world_size)}; use {', or '.join(commands)}"
    )


def _are(world_size: int) -> str:
    return "is 1" if world_size == 1 else f"are {world_size}"
