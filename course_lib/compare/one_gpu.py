"""Lessons on one GPU: what a pass keeps and computes, what a trainer moves, holds and learns, what a peak is made of.

run = OnePass(recompute_blocks)                    # `change` alters a model before forward
run.difference                                     # of gradients from the unchanged model's
run.kept_bytes, run.flops, run.timeline.peak_bytes
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker  # not public yet: its place may change
from torch.profiler import profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_lib.config import ModelConfig, preset
from course_lib.measure import MemoryTracker, Timeline
from course_lib.minimal.moe import MOE_CONFIG, MoE, put_experts
from course_lib.model import build
from course_lib.training import TrainConfig, loss_of, make_optimizer
from course_lib.training.data import batch, tokens
from course_lib.training.moe_training import MoeRun, held_out_loss
from course_lib.validate import Checked, Positive, Seed, Size, checked

TINY = preset("toy")
SMALL = replace(preset("mini"), name="small", d_model=128, num_heads=4, num_kv_heads=2, d_ff=320)
PASS_CONFIG = replace(preset("mini"), name="mini, as many key/value heads", num_kv_heads=8)
DROPOUT_CONFIG = replace(PASS_CONFIG, name="mini with dropout", family="gpt", dropout=0.1)


def no_change(model: nn.Module) -> None:
    """Leave the model as it is."""


def full_batch(model: nn.Module, x_BS: Tensor, y_BS: Tensor) -> None:
    """Run forward and backward of the whole batch at once."""
    loss_of(model, x_BS, y_BS).backward()


@dataclass(frozen=True)
class OnePass(Checked):
    """One forward and backward pass of a model; each property runs it, once.

    change     alters the model before the pass: what a lesson teaches
    backward   backward(model, x_BS, y_BS) runs the pass, forward included
    autocast   runs matrix products of `kept_bytes` in bfloat16
    """

    change: Callable = no_change
    backward: Callable = full_batch
    config: ModelConfig = PASS_CONFIG
    sequences: Size = 4
    seq_len: Size = 256
    attention: str = "standard"
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the changed model; a change draws the same random numbers every time."""
        torch.manual_seed(0)
        model = build(self.config, dtype=dtype or self.dtype, attention=self.attention)
        self.change(model)
        return model

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Token ids and targets."""
        return batch(tokens(100_000), 0, self.sequences, self.seq_len)

    @cached_property
    def gradients(self) -> Tensor:
        """All gradients end to end, in float64, of a quarter of the sequence."""
        short = replace(self, seq_len=self.seq_len // 4)
        model = short.model(torch.float64)
        torch.manual_seed(0)  # dropout draws the same numbers in any pass
        short.backward(model, *short.batch)
        return torch.cat([param.grad.flatten() for param in model.parameters()])

    @cached_property
    def difference(self) -> float:
        """The largest difference of any gradient from the unchanged model's."""
        right = _right_gradients(replace(self, change=no_change, backward=full_batch))
        return (self.gradients - right).abs().max().item()

    @cached_property
    def timeline(self) -> Timeline:
        """The bytes alive at each moment of forward and backward."""
        model, parts = self.model(), self.batch
        with MemoryTracker(model) as tracker:
            self.backward(model, *parts)
        return tracker.timeline

    @cached_property
    def kept_bytes(self) -> int:
        """The bytes of activations alive between forward and backward."""
        model, parts = self.model(), self.batch
        with MemoryTracker(model) as tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = loss_of(model, *parts)
            return tracker.current("activations") - loss.nbytes

    @cached_property
    def flops(self) -> int:
        """The FLOPs of all matrix products that forward and backward execute, as PyTorch counts them."""
        model = self.model()
        with FlopCounterMode(display=False) as counter:
            loss_of(model, *self.batch).backward()
        return counter.get_total_flops()


@cache
def _right_gradients(unchanged: OnePass) -> Tensor:
    """The gradients of the unchanged model, computed once."""
    return unchanged.gradients


