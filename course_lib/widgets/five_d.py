"""The explorer of whole layouts: who holds what, memory along the pipeline, bytes by axis, modelled step and MFU."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import escape
from io import BytesIO
from typing import Literal

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib.compare.five_d_profile import FiveDComparison, measure_five_d
from course_lib.config import MOE_PRESETS, PRESETS, preset
from course_lib.engines import ENGINES
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.mesh import AxisLinks, links_of_axes
from course_lib.layout.partition import fewer_at_the_ends
from course_lib.memory.budget import budgets
from course_lib.plots.five_d_costs import (
    draw_pipeline,
    draw_sent_by_axis,
    draw_time_by_part,
    pipeline_bars,
    pipeline_title,
    sent_rows,
    sent_title,
    time_rows,
    time_title,
)
from course_lib.plots.holdings import Holdings, draw_holdings, holdings, holdings_title, row_label
from course_lib.plots.memory import BudgetBar, gpu_limits
from course_lib.plots.style import FULL_WIDTH_IN, show_bytes, show_seconds, style, unit_for
from course_lib.run import Run
from course_lib.schedules import SCHEDULES
from course_lib.timing import StepTime, step_time
from course_lib.traffic import sent
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

ENGINE = ENGINES["megatron"]  # with its fused kernels the modelled step of Llama 3 405B is near its MFU
RECIPE = "bf16-master"  # on GPUs
TOYS = ("toy", "toy-moe")  # predicted in FP32 on a CPU, as they are measured
RECOMPUTE = ["none", "selective", "full"]
NOTHING = "your own"
KEPT = [("all tokens", False), ("own tokens (SP), gathered again", True)]  # of what a matrix reads, for backward
LAYERS = [("evenly", False), ("one less at both ends", True)]


@dataclass(frozen=True)
class FiveDChoice:
    """What the controls say; `inside` and `between` are keys of LINKS: within a node, and between nodes."""

    model: str = "llama-3.1-8b"
    gpu_key: str = "h100"
    ranks_per_node: Size = 8
    inside: str = "nvlink4"
    between: str = "ib-ndr400"
    dp: Size = 4
    cp: Size = 1
    tp: Size = 4
    pp: Size = 2
    ep: Size = 1
    zero_stage: Literal[0, 1, 2, 3] = 1
    sequence_parallel: bool = True
    regather: bool = False
    schedule: str = "1f1b"
    v: Size = 1
    fewer_at_ends: bool = False
    micro_batch: Size = 1
    micro_batches: Size = 8
    recompute: str = "none"
    seq_len: Size = 8192

    @property
    def layout(self) -> Layout:
        """Raises   ValueError if there is no such layout"""
        sizes = {name: getattr(self, name) for name in _OF_LAYOUT}
        layout = Layout(**sizes)
        if not self.fewer_at_ends:
            return layout
        layers = fewer_at_the_ends(preset(self.model).num_layers, layout.num_stages)
        return Layout(**sizes, layers_of_stage=tuple(layers))

    def __post_init__(self):
        check_fields(self)


_OF_LAYOUT = (
    "dp", "cp", "tp", "pp", "ep", "zero_stage", "sequence_parallel", "regather", "schedule", "v", "micro_batch",
    "micro_batches", "recompute",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A layout to start from, and what is to be known of it."""

    choice: FiveDChoice
    said: str


