"""The ZeRO explorer: what one GPU of many holds at each stage, what waits elsewhere, and what a step sends."""

from dataclasses import dataclass, replace
from html import escape
from typing import Literal

import ipywidgets as widgets

from course_lib.compare.five_d_profile import FiveDComparison
from course_lib.compare.sharded_profile import measure_zero
from course_lib.config import PRESETS, preset
from course_lib.hardware import gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import Budget, budget_of_rank
from course_lib.memory.states import RECIPES, count_parameters
from course_lib.memory.zero import Offload, offload_link_bytes, zero_state_bytes, zero_units
from course_lib.plots.memory import BudgetBar, budget_bars, draw_budgets, gpu_limits
from course_lib.plots.style import show_bytes, show_seconds
from course_lib.run import Run
from course_lib.timing import offload_s
from course_lib.traffic import calls, sent_bytes
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

OFFLOADS = {
    "none": Offload(),
    "optimizer on the CPU": Offload(optimizer="host"),
    "optimizer on disk": Offload(optimizer="disk"),
    "optimizer, parameters on the CPU": Offload(optimizer="host", parameters="host"),
    "optimizer, parameters on disk": Offload(optimizer="disk", parameters="disk"),
}
PCIE, DISK = "pcie4", "nvme"  # each GPU has its own way to the host; a drive is the node's
GPUS_PER_NODE = 8
RECOMPUTE = ["none", "selective", "full"]
MEASURED_RANKS = 4  # at most: they share this machine's cores
MEASURED_MICRO_BATCHES = 4  # at most: no more bytes are held with more of them


@dataclass(frozen=True)
class ZeroChoice:
    """What the controls say; `batch_size` is one GPU's micro-batch."""

    model: str = "llama-3.1-8b"
    dp_size: Size = 8
    gpu_key: str = "h100"
    stage: Literal[0, 1, 2, 3] = 3
    recipe: Literal[tuple(RECIPES)] = "bf16-master"
    offload: Literal[tuple(OFFLOADS)] = "none"
    batch_size: Size = 1
    seq_len: Size = 4096
    recompute: str = "none"
    micro_batches: Size = 1

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class ZeroView:
    """What the explorer shows, all predicted: bytes of one GPU, beside plain data parallelism, and of one step."""

    budget: Budget
    bars: list[BudgetBar]
    limits_bytes: dict[str, int]
    sent_bytes: int  # by one GPU in a step
    trips: float  # the same in units of the parameters' bytes, times (dp - 1) / dp
    link_bytes: dict[str, int]  # by one GPU over PCIe and to disk, one way each
    offload_s: float  # modelled: one crossing after the other
    title: str
    text: str


@checked
def explore_zero(chosen: ZeroChoice) -> ZeroView:
    """Turn choices into what is shown.

    Raises   ValueError if parameters are to be offloaded before stage 3, or the sequence is longer than the model reads
    """
    config, offload, recipe = preset(chosen.model), OFFLOADS[chosen.offload], RECIPES[chosen.recipe]
    if offload.parameters != "device" and chosen.stage < 3:
        raise ValueError(
            f"ZeRO stage is {chosen.stage}, but parameters can be offloaded only where they are sharded; "
            "choose 3, or offload the optimizer alone"
        )
    needed, plain = _budget(chosen), _budget(replace(chosen, stage=0, offload="none"))
    limits = gpu_limits([gpu(chosen.gpu_key)])
    bars = budget_bars({"plain DP": plain, f"stage {chosen.stage}": needed}, limits)
    units = zero_units(config, chosen.stage, recipe.param_bytes)
    sent = sent_bytes(calls(_run(chosen))["data"])
    one_trip = count_parameters(config) * recipe.param_bytes * (chosen.dp_size - 1) / chosen.dp_size
    shards = zero_state_bytes(units, chosen.stage, chosen.dp_size, recipe)
    moved = offload_link_bytes(shards, offload)
    seconds = offload_s(moved, PCIE, DISK, ranks_per_drive=min(chosen.dp_size, GPUS_PER_NODE))
    view = ZeroView(needed, bars, limits, sent, sent / one_trip if one_trip else 0.0, moved, seconds, "", "")
    return replace(view, title=_title(chosen, view), text=describe_zero(chosen, view))


def _run(chosen: ZeroChoice) -> Run:
    layout = Layout(
        dp=chosen.dp_size,
        zero_stage=chosen.stage,
        micro_batch=chosen.batch_size,
        micro_batches=chosen.micro_batches,
        recompute=chosen.recompute,
    )
    return Run(preset(chosen.model), layout, chosen.seq_len, chosen.recipe, offload=OFFLOADS[chosen.offload])


