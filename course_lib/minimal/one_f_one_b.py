"""Pipeline parallelism without options: one stage per rank, and for each rank a list of words that it executes.

    F3   forward of micro-batch 3             B3   its backward
    I3   gradient of the stage's input        W3   gradients of its weights: the two halves of B3

A schedule is one such list for each rank; `schedules.simulate` says when each instruction ends, `PipelineRank`
executes a list. The engine in parallel/pipeline.py adds several stages per rank, receives that are started early,
messages that are forgotten once they have arrived, weight gradients that cost nothing twice, tied embeddings and
uneven cuts.

Source   Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2021 (arXiv:2104.04473), section 2.2
"""

import torch
import torch.distributed as dist
from torch import nn

from course_lib.model import rope_tables
from course_lib.training import loss_of


class Stage(nn.Module):
    """Consecutive blocks of a Llama; the first stage embeds, the last gives logits."""

    def __init__(self, model, stage, num_stages):
        super().__init__()
        self.config, size = model.config, len(model.blocks) // num_stages
        numbers = range(stage * size, (stage + 1) * size)
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in numbers})
        is_last = stage == num_stages - 1
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()

    def forward(self, x):
        """Tokens (first stage) or hidden states in; hidden states or logits out."""
        x = self.embed(x)
        # rotary positions: a cosine and a sine for each position, the same in every block
        tables = rope_tables(self.config, torch.arange(x.shape[1]), x.dtype)
        for block in self.blocks.values():
            x = block(x, *tables)
        return self.head(self.norm(x))


class Neighbours:
    """This rank's stage, and its messages to the rank before and the rank behind."""

    def __init__(self, model, micro_batches):
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.stage = Stage(model, self.rank, self.last + 1)
        self.micro_batches, self.in_flight = micro_batches, {}
        self.to_send, self.works = [], []

    def send(self, x_BSD, dst):
        """Leave a message, which the next `start` sends."""
        self.to_send.append(dist.P2POp(dist.isend, x_BSD, dst))

    def start(self, *receive):
        """Start to send and to receive, all in one call."""
        messages, self.to_send = [*self.to_send, *receive], []
        if messages:  # `works` holds them: a sent tensor must stay until it has arrived
            self.works += [(work, messages) for work in dist.batch_isend_irecv(messages)]

    def receive(self, src):
        """Send, and wait for hidden states or their gradient; None if there is no src."""
        if src not in range(self.last + 1):
            return self.start()
        shape_BSD = (*self.micro_batches[0][0].shape, self.stage.config.d_model)
        dtype = next(self.stage.parameters()).dtype
        x_BSD = torch.empty(shape_BSD, dtype=dtype)
        self.start(dist.P2POp(dist.irecv, x_BSD, src))
        self.works.pop()[0].wait()  # the receive is the last message
        return x_BSD


class PipelineRank(Neighbours):
    """Executes a list of words: what F and B do on this rank."""

    def F(self, i):
        """Forward: receive, compute, send; keep what backward needs."""
        x, y_BS = self.micro_batches[i]
        received = self.receive(self.rank - 1)
        x = x if received is None else received.requires_grad_()
        if self.rank == self.last:
            out = loss_of(self.stage, x, y_BS) / len(self.micro_batches)
        else:
            out = self.stage(x)
            self.send(out.detach(), self.rank + 1)
        self.in_flight[i] = x, out

    def B(self, i):
        """Backward: receive the gradient of the output, send that of the input."""
        x, out = self.in_flight.pop(i)
        out.backward(self.receive(self.rank + 1))
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def run(self, words):
        """Execute a list such as ["F0", "B0"]; gradients add up in the stage."""
        for word in words:
            getattr(self, word[0])(int(word[1:]))
        self.start()
        for work, _ in self.works:
            work.wait()


class SplitRank(PipelineRank):
    """Backward in two halves: I now, because a rank waits for it, and W later."""

    def I(self, i):
        """The gradient of the input alone; W will find what it needs."""
        x, out = self.in_flight.pop(i)
        grad = self.receive(self.rank + 1)
        if self.rank > 0:
            (grad_x,) = torch.autograd.grad(out, x, grad, retain_graph=True)
            self.send(grad_x, self.rank - 1)
        self.in_flight["W", i] = out, grad

    def W(self, i):
        """The gradients of the weights alone; what I sent need not wait for them."""
        self.start()
        out, grad = self.in_flight.pop(("W", i))
        weights = list(self.stage.parameters())
        torch.autograd.backward(out, grad, inputs=weights)


def naive(p, m):
    """One micro-batch after the other, through all stages and back."""
    return [[f"{op}{i}" for i in range(m) for op in "FB"]] * p


def afab(p, m):
    """All forwards, then all backwards."""
    return [[f"{op}{i}" for op in "FB" for i in range(m)]] * p


def one_f_one_b(p, m):
    """Warm-up, then one forward and one backward in turn, then cool-down."""
    lists = []
    for rank in range(p):
        warm_up = min(p - 1 - rank, m)
        words = [f"F{i}" for i in range(warm_up)]
        for i in range(warm_up, m):
            words += [f"F{i}", f"B{i - warm_up}"]
        words += [f"B{i}" for i in range(m - warm_up, m)]
        lists.append(words)
    return lists
