"""The explorer of tensor and sequence parallelism: memory of one GPU, and the share of a step that is communication."""

from dataclasses import dataclass, replace
from html import escape
from typing import Literal

import ipywidgets as widgets

from course_lib.compare.five_d_profile import FiveDComparison
from course_lib.compare.sharded_profile import measure_tensor
from course_lib.config import PRESETS, ModelConfig, preset
from course_lib.engines import ENGINES
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import Budget, budgets
from course_lib.plots.memory import BudgetBar, budget_bars, draw_budgets, gpu_limits
from course_lib.plots.style import show_bytes, show_seconds
from course_lib.plots.timeline import draw_step_times
from course_lib.run import Run
from course_lib.timing import StepTime, step_time
from course_lib.traffic import calls, sent_bytes
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

ENGINE = replace(ENGINES["course"], hides_behind_weights=False)  # each sum is waited for
GPUS_PER_NODE = 8
LARGEST_TP = 64
MODES = [("TP", "tp"), ("TP + SP", "tp+sp"), ("TP + SP, gathered again in backward", "tp+sp regather")]
RECOMPUTE = ["none", "selective", "full"]
MEASURED_RANKS = 4  # at most: they share this machine's cores


@dataclass(frozen=True)
class TensorChoice:
    """What the controls say; `inside` and `between` are keys of LINKS: within a node, and between nodes."""

    model: str = "llama-3.1-8b"
    tp: Size = 8
    mode: Literal[tuple(mode for _, mode in MODES)] = "tp+sp"
    seq_len: Size = 4096
    batch_size: Size = 1
    recompute: str = "none"
    gpu_key: str = "h100"
    inside: str = "nvlink4"
    between: str = "efa"

    @property
    def sequence_parallel(self) -> bool:
        return self.mode != "tp"

    @property
    def regather(self) -> bool:
        return self.mode == "tp+sp regather"

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class TensorView:
    """What the explorer shows: bytes are predicted, seconds modelled, nothing is measured."""

    budget: Budget
    bars: list[BudgetBar]
    limits_bytes: dict[str, int]
    sent_bytes: int  # by one GPU in a step of one micro-batch
    steps: dict[int, StepTime]  # by tp: the chosen one, and the others that the model's heads allow
    title: str
    text: str


@checked
def explore_tensor(chosen: TensorChoice) -> TensorView:
    """Turn choices into what is shown.

    Assumes: kernels of the course's own engine; nodes of 8 GPUs, filled one after the other; communication
    waits for nothing and nothing hides it; BF16 with FP32 master weights; the optimizer's time is left out.

    Raises   ValueError if the model's heads do not divide, or the sequence is longer than the model reads
    """
    config = preset(chosen.model)
    if chosen.tp not in possible_tp(config):
        raise ValueError(
            f"{config.name} has {config.num_heads} heads, {config.num_kv_heads} of keys and values, which cannot be "
            f"dealt out to tp {chosen.tp}; choose tp from {', '.join(map(str, possible_tp(config)))}"
        )
    needed = _budget(chosen)
    limits = gpu_limits([gpu(chosen.gpu_key)])
    labelled = {"one GPU": _budget(replace(chosen, tp=1, mode="tp"))}
    if chosen.tp > 1:
        labelled[f"TP {chosen.tp}"] = _budget(replace(chosen, mode="tp"))
    if chosen.tp > 1 and chosen.sequence_parallel:
        labelled[f"TP {chosen.tp} + SP"] = needed
    bars = budget_bars(labelled, limits)
    sent = sent_bytes(calls(_run(chosen))["tp"])
    cluster = Cluster(gpu(chosen.gpu_key), link(chosen.inside), link(chosen.between), GPUS_PER_NODE)
    steps = {tp: step_time(_run(replace(chosen, tp=tp)), cluster, ENGINE) for tp in possible_tp(config)}
    view = TensorView(needed, bars, limits, sent, steps, "", "")
    return replace(view, title=_title(chosen, view), text=describe_tensor(chosen, view))


def _run(chosen: TensorChoice) -> Run:
    sharded = chosen.sequence_parallel and chosen.tp > 1
    layout = Layout(
        tp=chosen.tp,
        sequence_parallel=sharded,
        regather=sharded and chosen.regather,
        recompute=chosen.recompute,
        micro_batch=chosen.batch_size,
    )
    return Run(preset(chosen.model), layout, chosen.seq_len)


