"""Predicted beside measured on real ranks: a toy trained under ZeRO or under tensor parallelism, bytes by kind."""

from dataclasses import dataclass, replace

from course_lib.compare.five_d_profile import SENT, SENT_OVER, FiveDComparison, measure_five_d
from course_lib.compare.profile import Row
from course_lib.config import ModelConfig, preset
from course_lib.layout import Layout


@dataclass(frozen=True)
class Sizes:
    """What a toy is trained on: small enough that two steps on a CPU take a second."""

    batch_size: int = 2
    seq_len: int = 128


def measure_zero(
    stage: int,
    num_ranks: int = 4,
    recipe: str = "fp32",
    config: ModelConfig | None = None,
    sizes: Sizes = Sizes(),
    recompute: str = "none",
    micro_batches: int = 1,
) -> FiveDComparison:
    """Train two steps of a ZeRO stage (0: plain data parallelism) on real ranks; lay each rank's bytes on the formulas.

    Raises   ValueError if the stage is unknown, or no engine takes the recipe
    """
    cut = {"dp": num_ranks, "zero_stage": stage, "micro_batches": micro_batches}
    layout = Layout(**cut, micro_batch=sizes.batch_size, recompute=recompute)
    return _measured(config or preset("toy"), layout, sizes, recipe, f"ZeRO stage {stage}")


def measure_tensor(
    tp: int = 4,
    sequence_parallel: bool = False,
    regather: bool = False,
    config: ModelConfig | None = None,
    sizes: Sizes = Sizes(),
    recompute: str = "none",
) -> FiveDComparison:
    """Train two steps under tensor (and sequence) parallelism in FP32, and lay each rank's bytes on the formulas.

    Raises   ValueError if heads do not divide
    """
    cut = {"tp": tp, "sequence_parallel": sequence_parallel, "regather": regather}
    layout = Layout(**cut, micro_batch=sizes.batch_size, recompute=recompute)
    name = f"{'TP + SP' if sequence_parallel else 'TP'} {tp}"
    return _measured(config or preset("toy"), layout, sizes, "fp32", name)


def _measured(config: ModelConfig, layout: Layout, sizes: Sizes, recipe: str, name: str) -> FiveDComparison:
    """The layout's comparison, with one row for all that a rank sends for the technique, the loss left out."""
    found = measure_five_d(config, layout, sizes.seq_len, recipe)
    what = f"{config.name}, {name}, {recipe}, {sizes.batch_size} x {sizes.seq_len} tokens a rank"
    return replace(found, what=what, of_ranks=tuple(_with_one_sum(rows) for rows in found.of_ranks))


def _with_one_sum(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    over_axes = [row for row in rows if row.kind.startswith(SENT_OVER) and row.kind != f"{SENT_OVER}world"]
    total = Row(SENT, sum(r.predicted_bytes for r in over_axes), sum(r.measured_bytes for r in over_axes))
    return (*(row for row in rows if not row.kind.startswith(SENT_OVER)), total)
