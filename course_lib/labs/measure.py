"""What ranks measure in a lab: some steps of each of its layouts, by the engine of chapter 10."""

import gc
import socket
from statistics import median

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.cluster.measure import device_name, timed
from course_lib.config import ModelConfig
from course_lib.devices import rank_device
from course_lib.labs.table import lab_named
from course_lib.layout import Layout
from course_lib.measure import ByteMeter
from course_lib.parallel import five_d
from course_lib.validate import Size, checked

ROUNDS = 10


@checked
def run_lab(chapter: str, rounds: Size = ROUNDS) -> dict:
    """Measure a lab on these ranks; the same on every rank, made of JSON's kinds.

    Of each layout: seconds of a step (median of the slowest rank), tokens/s of a rank, the largest peak of a GPU, bytes
    that rank 0 sends in a step.
    """
    lab, world = lab_named(chapter), dist.group.WORLD
    on_gpu = rank_device().type == "cuda"
    config, seq_len = lab.model(on_gpu)
    runs = []
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


def measure_layout(config: ModelConfig, layout: Layout, seq_len: int, rounds: int) -> dict:
    """Train with parameters and gradients in BF16 and FP32 master weights."""
    world, device = dist.group.WORLD, rank_device()
    engine = five_d.build(config, layout, dtype=torch.bfloat16)
    optimizer = five_d.make_optimizer(engine)
    dp_rank = engine.groups.dp.rank()
    micro_batches = [
        tokens_of(config, layout.micro_batch, seq_len, seed=dp_rank * layout.micro_batches + index)
        for index in range(layout.micro_batches)
    ]
    with ByteMeter() as meter:
        five_d.step(engine, micro_batches, optimizer)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(lambda: five_d.step(engine, micro_batches, optimizer), rounds, world)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    of_ranks = comm.all_gather_json({"seconds": seconds, "peak_bytes": peak_bytes, "sent": meter.sent_bytes}, world)
    step_s = median(map(max, zip(*(one["seconds"] for one in of_ranks), strict=True)))
    return {
        "layout": str(layout),
        "step_s": step_s,
        "tokens_per_s_per_gpu": layout.sequences_per_step * seq_len / step_s / world.size(),
        "peak_bytes": max(one["peak_bytes"] for one in of_ranks) if peak_bytes is not None else None,
        "sent_bytes": of_ranks[0]["sent"],
    }


def tokens_of(config: ModelConfig, micro_batch: int, seq_len: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and the next of each: a lab measures seconds, and no text."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (micro_batch, seq_len + 1)
    drawn_BS = torch.randint(config.vocab_size, shape, generator=generator, device="cpu").to(rank_device())
    return drawn_BS[:, :-1].contiguous(), drawn_BS[:, 1:].contiguous()
