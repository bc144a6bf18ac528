"""Predicted beside measured: train a model for real under the tracker and lay its bytes on the formulas."""

import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from course_lib.config import ModelConfig, require_dense
from course_lib.layout import Layout
from course_lib.measure.tracker import KINDS, MemoryTracker, Timeline
from course_lib.memory.budget import budgets
from course_lib.model import build
from course_lib.run import Recipe, Run, recipe_of
from course_lib.training import make_optimizer, train_step
from course_lib.training.data import batch, tokens
from course_lib.training.precision import precision_named

MEASURABLE_OPTIMIZERS = ("adamw", "adafactor", "sgd-momentum", "sgd")
_TOKENS = 100_000
STATES = ("parameters", "gradients", "optimizer")
SENT_OVER = "sent over "  # and an axis


@dataclass(frozen=True)
class KindComparison:
    """One kind of memory: what the formula says, what the tracker saw."""

    kind: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_percent(self) -> float:
        """How far the prediction is off, in percent of what was measured (0 where both are 0)."""
        if self.measured_bytes == 0:
            return 0.0 if self.predicted_bytes == 0 else float("inf")
        return 100 * (self.predicted_bytes / self.measured_bytes - 1)


@dataclass(frozen=True)
class Comparison:
    """Of each rank a row for each kind of memory at its own largest, then bytes sent along each axis in a step.

    On one device the last row is the peak of all kinds together, and the timeline is that of the steps.
    """

    what: str
    of_ranks: tuple[tuple[KindComparison, ...], ...]
    seconds: float
    timeline: Timeline | None = None

    @property
    def rows(self) -> tuple[KindComparison, ...]:
        """Those of rank 0."""
        return self.of_ranks[0]

    @property
    def num_ranks(self) -> int:
        return len(self.of_ranks)

    def row(self, kind: str, rank: int = 0) -> KindComparison:
        """The row of a kind of memory, of "peak", or of "sent over <axis>".

        Raises   ValueError if there is none
        """
        rows = {row.kind: row for row in self.of_ranks[rank]}
        if kind not in rows:
            raise ValueError(f"there is no row {kind!r}; choose from {', '.join(rows)}")
        return rows[kind]

    @property
    def unequal(self) -> list[tuple[int, KindComparison]]:
        """(rank, row) wherever states or sent bytes, which the formulas have to the byte, were measured otherwise."""
        return [
            (rank, row)
            for rank, rows in enumerate(self.of_ranks)
            for row in rows
            if row.kind.startswith((*STATES, SENT_OVER)) and row.predicted_bytes != row.measured_bytes
        ]

    def __str__(self) -> str:
        ranks = self.num_ranks
        where = f"{ranks} ranks, rank 0 shown" if ranks > 1 else "one rank"
        told = f"States and bytes sent are as the formulas say, to the byte{f', on all {ranks}' if ranks > 1 else ''}"
        for rank, row in self.unequal[:1]:
            told = f"Rank {rank} differs, {row.kind}: {row.measured_bytes:,} bytes instead of {row.predicted_bytes:,}"
        return (
            f"Measured in {self.seconds:.1f} s on {where}: {self.what}. {told}. "
            "Activations and temporary bytes are estimates."
        )


def scale_down(config: ModelConfig, d_model: int = 128, num_layers: int = 4) -> ModelConfig:
    """Shrink a model to what a CPU trains in seconds, keeping its family and its ratios.

    Kept are F / D, V / D (but V is at least 256, the course's tokens), N / K, tied or not. Dropout goes: a CPU has
    no fused attention with it. A model that is no larger stays as it is.
    """
    require_dense(config, "scale_down")
    if config.d_model <= d_model and config.num_layers <= num_layers:
        return replace(config, dropout=0.0)
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(1, 8 // group)
    shrink = d_model / config.d_model
    return replace(
        config,
        name=f"{config.name}, scaled down",
        num_layers=min(config.num_layers, num_layers),
        d_model=d_model,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=max(2, d_model // (kv_heads * group) // 2 * 2),
        d_ff=max(8, round(config.d_ff * shrink / 8) * 8),
        vocab_size=max(256, round(config.vocab_size * shrink)),
        dropout=0.0,
    )


def profile_steps(
    config: ModelConfig,
    steps: int = 4,
    batch_size: int = 4,
    seq_len: int = 128,
    recipe: Recipe | str = "fp32",
    optimizer: str = "adamw",
    attention: str = "fused",
    recompute: str = "none",
) -> Timeline:
    """Train a model built from `config` and return its memory over time: the playbook's picture, measured.

    The first step differs from the others: the optimizer has no state before its end.

    Raises   ValueError if the recipe or the optimizer cannot be run here
    """
    name = recipe_of(recipe).name
    model = build(config, dtype=precision_named(name).param_dtype, attention=attention, recompute=recompute)
    chosen = _build_optimizer(model, name, optimizer)
    text_T = tokens(max(_TOKENS, batch_size * seq_len * (steps + 1)))
    with MemoryTracker(model, chosen) as tracker:
        for index in range(steps):
            train_step(model, chosen, *batch(text_T, index, batch_size, seq_len), precision=name)
    return tracker.timeline


def profile_step(
    config: ModelConfig,
    batch_size: int = 4,
    seq_len: int = 128,
    recipe: Recipe | str = "fp32",
    optimizer: str = "adamw",
    attention: str = "fused",
    recompute: str = "none",
) -> Comparison:
    """Train two steps on this CPU and compare each kind's largest with the formula's.

    States are equal to the byte. Temporary bytes are an estimate, and the peak says what it costs.

    Raises   ValueError if the recipe or the optimizer cannot be run here, or fused attention meets dropout
    """
    if attention == "fused" and config.dropout:
        raise ValueError(
            f"dropout is {config.dropout}, but a CPU has no fused attention with dropout; "
            "use attention='standard' or scale_down"
        )
    start_s = time.perf_counter()
    timeline = profile_steps(config, 2, batch_size, seq_len, recipe, optimizer, attention, recompute)
    layout = Layout(micro_batch=batch_size, recompute=recompute)
    name = recipe_of(recipe).name
    (predicted,) = budgets(Run(config, layout, seq_len, name, attention, "cpu", optimizer))
    rows = [KindComparison(kind, predicted.by_kind[kind], max(timeline.bytes_by_kind[kind])) for kind in KINDS]
    rows.append(KindComparison("peak", predicted.peak_bytes, timeline.peak_bytes))
    what = f"{config.name}, {batch_size} x {seq_len} tokens, {name}"
    return Comparison(what, (tuple(rows),), time.perf_counter() - start_s, timeline)


def _build_optimizer(model: nn.Module, recipe_name: str, optimizer: str) -> torch.optim.Optimizer:
    """The optimizer of that name; with FP32 master weights there is AdamW alone.

    Raises   ValueError naming what can be run
    """
    if optimizer == "adamw":
        return make_optimizer(model, recipe_name)
    if optimizer not in MEASURABLE_OPTIMIZERS or precision_named(recipe_name).master:
        raise ValueError(
            f"optimizer {optimizer!r} with recipe {recipe_name!r} has a formula, but cannot be measured here; "
            f"choose adamw, or one of {', '.join(MEASURABLE_OPTIMIZERS)} with fp32, autocast or bf16"
        )
    parameters = list(model.parameters())
    if optimizer == "adafactor":
        return torch.optim.Adafactor(parameters)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9 if optimizer == "sgd-momentum" else 0.0)