# --- a trainer: trainer(model, make_optimizer) as in precision.py, with backward(loss), update(), params, optimizer
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
    frequency_V = 1.0 / torch.arange(1, TINY.vocab_size + 1) ** 1.5
    size = sequences * (seq_len + 1)
    rows_BS = torch.multinomial(frequency_V, size, replacement=True, generator=generator).view(sequences, seq_len + 1)
    return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()


@checked
def train_tiny(
    trainer: Callable,
    dtype: torch.dtype = torch.float32,
    steps: Size = 10,
    learning_rate: Positive = 1e-5,
    change: Callable = no_change,
    config: ModelConfig = TINY,
    batch_of: Callable = lambda step: zipf_batch(),
) -> TinyTraining:
    """Train a small Llama with AdamW without weight decay.

    change    alters the model before the first step: it freezes parameters, or replaces layers
    batch_of  token ids and targets of a step; one batch of tokens again and again if nothing else is said
    """
    model = OnePass(change, config=config, dtype=dtype, attention="fused").model()
    made = trainer(model, partial(torch.optim.AdamW, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
    start = [param.detach().clone() for param in model.parameters()]
    losses, scales = [], []
    for step in range(steps):
        scales.append(getattr(made, "scale", 1.0))
        loss = loss_of(model, *batch_of(step))
        made.backward(loss)
        held = _held_bytes(made, model)
        made.update()
        losses.append(loss.item())
    pairs = zip(model.parameters(), start, strict=True)
    moved = sum(((param != before) & param.isfinite()).sum().item() for param, before in pairs)
    return TinyTraining(losses, moved / sum(before.numel() for before in start), held, scales)


def _held_bytes(trainer, model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that are held now.

    Frozen weights count as parameters, also where a layer stores them as buffers; master weights count as optimizer
    states. A step counter of one element and the tables of rotary embeddings do not count.
    """
    stored = [buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in ("packed", "scale")]
    params = list(model.parameters())
    masters = [param for group in trainer.optimizer.param_groups for param in group["params"]]
    masters = [master for master in masters if not any(master is param for param in params)]
    states = [tensor for states in trainer.optimizer.state.values() for tensor in tree_leaves(states)]
    kinds = {
        "parameters": params + stored,
        "gradients": [param.grad for param in params if param.grad is not None],
        "optimizer": masters + [state for state in states if torch.is_tensor(state) and state.dim()],
    }
    return {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()}


@checked
def train_experts(layer: Callable = MoE, balance: Callable | None = None, coefficient: Positive = 0.01) -> MoeRun:
    """Train a small Llama with layers as in moe.py on real text; count how many assignments fell on each expert.

    balance     a function of (logits_TE, expert_Tk), added to the loss of each layer, times the coefficient
    """
    model, text_T, counts, losses = put_experts(build(MOE_CONFIG), layer), tokens(), [], []
    optimizer, layers = make_optimizer(model), [block.mlp for block in model.blocks]
    for step in range(100):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(text_T, step, 8, 64))
        if balance is not None:
            loss = loss + coefficient * sum(balance(one.logits_TE, one.expert_Tk) for one in layers)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        num_experts = MOE_CONFIG.moe.num_experts
        counts.append(torch.stack([one.expert_Tk.flatten().bincount(minlength=num_experts) for one in layers]))
    load, held_out = torch.stack(counts).float(), held_out_loss(model, 8, TrainConfig(batch_size=8, seq_len=64))
    return MoeRun("experts", losses, held_out, load, torch.zeros_like(load), 0.0)


# --- the largest number of bytes alive in a step, as PyTorch counts it
@checked
def peak_by_torch(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Run step() under PyTorch's own tracker and return its peak in bytes, on the model's device."""
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    device = next(model.parameters()).device
    return tracker.get_tracker_snapshot("peak")[device]["Total"]


@checked
def peak_of_trace(trace: profile) -> int:
    """Return the largest sum of allocations and releases on the CPU that a profile recorded, from its start on.

    Raises   ValueError if the profile recorded no memory
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    if not events:
        raise ValueError("the profile has no memory events; record it with profile(..., profile_memory=True)")
    return max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))
