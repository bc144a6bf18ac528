"""The memory explorer: a model and how it is trained, against the GPUs that one has."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.compare.profile import Comparison, profile_step, scale_down
from course_lib.config import PRESETS, preset
from course_lib.hardware import gpu
from course_lib.layout import Layout
from course_lib.memory.budget import Budget, budgets
from course_lib.memory.states import OPTIMIZERS, RECIPES, count_parameters
from course_lib.plots.comparison import error_text
from course_lib.plots.memory import BudgetBar, budget_bars, draw_budgets, gpu_limits
from course_lib.plots.style import show_bytes
from course_lib.run import Run
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

ATTENTION_LABELS = [("fused (FlashAttention)", "fused"), ("standard (materialized scores)", "standard")]
RECOMPUTE = ["none", "selective", "full"]
MEASURED_BATCH, MEASURED_SEQ_LEN = 4, 256  # at most: a matter of seconds


@dataclass(frozen=True)
class MemoryChoice:
    """What the controls say."""

    model: str = "llama-3.1-8b"
    seq_len: Size = 4096
    batch_size: Size = 1
    recipe: str = "bf16-master"
    optimizer: str = "adamw"
    attention: str = "fused"
    recompute: str = "none"

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class MemoryView:
    """What the explorer shows: the budget, its bar, the limits of the GPUs, a title and a line of text."""

    budget: Budget
    bar: BudgetBar
    limits_bytes: dict[str, int]
    title: str
    text: str


@checked
def explore_memory(chosen: MemoryChoice, gpus: Sequence[str]) -> MemoryView:
    """Turn choices into what is shown.

    Raises   ValueError if a name is unknown, or the sequence is longer than the model reads
    """
    config = preset(chosen.model)
    layout = Layout(micro_batch=chosen.batch_size, recompute=chosen.recompute)
    run = Run(config, layout, chosen.seq_len, chosen.recipe, chosen.attention, optimizer=chosen.optimizer)
    (needed,) = budgets(run)
    limits = gpu_limits([gpu(key) for key in gpus])
    (bar,) = budget_bars(needed, limits)
    states = needed.states_bytes
    text = (
        f"{bar.total_bytes / 1e9:,.1f} GB = {bar.total_bytes / 2**30:,.1f} GiB at the largest moment of a step; "
        f"{states / 1e9:,.1f} GB ({states / 2**30:,.1f} GiB) for {count_parameters(config):,} parameters, "
        f"their gradients and the optimizer. "
    )
    return MemoryView(
        needed, bar, limits, f"{chosen.model}: {_verdict(bar, limits)}", text + _list_of_fits(bar, limits)
    )


def _verdict(bar: BudgetBar, limits_bytes: dict[str, int]) -> str:
    total = f"{bar.total_bytes / 1e9:,.1f} GB"
    if not limits_bytes:
        return total
    return (
        f"{total} fit in {len(bar.fits)} of {len(limits_bytes)} GPUs"
        if bar.fits
        else f"{total} fit in none of the chosen GPUs"
    )


def _list_of_fits(bar: BudgetBar, limits_bytes: dict[str, int]) -> str:
    too_small = [name for name in limits_bytes if name not in bar.fits]
    said = [
        f"Fits: {', '.join(bar.fits)}." if bar.fits else "",
        f"Out of memory: {', '.join(too_small)}." if too_small else "",
    ]
    return " ".join(part for part in said if part)


@checked
def measure_memory(chosen: MemoryChoice, d_model: Size = 128, num_layers: Size = 4) -> Comparison:
    """Train a scaled-down model of the same kind for real on this CPU, and lay what was measured on what is predicted.

    Raises   ValueError if the recipe or the optimizer cannot be run here
    """
    return profile_step(
        scale_down(preset(chosen.model), d_model, num_layers),
        min(chosen.batch_size, MEASURED_BATCH),
        min(chosen.seq_len, MEASURED_SEQ_LEN),
        chosen.recipe,
        chosen.optimizer,
        chosen.attention,
        chosen.recompute,
    )


@checked
def describe_measurement(result: Comparison) -> str:
    """One line: what was trained, and how far the predicted peak is from the measured one."""
    config, peak = result.config, result.row("peak")
    return (
        f"Measured in {result.seconds:.1f} s: {config.name} ({config.num_layers} layers of {config.d_model}, "
        f"{result.batch_size} x {result.seq_len} tokens). Peak {show_bytes(peak.measured_bytes, 'MB')} measured, "
        f"{show_bytes(peak.predicted_bytes, 'MB')} predicted: {error_text(peak.error_percent)}."
    )


@checked
def memory_explorer(
    start: MemoryChoice | None = None, gpus: Sequence[str] = ("t4", "a100-40", "h100", "h200")
) -> widgets.VBox:
    """Sliders over everything that decides how much memory training needs, and a button that measures it.

    `gpus` are keys of `course_lib.hardware.GPUS`, chosen at the start; others can be chosen in the widget.
    """
    start = start or MemoryChoice()
    fields = {
        "model": parts.choice("model", PRESETS, start.model),
        "seq_len": parts.slider("sequence", parts.powers_of_two(64, 131_072), start.seq_len),
        "batch_size": parts.slider("micro-batch", parts.powers_of_two(1, 64), start.batch_size),
        "recipe": parts.choice("precision", RECIPES, start.recipe),
        "optimizer": parts.choice("optimizer", OPTIMIZERS, start.optimizer),
        "attention": parts.choice("attention", ATTENTION_LABELS, start.attention),
        "recompute": parts.choice("recomputation", RECOMPUTE, start.recompute),
    }
    chosen_gpus = widgets.SelectMultiple(
        description="GPUs",
        options=parts.ALL_GPUS,
        value=tuple(gpus),
        rows=5,
        style=parts.LABEL,
        layout=widgets.Layout(width=parts.WIDTH),
    )

    def current() -> MemoryChoice:
        return MemoryChoice(**parts.values_of(fields))

    def predict() -> tuple[bytes, str]:
        view = explore_memory(current(), chosen_gpus.value)
        png = parts.figure_png(lambda axes: draw_budgets(axes, [view.bar], view.limits_bytes, "GB", view.title), 2.7)
        return png, escape(view.text)

    def measure() -> tuple[bytes, str]:
        result = measure_memory(current())
        return parts.comparison_png(result.rows, "largest of each kind"), escape(describe_measurement(result))

    controls = [*fields.values(), chosen_gpus]
    return parts.measured_panel(controls, predict, measure, "train a scaled-down model for real")