@checked
def possible_tp(config: ModelConfig) -> list[int]:
    """The powers of two up to LARGEST_TP into which the model's heads can be dealt out."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    sizes = [2**power for power in range(LARGEST_TP.bit_length())]
    return [tp for tp in sizes if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)]


@checked
def step_times(view: TensorView) -> dict[str, tuple[float, float]]:
    """`{label: (seconds computing, seconds waiting for communication)}` for the picture."""
    return {f"tp {tp}": (step.working_s, step.total_s - step.working_s) for tp, step in view.steps.items()}


def _budget(chosen: TensorChoice) -> Budget:
    return budgets(_run(chosen))[0]


def _title(chosen: TensorChoice, view: TensorView) -> str:
    fits = f"{'fits' if view.bars[-1].fits else 'does not fit'} on {gpu(chosen.gpu_key).name}"
    if chosen.tp == 1:
        return f"{chosen.model} on one GPU {fits}"
    return f"{view.bars[-1].label} {fits}; modelled: {100 * view.steps[chosen.tp].waiting_share:.0f} % communication"


@checked
def describe_tensor(chosen: TensorChoice, view: TensorView) -> str:
    """What each GPU holds and sends, and what a step takes by the model."""
    kept = view.budget.activations + view.budget.logits
    step = view.steps[chosen.tp]
    nodes = -(-chosen.tp // GPUS_PER_NODE)
    way = (
        link(chosen.inside).name
        if nodes == 1
        else f"{link(chosen.inside).name}, and {link(chosen.between).name} between {nodes} nodes"
    )
    needs = (
        f"{show_bytes(view.bars[-1].total_bytes)} a GPU, {show_bytes(kept)} of it activations and logits; "
        f"states BF16 with FP32 master weights"
    )
    sends = "One GPU alone sends nothing."
    if chosen.tp > 1:
        needs += f"; one GPU alone would need {show_bytes(view.bars[0].total_bytes)}"
        sends = f"A step of one micro-batch sends {show_bytes(view.sent_bytes)} from each GPU over {way}."
    return (
        f"Predicted: {needs}. {sends} Modelled, not measured: "
        f"{show_seconds(step.working_s)} computing; {show_seconds(step.total_s - step.working_s)} "
        "communicating; "
        f"{step.tokens_per_s_per_gpu:,.0f} tokens per second and GPU."
    )


@checked
def measure_tensor_choice(chosen: TensorChoice) -> FiveDComparison:
    """Train a toy for real under the chosen parallelism, and lay measured on predicted.

    Raises   ValueError if the choice is impossible
    """
    explore_tensor(chosen)  # what is impossible is not measured either
    ranks = min(chosen.tp, MEASURED_RANKS)
    return measure_tensor(ranks, chosen.sequence_parallel, chosen.regather, recompute=chosen.recompute)


@checked
def tensor_explorer(start: TensorChoice | None = None) -> widgets.VBox:
    """Sliders over model, tp, SP, sequence, GPU and links, and a button that measures a toy on real ranks."""
    start = start or TensorChoice()
    fields = {
        "model": parts.choice("model", PRESETS, start.model),
        "tp": parts.slider("tp", parts.powers_of_two(1, LARGEST_TP), start.tp),
        "mode": parts.choice("parallelism", MODES, start.mode),
        "seq_len": parts.slider("sequence", parts.powers_of_two(64, 131_072), start.seq_len),
        "batch_size": parts.slider("micro-batch", parts.powers_of_two(1, 64), start.batch_size),
        "recompute": parts.choice("recomputation", RECOMPUTE, start.recompute),
        "gpu_key": parts.choice("GPU", parts.BF16_GPUS, start.gpu_key),
        "inside": parts.choice("inside a node", parts.GPU_LINKS, start.inside),
        "between": parts.choice("between nodes", parts.GPU_LINKS, start.between),
    }

    def current() -> TensorChoice:
        return TensorChoice(**parts.values_of(fields))

    def predict() -> tuple[bytes, str]:
        view = explore_tensor(current())
        draw_bars = lambda axes: draw_budgets(axes, view.bars, view.limits_bytes, "GB", view.title)  # noqa: E731
        times = step_times(view)
        below = 1.3 + 0.3 * len(times)
        drawings = [(draw_bars, 1.9 + 0.55 * len(view.bars)), (lambda axes: draw_step_times(axes, times), below)]
        return parts.stacked_png(drawings), escape(view.text)

    def measure() -> tuple[bytes, str]:
        chosen = current()
        result = measure_tensor_choice(chosen)
        stands = parts.stands_for(chosen.model, chosen.tp, result.num_ranks)
        return parts.comparison_png(result.rows), escape(f"{result} {stands}")

    return parts.measured_panel(list(fields.values()), predict, measure, "train a toy on real ranks")
