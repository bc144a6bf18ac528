"""Pipeline parallelism's memory: how many micro-batches' activations a rank keeps at once.

Parameters are divided by stage, activations hardly: rank 0 of 1F1B has started pp micro-batches before the first comes
back, each in L / pp layers, and pp times L / pp is L.

    schedule                    rank i keeps, in micro-batches of its own layers     rank 0, in layers of the model
    naive                       1                                                    L / pp
    all-forward-all-backward    m                                                    m / pp  L
    1F1B                        min(m, pp - i)                                       L          if m >= pp
    interleaved, v a rank       more, as more are started ahead                      (1 + (pp - 1) / (pp v)) L

Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2;
         Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.3
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.config import ModelConfig
from course_lib.layout.partition import piece_sizes
from course_lib.memory.context import tokens_of_rank
from course_lib.schedules.instructions import Schedule
from course_lib.validate import Index, Size, checked, whole


@checked
def boundary_bytes(
    config: ModelConfig,
    batch_size: Size,
    seq_len: Size,
    itemsize: Size = 2,
    cp: Size = 1,
    tp: Size = 1,
    tp_rank: Index = 0,
) -> int:
    """What crosses from stage to stage for each micro-batch, and as a gradient back: B S D numbers.

    tp       divides it where sequence parallelism cuts the residual stream; without, every tp rank sends all of it
    """
    whole("tp_rank", tp_rank, 0, tp - 1)
    return batch_size * piece_sizes(tokens_of_rank(seq_len, cp), tp)[tp_rank] * config.d_model * itemsize


@checked
def live_layers(schedule: Schedule, layers: Sequence[int]) -> list[int]:
    """For each rank the layers whose activations it keeps at once, one micro-batch each: compare with num_layers."""
    peaks = []
    for row in schedule.instructions:
        live = most = 0
        for step in row:  # F saves, B or I frees, W has nothing of these
            live += {"F": 1, "B": -1, "I": -1, "W": 0}[step.op] * layers[step.stage]
            most = max(most, live)
        peaks.append(most)
    return peaks
