"""Table of chapter 07, exercise 8: a broken program, whose zigzag tokens have the positions of neighbours."""

import torch
import torch.nn.functional as F

from course_lib import comm
from course_lib.checks.table import Exercise
from course_lib.compare.record import Record
from course_lib.compare.trials import as_context_step
from course_lib.minimal.ring_attention import contiguous, use_ring, zigzag


class ZigzagStep:
    """One step of context parallelism: tokens cut in zigzag, attention by the ring."""

    def __init__(self, model, group, cut=zigzag):
        self.model, self.group, self.cut = model, group, cut

    def mine(self, x_BS, y_BS):
        """Return my tokens, their labels and their positions."""
        mine_s = self.where[self.group.rank()]
        start = self.group.rank() * len(mine_s)
        positions_s = torch.arange(start, start + len(mine_s))
        return x_BS[:, mine_s], y_BS[:, mine_s], positions_s

    def loss(self, x_BS, y_BS):
        """Return my tokens' part of the mean loss over all tokens."""
        x_Bs, y_Bs, positions_s = self.mine(x_BS, y_BS)
        logits_TV = self.model(x_Bs, positions_s).flatten(0, 1)
        losses = F.cross_entropy(logits_TV, y_Bs.flatten(), reduction="sum")
        return losses / y_BS.numel()

    def step(self, x_BS, y_BS):
        """Leave the gradient of the full mean loss on every rank; return that loss."""
        self.where = self.cut(x_BS.shape[1], self.group.size())
        use_ring(self.model, self.where, self.group)
        loss = self.loss(x_BS, y_BS)
        loss.backward()
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.group)
        return comm.all_reduce(loss.detach(), self.group)


class _Positioned(ZigzagStep):
    """Says itself where its tokens stand: positions(rank, ranks)."""

    def positions(self, rank, size):
        return self.where[rank]

    def mine(self, x_BS, y_BS):
        x_Bs, y_Bs, _ = super().mine(x_BS, y_BS)
        return x_Bs, y_Bs, self.positions(self.group.rank(), self.group.size())


def _watch(answer, seq_len):
    made, record = [], Record()

    def step(model, x_BS, y_BS, where, group):
        made.append(answer(model, group))
        return made[0].step(x_BS, y_BS)

    as_context_step(record, step, seq_len)
    seen = [sum(int((mine_s[:, None] >= other_s).sum()) for other_s in made[0].where) for mine_s in made[0].where]
    return {
        "relative errors": {name: round(match.error, 9) for name, match in record.matches.items()},
        "ranks look at equally many keys": max(seen) == min(seen),
    }


WRONG = {
    "every gradient is off, and the loss a little": ZigzagStep,
    "every gradient is still off, in another way than the program's": [
        {"positions": lambda self, rank, size: torch.arange(len(self.where[rank]))},
        {"positions": lambda self, rank, size: torch.arange(rank, size * len(self.where[rank]), size)},
    ],
    "all is right, but some ranks look at more keys than others": {
        "__init__": lambda self, model, group: ZigzagStep.__init__(self, model, group, contiguous)
    },
}
check_zigzag_step = Exercise(
    _Positioned, lambda rng: [(rng.choice([2, 4]), 8 * rng.randrange(3, 8))], WRONG, _watch, ranks=True
)
