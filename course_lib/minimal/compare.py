"""One line each: is a trainer right, what does it send, what does it hold, what does it do at the same time.

`trainer` is a class as in data.py and zero.py: trainer(model, make_optimizer, group), with backward(micro_batches),
update() and full_parameters(). All functions run it on real ranks, on the same tiny Llama and the same text. Each rank
brings its own sequences of the global batch; a class with `same_tokens = True` (tensor.py) brings all of them on every
rank. A class with a `config` (experts.py) trains that model in place of the tiny Llama.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib import comm
from course_lib.config import ModelConfig, preset
from course_lib.launch import launch
from course_lib.measure import ByteMeter, MemoryTracker, Timeline
from course_lib.minimal.data import DataParallel
from course_lib.model import build
from course_lib.span import Span
from course_lib.training import MasterAdamW, loss_of
from course_lib.training.data import batch, micro_batches, tokens
from course_lib.validate import Size, checked

CONFIG = preset("toy")
SEQUENCES, SEQ_LEN = 12, 32  # the global batch of a step
_EVENTS = (
    "trainer.backward",
    "autograd::engine::evaluate_function",
    "Optimizer.step",
    "c10d::allreduce_",
    "gloo:all_reduce",
)
sgd = partial(torch.optim.SGD, lr=0.1)
adamw = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
master_adamw = partial(MasterAdamW, lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)


@checked
def compare_with_one_process(trainer: type, world_size: Size = 4, num_micro_batches: Size = 1) -> float:
    """Return the largest difference of any parameter from one process, after steps of SGD and of AdamW.

    A step of SGD shows a wrong factor of the gradient, which AdamW's first step hides. Computed in float64.
    """
    return max(launch(_largest_difference, world_size, trainer, num_micro_batches))


@checked
def sent_bytes(trainer: type, world_size: Size = 4, num_micro_batches: Size = 1) -> int:
    """Return the bytes that one rank sends in a step, with parameters and gradients in bfloat16."""
    return launch(_sent, world_size, trainer, num_micro_batches)[0].sent_bytes


@checked
def sent_messages(trainer: type, world_size: Size = 4, num_micro_batches: Size = 1) -> int:
    """Return how many collectives one rank calls in a step."""
    return sum(calls_of_a_step(trainer, world_size, num_micro_batches).values())


@checked
def calls_of_a_step(trainer: type, world_size: Size = 4, num_micro_batches: Size = 1) -> dict[str, int]:
    """Return how often one rank calls each collective in a step."""
    return launch(_sent, world_size, trainer, num_micro_batches)[0].calls


@checked
def trace_of_a_step(trainer: type, world_size: Size = 2) -> list[Span]:
    """Return what rank 0 was busy with in one step, as torch.profiler saw it: computation, and a lane per all-reduce.

    On the CPU, where all lanes share the cores: the order is that of GPUs, the seconds are not.
    """
    return launch(_trace, world_size, trainer, backend="gloo", quiet=True)[0]


@checked
def held_bytes(trainer: type, world_size: Size = 4) -> dict[str, int]:
    """Return the bytes of each kind of state on one rank at the end of backward, before the update."""
    held, _ = launch(_memory, world_size, trainer, SEQ_LEN, 1)[0]
    return {kind: held[kind] for kind in ("parameters", "gradients", "optimizer")}


@checked
def bytes_after_backward(trainer: type, world_size: Size = 4) -> int:
    """Return all bytes alive on one rank at the end of backward, before the update: shards, and what was not freed."""
    held, _ = launch(_memory, world_size, trainer, SEQ_LEN, 1)[0]
    return sum(held.values())


@checked
def memory_of_a_step(
    trainer: type, world_size: Size = 4, seq_len: Size = SEQ_LEN, num_micro_batches: Size = 1
) -> Timeline:
    """Return which bytes are alive on one rank at each moment of a step of equally large micro-batches."""
    return launch(_memory, world_size, trainer, seq_len, num_micro_batches)[0][1]


@checked
def started_in_backward(spans: Sequence[Span]) -> tuple[int, int]:
    """Return how many all-reduces of a trace start while its backward computes, and how many there are."""
    stop_s = next(span.stop_s for span in spans if span.name == "backward")
    starts = [span.start_s for span in spans if span.lane != "compute"]
    return sum(start_s < stop_s for start_s in starts), len(starts)


@checked
def gradient_squares(steps: Size, sequences: Size = 4, world_size: Size = 2) -> list[tuple[float, float]]:
    """Train with AdamW; return of each step the mean squared norm of a rank's gradient, and that of the mean.

    sequences   of each rank in a step
    """
    return launch(_squares, world_size, steps, sequences)[0]


def micro_batches_of_rank(
    step: int, num_micro_batches: int, seq_len: int = SEQ_LEN, trainer: object = None
) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's sequences of the global batch of a step: all of them where the trainer has `same_tokens`."""
    rank, size = (0, 1) if getattr(trainer, "same_tokens", False) else (dist.get_rank(), dist.get_world_size())
    mine = batch(tokens(100_000), step, SEQUENCES, seq_len, dp_rank=rank, dp_size=size)
    return micro_batches(*mine, num_micro_batches)


