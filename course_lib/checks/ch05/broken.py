"""Table of chapter 05, exercise 8: a broken program, LoRA beside columns whose copies of `a` drift apart."""

import math

import torch
import torch.distributed as dist
from torch import nn

from course_lib import comm
from course_lib.checks import Exercise, but
from course_lib.compare.trials import CONFIG, micro_batches_of_rank, sgd
from course_lib.minimal.tensor import TensorParallel, copy_in
from course_lib.model import build


class LoRAColumn(nn.Module):
    """A column-parallel layer that is frozen, and beside it LoRA's two thin matrices."""

    def __init__(self, column, group, generator, rank=4):
        super().__init__()
        (d, D), self.column, self.group = column.weight.shape, column, group
        start_rD = torch.randn(rank, D, generator=generator) / math.sqrt(D)
        self.a_rD = nn.Parameter(start_rD.to(column.weight))  # the same on every rank
        self.b_dr = nn.Parameter(column.weight.new_zeros(d, rank))  # my features

    def forward(self, x_BSD):
        """Return complete values of some features."""
        h_BSr = x_BSD @ self.a_rD.T
        return self.column(x_BSD) + h_BSr @ self.b_dr.T


class LoRATensorParallel(TensorParallel):
    """A tensor-parallel Llama that is frozen, with LoRA beside q and v of each block."""

    layer = LoRAColumn

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        self.model.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for block in self.model.blocks:
            for name in ("q", "v"):
                column = getattr(block.attention, name)
                setattr(block.attention, name, self.layer(column, group, generator))
        self.optimizer = make_optimizer(list(self.adapters().values()))

    def adapters(self):
        """Return every parameter that trains, by its name."""
        named = self.model.named_parameters()
        return {name: param for name, param in named if param.requires_grad}

    def full_parameters(self):
        """Return what a checkpoint has: rank 0's a, and b of all ranks together."""
        full = {name: param.detach() for name, param in self.adapters().items()}
        for name in full:
            if name.endswith("b_dr"):
                full[name] = comm.join(full[name], self.group, 0)
        return full


class _Sums(LoRATensorParallel):
    op, summed = "sum", "a_rD"

    def update(self):
        for name, param in self.adapters().items():
            if name.endswith(self.summed):
                param.grad = comm.all_reduce(param.grad, self.group, op=self.op)
        super().update()


class _SumsTooOften(LoRATensorParallel):
    """Sums over ranks what has arrived, after each micro-batch: earlier sums are in it."""

    def __init__(self, *args):
        super().__init__(*args)
        for name, param in self.adapters().items():
            if name.endswith("a_rD"):
                param.register_post_accumulate_grad_hook(self.sum)

    def sum(self, param):
        param.grad = comm.all_reduce(param.grad, self.group)


def _through(h_of) -> type:
    """Return the program whose b multiplies h_of(its layer, x_BSD)."""

    def forward(layer, x_BSD):
        return layer.column(x_BSD) + h_of(layer, x_BSD) @ layer.b_dr.T

    return but(LoRATensorParallel, layer=but(LoRAColumn, forward=forward))


def _watch(answer, num_micro_batches):
    """Two steps of SGD: in the first every b is zero, and so is every gradient of a."""
    made, after = answer(build(CONFIG, dtype=torch.float64), sgd, dist.group.WORLD), []
    for step in range(2):
        made.backward(micro_batches_of_rank(step, num_micro_batches, answer))
        made.update()
        after.append({name: param.clone() for name, param in made.full_parameters().items()})
    copies = [comm.all_gather(param[None], dist.group.WORLD) for name, param in after[1].items() if "a_rD" in name]
    return {
        "adapters after one step": after[0],
        "all ranks have the same a after two steps": all(torch.allclose(copy, copy[:1]) for copy in copies),
        "what the second step changed": {name: param - after[0][name] for name, param in after[1].items()},
    }


WRONG = {
    "after one step all is right; after two, each rank has another a": LoRATensorParallel,
    "all ranks have the same a, but after two steps it moved less than that of one process": {"op": "mean"},
    "with several micro-batches, earlier sums in a's gradient are summed over the ranks again": _SumsTooOften,
    "the adapters of the last block are right, those of the blocks before it are not": _through(
        lambda layer, x_BSD: copy_in(x_BSD @ layer.a_rD.T, layer.group)
    ),
    "now b is wrong too, already after one step": {"summed": ""},
}
check_lora_tensor = Exercise(
    _Sums,
    lambda rng: [(size, m) for size in [rng.choice([2, 4])] for m in (1, 3)],
    WRONG,
    _watch,
    ranks=True,
    right=_through(lambda layer, x_BSD: x_BSD @ copy_in(layer.a_rD, layer.group).T),
    seconds=20.0,
)
