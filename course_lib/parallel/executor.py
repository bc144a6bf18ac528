"""The executor of pipeline schedules: does a rank's list one instruction after the other, on real tensors.

    F     take the input that has come, run the stage, send its output on; keep what backward needs
    B     take the gradient that has come, run autograd, send the input's gradient back; forget what was kept
    I, W  the same in two parts: see weight_gradients.py

Order, receives and sends are in the list, of any schedule; what is done with a stage is its `StageRunner`'s. The one
here takes whole sequences; five_d.py has one for sequences that are cut.
"""

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.channels import receive, send
from course_lib.parallel.engine import MicroBatches, balancing_loss, cross_entropy, share_of
from course_lib.parallel.weight_gradients import WeightGradientStore
from course_lib.schedules.instructions import Instruction
from course_lib.schedules.messages import Message, Step
from course_lib.span import Span
from course_lib.training import wait_for


@dataclass(eq=False)
class Kept:
    """What a micro-batch leaves on a stage between F and its backward."""

    x: Tensor | None  # the input, which collects its gradient; None: tokens
    roots: list[Tensor | torch.autograd.graph.GradientEdge]  # where backward starts; none: nothing here trains
    queue: WeightGradientStore | None  # where weight gradients will wait, if the backward is in two parts


class StageRunner:
    """What one pass does with stages and micro-batches. Losses are shares of the mean over num_tokens."""

    def __init__(self, engine: nn.Module, num_tokens: int):
        self.engine, self.num_tokens = engine, num_tokens

    def shape_between(self, x_BS: Tensor) -> tuple[int, ...]:
        return (*x_BS.shape, self.engine.config.d_model)

    def forward(self, stage: int, x: Tensor, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        return self.engine.stages[str(stage)](x)

    def token_losses(self, logits: Tensor, y_BS: Tensor) -> Tensor:
        """The loss of each token that this rank answers for."""
        return cross_entropy(logits, y_BS)

    def share_of_balancing(self, stage: int, y_BS: Tensor) -> Tensor | None:
        """The share of the auxiliary losses of the stage's experts, once for each token.

        It stays on the stage, as a second root of its B.
        """
        auxiliary = balancing_loss(self.engine.stages[str(stage)])
        return None if auxiliary is None else share_of(auxiliary.expand(y_BS.shape), self.num_tokens)

    def before_backward(self, stage: int, is_last: bool) -> None:
        """is_last: nothing will add to the stage's gradients after this B, I or W."""

    def after_backward(self, stage: int, is_last: bool) -> None:
        """After the B, or the W, of a micro-batch."""


class Executor:
    """One pass over the list of a rank's `pipeline.Pipeline`. It holds what is on its way and what waits."""

    def __init__(self, engine: nn.Module, micro_batches: MicroBatches, runner: StageRunner | None = None):
        self.engine, self.micro_batches = engine, micro_batches
        self.runner = runner or StageRunner(engine, sum(y_BS.numel() for _, y_BS in micro_batches))
        self.steps = engine.plan_for(len(micro_batches))
        self.in_two = {(s.instruction.stage, s.instruction.micro_batch) for s in self.steps if s.instruction.op == "W"}
        self.to_come = Counter(s.instruction.stage for s in self.steps if s.instruction.op != "F")
        self.device = micro_batches[0][0].device
        loss_dtype = torch.promote_types(engine.dtype, torch.float32)
        self.loss = torch.zeros((), dtype=loss_dtype, device=self.device)
        self.inbox: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.outbox: dict[Message, tuple[dist.Work, Tensor]] = {}
        self.kept: dict[tuple[int, int], Kept] = {}
        self.waiting: dict[tuple[int, int], WeightGradientStore] = {}
        self.peak_live = self.peak_waiting = 0

    def run(self) -> Tensor:
        """Executes the list; returns the sum of this rank's shares of the loss."""
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
            x_BSD = torch.empty(self.runner.shape_between(x_BS), dtype=self.engine.dtype, device=self.device)
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
        x_BS, y_BS = self.micro_batches[micro_batch]
        queue = WeightGradientStore() if (stage, micro_batch) in self.in_two else None
        if x_BSD is not None:
            x_BSD = x_BSD.requires_grad_()
        with self.delaying(stage, queue):
            out = self.runner.forward(stage, x_BS if x_BSD is None else x_BSD, x_BS, y_BS)
            balancing = self.runner.share_of_balancing(stage, y_BS)
            if stage == self.engine.num_stages - 1:
                out = share_of(self.runner.token_losses(out, y_BS), self.runner.num_tokens)
                self.loss += out.detach()
                roots, result = [out], None
            else:
                roots, result = [edge_of(out)], out.detach()
        if balancing is not None:
            self.loss += balancing.detach()
            roots.append(balancing)
        self.kept[stage, micro_batch] = Kept(x_BSD, [root for root in roots if root is not None], queue)
        self.peak_live = max(self.peak_live, len(self.kept))
        return result

    def backward(self, stage: int, micro_batch: int, grad_BSD: Tensor | None) -> Tensor | None:
        """B, or I where the weights' part waits: the gradient of the stage's input."""
        kept = self.kept.pop((stage, micro_batch))
        is_last = self.is_last_backward(stage)
        self.runner.before_backward(stage, is_last)
        if kept.roots:
            grads = [None if isinstance(root, Tensor) else grad_BSD for root in kept.roots]  # a loss needs none
            with self.delaying(stage, None if kept.queue is None else WeightGradientStore()):  # for recomputation
                torch.autograd.backward(kept.roots, grads)
        if kept.queue is None:
            self.runner.after_backward(stage, is_last)
        else:
            self.waiting[stage, micro_batch] = kept.queue
            self.peak_waiting = max(self.peak_waiting, len(self.waiting))
        return None if kept.x is None else kept.x.grad

    def weights(self, stage: int, micro_batch: int) -> None:
        """W: the gradients of the weights."""
        is_last = self.is_last_backward(stage)
        self.runner.before_backward(stage, is_last)
        self.waiting.pop((stage, micro_batch)).run()
        self.runner.after_backward(stage, is_last)

    def is_last_backward(self, stage: int) -> bool:
        """Whether no B, I or W of the stage follows the one that begins."""
        self.to_come[stage] -= 1
        return self.to_come[stage] == 0

    def delaying(self, stage: int, queue: WeightGradientStore | None) -> AbstractContextManager:
        """Inside, the stage's weight gradients wait in the queue, if there is one."""
        return nullcontext() if queue is None else self.engine.delayed[stage].into(queue)


def edge_of(out: Tensor) -> torch.autograd.graph.GradientEdge | None:
    """Where backward starts. Unlike the output itself it does not keep the output's numbers."""
    return torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None
