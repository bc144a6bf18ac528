"""Table of chapter 04, exercise 7: a broken program, whose norm counts the whole parameters once a rank."""

from functools import partial

import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.checks import Exercise, but
from course_lib.compare.trials import CONFIG, micro_batches_of_rank
from course_lib.minimal.data import DataParallel
from course_lib.minimal.zero import FlatParameter, units_of
from course_lib.model import build


class ClippingZero(DataParallel):
    """ZeRO-1 that clips, and leaves parameters of less than 3,000 elements whole on every rank."""

    smallest, max_norm = 3_000, 0.5

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.whole = [p for p in model.parameters() if p.numel() < self.smallest]
        self.flats = []
        for unit in units_of(model):
            large = [p for p in unit.parameters() if p.numel() >= self.smallest]
            self.flats += [FlatParameter(large, group)] if large else []
        self.shards = [flat.shard_p for flat in self.flats]
        self.optimizer = make_optimizer([*self.shards, *self.whole])

    def average(self):
        """Average gradients: of large parameters my shards, of small ones all of it."""
        for flat in self.flats:
            flat.reduce_scatter()
        for param in self.whole:
            param.grad = comm.all_reduce(param.grad, self.group, op="mean")

    def clip(self):
        """Scale the gradient of the whole model to a norm of at most max_norm."""
        params = [*self.shards, *self.whole]
        squares = sum(param.grad.square().sum() for param in params)
        self.norm = comm.all_reduce(squares, self.group).sqrt()
        for param in params:
            param.grad *= torch.clamp(self.max_norm / self.norm, max=1.0)

    def update(self):
        """Average, clip, update what this rank has, and gather the large parameters."""
        self.average()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


class _Clipping(ClippingZero):
    """Clips by norms of the shards and of the whole parameters."""

    def norms(self, shards, whole):
        """Return both, from the squares of mine."""
        return 2 * [(comm.all_reduce(shards, self.group) + whole).sqrt()]

    def clip(self):
        norms = self.norms(*(sum(p.grad.square().sum() for p in params) for params in (self.shards, self.whole)))
        for params, norm in zip((self.shards, self.whole), norms, strict=True):
            for param in params:
                param.grad *= min(1.0, self.max_norm / norm.item())


def _watch(answer, max_norm):
    model = build(CONFIG, dtype=torch.float64)
    before = [param.detach().clone() for param in model.parameters()]
    made = but(answer, max_norm=max_norm)(model, partial(torch.optim.SGD, lr=1.0), dist.group.WORLD)
    made.backward(micro_batches_of_rank(0, 1))
    made.update()
    steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    return {
        "the norm of the clipped gradient": torch.cat([step.flatten() for step in steps]).norm().item(),
        "the clipped gradient": steps,
    }


WRONG = {
    "the clipped gradient is shorter than max_norm": ClippingZero,
    "the clipped gradient is longer than max_norm": [
        {"norms": lambda self, shards, whole: 2 * [comm.all_reduce(shards, self.group).sqrt()]},
        {"norms": lambda self, shards, whole: 2 * [comm.all_reduce(shards + whole, self.group, op="mean").sqrt()]},
    ],
    "every rank clips by a norm of its own": {"norms": lambda self, shards, whole: 2 * [(shards + whole).sqrt()]},
    "the large and the whole parameters are scaled by two factors": {
        "norms": lambda self, shards, whole: [comm.all_reduce(shards, self.group).sqrt(), whole.sqrt()]
    },
}
check_clipping_zero = Exercise(
    _Clipping,
    lambda rng: [(size, norm) for size in [rng.choice([2, 4])] for norm in (rng.uniform(0.2, 0.6), 1e3)],
    WRONG,
    _watch,
    ranks=True,
)
