"""One page of what has to be known by heart: bytes, FLOPs, messages, bubbles, scales. Every number is computed here.

python -m course_lib.plots.cheat_sheet docs        docs/cheat_sheet.svg, docs/cheat_sheet.pdf
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from course_lib.config import preset
from course_lib.flops import flops_per_token
from course_lib.hardware import GPUS, Cluster, gpu, link
from course_lib.language import language, spoken
from course_lib.layout import Layout
from course_lib.memory.activations import layer_terms, part_of
from course_lib.memory.states import zero_bytes_per_parameter
from course_lib.plots.style import speak_korean
from course_lib.run import RECIPES, Run
from course_lib.schedules import make, simulate
from course_lib.schedules.simulator import Costs
from course_lib.tensors import count_parameters
from course_lib.timing import collective_s
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.traffic.collectives import collective_bytes
from course_lib.units import show_bytes, show_seconds

MODEL, RANKS, TOKENS = "llama-3.1-8b", 64, 8192
LETTERS = (
    "N parameters, L layers, D width, S sequence, V vocabulary, m micro-batches, p stages, n ranks; bytes and FLOPs "
    "are computed, times modelled"
)


def _states() -> Iterator[tuple[str, str]]:
    for name in ("bf16-master", "bf16-master-fp32-grads", "fp32", "bf16"):
        recipe = RECIPES[name]
        states = f"{recipe.param_bytes} + {recipe.grad_bytes} + {recipe.master_bytes + recipe.moment_bytes}"
        yield f"{name}", f"{states} = {recipe.bytes_per_param} bytes a parameter"
    count = count_parameters(preset(MODEL))
    for stage, of in enumerate(("plain DP", "ZeRO-1: optimizer", "ZeRO-2: + gradients", "ZeRO-3: + parameters")):
        each = zero_bytes_per_parameter(stage, RANKS)
        yield of, f"{each:.3g} bytes on {RANKS} ranks; {MODEL}: {show_bytes(count * each)}"


def _activations() -> Iterator[tuple[str, str]]:
    config = preset(MODEL)
    layer = sum(sum(half.values()) for half in layer_terms(part_of(Run(config, Layout(), TOKENS)), has_experts=False))
    yield "what a layer saves", f"{MODEL}, {TOKENS:,} tokens: {show_bytes(layer)}"
    yield "full recomputation", f"its input: tokens x D x 2 = {show_bytes(2 * TOKENS * config.d_model)} a layer"
    yield "logits in FP32", f"tokens x V x 4 = {show_bytes(4 * TOKENS * config.vocab_size)}; in chunks a part of it"
    yield "TP + SP", "divides by tp what a layer saves; CP by cp"
    yield "pipeline, 1F1B", "rank i keeps min(m, p - i) micro-batches of L / p layers"


def _work() -> Iterator[tuple[str, str]]:
    config, count = preset(MODEL), count_parameters(preset(MODEL))
    per_token = flops_per_token(config, TOKENS)
    yield "a token, forward and backward", "6 (N - V D) + 12 L S D;   full recomputation: a third more"
    yield MODEL, f"{per_token / 1e9:.1f} GFLOP at {TOKENS:,} tokens; 6 N alone: {6 * count / 1e9:.1f}"
    peak = gpu("h100").bf16_flops
    yield "an H100 at 40 % MFU", f"{0.4 * peak / per_token:,.0f} tokens a second"
    machine = peak / gpu("h100").memory_bytes_per_s
    yield "memory-bound below", f"{machine:.0f} FLOP a byte on an H100"


def _messages() -> Iterator[tuple[str, str]]:
    payload, ranks = 10**9, 8
    yield "all-reduce", f"2 (n - 1) / n of the tensor: {ring_all_reduce_bytes(payload, ranks) / payload:.2f} on {ranks}"
    yield "reduce-scatter, all-gather", f"(n - 1) / n: {collective_bytes('all_gather', payload, ranks) / payload:.3f}"
    yield (
        "all-to-all",
        f"(n - 1) / n of what a rank has: {collective_bytes('all_to_all', payload, ranks) / payload:.3f}",
    )
    inside = collective_s("all_reduce", payload, ranks, link("nvlink4"))
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    yield "1 GB, 8 GPUs, NVLink 4", f"{show_seconds(inside)} (modelled)"
    between = collective_s("all_reduce", payload, 64, cluster)
    yield "1 GB, 64 GPUs, InfiniBand NDR", f"{show_seconds(between)} (modelled)"


def _sends() -> Iterator[tuple[str, str]]:
    yield "DP, ZeRO-1, ZeRO-2", "gradients out, parameters or gradients back: 2 x the parameters' bytes a step"
    yield "ZeRO-3", "3 x: gathers in forward and in backward, sums out; each micro-batch"
    yield "TP", "4 sums of tokens x D a layer; with SP gathers and scatters of the same bytes"
    yield "CP, ring", "keys and values go round: 2 x tokens / c x K x H a step of the ring"
    yield "PP", "tokens x D a stage border, there and back, for each micro-batch"
    yield "EP", "k x tokens x D there and back, in forward and in backward"


def _bubbles(p: int = 8, m: int = 32) -> Iterator[tuple[str, str]]:
    yield "1F1B, all-forward-all-backward", f"(p - 1) / m of the ideal time: {(p - 1) / m:.1%} for p {p}, m {m}"
    costs = Costs(1.0, 1.0, 1.0)
    for name, words, v in (("interleaved", "interleaved, v 4: / v", 4), ("zb_h1", "ZB-H1", 1), ("zbv", "ZBV", 1)):
        clocked = simulate(make(name, p, m, v), costs)
        yield words, f"{clocked.bubble_of_ideal:.1%} (simulated, B of input and of weights as long as F)"


_WHEN = (
    ("fits with plain DP", "stop there; then ZeRO-1, which costs nothing"),
    ("states are too large", "ZeRO-2 or 3 while a micro-batch computes longer than it gathers; else TP or PP"),
    ("activations are too large", "smaller micro-batch, then selective, then full recomputation; SP with TP"),
    ("TP", "inside the fast links alone, up to heads / kv heads that divide"),
    ("PP", "between nodes, with m at least 4 p; ZeRO-1 beside it"),
    ("sequences are too long", "CP, ring where messages hide, after TP with SP"),
    ("experts", "EP inside the fast links if it can; over tp's ranks where experts are narrow"),
    ("two layouts within 3 %", "take the simpler one: no model tells them apart"),
)


def _scales() -> Iterator[tuple[str, str]]:
    for key in ("a100-80", "h100", "h200", "b200"):
        one = GPUS[key]
        gib, tb_per_s = one.memory_bytes / 2**30, one.memory_bytes_per_s / 1e12
        tflops, own = one.bf16_flops / 1e12, link(one.link).bytes_per_s / 1e9
        yield one.name, f"{gib:.0f} GiB, {tb_per_s:.2f} TB/s, {tflops:,.0f} TFLOP/s bf16, NVLink {own:.0f} GB/s"
    for key in ("ib-ndr400", "efa", "roce-400"):
        yield link(key).name, f"{link(key).bytes_per_s / 1e9:.3g} GB/s a GPU and direction"


def sheet() -> dict[str, list[tuple[str, str]]]:
    """Return the sheet's boxes by their titles: lines of (what, how much or how), with every number worked out."""
    parts = {
        "States (parameters + gradients + optimizer)": _states(), "Activations (BF16, FlashAttention)": _activations(),
        "Work of a step": _work(), "Collectives: what a rank sends": _messages(), "What each axis sends": _sends(),
        "Bubbles of a pipeline": _bubbles(), "When which axis": _WHEN, "Scales of today": _scales(),
    }  # fmt: skip
    return {title: list(lines) for title, lines in parts.items()}


