"""One line each: what a trainer of one GPU moves, holds and learns. All train the same tiny Llama on the same tokens.

`trainer` is a class as in precision.py: trainer(model, make_optimizer), with backward(loss), update() and the fields
params and optimizer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_lib.config import ModelConfig, preset
from course_lib.measure import MemoryTracker
from course_lib.model import build
from course_lib.training import loss_of
from course_lib.validate import Positive, Seed, Size, checked

CONFIG = preset("toy")


@dataclass(frozen=True)
class TinyTraining:
    """What a short training left: the loss of each step, the share of parameters that moved, bytes by kind.

    A parameter that became infinite or NaN did not move, and the losses show it.
    `scales` are the loss scales before each step, for a trainer that has one.
    """

    losses: list[float]
    moved: float
    held_bytes: dict[str, int]
    scales: list[float]


@checked
def zipf_batch(sequences: Size = 8, seq_len: Size = 32, seed: Seed = 0) -> tuple[Tensor, Tensor]:
    """Token ids and targets at random, a few frequent and many rare, as in text: the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    frequency_V = 1.0 / torch.arange(1, CONFIG.vocab_size + 1) ** 1.5
    size = sequences * (seq_len + 1)
    rows_BS = torch.multinomial(frequency_V, size, replacement=True, generator=generator).view(sequences, seq_len + 1)
    return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()


def no_change(model: nn.Module) -> None:
    """Leave the model as it is."""


@checked
def train_tiny(
    trainer: Callable,
    dtype: torch.dtype = torch.float32,
    steps: Size = 10,
    learning_rate: Positive = 1e-5,
    change: Callable = no_change,
    config: ModelConfig = CONFIG,
) -> TinyTraining:
    """Train a small Llama with AdamW without weight decay, on one batch of tokens again and again.

    change   alters the model before the first step: it freezes parameters, or replaces layers
    """
    model, (x_BS, y_BS) = changed_model(change, config, dtype), zipf_batch()
    made = trainer(model, partial(torch.optim.AdamW, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    start = [param.detach().clone() for param in model.parameters()]
    losses, scales = [], []
    for _ in range(steps):
        scales.append(getattr(made, "scale", 1.0))
        loss = loss_of(model, x_BS, y_BS)
        made.backward(loss)
        held = held_bytes_of(made, model)
        made.update()
        losses.append(loss.item())
    pairs = zip(model.parameters(), start, strict=True)
    moved = sum(((param != before) & param.isfinite()).sum().item() for param, before in pairs)
    return TinyTraining(losses, moved / sum(before.numel() for before in start), held, scales)


def changed_model(change: Callable, config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """Build a model and change it, with the same random numbers every time."""
    torch.manual_seed(0)
    model = build(config, dtype=dtype)
    change(model)
    return model


@checked
def activation_bytes(
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    change: Callable = no_change,
    config: ModelConfig = CONFIG,
) -> int:
    """Return the most bytes that a forward pass keeps for backward; `autocast` runs matrix products in bfloat16."""
    model, (x_BS, y_BS) = changed_model(change, config, dtype), zipf_batch(seq_len=128)
    with MemoryTracker(model) as tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, x_BS, y_BS)
        loss.backward()
    return max(tracker.timeline.bytes_by_kind["activations"])


@checked
def flops_of_a_pass(change: Callable = no_change, config: ModelConfig = CONFIG) -> int:
    """Return the FLOPs of all matrix products of one forward and backward pass, as PyTorch counts them."""
    model, (x_BS, y_BS) = changed_model(change, config, torch.float32), zipf_batch(seq_len=128)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, x_BS, y_BS).backward()
    return counter.get_total_flops()


@checked
def gradients_after_training(steps: Size = 10) -> Tensor:
    """Return the gradients of the tiny Llama that differ from zero, in FP32, after some steps on fresh tokens.

    An embedding of a token that did not occur has none. The steps teach the model which tokens are rare.
    """
    model = build(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *zipf_batch(seq_len=64, seed=step)).backward()
        optimizer.step()
    grad_P = torch.cat([param.grad.flatten() for param in model.parameters()])
    return grad_P[grad_P != 0]


@checked(trainer=object)
def held_bytes_of(trainer, model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that are held now.

    Frozen weights count as parameters, also where a layer stores them as buffers; master weights count as optimizer
    states. A step counter of one element and the tables of rotary embeddings do not count.
    """
    stored = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in ("packed", "scale")]
    params = list(model.parameters())
    masters = [param for group in trainer.optimizer.param_groups for param in group["params"]]
    masters = [master for master in masters if not any(master is param for param in params)]
    states = [tensor for states in trainer.optimizer.state.values() for tensor in tree_leaves(states)]
    return {
        "parameters": _nbytes(params + stored),
        "gradients": _nbytes(param.grad for param in params if param.grad is not None),
        "optimizer": _nbytes(masters) + _nbytes(state for state in states if torch.is_tensor(state) and state.dim()),
    }


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
