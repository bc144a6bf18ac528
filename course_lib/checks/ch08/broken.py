"""Table of chapter 08, exercise 9: a broken program, whose ranks go back through micro-batches in different orders."""

import torch
import torch.distributed as dist

from course_lib.checks import Exercise, but, fresh_seed, numbers
from course_lib.compare.trials import CONFIG
from course_lib.minimal.one_f_one_b import Neighbours
from course_lib.model import build
from course_lib.training import loss_of


class AfabRank(Neighbours):
    """All forwards, then all backwards; `waiting` has what backward needs."""

    def forward(self, x, y_BS):
        """Receive, compute, send; the last rank has the loss."""
        received = self.receive(self.rank - 1)
        x = x if received is None else received.requires_grad_()
        if self.rank == self.last:
            out = loss_of(self.stage, x, y_BS) / len(self.micro_batches)
            self.loss += out.detach()
        else:
            out = self.stage(x)
            self.send(out.detach(), self.rank + 1)
        self.waiting.append((x, out))

    def backward(self):
        """Take a micro-batch, receive its gradient, and send that of its input."""
        if self.rank == self.last:
            x, loss = self.waiting.pop()
            self.start()
            loss.backward()
        else:
            x, out = self.waiting.pop(0)
            out.backward(self.receive(self.rank + 1))
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def step(self):
        """Leave the mean gradient of all micro-batches; return the loss (last rank)."""
        self.loss, self.waiting = torch.zeros(()), []
        for x, y_BS in self.micro_batches:
            self.forward(x, y_BS)
        for _ in self.micro_batches:
            self.backward()
        self.start()
        for work, _ in self.works:
            work.wait()
        return self.loss


class _Pops(AfabRank):
    """Takes the micro-batch at a place of those that wait, and the loss so many times."""

    place, factor = lambda self: 0, 1

    def backward(self):
        x, out = self.waiting.pop(self.place())
        if self.rank == self.last:
            self.waiting.append((x, out * self.factor))
        else:
            self.waiting.insert(0, (x, out))
        super().backward()


def _watch(answer, count, seed):
    text_BS = (100 * numbers(seed, 2 * count, 9)).long() % 256
    parts = [(part[:, :-1], part[:, 1:]) for part in text_BS.chunk(count)]
    made = answer(build(CONFIG, dtype=torch.float64), parts)
    loss = made.step()
    seen = {"the loss": float(loss)} if dist.get_rank() == dist.get_world_size() - 1 else {}
    return seen | {"gradients": {name: param.grad for name, param in made.stage.named_parameters()}}


WRONG = {
    "the last rank is right, and all others have gradients of the right size and another direction": [
        AfabRank,
        {"place": lambda self: 0 if self.rank == self.last else -1},
    ],
    "two ranks are right: the last one and the one before it": {
        "place": lambda self: -1 if self.rank < self.last - 1 else 0
    },
    "gradients are too long by the number of micro-batches": {"factor": 3},
}
check_afab = Exercise(
    _Pops,
    lambda rng: [(4, 3, fresh_seed(rng))],
    WRONG,
    _watch,
    right=but(_Pops, place=lambda self: -1),
    ranks=True,
    backend="gloo",
)
