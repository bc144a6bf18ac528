"""What ranks measure in a lab: some steps of each of its layouts, by the engine of chapter 10; or ways to sum."""

import gc
import socket
import textwrap
from statistics import median

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.cluster.measure import device_name, timed
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.labs.sheet import Nodes, form
from course_lib.labs.table import SUMMED_BYTES, SUMMED_BYTES_ON_CPU, lab_named
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.minimal.ring import all_reduce_through_rank_0, ring_all_reduce
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.validate import Size, checked

ROUNDS = 10
SUMS = {"through rank 0": all_reduce_through_rank_0, "ring by hand": ring_all_reduce, "backend": comm.all_reduce}


@checked
def run_lab(chapter: str, rounds: Size = ROUNDS) -> dict:
    """Measure a lab on these ranks; the same on every rank, made of JSON's kinds.

    Of each layout: seconds of a step (median of the slowest rank), tokens/s of a rank, the largest peak of a GPU, bytes
    that rank 0 sends in a step. Of each way to sum: seconds and bytes of a call.
    """
    lab, world = lab_named(chapter), dist.group.WORLD
    on_gpu = rank_device().type == "cuda"
    config, seq_len = lab.model(on_gpu)
    lab.check_ranks(world.size())
    runs = [] if lab.layouts else [_measure_sum(name, on_gpu, rounds) for name in SUMS]
    for layout in lab.layouts_on(world.size()):
        runs.append(measure_layout(config, layout, seq_len, rounds))
        gc.collect()  # the engine of this layout, before the next one is built
        if on_gpu:
            torch.cuda.empty_cache()
    return {
        "lab": lab.chapter,
        "device": device_name(),
        "ranks": world.size(),
        "nodes": len(set(comm.all_gather_json(socket.gethostname(), world))),
        "runs": runs,
    }


@checked
def on_gpus(chapter: str) -> str:
    """Run a chapter's lab on GPUs of this machine, a rank on each, and return its form; or say how many it needs."""
    lab, gpus = lab_named(chapter), torch.cuda.device_count()
    ranks = max((size for size in lab.ranks if size <= gpus), default=0)
    if not ranks:
        found = f"Here {gpus or 'no'} GPU{'s' * (gpus != 1)}; with {min(lab.ranks)} or more this cell measures lab "
        return textwrap.fill(f"{found}{lab.chapter}: {lab.title}.", 88)
    measured = launch(run_lab, ranks, lab.chapter, backend="nccl", timeout=60.0 * lab.minutes, quiet=True)[0]
    return form(lab, measured, Nodes(nodes=1, gpus_per_node=ranks))


def measure_layout(config: ModelConfig, layout: Layout, seq_len: int, rounds: int) -> dict:
    """Train with parameters and gradients in BF16 and FP32 master weights."""
    world, device = dist.group.WORLD, rank_device()
    engine = five_d.build(config, layout, dtype=torch.bfloat16)
    optimizer = engines.make_optimizer(engine)
    dp_rank = engine.groups.dp.rank()
    micro_batches = [
        tokens_of(config, layout.micro_batch, seq_len, seed=dp_rank * layout.micro_batches + index)
        for index in range(layout.micro_batches)
    ]
    with ByteMeter() as meter:
        engines.step(engine, micro_batches, optimizer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(lambda: engines.step(engine, micro_batches, optimizer), rounds, world)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    step_s, sent_bytes = slowest_s(seconds), comm.all_gather_json(meter.sent_bytes, world)[0]
    return {
        "run": str(layout),
        "step_s": step_s,
        "tokens_per_s_per_gpu": layout.sequences_per_step * seq_len / step_s / world.size(),
        "peak_bytes": max(comm.all_gather_json(peak_bytes, world)) if peak_bytes is not None else None,
        "sent_bytes": sent_bytes,
    }


def _measure_sum(name: str, on_gpu: bool, rounds: int) -> dict:
    """Sum a tensor of FP32 over all ranks in one of the ways of SUMS."""
    world, act = dist.group.WORLD, SUMS[name]
    x_P = torch.ones((SUMMED_BYTES if on_gpu else SUMMED_BYTES_ON_CPU) // 4, device=rank_device())
    with ByteMeter() as meter:
        act(x_P, world)
    step_s = slowest_s(timed(lambda: act(x_P, world), rounds, world))
    return {"run": name, "step_s": step_s, "sent_bytes": comm.all_gather_json(meter.sent_bytes, world)[0]}


def slowest_s(seconds: list[float]) -> float:
    """The median over the rounds; of each round its slowest rank counts."""
    return median(map(max, zip(*comm.all_gather_json(seconds, dist.group.WORLD), strict=True)))


def tokens_of(config: ModelConfig, micro_batch: int, seq_len: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and the next of each: a lab measures seconds, and no text."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (micro_batch, seq_len + 1)
    drawn_BS = torch.randint(config.vocab_size, shape, generator=generator, device="cpu").to(rank_device())
    return drawn_BS[:, :-1].contiguous(), drawn_BS[:, 1:].contiguous()
