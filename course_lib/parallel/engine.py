"""What an engine is, and the one step that every engine takes.

An engine is an nn.Module that holds a model cut or copied in its way, with the groups over which it sends. A
technique's file, of this folder or of native/, says how the model is cut and what is sent; this file does the rest:

    engine = build(model, group)                            # of the technique's file; changes the model in place
    optimizer = make_optimizer(engine)
    loss = step(engine, micro_batches, optimizer, clip_norm=1.0)

Losses and norms are those of the global batch, on every rank.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import comm
from course_lib.model.moe import balance_after_step, count_load, moe_losses
from course_lib.span import Span
from course_lib.training.precision import MasterAdamW, gradient_of, scale_gradients, zero_gradients

Trace = list[Span]
NamedParameter = tuple[str, nn.Parameter]
MicroBatches = Sequence[tuple[Tensor, Tensor]]  # (inputs, targets) of this rank


def trainable(model: nn.Module) -> list[NamedParameter]:
    """Parameters that get a gradient, each once: a tied one has two names and one gradient, a frozen one has none."""
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def compute_span(trace: Trace | None, name: str, lane: str = "compute") -> Iterator[None]:
    """Records what runs inside as a Span; without a trace it does nothing."""
    start_s = time.perf_counter()
    yield
    if trace is not None:
        trace.append(Span(dist.get_rank(), lane, name, start_s, time.perf_counter()))


class Engine(Protocol):
    """What this file asks of an engine, beside what every nn.Module has. A technique replaces what is otherwise there.
    module        the model; an engine that has none replaces what uses it
    loss_group    over which shares of the loss are added, or with loss_op "mean" averaged; None: a rank's is the whole
    loss_copies   ranks of it that have the same share
    norm_groups   over which squares of gradients are added, one group after the other
    is_sharded    whether the optimizer updates shards of flat buffers
    trace         where spans are recorded, if anywhere
    """

    module: nn.Module
    loss_group: dist.ProcessGroup | None = None
    loss_op: str = "sum"
    loss_copies: int = 1
    norm_groups: tuple[dist.ProcessGroup, ...] = ()
    is_sharded: bool = False
    trace: Trace | None = None

    def run(self, micro_batches: MicroBatches) -> Tensor:
        """Forward and backward of all micro-batches; returns this rank's share of the mean loss."""
        return one_after_another(self, micro_batches)

    def count_tokens(self, micro_batches: MicroBatches) -> float:
        """The tokens over which shares of the loss are taken."""
        return sum(y_BS.numel() for _, y_BS in micro_batches)

    def token_losses(self, x_BS: Tensor, y_BS: Tensor) -> Tensor:
        """The loss of each token of a micro-batch that this rank answers for."""
        return cross_entropy(self(x_BS), y_BS)

    def share_of_loss(self, x_BS: Tensor, y_BS: Tensor, num_tokens: float) -> Tensor:
        """What one micro-batch adds to the mean loss of num_tokens tokens, what balances experts included."""
        return share_of(self.token_losses(x_BS, y_BS), num_tokens, balancing_loss(self))

    def no_sync(self) -> AbstractContextManager:
        """Around every micro-batch but the last: nothing to hold back where only `finish` sends."""
        return nullcontext()

    def finish(self) -> None:
        """Sums over ranks what backward has not summed, and waits for what it has begun to sum."""

    def mean_loss(self, share: Tensor) -> Tensor:
        """The mean loss of the global batch from this rank's share."""
        if self.loss_group is None:
            return share
        return comm.all_reduce(share / self.loss_copies, self.loss_group, op=self.loss_op)

    def owned(self) -> Iterator[tuple[nn.Parameter, int]]:
        """What this rank updates: parameters or shards, each with the ranks of `norm_groups` that hold the same."""
        return ((param, 1) for _, param in trainable(self.module))

    def share_update(self) -> None:
        """Sends what the optimizer made of shards to those that compute with it."""

    def whole(self, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """What `tensor_of` gives of each parameter, put together over ranks, by the unsharded model's names."""
        tensors = {name: tensor_of(param) for name, param in self.module.named_parameters()}
        return {name: x.clone() for name, x in tensors.items() if x is not None}


class ModelEngine(nn.Module, Engine):
    """An engine around one model: called as the model is, with parameters under the model's names."""

    def __init__(self, module: nn.Module, trace: Trace | None = None) -> None:
        super().__init__()
        self.module, self.config, self.trace = module, module.config, trace

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def named_parameters(self, *args, **kwargs) -> Iterator[NamedParameter]:
        return self.module.named_parameters(*args, **kwargs)


def cross_entropy(logits_BSV: Tensor, y_BS: Tensor) -> Tensor:
    """Cross-entropy of each token, in float32 at least."""
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten(), reduction="none").view_as(y_BS)


def balancing_loss(module: nn.Module) -> Tensor | None:
    """In training the loss that balances experts, after their load is counted; None where there is none."""
    if not module.training:
        return None
    auxiliary = moe_losses(module)  # also without tokens: it sums the load over ranks
    count_load(module)
    return auxiliary


