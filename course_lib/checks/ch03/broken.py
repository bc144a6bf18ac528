"""Table of chapter 03, exercise 8: a broken program, whose ranks shuffle differently from the second epoch on."""

from itertools import chain

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.checks import Exercise, fresh_seed, numbers
from course_lib.config import ModelConfig
from course_lib.model import build
from course_lib.training import loss_of

_TINY = ModelConfig("tiny", 1, 8, num_heads=2, num_kv_heads=2, d_ff=16, vocab_size=64, max_seq_len=8)
_ROWS, _EPOCHS = 64, 3


class RowTrainer:
    """Takes every row once in each epoch, in a new random order; a step's rows are dealt to the ranks."""

    def __init__(self, model, group, lr=0.1):
        torch.manual_seed(0)  # the same on every rank
        self.model, self.group = model, group
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def order(self, epoch, num_rows):
        """Return the numbers of all rows in the order of this epoch."""
        return torch.randperm(num_rows)

    def step(self, rows_BS):
        """Average the gradients of all ranks' rows, and update; return the mean loss."""
        loss = loss_of(self.model, rows_BS[:, :-1], rows_BS[:, 1:])
        loss.backward()
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.group, op="mean")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return comm.all_reduce(loss.detach(), self.group, op="mean").item()

    def log(self, epoch, losses, rows_NS):
        """Rank 0 prints the loss, and how a row begins that nobody chose."""
        if self.group.rank() == 0:
            row_S = rows_NS[torch.randint(len(rows_NS), (1,))][0]
            print(f"epoch {epoch}: loss {losses[-1]:.3f}, row {row_S[:4].tolist()}")

    def train(self, rows_NS, epochs, batch_size):
        """Return the loss of every step."""
        losses = []
        for epoch in range(epochs):
            for batch_B in self.order(epoch, len(rows_NS)).split(batch_size):
                mine_b = batch_B[self.group.rank() :: self.group.size()]
                losses.append(self.step(rows_NS[mine_b]))
            self.log(epoch, losses, rows_NS)
        return losses


class _Seeds(RowTrainer):
    def seed(self, epoch):
        return epoch

    def order(self, epoch, num_rows):
        return torch.randperm(num_rows, generator=torch.Generator().manual_seed(self.seed(epoch)))


class _OrderOfRank0(RowTrainer):
    def order(self, epoch, num_rows):
        order_N = super().order(epoch, num_rows)
        dist.broadcast(order_N, src=0, group=self.group)
        return order_N


def _watch(answer, seed):
    """Rows begin with their own number. One process repeats the steps with the rows that all ranks took."""
    rows_NS = torch.cat([torch.arange(_ROWS)[:, None], numbers(seed, _ROWS, 4).argsort(0)], dim=1)
    model, again, taken = build(_TINY, dtype=torch.float64), build(_TINY, dtype=torch.float64), []
    made = answer(model, dist.group.WORLD, lr=0.5)
    model.register_forward_pre_hook(lambda _, args: taken.append(args[0][:, 0].tolist()))
    losses = made.train(rows_NS, _EPOCHS, 8)
    steps = [list(chain(*parts)) for parts in zip(*comm.all_gather_json(taken, dist.group.WORLD), strict=True)]
    optimizer = torch.optim.SGD(again.parameters(), lr=0.5)
    for rows in steps:
        loss_of(again, rows_NS[rows, :-1], rows_NS[rows, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    epochs = [list(chain(*steps[i : i + _ROWS // 8])) for i in range(0, len(steps), _ROWS // 8)]
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return {
        "whether an epoch takes every row once": [sorted(rows) == list(range(_ROWS)) for rows in epochs],
        "orders": len({tuple(rows) for rows in epochs}),
        "losses": len(losses),
        "weights are those of one process with the same rows": all(torch.allclose(*pair) for pair in pairs),
    }


WRONG = {
    "the first epoch is right; in later ones some rows are taken twice and others by nobody": RowTrainer,
    "already in the first epoch some rows are taken twice and others by nobody": {
        "seed": lambda self, epoch: 10 * epoch + self.group.rank()
    },
    "every row is taken once in an epoch, but all epochs have the same order": {"seed": lambda self, epoch: 0},
}
check_row_trainer = Exercise(
    _Seeds, lambda rng: [(rng.choice([2, 4]), fresh_seed(rng))], WRONG, _watch, ranks=True, right=_OrderOfRank0
)
