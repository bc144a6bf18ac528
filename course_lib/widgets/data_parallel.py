"""The data-parallel explorer: batch in tokens, modelled step time, and the communication that nothing hides."""

from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

from course_lib.config import PRESETS, preset
from course_lib.flops import step_flops
from course_lib.hardware import gpu, link, peak_flops
from course_lib.memory.states import count_parameters
from course_lib.plots.style import show_bytes, show_seconds
from course_lib.plots.timeline import draw_overlap, overlap_picture
from course_lib.span import Span
from course_lib.timing import collective_s, dp_spans, exposed_s
from course_lib.validate import Size, check_fields, checked
from course_lib.widgets import parts

ASSUMED_MFU = 0.4  # of one GPU while it computes; published good runs on H100 reach 0.4 to 0.5
GRAD_BYTES = 4  # gradients are reduced in FP32
MAX_BUCKETS = 12  # as many as a picture can show
BUCKET_BYTES = 25 * 2**20  # DDP's default


@dataclass(frozen=True)
class DPChoice:
    """What the controls say."""

    model: str = "llama-3.2-1b"
    dp_size: Size = 8
    batch_size: Size = 2
    seq_len: Size = 4096
    micro_batches: Size = 1
    link_key: str = "efa"
    gpu_key: str = "h100"
    overlap: bool = True

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class DPView:
    """What the explorer shows. Seconds are modelled, none is measured."""

    global_batch_tokens: int
    grad_bytes: int
    compute_s: float
    comm_s: float
    exposed_s: float
    step_s: float
    tokens_per_s: float
    efficiency_percent: float
    spans: list[Span]


@checked
def explore_dp(chosen: DPChoice) -> DPView:
    """Turn choices into what is shown.

    Assumes: each GPU computes at ASSUMED_MFU of its peak; gradients travel once a step, in the last micro-batch, by
    a ring over the slowest link; the model fits; the optimizer's time is left out.
    """
    config, device = preset(chosen.model), gpu(chosen.gpu_key)
    flops = step_flops(config, chosen.batch_size * chosen.seq_len, chosen.seq_len)
    precision = "bf16" if device.bf16_flops else "fp16"
    micro_s = flops / (peak_flops(device, precision) * ASSUMED_MFU)
    grad_bytes = GRAD_BYTES * count_parameters(config)
    buckets = max(1, min(MAX_BUCKETS, round(grad_bytes / BUCKET_BYTES)))
    comm_s = collective_s("all_reduce", grad_bytes / buckets, chosen.dp_size, link(chosen.link_key)) * buckets
    spans = dp_spans(micro_s / 3, 2 * micro_s / 3, [comm_s / buckets] * buckets, chosen.overlap) if comm_s else []
    spans = _after_accumulation(spans or [Span(0, "compute", "forward and backward", 0.0, micro_s)], micro_s, chosen)
    step_s = max(span.stop_s for span in spans)
    compute_s = chosen.micro_batches * micro_s
    tokens = chosen.dp_size * chosen.batch_size * chosen.seq_len * chosen.micro_batches
    return DPView(
        global_batch_tokens=tokens,
        grad_bytes=grad_bytes,
        compute_s=compute_s,
        comm_s=comm_s,
        exposed_s=exposed_s(spans),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        efficiency_percent=100 * compute_s / step_s,
        spans=spans,
    )


def _after_accumulation(spans: list[Span], micro_s: float, chosen: DPChoice) -> list[Span]:
    """Earlier micro-batches communicate nothing (`no_sync`): they come first, as one block."""
    earlier = chosen.micro_batches - 1
    if not earlier:
        return spans
    shift = earlier * micro_s
    name = f"{earlier} micro-batch{'es' if earlier > 1 else ''} without communication"
    later = [Span(s.rank, s.lane, s.name, s.start_s + shift, s.stop_s + shift) for s in spans]
    return [Span(0, "compute", name, 0.0, shift), *later]


@checked
def describe_dp(view: DPView) -> str:
    """The numbers in one line."""
    return (
        f"Global batch {view.global_batch_tokens:,} tokens. Modelled step {show_seconds(view.step_s)}: "
        f"{show_seconds(view.compute_s)} of computation, {show_seconds(view.comm_s)} to all-reduce "
        f"{show_bytes(view.grad_bytes)} of gradients, {show_seconds(view.exposed_s)} of it exposed. "
        f"{view.tokens_per_s:,.0f} tokens per second, {view.efficiency_percent:.0f} % of the ideal."
    )


@checked
def dp_explorer(start: DPChoice | None = None) -> widgets.VBox:
    """Controls over one data-parallel step: who waits for what, and for how long."""
    start = start or DPChoice()
    fields = {
        "model": parts.choice("model", PRESETS, start.model),
        "dp_size": parts.slider("dp ranks", parts.powers_of_two(1, 1024), start.dp_size),
        "batch_size": parts.slider("micro-batch", parts.powers_of_two(1, 64), start.batch_size),
        "seq_len": parts.slider("sequence", parts.powers_of_two(128, 131_072), start.seq_len),
        "micro_batches": parts.slider("micro-batches", parts.powers_of_two(1, 64), start.micro_batches),
        "link_key": parts.choice("slowest link", parts.ALL_LINKS, start.link_key),
        "gpu_key": parts.choice("GPU", parts.ALL_GPUS, start.gpu_key),
        "overlap": widgets.Checkbox(description="overlap with the backward pass", value=start.overlap),
    }

    def predict() -> tuple[bytes, str]:
        view = explore_dp(DPChoice(**parts.values_of(fields)))
        drawn = overlap_picture(view.spans)
        png = parts.figure_png(lambda axes: draw_overlap(axes, drawn), 1.9)
        return png, escape(describe_dp(view))

    return parts.picture_panel(list(fields.values()), predict)
