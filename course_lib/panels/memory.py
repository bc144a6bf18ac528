"""What one GPU holds: a model against GPUs (lesson 1), and optimizers against each other (lesson 2c)."""

from __future__ import annotations

from course_lib.config import PRESETS, preset
from course_lib.hardware import GPUS, gpu
from course_lib.memory.budget import Budget, budgets, fits
from course_lib.memory.states import OPTIMIZERS, count_parameters
from course_lib.panels.controls import budget_bars, controls, layout_of, named, of_table, powers
from course_lib.panels.record import Panel, Shown
from course_lib.panels.svg import Bars
from course_lib.run import Run
from course_lib.units import show_bytes

COMPARED = ("t4", "a100-40", "h100", "h200", "b200")


def budget_of(values: dict) -> Budget:
    """Return the budget of one GPU for these values.

    Raises   ValueError if the model does not read so many tokens
    """
    how = {name: values[name] for name in ("recipe", "attention", "optimizer") if name in values}
    return budgets(Run(preset(values["model"]), layout_of(values), values["seq_len"], **how))[0]


def _draw_memory(**values) -> Shown:
    """What is there between two steps and at the largest moment of one, and which GPUs have room for it."""
    needed = budget_of(values)
    limits = dict.fromkeys((*COMPARED, values["gpu"]))
    title = f"{values['model']}: {needed.total_bytes / 1e9:,.1f} GB at the largest moment"
    bars = budget_bars(title, {"largest moment": needed}, limits)
    overhead = sum(needed.overheads.values())
    between = {"parameters": needed.parameters, "optimizer": needed.optimizer, "overhead": overhead}
    rows = {"between steps": between, **bars.rows}
    fit = [gpu(key).name for key in limits if fits(needed, key)]
    small = [gpu(key).name for key in limits if not fits(needed, key)]
    states, count = needed.states_bytes, count_parameters(preset(values["model"]))
    said = (
        f"{needed.total_bytes / 1e9:,.1f} GB = {needed.total_bytes / 2**30:,.1f} GiB at the largest moment of a step "
        f"({needed.moment}); {states / 1e9:,.1f} GB ({states / 2**30:,.1f} GiB) for {count:,} parameters, their "
        f"gradients and the optimizer. "
    )
    said += f"Fits: {', '.join(fit)}. " * bool(fit) + f"Out of memory: {', '.join(small)}." * bool(small)
    return [Bars(bars.title, rows, limits=bars.limits)], said.strip()


def _draw_optimizers(**values) -> Shown:
    """One bar for each optimizer, and which of them fit."""
    found = {name: budget_of(values | {"optimizer": name}) for name in OPTIMIZERS}
    fit = [name for name, needed in found.items() if fits(needed, values["gpu"])]
    chosen = gpu(values["gpu"])
    title = f"{values['model']}, all weights trained: the largest moment of a step"
    said = (
        f"{chosen.name} gives programs {show_bytes(chosen.usable_bytes)}. Fits: {', '.join(fit) or 'none'}. "
        + " ".join(f"{name} needs {needed.total_bytes / 1e9:,.1f} GB." for name, needed in found.items())
    )
    return [budget_bars(title, found, [values["gpu"]])], said


ALL_MODELS = named(PRESETS)
_ALL_GPUS = of_table(GPUS)
_SIZES = controls(model=("llama-3.1-8b", ALL_MODELS), seq_len=(4096, powers(64, 131_072)), micro_batch=1)
MEMORY = Panel(
    "Memory of one GPU",
    _SIZES
    | controls(recipe="bf16-master", optimizer="adamw", attention="fused", recompute="none", gpu=("h100", _ALL_GPUS)),
    _draw_memory,
)
OPTIMIZER = Panel(
    "Optimizers and memory",
    _SIZES
    | controls(micro_batches=(1, powers(1, 16)), recipe="bf16-master", recompute="none", gpu=("h100", _ALL_GPUS)),
    _draw_optimizers,
)