def share_of(losses: Tensor, num_tokens: float, auxiliary: Tensor | None = None) -> Tensor:
    """What the losses of some tokens, one each, add to the mean over num_tokens: the one rule of all engines.

    Whose tokens num_tokens counts decides how ranks' shares become the mean. All ranks' tokens: the sum of shares, and
    gradients are summed. One rank's: the mean of shares, and gradients are averaged. Perhaps no token is here.
    auxiliary   a loss of these tokens together, such as that which balances experts: it counts by their number
    """
    share = losses.sum() / num_tokens
    return share if auxiliary is None or not losses.numel() else share + auxiliary * (losses.numel() / num_tokens)


def one_after_another(engine: Engine, micro_batches: MicroBatches) -> Tensor:
    """Forward and backward of one micro-batch after the other; returns this rank's share of the mean loss.

    Each micro-batch's mean counts by its share of the tokens.
    """
    num_tokens, losses = engine.count_tokens(micro_batches), []
    for index, (x_BS, y_BS) in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else engine.no_sync():
            with compute_span(engine.trace, "forward"):
                loss = engine.share_of_loss(x_BS, y_BS, num_tokens)
            with compute_span(engine.trace, "backward"):
                loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def check_micro_batches(engine: Engine, micro_batches: MicroBatches) -> None:
    """Raises ValueError if there is none, or one that does not fit an engine whose ranks bring the same ones."""
    if len(micro_batches) == 0:
        raise ValueError("there are no micro-batches; give a list of one (x_BS, y_BS) or more")
    for index, (x_BS, y_BS) in enumerate(micro_batches):
        if x_BS.dim() != 2 or x_BS.shape != y_BS.shape:
            raise ValueError(
                f"micro-batch {index} has inputs {tuple(x_BS.shape)} and targets {tuple(y_BS.shape)}; "
                "both must be B x S, alike"
            )
        if engine.config.family == "gpt" and x_BS.shape[1] > engine.config.max_seq_len:
            raise ValueError(
                f"micro-batch {index} has {x_BS.shape[1]} tokens; max_seq_len is {engine.config.max_seq_len}"
            )


def accumulate_gradients(engine: Engine, micro_batches: MicroBatches) -> Tensor:
    """Leaves the gradient of the global batch in each rank's parameters, or shards; returns the mean loss.

    Give all micro-batches of a step in one call: a second one before `update` sums again what is summed already.
    Every target counts: micro-batches weigh by their tokens, which is wrong where cross-entropy ignores some (-100). To
    leave tokens out, multiply their losses by zero.
    """
    share = engine.run(micro_batches)
    engine.finish()
    return engine.mean_loss(share)


@torch.no_grad()
def clip_gradients(engine: Engine, max_norm: float) -> Tensor:
    """Scales all gradients together to the norm max_norm where theirs is larger; returns the norm they had.

    No rank needs the whole gradient: each adds up the squares of what it owns, what several ranks hold is divided by
    their number, and the sums are added over ranks.
    Bytes    an all-reduce of one number over each of the engine's `norm_groups`
    Raises   ValueError if this rank trains something and has no gradient
    """
    trained = list(engine.owned())
    owned = [(param, copies) for param, copies in trained if gradient_of(param) is not None]
    if trained and not owned:
        raise ValueError("no parameter has a gradient to clip; call accumulate_gradients first")
    first = next(engine.parameters())
    square = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    for param, copies in owned:
        square += local(gradient_of(param)).to(square.dtype).square().sum() / copies
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
    has_masters = engine.is_sharded or any(param.element_size() == 2 for param in params)
    optimizer_class = MasterAdamW if has_masters else torch.optim.AdamW
    kinds = {type(param) for param in params} or {nn.Parameter}  # on a GPU one call cannot update DTensors and others
    groups = [{"params": [param for param in params if type(param) is kind]} for kind in sorted(kinds, key=str)]
    return optimizer_class(groups, lr=lr, betas=betas, weight_decay=weight_decay)


def step(
    engine: Engine, micro_batches: MicroBatches, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
) -> Tensor:
    """One training step; returns the mean loss of the global batch."""
    loss = accumulate_gradients(engine, micro_batches)
    if clip_norm is not None:
        clip_gradients(engine, clip_norm)
    update(engine, optimizer)
    return loss


class StepNumbers(NamedTuple):
    """What a step says of itself: the mean loss of all ranks, this rank's share of it, the gradient norm of all."""

    loss: Tensor
    share: Tensor
    norm: Tensor


def measured_step(
    engine: Engine, micro_batches: MicroBatches, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
) -> StepNumbers:
    """`step`, with the gradient norm before clipping and this rank's share of the loss."""
    share = engine.run(micro_batches)
    engine.finish()
    loss = engine.mean_loss(share)
    norm = clip_gradients(engine, math.inf if clip_norm is None else clip_norm)
    update(engine, optimizer)
    return StepNumbers(loss, share, norm)


def update(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """What follows the gradients: the optimizer, sharing what it made, forgetting gradients, balancing experts."""
    with compute_span(engine.trace, "optimizer"):
        optimizer.step()
    engine.share_update()
    engine.zero_grad()
    zero_gradients(engine.parameters())
    balance_after_step(engine)


def full_parameters(engine: Engine) -> dict[str, Tensor]:
    """Every parameter whole, on each rank, by the unsharded model's names. All ranks must call it."""
    return engine.whole(lambda param: param.detach())


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """Every gradient whole, on each rank, by the unsharded model's names; those that there are."""
    return engine.whole(gradient_of)
