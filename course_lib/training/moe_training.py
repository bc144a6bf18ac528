"""Mixtures of experts at work: trained on real text beside a dense model of equal FLOPs, their load step by step.

Where experts win, and by how much, stands above CONTEST.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.config import ModelConfig, MoeConfig, require_bytes
from course_lib.launch import launch, progress, report
from course_lib.model import build
from course_lib.model.moe import moe_layers
from course_lib.training.data import batch, tokens
from course_lib.training.loop import TrainConfig, loss_of, make_optimizer, train_step
from course_lib.validate import Index, Size, checked

# A contest at equal FLOPs a token: the dense MLP is as narrow as one that pays for the experts and their router (22
# against 2 x 8 and a matrix of 16 x 32: 28,800 and 28,672 FLOPs forward). Text holds more n-grams than it can.
# Loss on text not seen, dense minus experts, measured on a CPU:
#   1,200 steps, Python 3.13 (its text), torch 2.11, seeds 0 to 3: 0.074 0.078 0.045 0.161
#     800 steps, the same: 0.080 0.021 0.044 0.154; Python 3.11, torch 2.13, seeds 0 to 7: 0.088 0.058 0.069 0.135 0.108
#     0.092 0.070 0.044
# Never negative; the size of the gain is the seed's as much as the experts', so one seed shows a sign, not a size.
# The 1,200 were chosen after seeing the 800. At 800 steps and rate 1e-2 dense gains on seed 0, and 0.043 and 0.022
# remain (seeds 0, 1). Less or none: one of 16 experts (sigmoid), RoPE base 10 (at rate 2e-2); 32 experts: no more.
CONTEST = {
    "dense": ModelConfig("contest, dense", 1, 32, 2, 2, d_ff=22, vocab_size=256, max_seq_len=64),
    "experts": ModelConfig(
        "contest, experts", 1, 32, 2, 2, d_ff=16, vocab_size=256, max_seq_len=64,
        moe=MoeConfig(num_experts=16, top_k=2, d_expert=8, balancing="aux_loss"),
    ),
}  # fmt: skip
CONTEST_PLAN = TrainConfig(steps=1200, batch_size=16, seq_len=64, learning_rate=2e-2)


OnLoss = Callable[[str, float], None]  # called with (name, loss) after each step, such as a `LiveCurve`'s `add`


@dataclass(frozen=True)
class MoeRun:
    """What training a model left. `load` and `dropped` count assignments by step, layer and expert; dense: no layers.
    losses   of each step, auxiliary losses included; `held_out_loss` is the cross-entropy alone, on text not seen
    """

    name: str
    losses: list[float]
    held_out_loss: float
    load: Tensor  # steps x layers x experts
    dropped: Tensor
    seconds: float

    def imbalance(self, steps: int = 20) -> list[float]:
        """The most loaded expert over the mean, layer by layer, over the last `steps`: 1 is even, E all on one."""
        late_LE = self.load[-steps:].sum(0).double()
        return (late_LE.amax(-1) / late_LE.mean(-1)).tolist()

    def dropped_share(self, steps: int = 20) -> float:
        return (self.dropped[-steps:].sum() / self.load[-steps:].sum()).item() if self.load.numel() else 0.0

    def drop_share(self, capacity_factor: float, steps: int = 20) -> float:
        """Share of assignments that a capacity of that factor would have dropped in the last `steps`, at this load.

        Assumes one micro-batch a step, on one rank: capacity is counted where the tokens are.
        """
        late = self.load[-steps:].double()
        if not late.numel():
            return 0.0
        room = (capacity_factor * late.sum(-1, keepdim=True) / late.shape[-1]).round(decimals=9).ceil()
        return ((late - room).clamp_min(0).sum() / late.sum()).item()


def warm_then_cosine(index: Index, steps: Size) -> float:
    """Factor on the learning rate of step `index`: up to 1 over 50 steps, and along a half cosine to 0.05 of it."""
    return min(1.0, (index + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * index / steps)))


def train_one(
    name: str,
    config: ModelConfig,
    plan: TrainConfig | None = None,
    schedule: Callable[[int, int], float] | None = None,
    on_loss: OnLoss | None = None,
) -> MoeRun:
    """Trains one model on the standard library's text, and counts where its tokens went.
    schedule   `schedule(index, steps)` is a factor on the learning rate of each step; None: always 1
    """
    plan = plan or TrainConfig()
    require_bytes(config)
    model, text_T, counts = build(config, plan.seed), tokens(), []
    optimizer = make_optimizer(model, plan.precision, plan.learning_rate, plan.weight_decay)
    losses, start_s = [], time.perf_counter()
    for index in progress(range(plan.steps), name):
        x_BS, y_BS = batch(text_T, index, plan.batch_size, plan.seq_len, seed=plan.seed)
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * schedule(index, plan.steps)
        watch = LoadWatch(model)
        losses.append(train_step(model, optimizer, x_BS, y_BS, plan.micro_batches, plan.clip_norm, plan.precision))
        counts.append(watch.stop())
        if on_loss is not None:
            on_loss(name, losses[-1])
    load, dropped = (torch.stack(part) for part in zip(*counts, strict=True))
    loss = held_out_loss(model, 8, plan)
    return MoeRun(name, losses, loss, load, dropped, time.perf_counter() - start_s)


@checked
def train_each(
    configs: dict[str, ModelConfig], plan: TrainConfig | None = None, on_loss: OnLoss | None = None
) -> dict[str, MoeRun]:
    """One run after another, each from its seed's weights, on the same batches; `on_loss` as in `train_one`."""
    return {name: train_one(name, config, plan, on_loss=on_loss) for name, config in configs.items()}


