"""The explorer of context parallelism: memory of one GPU by length, and one layer's attention by each method."""

from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.config import PRESETS, ModelConfig, preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.layout.block_pairs import pairs, share_of_ideal
from course_lib.layout.partition import CP_METHODS
from course_lib.layout.sequence_sharding import SEQUENCE_SHARDINGS
from course_lib.memory.budget import budgets
from course_lib.memory.ranks import for_length, kv_block_bytes
from course_lib.plots.memory import BudgetBar, budget_bars, draw_budgets, gpu_limits
from course_lib.plots.style import show_bytes, show_seconds
from course_lib.plots.timeline import draw_step_times
from course_lib.run import Run
from course_lib.timing import AttentionTime, Utilisation, attention_time, ring_link, tokens_that_hide_a_hop
from course_lib.validate import Share, Size, check_fields, checked
from course_lib.widgets import parts

UTILISATION = Utilisation()
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class ContextChoice:
    """What the controls say; `inside` and `between` are keys of LINKS: within a node, and between nodes."""

    model: str = "llama-3.1-8b"
    seq_len: Size = 131_072
    tp: Size = 8
    cp: Size = 4
    sequence_sharding: str = "zigzag"
    recompute: str = "none"
    gpu_key: str = "h100"
    inside: str = "nvlink4"
    between: str = "ib-ndr400"

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class ContextView:
    """What the explorer shows: bytes are predicted, seconds modelled, nothing is measured."""

    bars: list[BudgetBar]
    limits_bytes: dict[str, int]
    times: dict[str, AttentionTime]  # one layer's attention, forward and backward, by the methods that are possible
    share_of_ideal: float
    title: str
    text: str


@checked
def explore_context(chosen: ContextChoice) -> ContextView:
    """Turn choices into what is shown.

    Assumes: tp ranks with sequence parallelism side by side in nodes of 8, cp around them; ZeRO-1 over the cp ranks;
    BF16 with FP32 master weights; attention's kernels at UTILISATION of the GPU's peak, only a ring's messages hidden.

    Raises   ValueError if the model's heads or the sequence do not divide
    """
    config = for_length(preset(chosen.model), chosen.seq_len)
    labelled = {f"cp {cp}": budgets(_run(config, chosen, cp))[0] for cp in dict.fromkeys((1, chosen.cp))}
    limits = gpu_limits([gpu(chosen.gpu_key)])
    bars = budget_bars(labelled, limits)
    times = {}
    for method in CP_METHODS if chosen.cp > 1 else ():
        try:
            times[method] = attention_time(_run(config, chosen, chosen.cp, method), _cluster(chosen), UTILISATION)
        except ValueError:  # Ulysses without heads enough: said in the text
            continue
    share = share_of_ideal(pairs(chosen.sequence_sharding, chosen.seq_len, chosen.cp))
    fits = f"{'fits' if bars[-1].fits else 'does not fit'} on {gpu(chosen.gpu_key).name}"
    title = f"{chosen.model}, {chosen.seq_len:,} tokens on {chosen.tp * chosen.cp} GPUs {fits}"
    return ContextView(bars, limits, times, share, title, describe_context(config, chosen, times, share))


def _run(config: ModelConfig, chosen: ContextChoice, cp: int, method: str = "ring") -> Run:
    layout = Layout(
        cp=cp,
        tp=chosen.tp,
        sequence_parallel=chosen.tp > 1,
        zero_stage=1,
        recompute=chosen.recompute,
        cp_method=method,
        cp_sharding=chosen.sequence_sharding,
    )
    return Run(config, layout, chosen.seq_len)


def _cluster(chosen: ContextChoice) -> Cluster:
    return Cluster(gpu(chosen.gpu_key), link(chosen.inside), link(chosen.between), GPUS_PER_NODE)


@checked
def describe_context(config: ModelConfig, chosen: ContextChoice, times: dict[str, AttentionTime], share: Share) -> str:
    """What a ring hands on and whether it hides, and what each method takes."""
    if chosen.cp == 1:
        return "One rank has the whole sequence: nothing is sent. States are BF16 with FP32 master weights."
    cluster = _cluster(chosen)
    on, rate = ring_link(_run(config, chosen, chosen.cp).layout, cluster), UTILISATION.attention_flops_per_s(cluster)
    copies = config.num_heads / config.num_kv_heads
    needed = max(tokens_that_hide_a_hop(rate, on, copies, backward) for backward in (False, True))
    block = kv_block_bytes(config, 1, chosen.seq_len, chosen.cp, tp=chosen.tp)
    missing = "" if "ulysses" in times else " Ulysses is not possible: too few key/value heads a rank."
    layer = ", ".join(f"{method} {show_seconds(time.total_s)}" for method, time in times.items())
    return (
        f"Predicted: a rank has {chosen.seq_len // chosen.cp:,} tokens and hands on {show_bytes(block)} per ring step "
        f"over {on.name}; counted: {chosen.sequence_sharding} allows {100 * share:.1f} % of the ideal speed. "
        f"Modelled, not measured: a ring step hides from {needed:,.0f} tokens a rank; "
        f"one layer's attention, forward and backward: {layer}.{missing}"
    )


@checked
def context_explorer(start: ContextChoice | None = None) -> widgets.VBox:
    """Sliders over model, sequence, tp, cp, sequence sharding, GPU and links."""
    start = start or ContextChoice()
    fields = {
        "model": parts.choice("model", PRESETS, start.model),
        "seq_len": parts.slider("sequence", parts.powers_of_two(1024, 2**20), start.seq_len),
        "tp": parts.slider("tp", parts.powers_of_two(1, 8), start.tp),
        "cp": parts.slider("cp", parts.powers_of_two(1, 64), start.cp),
        "sequence_sharding": parts.choice("sequence sharding", SEQUENCE_SHARDINGS, start.sequence_sharding),
        "recompute": parts.choice("recomputation", ["none", "selective", "full"], start.recompute),
        "gpu_key": parts.choice("GPU", parts.BF16_GPUS, start.gpu_key),
        "inside": parts.choice("inside a node", parts.GPU_LINKS, start.inside),
        "between": parts.choice("between nodes", parts.GPU_LINKS, start.between),
    }

    def predict() -> tuple[bytes, str]:
        view = explore_context(ContextChoice(**parts.values_of(fields)))
        return context_png(view), escape(view.text)

    return parts.picture_panel(list(fields.values()), predict)


@checked
def context_png(view: ContextView) -> bytes:
    """Memory of one GPU, and below it one layer's attention by each method."""

    def draw_times(axes) -> None:
        draw_step_times(axes, {m: (t.compute_s + t.waiting_s, t.exposed_s) for m, t in view.times.items()})
        axes.set_xlabel(axes.get_xlabel().replace("one step", "one layer's attention"))

    bars = (
        lambda axes: draw_budgets(axes, view.bars, view.limits_bytes, "GB", view.title),
        1.9 + 0.55 * len(view.bars),
    )
    times = [(draw_times, 1.4 + 0.3 * len(view.times))] if view.times else []
    return parts.stacked_png([bars, *times])
