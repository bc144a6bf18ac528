"""What an engine is, and the one step that every engine takes.

An engine is an nn.Module that holds a model cut or copied in its way, with the groups over which it sends. `build` of
a technique's file makes one. That file says how the model is cut and what is sent; this file does the rest:

    optimizer = make_optimizer(engine)
    loss = step(engine, micro_batches, optimizer, clip_norm=1.0)

    accumulate_gradients    forward and backward of all micro-batches, then what is summed over ranks
    clip_gradients          the norm of the whole gradient, of which a rank has a part
    update                  the optimizer, sharing what it made, forgetting the gradients
    full_parameters, full_gradients     whole tensors by the unsharded model's names, for tests and for looking

Losses and norms are those of the global batch, on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import comm
from course_lib.model.moe import balance_after_step
from course_lib.parallel.data import MicroBatches, Trace, compute_span
from course_lib.parallel.shards import ShardedAdamW
from course_lib.training.precision import MasterAdamW, gradient_of, scale_gradients, zero_gradients

# --- what an engine is


class Engine(Protocol):
    """What this file asks of an engine, beside what every nn.Module has.

    norm_groups   over which squares of gradients are added, one group after the other
    is_sharded    whether the optimizer updates shards of flat buffers
    trace         where spans are recorded, if anywhere
    """

    norm_groups: tuple[dist.ProcessGroup, ...]
    is_sharded: bool
    trace: Trace | None

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of all micro-batches; returns this rank's share of the mean loss."""

    def reduce_gradients(self) -> None:
        """Sums over ranks what backward has not summed."""

    def mean_loss(self, share: Tensor) -> Tensor:
        """The mean loss of the global batch from this rank's share."""

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        """What this rank updates: parameters or shards, each with the ranks of `norm_groups` that hold the same."""

    def share_update(self) -> None:
        """Sends what the optimizer made of shards to those that compute with it."""

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """What `tensor_of` gives of each parameter, put together over ranks, by the unsharded model's names."""


# --- the step


def accumulate_gradients(engine: Engine, micro_batches: MicroBatches) -> Tensor:
    """Leaves the gradient of the global batch in each rank's parameters, or shards; returns the mean loss.

    Give all micro-batches of a step in one call: a second one before `update` sums again what is summed already.
    """
    share = engine.run(micro_batches)
    engine.reduce_gradients()
    return engine.mean_loss(share)


@torch.no_grad()
def clip_gradients(engine: Engine, max_norm: float) -> Tensor:
    """Scales all gradients together to the norm max_norm where theirs is larger; returns the norm they had.

    No rank needs the whole gradient: each adds up the squares of what it owns, what several ranks hold is divided by
    their number, and the sums are added over ranks.

    Bytes    an all-reduce of one number over each of the engine's `norm_groups`
    """
    owned = [(param, copies) for param, copies in engine.owned() if gradient_of(param) is not None]
    first = next(engine.parameters())
    square = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    for param, copies in owned:
        square += gradient_of(param).to(square.dtype).square().sum() / copies
    for group in engine.norm_groups:
        square = comm.all_reduce(square, group)
    norm = square.sqrt()
    scale_gradients((param for param, _ in owned), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def make_optimizer(
    engine: Engine, lr: float = 3e-3, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.Optimizer:
    """AdamW over what this rank updates, with FP32 master weights where parameters have 16 bits. All may be frozen."""
    params = [param for param, _ in engine.owned()]
    if engine.is_sharded:
        return ShardedAdamW(params, lr, betas, weight_decay=weight_decay)
    optimizer_class = MasterAdamW if any(param.element_size() == 2 for param in params) else torch.optim.AdamW
    return optimizer_class([{"params": params}], lr=lr, betas=betas, weight_decay=weight_decay)


def step(
    engine: Engine, micro_batches: MicroBatches, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
) -> Tensor:
    """One training step; returns the mean loss of the global batch."""
    loss = accumulate_gradients(engine, micro_batches)
    if clip_norm is not None:
        clip_gradients(engine, clip_norm)
    update(engine, optimizer)
    return loss


def update(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """What follows the gradients: the optimizer, sharing what it made, forgetting gradients, balancing experts."""
    with compute_span(engine.trace, "optimizer"):
        optimizer.step()
    engine.share_update()
    engine.zero_grad()
    zero_gradients(engine.parameters())
    balance_after_step(engine)


# --- whole tensors, for tests and for looking


def full_parameters(engine: Engine) -> dict[str, Tensor]:
    """Every parameter whole, on each rank, by the unsharded model's names. All ranks must call it."""
    return engine.whole(lambda param: param.detach())


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """Every gradient whole, on each rank, by the unsharded model's names; those that there are."""
    return engine.whole(gradient_of)
