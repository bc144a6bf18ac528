"""The executor of pipeline schedules: does a rank's list one instruction after the other, on real tensors.

    F     take the input that has come, run the stage, send its output on; keep what backward needs
    B     take the gradient that has come, run autograd, send the input's gradient back; forget what was kept
    I, W  the same in two parts: see deferred.py

It knows nothing of any schedule: order, receives and sends are in the list of `channels.plan`.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.instructions import Instruction
from course_lib.parallel.channels import Message, Step, receive, send
from course_lib.parallel.data import MicroBatches
from course_lib.parallel.deferred import WeightQueue
from course_lib.timing import Span
from course_lib.training import loss_of, wait_for


@dataclass(eq=False)
class Kept:
    """What a micro-batch leaves on a stage between F and its backward."""

    x: Tensor | None  # the input, which collects its gradient; None: tokens
    root: Tensor | torch.autograd.graph.GradientEdge | None  # where backward starts; None: nothing here trains
    queue: WeightQueue | None  # where weight gradients will wait, if the backward is in two parts


class Executor:
    """One pass over the list of a rank's `pipeline.Pipeline`. It holds what is on its way and what waits."""

    def __init__(self, engine: nn.Module, micro_batches: MicroBatches):
        self.engine, self.micro_batches = engine, micro_batches
        self.steps = engine.plan_for(len(micro_batches))
        self.in_two = {(s.instruction.stage, s.instruction.micro_batch) for s in self.steps if s.instruction.op == "W"}
        self.num_tokens = sum(y_BS.numel() for _, y_BS in micro_batches)
        self.device = micro_batches[0][0].device
        loss_dtype = torch.promote_types(engine.dtype, torch.float32)
        self.loss = torch.zeros((), dtype=loss_dtype, device=self.device)
        self.inbox: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.outbox: dict[Message, tuple[dist.Work, Tensor]] = {}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.waiting: dict[tuple[int, int], WeightQueue] = {}
        self.peak_live = self.peak_waiting = 0

    def run(self) -> Tensor:
        """Executes the list; returns the sum of this rank's losses: the mean loss on the last stage's, else 0."""
        for step in self.steps:
            self.pass_on(step, self.compute(step.instruction, self.communicate(step)))
        for work, _ in self.outbox.values():
            work.wait()
        return self.loss

    # what comes and goes

    def communicate(self, step: Step) -> Tensor | None:
        """Posts the receives that are due, waits for what the instruction needs, forgets sends that have come."""
        for message, src in step.post:
            x_BS = self.micro_batches[message[1]][0]
            x_BSD = torch.empty(*x_BS.shape, self.engine.config.d_model, dtype=self.engine.dtype, device=self.device)
            self.inbox[message] = receive(x_BSD, self.engine.channels[src, self.engine.group.rank()]), x_BSD
        if step.needs is None:
            return None
        work, x_BSD = self.inbox.pop(step.needs)
        if work is not None:
            work.wait()
        for message in step.arrived:
            self.outbox.pop(message)[0].wait()
        return x_BSD

    def pass_on(self, step: Step, result: Tensor | None) -> None:
        """Sends what the instruction made, or keeps it for another stage of this rank."""
        if step.gives is None:
            return
        if step.dst is None:
            self.inbox[step.gives] = None, result
        else:
            result = result.contiguous()
            self.outbox[step.gives] = send(result, self.engine.channels[self.engine.group.rank(), step.dst]), result

    # what is computed

    def compute(self, one: Instruction, came: Tensor | None) -> Tensor | None:
        """Runs one instruction, and records when. `came` is forgotten on return: nothing lives longer than it must."""
        start_s = time.perf_counter()
        if one.op == "F":
            result = self.forward(one.stage, one.micro_batch, came)
        elif one.op == "W":
            result = self.weights(one.stage, one.micro_batch)
        else:
            result = self.backward(one.stage, one.micro_batch, came)
        if self.engine.trace is not None:
            wait_for(self.device)
            stop_s = time.perf_counter()
            self.engine.trace.append(Span(self.engine.group.rank(), "compute", str(one), start_s, stop_s))
        return result

    def forward(self, stage: int, micro_batch: int, x_BSD: Tensor | None) -> Tensor | None:
        """F: the stage's output, or nothing and the loss counted."""
        module, (x_BS, y_BS) = self.engine.stages[str(stage)], self.micro_batches[micro_batch]
        queue = WeightQueue() if (stage, micro_batch) in self.in_two else None
        if x_BSD is not None:
            x_BSD = x_BSD.requires_grad_()
        with self.deferring(stage, queue):
            if stage == self.engine.num_stages - 1:
                out = loss_of(module, x_BS if x_BSD is None else x_BSD, y_BS) * (y_BS.numel() / self.num_tokens)
                self.loss += out.detach()
                root, result = out, None
            else:
                out = module(x_BS if x_BSD is None else x_BSD)
                root, result = edge_of(out), out.detach()
        self.kept[stage, micro_batch] = Kept(x_BSD, root, queue)
        self.peak_live = max(self.peak_live, len(self.kept))
        return result

    def backward(self, stage: int, micro_batch: int, grad_BSD: Tensor | None) -> Tensor | None:
        """B, or I where the weights' part waits: the gradient of the stage's input."""
        kept = self.kept.pop((stage, micro_batch))
        if kept.root is not None:
            with self.deferring(stage, None if kept.queue is None else WeightQueue()):  # for recomputation
                torch.autograd.backward((kept.root,), None if grad_BSD is None else (grad_BSD,))
        if kept.queue is not None:
            self.waiting[stage, micro_batch] = kept.queue
            self.peak_waiting = max(self.peak_waiting, len(self.waiting))
        return None if kept.x is None else kept.x.grad

    def weights(self, stage: int, micro_batch: int) -> None:
        """W: the gradients of the weights."""
        self.waiting.pop((stage, micro_batch)).run()

    def deferring(self, stage: int, queue: WeightQueue | None) -> AbstractContextManager:
        """Inside, the stage's weight gradients wait in the queue, if there is one."""
        return nullcontext() if queue is None else self.engine.deferrals[stage].into(queue)


def edge_of(out: Tensor) -> torch.autograd.graph.GradientEdge | None:
    """Where backward starts. Unlike the output itself it does not keep the output's numbers."""
    return torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None
