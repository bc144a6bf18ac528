"""The single-process reference: what every parallel version of the course must equal.

tokens -> batch -> micro-batches -> loss -> backward -> clip -> AdamW -> TrainRecord
"""

import importlib.util
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import std as tqdm_std

from course_lib.config import ModelConfig, TrainSettings
from course_lib.devices import rank_device
from course_lib.model import build
from course_lib.model.moe import add_balancing, balance_after_step
from course_lib.training.data import batch, micro_batches, tokens
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
from course_lib.validate import Amount, Index, Positive, Size, checked

__all__ = [
    "LossScaler", "MasterAdamW", "TrainConfig", "TrainRecord", "accumulate_gradients", "clip_gradients", "loss_of",
    "make_optimizer", "train", "train_step",
]  # fmt: skip


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


@dataclass(frozen=True)
class TrainRecord:
    """What a run left: loss and duration of each step, tokens_per_s of the median step, mfu where the peak is known.

    `peak_bytes`: on a GPU the allocator's peak during the run; on a CPU the most memory that this process ever held.
    """

    losses: list[float]
    step_s: list[float]
    tokens_per_s: float
    peak_bytes: int
    mfu: float | None = None


@checked
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


@checked
def train(
    model_config: ModelConfig,
    train_config: TrainConfig,
    attention: str = "fused",
    recompute: str = "none",
    device: str | torch.device | None = None,
    flops_per_token: Positive | None = None,
    peak_flops: Positive | None = None,
    progress: bool = True,
) -> TrainRecord:
    """Builds the model of that config and trains it on the standard library's text, under a progress bar.

    MFU is shown and recorded if both `flops_per_token` (of the model, forward and backward) and `peak_flops` (of the
    device, per second) are given; `course_lib.flops` and `course_lib.hardware` know them.
    """
    plan, precision, device = train_config, precision_named(train_config.precision), device or rank_device()
    model = build(model_config, plan.seed, precision.param_dtype, device, attention, recompute)
    optimizer = make_optimizer(model, plan.precision, plan.learning_rate, plan.weight_decay)
    scaler = LossScaler() if precision.loss_scaling else None
    text_T = tokens()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, step_s = [], []
    with progress_bar(plan.steps, progress) as bar, torch.random.fork_rng():
        torch.manual_seed(plan.seed)  # dropout's, in the gpt family
        for index in range(plan.steps):
            x_BS, y_BS = (t.to(device) for t in batch(text_T, index, plan.batch_size, plan.seq_len, seed=plan.seed))
            start_s = time.perf_counter()
            loss = train_step(model, optimizer, x_BS, y_BS, plan.micro_batches, plan.clip_norm, plan.precision, scaler)
            wait_for(device)
            losses.append(loss)
            step_s.append(time.perf_counter() - start_s)
            record = _record(losses, step_s, plan, device, flops_per_token, peak_flops)
            bar.set_postfix_str(describe(record), refresh=False)
            bar.update()
    return record


def _record(losses, step_s, plan, device, flops_per_token, peak_flops) -> TrainRecord:
    warm_s = step_s[1:] or step_s  # the first step warms up
    tokens_per_s = plan.batch_size * plan.seq_len / statistics.median(warm_s)
    mfu = tokens_per_s * flops_per_token / peak_flops if flops_per_token and peak_flops else None
    return TrainRecord(list(losses), list(step_s), tokens_per_s, peak_memory_bytes(device), mfu)


@checked
def describe(record: TrainRecord) -> str:
    """The last loss, speed, memory and MFU in one line, as the bar shows them."""
    parts = [
        f"loss {record.losses[-1]:.3f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        f"{record.peak_bytes / 1e9:.2f} GB",
    ]
    return ", ".join(parts + ([f"MFU {record.mfu:.1%}"] if record.mfu is not None else []))


@checked
def progress_bar(total: Index, shown: bool = True) -> tqdm_std.tqdm:
    """A tqdm bar: a widget in a notebook that has ipywidgets, plain text elsewhere."""
    if importlib.util.find_spec("ipywidgets") is None:
        return tqdm_std.tqdm(total=total, disable=not shown)
    from tqdm.auto import tqdm

    return tqdm(total=total, disable=not shown)


@checked
def wait_for(device: str | torch.device) -> None:
    """Returns when the device has done its work, so that a clock read next tells the truth."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@checked
def peak_memory_bytes(device: str | torch.device = "cpu") -> int:
    """On a GPU the allocator's peak since its last reset; on a CPU the most memory that this process ever held."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
