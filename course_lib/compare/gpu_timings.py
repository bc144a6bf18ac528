"""What a chapter models, timed on the GPUs of this machine: `print(on_gpus("05"))` is its cell tagged gpu.

Each rank has a GPU of its own here; ranks that share one would time each other. Without enough GPUs the text says what
would be shown, and nothing is launched. A collective stands beside its model; of a step the profiler tells which part
of the communication computation hides.
"""

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import DeviceType, ProfilerActivity, profile

from course_lib import comm
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.hardware import gpu_of_device, link
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.model import build
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.span import Span, busy
from course_lib.timing import bus_bandwidth, fastest
from course_lib.training import make_optimizer, train_step
from course_lib.training.precision import precision_named

DENSE = ModelConfig("timed", 8, 1024, num_heads=16, num_kv_heads=4, d_ff=3584, vocab_size=8192, max_seq_len=8192)
SEQ_LEN, PAYLOAD_BYTES, ROUNDS, WARM_UP = 2048, 256 << 20, 10, 3
COLLECTIVES = {
    "all-reduce": comm.all_reduce_,
    "all-gather": lambda x, group: comm.all_gather(x.chunk(group.size())[0].contiguous(), group),
    "reduce-scatter": comm.reduce_scatter,
}


@dataclass(frozen=True)
class Timed:
    """What a chapter times: a collective alone, and a step of a layout whose `{n}` is the number of ranks."""

    collective: str | None = None
    layout: str | None = None
    recipe: str = "bf16"  # on one GPU
    most: int = 4


CHAPTERS = {
    "00": Timed("all-reduce", most=8),
    "01": Timed(recipe="fp32", most=1),
    "02": Timed(recipe="bf16", most=1),
    "03": Timed("all-reduce", "dp={n}"),
    "04": Timed("reduce-scatter", "dp={n},zero_stage=3"),
    "05": Timed("all-reduce", "tp={n}"),
    "06": Timed("all-gather", "tp={n},sequence_parallel=true"),
    "07": Timed("all-gather", "cp={n}"),
    "08": Timed(layout="pp={n},micro_batches=8"),
    "09": Timed("all-gather", "dp={n},zero_stage=1"),
    "10": Timed("all-reduce", "dp=2,tp={half},sequence_parallel=true", most=8),
}


def on_gpus(chapter: str) -> str:
    """Time the chapter's collective and step on as many GPUs as it can use; without GPUs say what would be timed.

    Raises   ValueError for a chapter that does not exist
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"chapter is {chapter!r}; choose from {', '.join(CHAPTERS)}")
    timed = CHAPTERS[chapter]
    least, gpus = min(2, timed.most), torch.cuda.device_count()
    if gpus < least:
        found = f"Here {gpus or 'no'} GPU{'s' * (gpus != 1)}; with {least} or more this cell times {shown_by(timed)}."
        return textwrap.fill(found, 88)
    ranks = max(size for size in (1, 2, 4, 8) if least <= size <= min(gpus, timed.most))
    layout = timed.layout and timed.layout.format(n=ranks, half=ranks // 2)
    return "\n".join(launch(time_on_rank, ranks, timed, layout, backend="nccl", quiet=True)[0])


def shown_by(timed: Timed) -> str:
    """Say what a chapter's cell times."""
    collective = f"an {timed.collective}" if timed.collective in ("all-reduce", "all-gather") else "a reduce-scatter"
    parts = [f"{collective} of {PAYLOAD_BYTES >> 20} MiB beside its model"] if timed.collective else []
    if timed.layout or timed.most == 1:
        layout = (timed.layout or f"one GPU, {timed.recipe}").format(n="n", half="n/2")
        hidden = ", hidden communication" if timed.layout else ""
        parts.append(f"a step of {DENSE.num_layers} layers ({layout}): tokens per second{hidden} and peak memory")
    return " and ".join(parts)


def time_on_rank(timed: Timed, layout: str | None) -> list[str]:
    """On each rank: the lines of text with what was timed."""
    lines = [time_collective(timed.collective)] if timed.collective else []
    if layout:
        lines.append(time_layout(Layout.parse(layout)))
    elif timed.most == 1:
        lines.append(time_one_gpu(timed.recipe))
    return lines


