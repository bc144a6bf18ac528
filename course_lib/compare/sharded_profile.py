"""Predicted beside measured on real ranks: a toy trained under ZeRO or under tensor parallelism, bytes by kind."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_lib import model
from course_lib.compare.profile import Row
from course_lib.config import ModelConfig, preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.meter import ByteMeter
from course_lib.measure.tracker import KINDS, MemoryTracker
from course_lib.memory.budget import Budget, budgets
from course_lib.parallel import data as dp
from course_lib.parallel import sequence, tensor, zero
from course_lib.run import Run
from course_lib.traffic import calls, sent_bytes
from course_lib.training import data, make_optimizer
from course_lib.training.precision import precision_named

SENT = "sent in a step"
MEASURABLE = ("fp32", "bf16-master")
STEPS = 2  # one under the tracker, one under the meter


@dataclass(frozen=True)
class Sizes:
    """What a toy is trained on: small enough that two steps on a CPU take a second."""

    batch_size: int = 2
    seq_len: int = 128


@dataclass(frozen=True)
class ShardedComparison:
    """A row for each kind at its own largest on rank 0, then what rank 0 sends in a step."""

    what: str
    num_ranks: int
    rows: tuple[Row, ...]
    seconds: float

    def row(self, kind: str) -> Row:
        """The row of that kind, or of SENT.

        Raises   ValueError if there is none
        """
        for row in self.rows:
            if row.kind == kind:
                return row
        raise ValueError(f"there is no row {kind!r}; choose from {', '.join(row.kind for row in self.rows)}")

    def __str__(self) -> str:
        where = f"{self.num_ranks} ranks, rank 0 shown" if self.num_ranks > 1 else "one rank"
        return f"Measured in {self.seconds:.1f} s on {where}: {self.what}. Temporary bytes are an estimate."


@dataclass(frozen=True)
class Seen:
    """What one rank saw: the largest of each kind, and the bytes that it sent in one step."""

    largest_bytes: dict[str, int]
    sent_bytes: int


def measure_zero(
    stage: int,
    num_ranks: int = 4,
    recipe: str = "fp32",
    config: ModelConfig | None = None,
    sizes: Sizes = Sizes(),
    recompute: str = "none",
) -> ShardedComparison:
    """Train two steps of a ZeRO stage (0: plain data parallelism) on real ranks; lay rank 0's bytes on the formulas.

    Raises   ValueError if the stage is unknown or the recipe cannot be run
    """
    if recipe not in MEASURABLE:
        raise ValueError(
            f"recipe {recipe!r} has a formula, but is not measured here; choose from {', '.join(MEASURABLE)}"
        )
    config, start_s = config or preset("toy"), time.perf_counter()
    ranks = launch(_zero_rank, num_ranks, config, stage, recipe, sizes, recompute, quiet=True)
    layout = Layout(dp=num_ranks, zero_stage=stage, micro_batch=sizes.batch_size, recompute=recompute)
    run = Run(config, layout, sizes.seq_len, recipe, device=ranks.device_type)
    (needed,) = budgets(run)
    every = calls(run)
    sent = sent_bytes([*every["data"], *(call for call in every["world"] if call.place == "loss")])
    what = f"{config.name}, ZeRO stage {stage}, {recipe}, {sizes.batch_size} x {sizes.seq_len} tokens a rank"
    return _compare(what, num_ranks, ranks[0], needed, sent, start_s)


def measure_tensor(
    tp: int = 4,
    sequence_parallel: bool = False,
    regather: bool = False,
    config: ModelConfig | None = None,
    sizes: Sizes = Sizes(),
    recompute: str = "none",
) -> ShardedComparison:
    """Train two steps under tensor (and sequence) parallelism in FP32, and lay rank 0's bytes on the formulas.

    Raises   ValueError if heads do not divide
    """
    config, start_s = config or preset("toy"), time.perf_counter()
    how = (sequence_parallel, regather)
    ranks = launch(_tensor_rank, tp, config, *how, sizes, recompute, quiet=True)
    layout = Layout(
        tp=tp,
        sequence_parallel=sequence_parallel,
        regather=regather,
        micro_batch=sizes.batch_size,
        recompute=recompute,
    )
    run = Run(config, layout, sizes.seq_len, "fp32", device=ranks.device_type)
    (needed,) = budgets(run)
    sent = sent_bytes(calls(run)["tp"])
    name = "TP + SP" if sequence_parallel else "TP"
    what = f"{config.name}, {name} {tp}, fp32, {sizes.batch_size} x {sizes.seq_len} tokens"
    return _compare(what, tp, ranks[0], needed, sent, start_s)


def _compare(what: str, num_ranks: int, seen: Seen, needed: Budget, sent: int, start_s: float) -> ShardedComparison:
    rows = [Row(kind, needed.by_kind[kind], seen.largest_bytes[kind]) for kind in KINDS]
    rows.append(Row(SENT, sent, seen.sent_bytes))
    return ShardedComparison(what, num_ranks, tuple(rows), time.perf_counter() - start_s)


# ------------------------------------------------------------------------------------ on each rank


def _zero_rank(config: ModelConfig, stage: int, recipe: str, sizes: Sizes, recompute: str) -> Seen:
    group = dist.group.WORLD
    whole = model.build(config, dtype=precision_named(recipe).param_dtype, recompute=recompute)
    if stage:
        engine = zero.build(whole, group, stage)
        optimizer = zero.make_optimizer(engine)
    else:
        engine = dp.build(whole, group)
        optimizer = make_optimizer(engine, recipe)
    step = zero.step if stage else dp.step
    text_T = data.tokens(20_000)
    batches = [data.batch(text_T, index, sizes.batch_size, sizes.seq_len) for index in range(STEPS)]
    return _watch(engine, optimizer, lambda index: step(engine, [batches[index]], optimizer))


def _tensor_rank(config: ModelConfig, sequence_parallel: bool, regather: bool, sizes: Sizes, recompute: str) -> Seen:
    group, whole = dist.group.WORLD, model.build(config, recompute=recompute)
    technique = sequence if sequence_parallel else tensor
    engine = technique.build(whole, group, **({"regather": regather} if sequence_parallel else {}))
    optimizer = technique.make_optimizer(engine)
    text_T = data.tokens(20_000)
    batches = [data.batch(text_T, index, sizes.batch_size, sizes.seq_len) for index in range(STEPS)]
    return _watch(engine, optimizer, lambda index: technique.step(engine, [batches[index]], optimizer))


def _watch(engine: torch.nn.Module, optimizer: torch.optim.Optimizer, step) -> Seen:
    """One step under the tracker, one under the meter: each sees every operator, so they do not share a step."""
    with MemoryTracker(engine, optimizer) as tracker:
        step(0)
    with ByteMeter() as meter:
        step(1)
    timeline = tracker.timeline
    return Seen({kind: max(timeline.bytes_by_kind[kind]) for kind in KINDS}, meter.sent_bytes)
