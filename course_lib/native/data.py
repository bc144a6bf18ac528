"""Data parallelism as PyTorch ships it: DistributedDataParallel, and Accelerate on top. Read beside parallel/data.py.

What DDP's options are in the from-scratch engine:

    bucket_cap_mb (25, the first 1)   assign_buckets. In its first step DDP sends everything in one bucket and notes the
                                      order in which gradients come; in its second it broadcasts that order, and builds
                                      its buckets anew.
    gradient_as_bucket_view           Bucket.views. Without it every gradient exists twice: in .grad and in the bucket.
    no_sync()                         the same name. The forward pass must be inside as well.
    find_unused_parameters            allow_unused. DDP walks the graph after each forward pass; no finish() then.
    static_graph                      that walk is done once: every step uses the same parameters, equally often. The
                                      very first backward pass must be outside no_sync(), or PyTorch gives up.
    register_comm_hook                Bucket.start; the hook below can send bfloat16.
    broadcast_buffers                 (2.13: forward_sync_buffers) the first rank's buffers, sent before each forward
                                      pass; from scratch they are sent at build only. The course's models have none.

Not to be confused with torch.nn.DataParallel (DP), the older class. DP is one process with one thread a GPU: threads
share one interpreter lock; parameters are copied to every GPU in each step; outputs, and so the loss, are gathered on
GPU 0, which needs more memory than the others; gradients are reduced to GPU 0, and only there the optimizer steps.
It needs GPUs, and one machine. DDP is one process a GPU: parameters stay where they are, only gradients travel.
"""

import time

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import comm
from course_lib.parallel.data import BUCKET_BYTES, record_when_done
from course_lib.parallel.engine import (
    Engine,
    MicroBatches,
    Trace,
    accumulate_gradients,
    clip_gradients,
    full_gradients,
    full_parameters,
    make_optimizer,
    step,
)
from course_lib.training import loss_of

__all__ = [
    "DDP", "accelerated_step", "accumulate_gradients", "build", "build_accelerated", "clip_gradients",
    "communication_hook", "full_gradients", "full_parameters", "make_optimizer", "step",
]  # fmt: skip


class DDP(DistributedDataParallel, Engine):
    """DistributedDataParallel, which the course's step can drive.

    DDP waits for its buckets at the end of the backward pass that is outside `no_sync()`: `finish` has nothing to do.
    """

    def mean_loss(self, share: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce(share, self.process_group, op="mean")


def build(
    model: nn.Module,
    group: dist.ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
    allow_unused: bool = False,
    wire_dtype: torch.dtype | None = None,
    trace: Trace | None = None,
    static_graph: bool = False,
) -> DDP:
    """Makes `model` data parallel over `group` with DDP; the arguments mean what they mean in parallel/data.py.

    Bytes    sent per rank and step: 2 (dp - 1) / dp * P * itemsize; the second step also broadcasts the buckets
    """
    engine = DDP(
        model,
        process_group=group,
        bucket_cap_mb=None if bucket_bytes == BUCKET_BYTES else bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        find_unused_parameters=allow_unused,
        static_graph=static_graph,
    )
    engine.trace = trace
    if wire_dtype is not None or trace is not None:
        engine.register_comm_hook(None, communication_hook(group, wire_dtype, trace))
    return engine


def communication_hook(group: dist.ProcessGroup, wire_dtype: torch.dtype | None = None, trace: Trace | None = None):
    """What DDP calls with a full bucket: divide, start the sum, return a future of the averaged buffer."""

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        start_s = time.perf_counter()
        sent_P = bucket.buffer().div_(group.size()).to(wire_dtype or bucket.buffer().dtype)
        future = dist.all_reduce(sent_P, group=group, async_op=True).get_future()
        if trace is not None:
            future = record_when_done(future, trace, f"bucket {bucket.index()}", start_s)
        return future.then(lambda _: bucket.buffer().copy_(sent_P))

    return hook


# --- the same with Accelerate


def build_accelerated(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_micro_batches: int
) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """Lets an Accelerator wrap model (in DDP) and optimizer, over all ranks.

    On a CPU `Accelerator(cpu=True)` is essential: without it each rank trains alone, and nothing says so.

    Raises   RuntimeError if the Accelerator does not see every rank
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=num_micro_batches, kwargs_handlers=[options])
    if accelerator.num_processes != dist.get_world_size():
        raise RuntimeError(
            f"Accelerator sees {accelerator.num_processes} process(es), the world has {dist.get_world_size()}: "
            "on a CPU, pass cpu=True, and create no other Accelerator before"
        )
    engine, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, engine, optimizer


def accelerated_step(
    accelerator: Accelerator, engine: nn.Module, micro_batches: MicroBatches, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    """One training step; `accumulate` decides when to average, `backward` divides by the number of micro-batches.

    Micro-batches must hold equally many tokens: here the mean over them, and over ranks, is of their means.
    """
    losses = []
    for x_BS, y_BS in micro_batches:
        with accelerator.accumulate(engine):
            loss = loss_of(engine, x_BS, y_BS)
            accelerator.backward(loss)
            optimizer.step()  # does nothing but after the last micro-batch
            optimizer.zero_grad()
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