def _budget(chosen: ZeroChoice) -> Budget:
    return budget_of_rank(_run(chosen), 0)


def _title(chosen: ZeroChoice, view: ZeroView) -> str:
    fits = "fits" if view.bars[1].fits else "does not fit"
    gpus = f"{chosen.dp_size:,} GPUs" if chosen.dp_size > 1 else "1 GPU"
    return f"{chosen.model}, stage {chosen.stage} on {gpus}: {fits} on {gpu(chosen.gpu_key).name}"


@checked
def describe_zero(chosen: ZeroChoice, view: ZeroView) -> str:
    """What each GPU holds, what waits elsewhere, and what a step moves; seconds are modelled."""
    states = view.budget.states_bytes
    lines = [
        f"Predicted: {show_bytes(view.bars[1].total_bytes)} a GPU, {show_bytes(states)} of it states; "
        f"plain data parallelism {show_bytes(view.bars[0].total_bytes)}.",
        f"A step sends {show_bytes(view.sent_bytes)} from each GPU: {view.trips:.2f} times the parameters' "
        f"bytes, times (dp − 1) / dp, with dp = {chosen.dp_size:,}."
        if view.trips
        else "One GPU alone sends nothing.",
    ]
    for place, size in view.budget.elsewhere.items():
        name = "In the host's memory" if place == "host" else "On disk"
        lines.append(f"{name}: {show_bytes(size)} for each GPU, {show_bytes(size * chosen.dp_size)} for all.")
    if any(view.link_bytes.values()):
        moved = ", ".join(f"{name} {show_bytes(size)}" for name, size in view.link_bytes.items() if size)
        drive = f" and a drive ({link(DISK).name}) for each node of {GPUS_PER_NODE} GPUs"
        lines.append(
            f"A step of one GPU moves: {moved}; modelled {show_seconds(view.offload_s)}, one after the other, over "
            f"{link(PCIE).name}{drive if 'disk' in view.budget.elsewhere else ''}."
        )
    return " ".join(lines)


@checked
def measure_zero_choice(chosen: ZeroChoice) -> FiveDComparison:
    """Train a toy for real at the chosen stage and precision, and lay measured on predicted.

    Raises   ValueError if the choice is impossible, states are to be offloaded, or the precision cannot be run here
    """
    explore_zero(chosen)  # what is impossible is not measured either
    if chosen.offload != "none":
        raise ValueError("offload is not measured here; choose offload none (chapter 04 measures it)")
    ranks, few = min(chosen.dp_size, MEASURED_RANKS), min(chosen.micro_batches, MEASURED_MICRO_BATCHES)
    return measure_zero(chosen.stage, ranks, chosen.recipe, recompute=chosen.recompute, micro_batches=few)


@checked
def zero_explorer(start: ZeroChoice | None = None) -> widgets.VBox:
    """Sliders over model, GPUs, stage, precision and offload, and a button that measures a toy on real ranks."""
    start = start or ZeroChoice()
    fields = {
        "model": parts.choice("model", PRESETS, start.model),
        "stage": parts.slider("ZeRO stage", [(f"{stage}", stage) for stage in range(4)], start.stage),
        "dp_size": parts.slider("GPUs", parts.powers_of_two(1, 1024), start.dp_size),
        "gpu_key": parts.choice("GPU", parts.ALL_GPUS, start.gpu_key),
        "recipe": parts.choice("precision", RECIPES, start.recipe),
        "offload": parts.choice("offload", OFFLOADS, start.offload),
        "batch_size": parts.slider("micro-batch", parts.powers_of_two(1, 64), start.batch_size),
        "micro_batches": parts.slider("micro-batches", parts.powers_of_two(1, 64), start.micro_batches),
        "seq_len": parts.slider("sequence", parts.powers_of_two(64, 131_072), start.seq_len),
        "recompute": parts.choice("recomputation", RECOMPUTE, start.recompute),
    }

    def current() -> ZeroChoice:
        return ZeroChoice(**parts.values_of(fields))

    def predict() -> tuple[bytes, str]:
        view = explore_zero(current())
        draw_bars = lambda axes: draw_budgets(axes, view.bars, view.limits_bytes, "GB", view.title)  # noqa: E731
        return parts.figure_png(draw_bars, 3.0), escape(view.text)

    def measure() -> tuple[bytes, str]:
        chosen = current()
        result = measure_zero_choice(chosen)
        stands = parts.stands_for(chosen.model, chosen.dp_size, result.num_ranks)
        return parts.comparison_png(result.rows), escape(f"{result} {stands}")

    return parts.measured_panel(list(fields.values()), predict, measure, "train a toy on real ranks")