@checked
def train_side_by_side(
    configs: dict[str, ModelConfig], plan: TrainConfig | None = None, on_loss: OnLoss | None = None
) -> dict[str, MoeRun]:
    """The same as `train_each`, with `warm_then_cosine`, each model in a process of its own, all at once.

    The ranks do not talk: two models on two idle cores or GPUs need the time of the slower one.
    """
    runs = launch(_train_own, len(configs), configs, plan, timeout=600, on_report=on_loss)
    return {run.name: run for run in runs}


def _train_own(configs: dict[str, ModelConfig], plan: TrainConfig | None) -> MoeRun:
    name = list(configs)[dist.get_rank()]
    return train_one(name, configs[name], plan, schedule=warm_then_cosine, on_loss=report)


class LoadWatch:
    """Counts assignments of every mixture of experts, over all forward passes until `stop`."""

    def __init__(self, model: nn.Module):
        self.layers = moe_layers(model)
        self.load = [torch.zeros_like(moe.router.bias_steps_E, dtype=torch.float32) for moe in self.layers]
        self.dropped = [torch.zeros_like(load_E) for load_E in self.load]
        self.handles = [
            moe.router.register_forward_hook(lambda _, args, routing, layer=layer: self._count(layer, routing))
            for layer, moe in enumerate(self.layers)
        ]

    def _count(self, layer: int, routing) -> None:
        self.load[layer] += routing.tokens_E
        self.dropped[layer] += routing.dropped_E

    def stop(self) -> tuple[Tensor, Tensor]:
        """Ends the watch: load and dropped assignments, layers x experts."""
        for handle in self.handles:
            handle.remove()
        if not self.layers:
            return torch.zeros(0, 1), torch.zeros(0, 1)
        return torch.stack(self.load).cpu(), torch.stack(self.dropped).cpu()


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Size, plan: TrainConfig) -> float:
    """Mean cross-entropy on the tenth of the text that training leaves out."""
    was_training, text_T = model.training, tokens(held_out=True)
    model.eval()
    losses = [loss_of(model, *batch(text_T, index, 64, plan.seq_len)).item() for index in range(batches)]
    model.train(was_training)
    return math.fsum(losses) / batches