def draw() -> Figure:
    """Return the sheet as one page of A4."""
    figure = Figure(figsize=(8.27, 11.69))  # A4
    figure.text(0.05, 0.965, "Training on many GPUs: one page", fontsize=15, weight="bold")
    figure.text(0.05, 0.951, LETTERS, fontsize=6.5, color="#595959")
    y = 0.93
    for title, lines in sheet().items():
        figure.text(0.05, y, title, fontsize=9, weight="bold", color="#0072B2")
        for what, how in lines:
            y -= 0.0152
            figure.text(0.06, y, what, fontsize=7)
            figure.text(0.36, y, how, fontsize=7)
        y -= 0.0245
    if language() != "en":
        speak_korean(figure)
    return figure


def write(folder: Path) -> list[Path]:
    """Write the page as SVG, its text as text, and as PDF; the same bytes each time."""
    name = "cheat_sheet" if language() == "en" else f"cheat_sheet.{language()}"
    paths = [folder / f"{name}.svg", folder / f"{name}.pdf"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "sheet", "pdf.fonttype": 42}):
        for path, date in zip(paths, ("Date", "CreationDate"), strict=True):
            draw().savefig(path, metadata={date: None})
    return paths


if __name__ == "__main__":
    for spoken_there in ("en", "ko"):
        with spoken(spoken_there):
            print(*write(Path(sys.argv[1])), sep="\n")
