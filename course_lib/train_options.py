"""The trainer's command line as records: a model, a layout, a plan, and where checkpoints are; each checked."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout
from course_lib.train_plan import DECAYS, PRECISIONS, Checkpoints, TrainPlan


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options once, not once a rank."""

    def error(self, message: str):
        raise ValueError(f"{message}; see python -m course_lib.train --help")


def build_parser() -> Parser:
    """The options; what each means stands with the dataclass that takes it.

    None may begin one of torchrun's: it would take `--log`, behind the script's name, for two of its own, and stop.
    """
    parser = Parser(prog="train", description="Train a model on the standard library's text, under any layout.")
    add = parser.add_argument
    add("--model", default="toy", help='a preset, with changes behind it: "toy,num_layers=2" (toy)')
    add("--layout", default="dp=1", help='such as "dp=2,tp=2,zero=1" (one process)')
    add("--batch", type=int, metavar="N", help="sequences a step under any layout; sets accumulation")
    add("--steps", type=int, default=20)
    add("--seq", type=int, default=64, help="tokens of a sequence (64)")
    add("--precision", default="fp32", help=f"{', '.join(PRECISIONS)} (fp32)")
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=3e-3, help="the highest learning rate (3e-3)")
    add("--warmup", type=int, default=0, metavar="STEPS", help="steps that lead up to it (0)")
    add("--decay", default="none", help=f"how it goes down again: {', '.join(DECAYS)} (none)")
    add("--weight-decay", type=float, default=0.01)
    add("--clip", type=float, default=1.0, metavar="NORM", help="longest gradient; 0: any (1.0)")
    add(
        "--checkpoint",
        metavar="DIR",
        help="where checkpoints are kept, on a disk that all machines see; none: no checkpoints",
    )
    add("--every", type=int, default=5, metavar="STEPS", help="steps between two checkpoints (5)")
    add("--keep", type=int, default=2, metavar="N", help="how many checkpoints remain (2)")
    add("--resume", default="auto", help="auto: from the last checkpoint if there is one; never: DIR must have none")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--log-file", metavar="FILE", help="a JSON line for each step")
    add(
        "--backend",
        default="auto",
        help="auto: NCCL if each rank has a GPU of its own, else gloo on the CPU; or nccl, gloo, shared-gpu",
    )
    return parser


def read(argv: Sequence[str] | None) -> tuple[ModelConfig, Layout, TrainPlan, Checkpoints | None, argparse.Namespace]:
    """The options as records, each checked.

    Raises   ValueError
    """
    options = build_parser().parse_args(argv)
    plan = TrainPlan(
        steps=options.steps,
        seq_len=options.seq,
        seed=options.seed,
        learning_rate=options.lr,
        warmup=options.warmup,
        decay=options.decay,
        weight_decay=options.weight_decay,
        clip_norm=options.clip or None,
        precision=options.precision,
    )
    checkpoints = None
    if options.checkpoint:
        checkpoints = Checkpoints(options.checkpoint, options.every, options.keep, options.resume, options.async_save)
    layout, config = layout_for(options.layout, options.batch), model_named(options.model)
    layout.check_model(config, plan.seq_len)
    return config, layout, plan, checkpoints, options


# --- texts that stand for records


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


def layout_for(text: str, batch_size: int | None) -> Layout:
    """The layout that the text describes; with a batch size it accumulates until a step has so many sequences.

    Raises   ValueError if the layout's own numbers give another batch, or no accumulation gives this one
    """
    if batch_size is None:
        return Layout.parse(text)
    at_once = [part for part in text.split(",") if part.partition("=")[0].strip() in ("dp", "micro_batch")]
    together = Layout.parse(",".join(at_once) or "dp=1").sequences_per_step
    if batch_size < 1 or batch_size % together:
        low = max(batch_size, 0) // together * together
        nearest = f"{low} or {low + together}" if low else together
        raise ValueError(f"batch ({batch_size}) must be a multiple of dp x micro_batch ({together}); choose {nearest}")
    if "accumulation" not in text:
        return Layout.parse(f"{text},accumulation={batch_size // together}")
    layout = Layout.parse(text)
    if layout.sequences_per_step != batch_size:
        raise ValueError(
            f"batch is {batch_size}, but layout {text} has {layout.sequences_per_step} sequences a step; "
            "leave out accumulation, or batch"
        )
    return layout


STARTS = {  # how each engine starts that many ranks
    "torchrun": "torchrun --nproc-per-node {ranks}",
    "accelerate": "accelerate launch --multi_gpu --num_processes {ranks} (without GPUs too; --cpu starts one process)",
    "srun": "srun --ntasks {ranks}",
    "launch": "launch(train, {ranks}, ...)",
}


def check_world(layout: Layout, world_size: int, engine: str = "torchrun") -> None:
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