def time_collective(name: str) -> str:
    """Time a collective of PAYLOAD_BYTES in BF16 over all ranks."""
    group = dist.group.WORLD
    x_P = torch.zeros(PAYLOAD_BYTES // 2, dtype=torch.bfloat16, device=rank_device())
    measured = in_words(name, group.size(), median_s(lambda: COLLECTIVES[name](x_P, group)))
    model = modelled(name, group.size(), torch.cuda.get_device_name())
    return f"{name} of {PAYLOAD_BYTES >> 20} MiB over {group.size()} GPUs: {measured}; {model}"


def in_words(name: str, num_gpus: int, seconds: float) -> str:
    """Return a duration of the collective with its bus bandwidth."""
    bandwidth = bus_bandwidth(name.replace("-", "_"), PAYLOAD_BYTES, seconds, num_gpus)
    return f"{seconds * 1e3:.2f} ms, bus bandwidth {bandwidth / 1e9:.0f} GB/s"


def modelled(name: str, num_gpus: int, device_name: str) -> str:
    """Return what the model says of the collective over this GPU's link to its neighbours."""
    known = gpu_of_device(device_name)
    if known is None:
        return f"the course has no numbers for {device_name}, so no model stands beside"
    way = fastest(name.replace("-", "_"), PAYLOAD_BYTES, num_gpus, link(known.link))
    words = in_words(name, num_gpus, way.seconds(PAYLOAD_BYTES))
    return f"modelled over {link(known.link).name} ({way.algorithm}, {way.protocol}): {words}"


def time_layout(layout: Layout) -> str:
    """Time steps of the layout with parameters and gradients in BF16."""
    engine = five_d.build(DENSE, layout, dtype=torch.bfloat16)
    optimizer = engines.make_optimizer(engine)
    tokens_BS = torch.zeros(layout.micro_batch, SEQ_LEN, dtype=torch.int64, device=rank_device())
    micro_batches = [(tokens_BS, tokens_BS)] * layout.micro_batches
    seconds = median_s(lambda: engines.step(engine, micro_batches, optimizer))
    spans = profiled(lambda: engines.step(engine, micro_batches, optimizer))
    return f"{speed(f'{layout}', seconds, layout.sequences_per_step * SEQ_LEN)}; {overlap(spans)}"


def time_one_gpu(recipe: str) -> str:
    """Time steps of one process."""
    model = build(DENSE, dtype=precision_named(recipe).param_dtype)
    optimizer = make_optimizer(model, recipe)
    tokens_BS = torch.zeros(1, SEQ_LEN, dtype=torch.int64, device=rank_device())
    seconds = median_s(lambda: train_step(model, optimizer, tokens_BS, tokens_BS, precision=recipe))
    return speed(f"one GPU, {recipe}", seconds, SEQ_LEN)


def speed(what: str, seconds: float, num_tokens: int) -> str:
    """Return a line with tokens per second and the allocator's peak."""
    peak = torch.cuda.max_memory_allocated() / 1e9
    return f"{what}: {seconds * 1e3:.1f} ms a step, {num_tokens / seconds:,.0f} tokens/s, peak {peak:.2f} GB on rank 0"


def profiled(action: Callable[[], object]) -> list[Span]:
    """Run `action` once under the profiler; return what ran on this rank's GPU, in its lanes."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    return [
        Span(dist.get_rank(), "communication" if "nccl" in event.name else "compute", event.name, start, stop)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        for start, stop in [(event.time_range.start / 1e6, event.time_range.end / 1e6)]
    ]


def overlap(spans: list[Span]) -> str:
    """Return how long the GPU communicated, and which share of it at the same time as it computed."""
    communication = [span for span in spans if span.lane == "communication"]
    compute = [span for span in spans if span.lane == "compute"]
    busy_s = busy(communication)
    if not busy_s:
        return "nothing is communicated"
    hidden_s = busy_s + busy(compute) - busy(spans)
    return f"communication {busy_s * 1e3:.1f} ms, {hidden_s / busy_s:.0%} of it hidden by computation"


def median_s(action) -> float:
    """Return the median seconds of `action`, after some rounds that warm up."""
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        action()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return sorted(seconds[WARM_UP:])[ROUNDS // 2]
