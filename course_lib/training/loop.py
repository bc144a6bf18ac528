"""The single-process reference: what every parallel version of the course must equal.

batch -> micro-batches -> loss -> backward -> clip -> AdamW
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.config import TrainSettings
from course_lib.model.moe import add_balancing, balance_after_step
from course_lib.training.data import micro_batches
from course_lib.training.precision import (
    PRECISIONS,
    LossScaler,
    MasterAdamW,
    Precision,
    accumulate_in_fp32,
    autocast_for,
    clip_gradients,
    precision_named,
    zero_gradients,
)
from course_lib.validate import Amount, Positive, Size, checked


@dataclass(frozen=True)
class TrainConfig(TrainSettings):
    """How to train: `batch_size` sequences a step, cut into `micro_batches` parts that run one after the other.
    Raises   ValueError where a number makes no sense
    """

    steps: Size = 50
    batch_size: Size = 8
    micro_batches: Size = 1
    precision: Literal[tuple(PRECISIONS)] = "fp32"

    def __post_init__(self):
        super().__post_init__()
        if self.micro_batches > self.batch_size:
            raise ValueError(
                f"micro_batches ({self.micro_batches}) must not exceed batch_size ({self.batch_size}): "
                "each part needs a sequence"
            )


def loss_of(model: nn.Module, x_BS: Tensor, y_BS: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, computed in FP32 at least.

    A model with experts, in training mode: their auxiliary losses are added, and their load is counted.
    Bytes    kept for backward: 4 V per token (the log-softmax), whatever the precision of the logits
    """
    logits_BSV = model(x_BS)
    logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    loss = F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten())
    return add_balancing(model, loss) if model.training else loss


@checked(count=Size, scale=Positive)
def accumulate_gradients(
    model: nn.Module, x_BS: Tensor, y_BS: Tensor, count: int = 1, precision: Precision | None = None, scale: float = 1.0
) -> float:
    """Adds to the gradients those of the whole batch's mean loss, from `count` micro-batches. Returns that loss.

    Each micro-batch's mean counts by its share of the tokens. With equal parts that is 1 / count; forget it and the
    gradient is `count` times too large, which AdamW hides.
    """
    total = torch.zeros((), device=x_BS.device)
    for x_part, y_part in micro_batches(x_BS, y_BS, count):
        with autocast_for(precision or precision_named("fp32"), x_BS.device):
            loss = loss_of(model, x_part, y_part) * (y_part.numel() / y_BS.numel())
        (loss * scale).backward()
        total = total + loss.detach()
    return total.item()


@checked
def make_optimizer(
    model: nn.Module, precision: str = "fp32", learning_rate: Amount = 3e-3, weight_decay: Amount = 0.01
) -> torch.optim.Optimizer:
    """AdamW over the parameters that train, as the precision asks: torch's own, or with master weights and FP32
    gradients.
    """
    chosen = precision_named(precision)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if chosen.fp32_grads != "no":
        accumulate_in_fp32(parameters, keep_low=chosen.fp32_grads == "both")
    optimizer_class = MasterAdamW if chosen.master else torch.optim.AdamW
    return optimizer_class(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)


@checked(scaler=object)  # a lesson brings the class that it shows
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x_BS: Tensor,
    y_BS: Tensor,
    micro_batches: Size = 1,
    clip_norm: Positive | None = 1.0,
    precision: str = "fp32",
    scaler: LossScaler | None = None,
) -> float:
    """One step: gradients of all micro-batches, clipping, one update. Returns the batch's mean loss.

    With a scaler whose gradients overflowed the update is left out.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    zero_gradients(parameters)
    scale = scaler.scale if scaler else 1.0
    loss = accumulate_gradients(model, x_BS, y_BS, micro_batches, precision_named(precision), scale)
    finite = scaler.unscale(parameters) if scaler else True
    if finite:
        if clip_norm is not None:
            clip_gradients(parameters, clip_norm)
        optimizer.step()
    balance_after_step(model)
    if scaler:
        scaler.update(finite)
    return loss


def wait_for(device: str | torch.device) -> None:
    """Returns when the device has done its work, so that a clock read next tells the truth."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
