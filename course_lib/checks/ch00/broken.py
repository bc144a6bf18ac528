"""Table of chapter 00, exercise 9: a broken program, whose ranks call collectives of one shape in different orders."""

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.checks import Each, Exercise, Stops, numbers, result


class Summary:
    """Mean and largest of the values of all ranks, a batch at a time."""

    def __init__(self, group):
        self.group = group

    def add(self, batch, total, count):
        """Add the batches of all ranks to a sum and a number of values."""
        total = total + comm.all_reduce(batch.sum(), self.group)
        length = torch.tensor(len(batch), dtype=batch.dtype)
        return total, count + comm.all_reduce(length, self.group)

    def largest(self, values):
        """Return the largest value of all ranks."""
        return comm.all_reduce(values.max(), self.group, op="max")

    def of(self, values, batch_size):
        """Return (mean, largest), the same on every rank."""
        total, count = torch.zeros_like(values[0]), torch.zeros_like(values[0])
        for batch in values.split(batch_size):
            total, count = self.add(batch, total, count)
        return total / count, self.largest(values)


class _Summed(Summary):
    def mean(self, values, batch_size):
        both = torch.stack([values.sum(), torch.tensor(float(len(values))).to(values)])
        total, count = comm.all_reduce(both, self.group)
        return total / count

    def of(self, values, batch_size):
        return self.mean(values, batch_size), self.largest(values)


def _of_the_fewest(program, values, batch_size):
    shortest = -int(comm.all_reduce(torch.tensor(-float(len(values))), program.group, op="max"))
    return _Summed.mean(program, values[: shortest // batch_size * batch_size or shortest], batch_size)


def _values(rng):
    """Ranks with 1, 2, 3, ... batches, the last of them not full."""
    size = rng.choice([2, 3, 4])
    return [(size, Each([numbers(rng, 4 * rank + 3) + rank for rank in range(size)]), 4)]


def _watch(answer, values, batch_size):
    return result(answer(dist.group.WORLD).of, values[dist.get_rank()], batch_size)


WRONG = {
    "your ranks wait for each other for ever": Stops(Summary),
    "the mean is that of the ranks' means; ranks have different numbers of values": {
        "mean": lambda self, values, batch_size: comm.all_reduce(values.mean(), self.group, op="mean")
    },
    "the mean lacks the values of ranks that have more batches than others": {"mean": _of_the_fewest},
}
check_summary = Exercise(_Summed, _values, WRONG, _watch, ranks=True, seconds=3.0)
