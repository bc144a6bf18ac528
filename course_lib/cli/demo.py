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
from course_lib.launch import launch
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
class DemoRow:
    """One line of the table. Bytes are those that each rank sends in a step."""

    ranks: int
    first_loss: float
    last_loss: float
    gradient_difference: float
    measured_bytes: int
    formula_bytes: int


def side_by_side(steps: int) -> tuple[list[float], float, int]:
    """On a rank: train twice on the same batches; the losses, the worst gradient and the most bytes of any step.

    Once as everybody knows it, alone and on whole batches; once by the engine of chapter 03, on this rank's share.
    """
    group = dist.group.WORLD
    (alone, its_optimizer, tokens_T), (llama, optimizer, _) = _model_and_text(), _model_and_text()
    engine, losses, worst, most_bytes = build(llama, group, BUCKET_BYTES), [], 0.0, 0
    for index in range(steps):
        its_optimizer.zero_grad()
        loss_of(alone, *data.batch(tokens_T, index, BATCH_SIZE, SEQ_LEN)).backward()
        share = data.batch(tokens_T, index, BATCH_SIZE, SEQ_LEN, group.rank(), group.size())
        with ByteMeter() as meter:  # without the loss, one number more
            share_of_loss = engine.run([share])
            engine.finish()
        worst = max(worst, (flat_gradient(llama) - flat_gradient(alone)).abs().max().item())
        most_bytes = max(most_bytes, meter.sent_bytes)
        losses.append(engine.mean_loss(share_of_loss).item())
        update(engine, optimizer)
        its_optimizer.step()
    return losses, worst, most_bytes


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
    """Train on one rank and on each number of ranks; return a row for each."""
    return [row_of(launch(side_by_side, size, steps, quiet=True)) for size in (1, *ranks)]


def row_of(results: Sequence[tuple[list[float], float, int]]) -> DemoRow:
    """One row: the losses, the worst gradient and the most bytes of any rank."""
    losses, size = results[0][0], len(results)
    worst, most_bytes = (max(of_rank[index] for of_rank in results) for index in (1, 2))
    return DemoRow(size, losses[0], losses[-1], worst, most_bytes, formula_bytes(size))


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