def _largest_difference(trainer: type, num_micro_batches: int) -> float:
    runs = [_differences(trainer, num_micro_batches, *steps) for steps in ((sgd, 1), (adamw, 2))]
    return max(difference for differences in runs for difference in differences.values())


def _differences(trainer: type, num_micro_batches: int, make_optimizer, steps: int) -> dict[str, float]:
    config = _config_of(trainer)
    made = trainer(build(config, dtype=torch.float64), make_optimizer, dist.group.WORLD)
    for step in range(steps):
        made.backward(micro_batches_of_rank(step, num_micro_batches, trainer=trainer))
        made.update()
    full, expected = made.full_parameters(), _one_process(config, make_optimizer, steps)
    if full.keys() != expected.keys():
        raise ValueError(f"full_parameters() lacks or adds {sorted(full.keys() ^ expected.keys())}; return all")
    return {name: (full[name] - expected[name]).abs().max().item() for name in expected}


def _config_of(trainer: type) -> ModelConfig:
    return getattr(trainer, "config", CONFIG)


def one_process(config: ModelConfig, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the mean gradients of equally large micro-batches, computed without ranks in float64."""
    model = build(config, dtype=torch.float64)
    for x_BS, y_BS in micro_batches:
        (loss_of(model, x_BS, y_BS) / len(micro_batches)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def _one_process(config: ModelConfig, make_optimizer, steps: int) -> dict[str, Tensor]:
    """Train on the whole global batch without any ranks; return the parameters."""
    model = build(config, dtype=torch.float64)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(tokens(100_000), step, SEQUENCES, SEQ_LEN)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def _sent(trainer: type, num_micro_batches: int) -> ByteMeter:
    made = trainer(build(_config_of(trainer), dtype=torch.bfloat16), master_adamw, dist.group.WORLD)
    parts = micro_batches_of_rank(0, num_micro_batches, trainer=trainer)
    with ByteMeter() as meter:
        made.backward(parts)
        made.update()
    return meter


def _trace(trainer: type) -> list[Span]:
    """The last of three steps: in the first, threads and buffers are made."""
    made = trainer(build(_config_of(trainer)), adamw, dist.group.WORLD)
    for step in range(3):
        parts = micro_batches_of_rank(step, 1, 4 * SEQ_LEN, trainer)
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("trainer.backward"):
                made.backward(parts)
            made.update()
    return _spans(profiler.events())


def _squares(steps: int, sequences: int) -> list[tuple[float, float]]:
    rank, size, group, squares = dist.get_rank(), dist.get_world_size(), dist.group.WORLD, []
    made = DataParallel(build(CONFIG), adamw, group)
    for step in range(steps):
        made.backward([batch(tokens(), step, sequences * size, SEQ_LEN, dp_rank=rank, dp_size=size)])
        own_P = torch.cat([param.grad.flatten() for param in made.model.parameters()])
        mean_P = comm.all_reduce(own_P, group, op="mean")
        squares.append((comm.all_reduce(own_P.square().sum(), group, op="mean").item(), mean_P.square().sum().item()))
        made.update()
    return squares


def _spans(events) -> list[Span]:
    """Forward, backward, the optimizer and each all-reduce of a profile, from the moment when forward begins.

    Backward is over when its last node begins, which only stores the last gradient and calls its hooks.
    """
    named = {name: [e.time_range for e in events if e.name.startswith(name)] for name in _EVENTS}
    start_us = named["trainer.backward"][0].start
    backward = named["autograd::engine::evaluate_function"]
    backward_us = min(e.start for e in backward), max(e.start for e in backward)
    update = named["Optimizer.step"][0]
    bars = [("compute", "forward", start_us, backward_us[0]), ("compute", "backward", *backward_us)]
    bars += [("compute", "optimizer", update.start, update.end)]
    calls, sends = (sorted(named[name], key=lambda e: e.start) for name in ("c10d::allreduce_", "gloo:all_reduce"))
    pairs = enumerate(zip(calls, sends, strict=True))  # from the call until gloo's thread has done it
    bars += [(f"all-reduce {index}", f"all-reduce {index}", call.start, send.end) for index, (call, send) in pairs]
    return [Span(0, lane, name, (a - start_us) * 1e-6, (b - start_us) * 1e-6) for lane, name, a, b in bars]


def _memory(trainer: type, seq_len: int, num_micro_batches: int) -> tuple[dict[str, int], Timeline]:
    """Bytes by kind at the end of backward, and over the whole step; the first step makes the optimizer states."""
    made = trainer(build(_config_of(trainer), dtype=torch.bfloat16), master_adamw, dist.group.WORLD)
    made.backward(micro_batches_of_rank(0, 1, seq_len, trainer))
    made.update()
    numbers = range(1, 1 + num_micro_batches)
    parts = [part for number in numbers for part in micro_batches_of_rank(number, 1, seq_len, trainer)]
    mine = [param for group in made.optimizer.param_groups for param in group["params"]]
    with MemoryTracker(nn.ModuleList([made.model, nn.ParameterList(mine)]), made.optimizer) as tracker:
        made.backward(parts)
        held = tracker.current_by_kind()
        made.update()
    return held, tracker.timeline
