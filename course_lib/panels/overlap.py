"""One step of data parallelism: batch, buckets, and the communication that backward does not hide (lesson 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from course_lib.config import preset
from course_lib.flops import step_flops
from course_lib.hardware import GPUS, LINKS, gpu, link, peak_flops
from course_lib.memory.states import count_parameters
from course_lib.panels.controls import controls, named, of_table, powers
from course_lib.panels.memory import ALL_MODELS
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Lanes
from course_lib.span import Span
from course_lib.timing import collective_s, dp_spans, exposed_s
from course_lib.units import show_bytes, show_seconds

_ASSUMED_MFU = 0.4  # of one GPU while it computes; published good runs on H100 reach 0.4 to 0.5
GRAD_BYTES = 4  # gradients are reduced in FP32


def _step_spans(values: Mapping) -> list[Span]:
    """Spans of one step: micro-batches without communication, the last with an all-reduce for each bucket.

    Assumes: each GPU computes at ASSUMED_MFU of its peak; a ring over the slowest link; equal buckets; the model fits;
    the optimizer's time is left out.
    """
    config, device = preset(values["model"]), gpu(values["gpu"])
    peak = peak_flops(device, "bf16" if device.bf16_flops else "fp16")
    tokens, buckets = values["micro_batch"] * values["seq_len"], values["buckets"] * (values["dp"] > 1)
    micro_s = step_flops(config, tokens, values["seq_len"]) / (peak * _ASSUMED_MFU)
    size = GRAD_BYTES * count_parameters(config) / values["buckets"]
    one_s = collective_s("all_reduce", size, values["dp"], link(values["link"]))
    spans = dp_spans(micro_s / 3, 2 * micro_s / 3, [one_s] * buckets, values["overlap"])
    earlier = values["micro_batches"] - 1
    shift = earlier * micro_s
    later = [replace(span, start_s=span.start_s + shift, stop_s=span.stop_s + shift) for span in spans]
    before = Span(0, "compute", f"{earlier} micro-batch{'es' * (earlier > 1)} without communication", 0.0, shift)
    return [before] * bool(earlier) + later


def draw_overlap(**values) -> Shown:
    """Two lanes, computing and communication; what begins after computing has ended is not hidden."""
    spans = _step_spans(values)
    stop_s, hidden_until = max(span.stop_s for span in spans), max(s.stop_s for s in spans if s.lane == "compute")
    lanes = {"computing": [], "communication": []}
    for span in spans:
        if span.lane == "compute":
            shade = 0.5 if span.name == "forward" else 0.25 if span.name != "backward" else 0.0
            lanes["computing"].append(Box(span.start_s, span.stop_s, "computing", span.name, shade))
            continue
        name, edge = span.name.removeprefix("all-reduce "), min(max(span.start_s, hidden_until), span.stop_s)
        lanes["communication"] += [
            Box(span.start_s, edge, "communication", name),
            Box(edge, span.stop_s, "not hidden", name),
        ]
    tokens = values["dp"] * values["micro_batch"] * values["seq_len"] * values["micro_batches"]
    grad_bytes = GRAD_BYTES * count_parameters(preset(values["model"]))
    comm_s = sum(span.stop_s - span.start_s for span in spans if span.lane == "communication")
    late_s = exposed_s(spans)
    said = (
        f"Global batch {tokens:,} tokens. Modelled step {show_seconds(stop_s)}: {show_seconds(stop_s - late_s)} of "
        f"computation, {show_seconds(comm_s)} to all-reduce {show_bytes(grad_bytes)} of gradients, "
        f"{show_seconds(late_s)} of it not hidden. {tokens / stop_s:,.0f} tokens per second, "
        f"{1 - late_s / stop_s:.0%} of the ideal."
    )
    return [Lanes("Computation and communication of one step", lanes, 0.0, stop_s, "seconds")], said


OVERLAP = Panel(
    "Data parallelism: what backward hides",
    controls(model=("llama-3.2-1b", ALL_MODELS), dp=(8, powers(1, 1024)), micro_batch=2)
    | controls(seq_len=(4096, powers(128, 131_072)), micro_batches=(1, powers(1, 64)))
    | {"buckets": Control("buckets", named(range(1, 25)), 12, "slider")}
    | {"link": Control("slowest link", of_table(LINKS), "efa")}
    | controls(gpu=("h100", of_table(GPUS)))
    | {"overlap": Control("overlap with backward", (("yes", True), ("no", False)), True)},
    draw_overlap,
)
