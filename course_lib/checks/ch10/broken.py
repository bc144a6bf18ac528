"""Table of chapter 10, exercise 8: a broken program, whose tensor-parallel ranks read different rows."""

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.checks.table import Exercise
from course_lib.compare.trials import CONFIG, micro_batches_of_rank, one_process, sgd
from course_lib.minimal.tensor import TensorParallel
from course_lib.model import build


class DataAndTensor(TensorParallel):
    """A Llama cut over pairs of ranks; pairs share the batch. Every rank is given all rows."""

    tp = 2

    def __init__(self, model, make_optimizer, world):
        self.rank, self.dp = world.rank(), world.size() // self.tp
        ranks = torch.arange(world.size()).view(self.dp, self.tp)
        pairs = [dist.new_group(of_one) for of_one in ranks.tolist()]
        peers = [dist.new_group(of_one) for of_one in ranks.T.tolist()]
        super().__init__(model, make_optimizer, pairs[self.rank // self.tp])
        self.dp_group = peers[self.rank % self.tp]

    def my_rows(self, x_BS):
        """Return this rank's share of the batch."""
        return x_BS.chunk(self.dp)[self.rank % self.dp]

    def backward(self, micro_batches):
        """Accumulate the mean gradient of my rows."""
        super().backward([tuple(map(self.my_rows, part)) for part in micro_batches])

    def update(self):
        """Average over the ranks that hold the same parts, then update."""
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.dp_group, op="mean")
        super().update()


class _RowsOfMyPair(DataAndTensor):
    op = "mean"

    def peers(self):
        return self.dp_group

    def my_rows(self, x_BS):
        return x_BS.chunk(self.dp)[self.rank // self.tp]

    def update(self):
        for param in self.model.parameters():
            param.grad = comm.all_reduce(param.grad, self.peers(), op=self.op)
        TensorParallel.update(self)


def _watch(answer, num_micro_batches):
    model, rows = build(CONFIG, dtype=torch.float64), []
    made = answer(model, sgd, dist.group.WORLD)
    made.model.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    parts = micro_batches_of_rank(0, num_micro_batches, answer)
    made.backward(parts)
    made.update()
    right = dict(one_process(CONFIG, [parts])[1].named_parameters())
    return {
        "parameters less one process's": {name: full - right[name] for name, full in made.full_parameters().items()},
        "rows that a rank computes": sum(rows),
    }


WRONG = {
    "the gradient is that of some of the rows alone": [
        DataAndTensor,
        {"my_rows": lambda self, x_BS: x_BS.chunk(self.dp)[0]},
    ],
    "all is right, but every rank computes all rows": {"my_rows": lambda self, x_BS: x_BS},
    "gradients are too long by dp": {"op": "sum"},
    "gradients are averaged over all ranks, though tp's ranks have those of different parts": {
        "peers": lambda self: dist.group.WORLD
    },
}
check_data_and_tensor = Exercise(
    _RowsOfMyPair, lambda rng: [(4, rng.choice([1, 2]))], WRONG, _watch, ranks=True, seconds=20.0
)