KNOWN = {
    "Llama 3 405B, 16,384 GPUs": Known(
        FiveDChoice(
            "llama-3.1-405b", between="roce-400", dp=128, tp=8, pp=16, schedule="interleaved", v=4,
            fewer_at_ends=True, micro_batches=16,
        ),
        "Published: MFU 41 %, nothing recomputed (arXiv:2407.21783, table 4). The paper does not tell how many stages "
        "a GPU has; 4 are the course's choice. The course's layers keep more for backward than Llama's own: here it "
        "fits with recomputation full.",
    ),
    "DeepSeek-V3, 2,048 GPUs": Known(
        FiveDChoice(
            "deepseek-v3", inside="nvlink-h800", dp=128, tp=1, pp=16, ep=64, sequence_parallel=False,
            schedule="dualpipe_v", micro_batches=120, recompute="full", seq_len=4096,
        ),
        "Published: 180,000 H800 hours for 10¹² tokens, 1,543 tokens per second and GPU, computing in FP8 and "
        "recomputing a little (arXiv:2412.19437). Here all is BF16, whole blocks are recomputed, and weight gradients "
        "that wait keep more than a GPU has: with schedule 1f1b it fits, and takes longer.",
    ),
    "70B on 32 A100": Known(
        FiveDChoice(
            "llama-3.1-70b", "a100-80", inside="nvlink3", between="ib-hdr200", dp=2, tp=8, pp=2, micro_batches=16,
            seq_len=4096,
        ),
        "tp fills a node; two nodes are a pipeline, and there are two of these.",
    ),
    "one laptop (toy), 8 ranks": Known(
        FiveDChoice("toy-moe", ranks_per_node=8, dp=2, tp=2, pp=2, ep=2, micro_batches=4, seq_len=64),
        "Small enough to be run here: press Measure.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FiveDView:
    """What the explorer shows: bytes are predicted, seconds modelled, nothing is measured."""

    layout: Layout
    holdings: Holdings
    bars: list[BudgetBar]  # of each rank of the pipeline
    limits_bytes: dict[str, int]
    largest: int  # place along pp
    sent_bytes: dict[str, int]  # by axis, of a rank there
    links: dict[str, AxisLinks]
    time: StepTime
    text: str = field(repr=False)


@checked
@lru_cache(maxsize=16)
def explore_five_d(chosen: FiveDChoice) -> FiveDView:
    """Turn choices into what is shown.

    Assumes: kernels and overlap of ENGINE, with DualPipeV also of experts' rows; BF16 with FP32 master weights; a toy
    in FP32.
    Raises   ValueError if the layout cannot be, or the model cannot lie so: with the nearest that can
    """
    config, layout, toy = preset(chosen.model), chosen.layout, chosen.model in TOYS
    layout.check_model(config, chosen.seq_len)
    recipe, device = ("fp32", "cpu") if toy else (RECIPE, "cuda")
    of_ranks = budgets(Run(config, layout, chosen.seq_len, recipe, device=device))
    limits = {} if toy else gpu_limits([gpu(chosen.gpu_key)])
    bars = pipeline_bars(of_ranks, limits)
    largest = max(range(layout.pp), key=lambda place: bars[place].total_bytes)
    run = Run(config, layout, chosen.seq_len, recipe, device=device)
    by_axis = sent(run, layout.mesh.rank(pp=largest, dp=0, cp=0, tp=0))
    cluster = Cluster(gpu(chosen.gpu_key), link(chosen.inside), link(chosen.between), chosen.ranks_per_node)
    engine = replace(ENGINE, hides_ep=layout.schedule == "dualpipe_v")
    time = step_time(Run(config, layout, chosen.seq_len, recipe), cluster, engine)
    links = links_of_axes(layout.mesh, chosen.ranks_per_node, layout.ep, layout.folded)
    text = describe_five_d(chosen, layout, bars[largest], limits, links, time)
    return FiveDView(layout, holdings(config, layout), bars, limits, largest, by_axis, links, time, text)


@checked
def describe_five_d(chosen, layout, largest, limits, links, time) -> str:
    """The layout, where its groups lie, what the most loaded rank needs, and what a step takes by the model."""
    nodes = -(-layout.world_size // chosen.ranks_per_node)
    inside = [axis for axis in SHOWN_AXES if links[axis].kind == "node"]
    outside = [axis for axis in SHOWN_AXES if links[axis].kind in ("network", "both")]
    where = f" In a node: {', '.join(inside)}." if inside and nodes > 1 else ""
    where += f" Over the network: {', '.join(outside)}." if outside else ""
    fits = ""
    if limits:
        fits = f", which {'fits on' if largest.fits else 'does not fit on'} {gpu(chosen.gpu_key).name}"
    shown = f"{replace(layout, layers_of_stage=None)}" + (" (one layer less at both ends)" * chosen.fewer_at_ends)
    return (
        f"{shown}: {layout.world_size:,} ranks on {nodes:,} node{'s' if nodes > 1 else ''}, "
        f"{time.num_tokens:,} tokens a step.{where} Predicted: the most loaded rank needs "
        f"{show_bytes(largest.total_bytes)}{fits}. Modelled, not measured: {show_seconds(time.total_s)} a step, "
        f"{time.tokens_per_s_per_gpu:,.0f} tokens per second and GPU, MFU {100 * time.mfu:.2g} % "
        f"({100 * time.causal_mfu:.2g} % if half of attention counts)."
    )


SHOWN_AXES = ("pp", "dp", "cp", "tp", "ep")


@checked
@lru_cache(maxsize=16)
def five_d_png(chosen: FiveDChoice) -> bytes:
    """The picture of a choice."""
    buffer = BytesIO()
    with style():
        five_d_figure(explore_five_d(chosen)).savefig(buffer, format="png", dpi=parts.WIDGET_DPI)
    return buffer.getvalue()


@checked
def five_d_figure(view: FiveDView) -> Figure:
    """Who holds what; below it memory along the pipeline; below that bytes by axis and seconds by part.

    Panels are placed in inches: looking for places that fit would take as long as the drawing.
    """
    rows = max(len(sent_rows(view.sent_bytes)), len(time_rows(view.time.parts)), 2)
    held_in, memory_in, costs_in = 1.0 + 0.22 * len(view.holdings.ranks), 2.9, 0.95 + 0.24 * rows
    figure = Figure(figsize=(FULL_WIDTH_IN, held_in + memory_in + costs_in), layout="none")
    left = 0.15 + 0.064 * max(len(row_label(view.layout, rank)) for rank in view.holdings.ranks)

    held = _panel(figure, left, costs_in + memory_in + 0.36, FULL_WIDTH_IN - left - 0.1, held_in - 0.98)
    draw_holdings(held, view.holdings)
    held.set_title(holdings_title(view.holdings), fontsize=10, pad=26, x=-left / (FULL_WIDTH_IN - left - 0.1) + 0.01)

    memory = _panel(figure, 0.75, costs_in + 0.85, FULL_WIDTH_IN - 2.1, memory_in - 1.2)
    unit = unit_for(max([bar.total_bytes for bar in view.bars] + list(view.limits_bytes.values())))
    draw_pipeline(memory, view.bars, view.limits_bytes, unit)
    memory.set_title(pipeline_title(view.bars, view.limits_bytes), fontsize=10)

    sent = _panel(figure, 0.95, 0.5, 2.75, costs_in - 0.85)
    draw_sent_by_axis(sent, view.sent_bytes)
    sent.set_title(sent_title(view.sent_bytes), fontsize=10)

    time = _panel(figure, 5.0, 0.5, 3.3, costs_in - 0.85)
    draw_time_by_part(time, view.time.parts)
    time.set_title(time_title(view.time.parts), fontsize=10)
    return figure


def _panel(figure: Figure, left_in: float, bottom_in: float, width_in: float, height_in: float):
    width, height = figure.get_size_inches()
    return figure.add_axes((left_in / width, bottom_in / height, width_in / width, height_in / height))


@checked
def measure_five_d_choice(chosen: FiveDChoice) -> FiveDComparison:
    """Train a toy for real in the chosen layout, and lay measured on predicted.

    Raises   ValueError if the choice is impossible, or too large to be run here
    """
    explore_five_d(chosen)  # what is impossible is not measured either
    return measure_five_d(preset(chosen.model), chosen.layout, chosen.seq_len)


@checked
def sizes_up_to(last: int, *others: int) -> list[tuple[str, int]]:
    """(label, value) pairs: powers of two and three times these, and a few more."""
    powers = [2**i for i in range(last.bit_length())]
    values = {*powers, *(3 * power for power in powers), *others}
    return [(f"{value:,}", value) for value in sorted(values) if value <= last]


@checked
def five_d_explorer(start: FiveDChoice | None = None) -> widgets.VBox:
    """Controls for a whole layout, a menu of known ones, and a button that measures a toy on real ranks."""
    start = start or FiveDChoice()
    models = [name for name, config in (PRESETS | MOE_PRESETS).items() if config.family == "llama"]
    controls = {
        "model": parts.choice("model", models, start.model),
        "gpu_key": parts.choice("GPU", parts.BF16_GPUS, start.gpu_key),
        "ranks_per_node": parts.slider("ranks a node", parts.powers_of_two(1, 64), start.ranks_per_node),
        "inside": parts.choice("inside a node", parts.GPU_LINKS, start.inside),
        "between": parts.choice("between nodes", parts.GPU_LINKS, start.between),
        "seq_len": parts.slider("sequence", parts.powers_of_two(64, 131_072), start.seq_len),
        "micro_batch": parts.slider("micro-batch", parts.powers_of_two(1, 16), start.micro_batch),
        "micro_batches": parts.slider("micro-batches", sizes_up_to(512, 120), start.micro_batches),
        "recompute": parts.choice("recomputation", RECOMPUTE, start.recompute),
        "regather": parts.choice("inputs kept", KEPT, start.regather),
        "dp": parts.slider("dp", sizes_up_to(2048), start.dp),
        "cp": parts.slider("cp", sizes_up_to(64), start.cp),
        "tp": parts.slider("tp", sizes_up_to(64), start.tp),
        "sequence_parallel": parts.choice("SP", [("no", False), ("yes", True)], start.sequence_parallel),
        "pp": parts.slider("pp", sizes_up_to(64), start.pp),
        "schedule": parts.choice("schedule", list(SCHEDULES), start.schedule),
        "v": parts.slider("stages a rank", range(1, 9), start.v),
        "fewer_at_ends": parts.choice("layers", LAYERS, start.fewer_at_ends),
        "ep": parts.slider("ep", sizes_up_to(256), start.ep),
        "zero_stage": parts.slider("ZeRO stage", [(f"{stage}", stage) for stage in range(4)], start.zero_stage),
    }
    menu = parts.choice("layout of", [NOTHING, *KNOWN], NOTHING)
    settling = _connect(menu, controls)
    last: list[tuple[bytes, str]] = [(b"", "")]

    def current() -> FiveDChoice:
        return FiveDChoice(**parts.values_of(controls))

    def predict() -> tuple[bytes, str]:
        if not settling:
            known = KNOWN.get(menu.value)
            said = explore_five_d(current()).text + (f" {known.said}" if known else "")
            last[0] = five_d_png(current()), escape(said)
        return last[0]

    def measured() -> tuple[bytes, str]:
        result = measure_five_d_choice(current())
        return parts.comparison_png(result.rows), escape(str(result))

    return parts.measured_panel([menu, *controls.values()], predict, measured, "train a toy on real ranks")


def _connect(menu: widgets.Dropdown, controls: dict[str, widgets.Widget]) -> list[str]:
    """A known layout sets all controls; one that is then changed makes it one's own.

    Returns a list that is not empty while controls are being set: what they say in between is nobody's choice.
    """
    settling: list[str] = []

    def set_all(change) -> None:
        if settling or menu.value == NOTHING:
            return
        settling.append(menu.value)
        for name, control in controls.items():
            control.value = getattr(KNOWN[menu.value].choice, name)
        settling.clear()

    def own(change) -> None:
        if not settling and menu.value != NOTHING:
            settling.append(NOTHING)
            menu.value = NOTHING
            settling.clear()

    menu.observe(set_all, names="value")
    for control in controls.values():
        control.observe(own, names="value")
    return settling
