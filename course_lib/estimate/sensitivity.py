"""Which assumption decides: what becomes of a ranking of runs if a rate is a fifth less, or a fifth more."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from course_lib.estimate.calibrate import Calibration
from course_lib.estimate.estimate import Estimate
from course_lib.hardware import Cluster
from course_lib.timing.rates import RANGES, Rates

_CHANGE = 0.2

Predicted = Sequence[Estimate | str]


def fastest(rows: Sequence[Mapping[str, str]], predictions: Predicted) -> dict[tuple[str, str], int]:
    """Of each (model, gpus) the index of the fastest run that fits."""
    cells: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for index, (row, one) in enumerate(zip(rows, predictions, strict=True)):
        if not isinstance(one, str) and one.may_run:
            cells[row["model"], row["gpus"]].append((one.tokens_per_s_per_gpu, -index))
    return {cell: -max(found)[1] for cell, found in cells.items()}


def sensitivity(
    rows: Sequence[Mapping[str, str]],
    predict_all: Callable[[Cluster, Rates], Predicted],
    cluster: Cluster,
    rates: Rates,
) -> dict[str, tuple[int, float]]:
    """Of each assumption: cells whose fastest run changes, and the largest change of a prediction (a share)."""
    before, changed = predict_all(cluster, rates), {}
    best = fastest(rows, before)
    for name in (*RANGES, *Calibration.__dataclass_fields__):
        flips, largest = set(), 0.0
        for factor in (1 - _CHANGE, 1 + _CHANGE):
            after = predict_all(*_with(name, factor, cluster, rates))
            flips |= {cell for cell, index in fastest(rows, after).items() if best.get(cell, index) != index}
            for one, other in zip(before, after, strict=True):
                if not isinstance(one, str) and not isinstance(other, str):
                    ratios = other.step_s / one.step_s, other.memory_bytes / one.memory_bytes
                    largest = max(largest, *(abs(ratio - 1) for ratio in ratios))
        changed[f"{name} +-{_CHANGE:.0%}"] = (len(flips), largest)
    return changed


def _with(name: str, factor: float, cluster: Cluster, rates: Rates) -> tuple[Cluster, Rates]:
    if name not in RANGES:
        return Calibration(**{name: factor}).of(cluster), rates
    least, most = RANGES[name]
    return cluster, replace(rates, **{name: min(most, max(least, factor * getattr(rates, name)))})
