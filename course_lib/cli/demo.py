"""The course in one table: the same tiny Llama trained by one process and by several. `make demo`, or `course demo`.

Every row sees the same global batches. Equal losses and gradients say that the split changed nothing; equal bytes say
that the network carried what the formula asks for. All in float64, so that rounding cannot hide an error.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from course_lib import model
from course_lib.config import PRESETS
from course_lib.launch import Results, launch
from course_lib.measure.meter import ByteMeter
from course_lib.parallel.data import assign_buckets, build
from course_lib.parallel.engine import trainable, update
from course_lib.traffic import ring_all_reduce_bytes
from course_lib.training import data, loss_of

CONFIG = PRESETS["toy"]
BATCH_SIZE, SEQ_LEN, LEARNING_RATE = 8, 64, 3e-3
BUCKET_BYTES = 2**18  # smaller than the default, so that the tiny model has several
_EQUAL = 1e-10  # largest difference of gradients that rounding in float64 explains


@dataclass(frozen=True)
class Run:
    """What one rank brings back, step by step. Flat gradients come from rank 0 alone: the others have the same."""

    losses: list[float]
    gradients_P: list[torch.Tensor]
    sent_bytes: list[int]


@dataclass(frozen=True)
class DemoRow:
    """One line of the table. Bytes are those that each rank sends in a step."""

    ranks: int
    first_loss: float
    last_loss: float
    gradient_difference: float
    measured_bytes: int
    formula_bytes: int


def one_process(steps: int) -> Run:
    """Training as everybody knows it: no group, no engine."""
    llama, optimizer, tokens_T = _model_and_text()
    losses, gradients_P = [], []
    for index in range(steps):
        loss = loss_of(llama, *data.batch(tokens_T, index, BATCH_SIZE, SEQ_LEN))
        loss.backward()
        losses.append(loss.item())
        gradients_P.append(flat_gradient(llama))
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, gradients_P, sent_bytes=[0] * steps)


def _one_rank_of_several(steps: int) -> Run:
    """The same with the from-scratch engine of chapter 03, on this rank's share of each batch."""
    group = dist.group.WORLD
    llama, optimizer, tokens_T = _model_and_text()
    engine = build(llama, group, BUCKET_BYTES)
    losses, gradients_P, sent_bytes = [], [], []
    optimizer.register_step_pre_hook(lambda *_: gradients_P.append(flat_gradient(llama)))
    for index in range(steps):
        share = data.batch(tokens_T, index, BATCH_SIZE, SEQ_LEN, group.rank(), group.size())
        with ByteMeter() as meter:  # without the loss, one number more
            share_of_loss = engine.run([share])
            engine.finish()
        losses.append(engine.mean_loss(share_of_loss).item())
        update(engine, optimizer)
        sent_bytes.append(meter.sent_bytes)
    return Run(losses, gradients_P if group.rank() == 0 else [], sent_bytes)


def _model_and_text() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    llama = model.build(CONFIG, dtype=torch.float64)
    return llama, torch.optim.AdamW(llama.parameters(), lr=LEARNING_RATE), data.tokens(200_000)


def flat_gradient(llama: nn.Module) -> torch.Tensor:
    return torch.cat([param.grad.flatten() for _, param in trainable(llama)])


def formula_bytes(ranks: int) -> int:
    """What one rank sends in a step: an all-reduce of every bucket."""
    llama = model.build(CONFIG, dtype=torch.float64, device="meta")
    payloads = [sum(param.nbytes for _, param in bucket) for bucket in assign_buckets(trainable(llama), BUCKET_BYTES)]
    return sum(ring_all_reduce_bytes(payload, ranks, itemsize=8) for payload in payloads)


def compare(reference: Run, runs: Sequence[Run]) -> DemoRow:
    """One row: the mean of the ranks' losses; the worst gradient, and the most bytes, of any step."""
    losses = [sum(of_ranks) / len(runs) for of_ranks in zip(*(run.losses for run in runs), strict=True)]
    pairs = zip(runs[0].gradients_P, reference.gradients_P, strict=True)
    worst = max((ours_P - theirs_P).abs().max().item() for ours_P, theirs_P in pairs)
    most_bytes = max(sent for run in runs for sent in run.sent_bytes)
    return DemoRow(len(runs), losses[0], losses[-1], worst, most_bytes, formula_bytes(len(runs)))


def agrees(row: DemoRow) -> bool:
    return row.gradient_difference < _EQUAL and row.measured_bytes == row.formula_bytes


def _shown_difference(row: DemoRow) -> str:
    """What rounding explains is not shown: its digits differ from machine to machine."""
    return f"<{_EQUAL:g}" if row.gradient_difference < _EQUAL else f"{row.gradient_difference:.1e}"


def demo_table(rows: Sequence[DemoRow]) -> str:
    """The rows as plain text."""
    lines = [
        "ranks   loss, first and last   largest gradient    sent by each rank in a step (MB)",
        "                               difference          measured    by formula",
    ]
    for row in rows:
        lines.append(
            f"{row.ranks:>5}{row.first_loss:>11.6f}{row.last_loss:>11.6f}{_shown_difference(row):>16}"
            f"{row.measured_bytes / 1e6:>21.6f}{row.formula_bytes / 1e6:>14.6f}"
        )
    return "\n".join(lines)


def measured_rows(ranks: Sequence[int] = (2, 4), steps: int = 20) -> list[DemoRow]:
    """Train by one process and by each number of ranks; return a row for each."""
    reference = launch(one_process, 1, steps, quiet=True)
    results: list[Results] = [reference, *(launch(_one_rank_of_several, size, steps, quiet=True) for size in ranks)]
    return [compare(reference[0], runs) for runs in results]


def demo(ranks: Sequence[int] = (2, 4), steps: int = 20) -> int:
    """Prints the table; 0 if every row agrees with one process and with the formula, otherwise 1."""
    start_s = time.perf_counter()
    num_parameters = sum(param.numel() for param in model.build(CONFIG, device="meta").parameters())
    print(f"The same Llama ({num_parameters:,} parameters), {steps} steps of {BATCH_SIZE} x {SEQ_LEN} tokens, float64")
    rows = measured_rows(ranks, steps)
    print(demo_table(rows))
    right = all(agrees(row) for row in rows)
    print("Formula == Run: every row agrees." if right else f"NOT equal: differences must be below {_EQUAL:g}.")
    print(
        f"{time.perf_counter() - start_s:.0f} s. What happened in between is chapter 03; `make lab` opens the course."
    )
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(demo())
