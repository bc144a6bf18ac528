"""Table of chapter 09, exercise 7: a broken program, which draws the same experts on every rank."""

import math

import torch
import torch.distributed as dist
from torch import nn

from course_lib import comm
from course_lib.checks import Exercise, fresh_seed
from course_lib.minimal.experts import ExpertParallelMoE


class DrawnMoE(ExpertParallelMoE):
    """An expert-parallel layer that draws its weights where they are used."""

    def __init__(self, num_experts, d_model, d_expert, k, group, seed=0):
        nn.Module.__init__(self)
        self.k, self.group = k, group
        self.sizes, self.seed = (d_model, d_expert), seed
        torch.manual_seed(seed)  # the router must be the same on every rank
        self.router = nn.Linear(d_model, num_experts, bias=False)
        each = num_experts // group.size()
        first = group.rank() * each
        mine = range(first, first + each)
        self.experts = nn.ModuleDict({str(e): self.draw(e) for e in mine})

    def draw(self, number):
        """Return the expert of this number."""
        D, F = self.sizes
        up, down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)
        return nn.Sequential(up, nn.SiLU(), down)


class _Seeds(DrawnMoE):
    def seed_of(self, number):
        return 1000 * self.seed + number

    def draw(self, number):
        torch.manual_seed(self.seed_of(number))
        return super().draw(number)


class _SeedsOnce(DrawnMoE):
    """Seeds by rank behind the router, with a sum: another seed's ranks have the same."""

    begun = False

    def draw(self, number):
        if not self.begun:
            torch.manual_seed(self.seed + 1 + self.group.rank())
        self.begun = True
        return super().draw(number)


class _SeedsRanks(DrawnMoE):
    def __init__(self, *args, seed=0):
        super().__init__(*args, seed=seed + args[-1].rank())


class _SendsRank0sRouter(_SeedsRanks):
    """Right: each rank draws all of its own, then takes the router of rank 0."""

    def __init__(self, *args, seed=0):
        super().__init__(*args, seed=1000 * seed)
        dist.broadcast(self.router.weight.data, src=0, group=self.group)


def _weights(layer) -> tuple:
    """Return the routers of all ranks, and all experts, a row each."""
    rows = [torch.cat([p.detach().flatten() for p in expert.parameters()]) for expert in layer.experts.values()]
    return comm.all_gather(layer.router.weight.detach()[None], layer.group), comm.all_gather(
        torch.stack(rows), layer.group
    )


def _watch(answer, seed):
    made, other = (answer(8, 16, 24, 2, dist.group.WORLD, seed=seed % 10**6 + more) for more in (0, 1))
    (routers, experts), (_, others) = _weights(made), _weights(other)
    x_TD = torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
    return {
        "ranks with rank 0's router": int((routers == routers[:1]).flatten(1).all(1).sum()),
        "different experts": len(experts.unique(dim=0)),
        "experts that another seed draws again": int((experts[:, None] == others).all(-1).any(1).sum()),
        "weights have the spread of nn.Linear's": bool(abs(experts[:, : 16 * 24].std() * math.sqrt(3 * 16) - 1) < 0.15),
        "the shape of what the layer returns": list(made(x_TD).shape),
    }


WRONG = {
    "several experts begin with the same weights": [DrawnMoE, {"seed_of": lambda self, number: self.seed}],
    "some experts are those of another seed: seed plus number, or plus rank, is also another seed's": [
        {"seed_of": lambda self, number: self.seed + number},
        _SeedsOnce,
    ],
    "ranks have different routers": _SeedsRanks,
    "another seed draws the same experts": {"seed_of": lambda self, number: number},
}
check_drawn = Exercise(
    _Seeds, lambda rng: [(rng.choice([2, 4]), fresh_seed(rng))], WRONG, _watch, right=_SendsRank0sRouter, ranks=True
)
