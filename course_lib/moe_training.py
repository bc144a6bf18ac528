"""Mixtures of experts at work: trained on real text beside a dense model of equal FLOPs, their load step by step.

runs = train_each({"dense": dense, "none": with_moe(config, balancing="none"), ...}, TrainConfig(steps=400))
runs["none"].held_out_loss, runs["none"].imbalance(), runs["none"].drop_share(1.25)
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from course_lib.config import ModelConfig
from course_lib.data import batch, tokens
from course_lib.model import build
from course_lib.moe import moe_layers
from course_lib.training import TrainConfig, loss_of, make_optimizer, train_step


@dataclass(frozen=True)
class MoeRun:
    """What training a model left. `load` and `dropped` count choices by step, layer and expert; dense: no layers.

    losses   of each step, auxiliary losses included; `held_out_loss` is the cross-entropy alone, on text not seen
    """

    name: str
    losses: list[float]
    held_out_loss: float
    load: Tensor  # steps x layers x experts
    dropped: Tensor
    seconds: float

    def imbalance(self, steps: int = 20) -> list[float]:
        """The fullest expert over the mean, layer by layer, over the last `steps`: 1 is even, E all on one."""
        late_LE = self.load[-steps:].sum(0).double()
        return (late_LE.amax(-1) / late_LE.mean(-1)).tolist()

    def dropped_share(self, steps: int = 20) -> float:
        """Share of choices that were dropped in the last `steps`; 0 where nothing has a capacity."""
        return (self.dropped[-steps:].sum() / self.load[-steps:].sum()).item() if self.load.numel() else 0.0

    def drop_share(self, capacity_factor: float, steps: int = 20) -> float:
        """Share of choices that a capacity of that factor would have dropped in the last `steps`, at this load.

        Assumes one micro-batch a step, on one rank: capacity is counted where the tokens are.
        """
        late = self.load[-steps:].double()
        if not late.numel():
            return 0.0
        room = (capacity_factor * late.sum(-1, keepdim=True) / late.shape[-1]).round(decimals=9).ceil()
        return ((late - room).clamp_min(0).sum() / late.sum()).item()


def train_one(name: str, config: ModelConfig, plan: TrainConfig | None = None, held_out_batches: int = 8) -> MoeRun:
    """Trains one model on the standard library's text, and counts where its tokens went."""
    plan = plan or TrainConfig()
    model, text_T, counts = build(config, plan.seed), tokens(), []
    optimizer = make_optimizer(model, plan.precision, plan.learning_rate, plan.weight_decay)
    losses, start_s = [], time.perf_counter()
    for index in range(plan.steps):
        x_BS, y_BS = batch(text_T, index, plan.batch_size, plan.seq_len, seed=plan.seed)
        watch = LoadWatch(model)
        losses.append(train_step(model, optimizer, x_BS, y_BS, plan.micro_batches, plan.clip_norm, plan.precision))
        counts.append(watch.stop())
    load, dropped = (torch.stack(part) for part in zip(*counts))
    loss = held_out_loss(model, held_out_batches, plan)
    return MoeRun(name, losses, loss, load, dropped, time.perf_counter() - start_s)


def train_each(configs: dict[str, ModelConfig], plan: TrainConfig | None = None) -> dict[str, MoeRun]:
    """One run after another, each from its seed's weights, on the same batches."""
    return {name: train_one(name, config, plan) for name, config in configs.items()}


class LoadWatch:
    """Counts choices of every mixture of experts, over all forward passes until `stop`."""

    def __init__(self, model: nn.Module):
        self.layers = moe_layers(model)
        self.load = [torch.zeros(moe.config.num_experts) for moe in self.layers]
        self.dropped = [torch.zeros(moe.config.num_experts) for moe in self.layers]
        self.handles = [
            moe.router.register_forward_hook(lambda _, args, routing, layer=layer: self._count(layer, routing))
            for layer, moe in enumerate(self.layers)
        ]

    def _count(self, layer: int, routing) -> None:
        self.load[layer] += routing.tokens_E.cpu()
        self.dropped[layer] += routing.dropped_E.cpu()

    def stop(self) -> tuple[Tensor, Tensor]:
        """Ends the watch: load and dropped choices, layers x experts."""
        for handle in self.handles:
            handle.remove()
        empty = torch.zeros(0, 1)
        return (torch.stack(self.load), torch.stack(self.dropped)) if self.layers else (empty, empty)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: int, plan: TrainConfig) -> float:
    """Mean cross-entropy on the tenth of the text that training leaves out."""
    was_training, text_T = model.training, tokens(held_out=True)
    model.eval()
    losses = [loss_of(model, *batch(text_T, index, 64, plan.seq_len)).item() for index in range(batches)]
    model.train(was_training)
    return math.fsum(losses) / batches
