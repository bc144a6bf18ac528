"""Fit the twelve rates of `course_lib.predict` to a table of measured runs, and tell how far predictions are off.

    python benchmarks/fit_rates.py runs.csv --models models.json --nodes-link efa --seq 4096 --picture errors.svg

runs.csv has the columns that `course predict` reads, and status, mfu_pct, tok_s_gpu, mem_gb. Each model is also left
out of the fit and then predicted: those errors are what to expect of a model that was not measured.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy.optimize import least_squares
from tyro.conf import Positional

from course_lib.hardware import GIB, Cluster, gpu, link
from course_lib.plan.search import TOLD_APART
from course_lib.predict import nanotron
from course_lib.predict.rates import RANGES, RATES, Rates
from course_lib.predict.table import read_rows, run_of
from course_lib.run import Run
from course_lib.shapes import read_models

OF_MEMORY = ("activation_scale", "queued_tensors")
OF_TIME = (
    "dense_share",
    "eager_passes",
    "layer_launch_ms",
    "tp_hop_ms",
    "tp_hop_waiting_ms",
    "stall_s",
    "data_share",
)
USEFUL_MFU = 10.0  # percent: below, a run mostly waits, and counts half


@dataclass(frozen=True)
class Measured:
    """One run that finished."""

    run: Run
    nodes: int
    model: str
    mfu_pct: float
    tokens_per_s_per_gpu: float
    memory_gb: float


def read_measured(path: Path, models: Mapping, seq_len: int) -> list[Measured]:
    """The runs of a table that finished."""
    return [
        Measured(
            run_of(row, models, seq_len),
            int(row["nodes"]),
            row["model"],
            *(float(row[column]) for column in ("mfu_pct", "tok_s_gpu", "mem_gb")),
        )
        for row in read_rows(path)
        if row["status"] == "ok"
    ]


def memory_gb(one: Measured, rates: Rates, cluster: Cluster) -> float:
    """As nanotron's log has it: in GiB, which it calls GB."""
    return sum(nanotron.memory_of(one.run, cluster, rates, one.nodes).values()) / GIB


def speed(one: Measured, rates: Rates, cluster: Cluster) -> float:
    """Tokens a second on each GPU."""
    layout = one.run.layout
    step_s = sum(nanotron.seconds_of(one.run, cluster, rates, one.nodes).values())
    return layout.sequences_per_step * one.run.seq_len / step_s / layout.world_size


def fit(measured: Sequence[Measured], cluster: Cluster) -> Rates:
    """Fit nanotron's rates of memory, then those of time; outliers count little."""

    def off_in_memory(rates: Rates) -> list[float]:
        return [np.log(memory_gb(m, rates, cluster) / m.memory_gb) for m in measured]

    rates = _fitted(RATES, OF_MEMORY, off_in_memory, "soft_l1")

    def off(rates: Rates) -> list[float]:
        weights = [1.0 if m.mfu_pct >= USEFUL_MFU else 0.5 for m in measured]
        return [
            weight * np.log(speed(m, rates, cluster) / m.tokens_per_s_per_gpu)
            for weight, m in zip(weights, measured, strict=True)
        ]

    return _fitted(rates, OF_TIME, off, "cauchy")


def _fitted(rates: Rates, names: Sequence[str], off: Callable[[Rates], list[float]], loss: str) -> Rates:
    least, most = (np.array([RANGES[name][side] for name in names]) for side in (0, 1))
    start = np.array([getattr(rates, name) for name in names])

    def with_values(values: np.ndarray) -> Rates:
        inside = np.clip(values, least, most)
        return Rates(**asdict(rates) | dict(zip(names, map(float, inside), strict=True)))

    found = least_squares(
        lambda values: off(with_values(values)),
        start,
        bounds=(least, most),
        x_scale=start,
        loss=loss,
        f_scale=0.04,  # errors of 4 % and less count squared
        diff_step=1e-3,
    )
    return with_values(found.x)


def errors(measured: Sequence[Measured], rates: Rates, cluster: Cluster) -> dict[str, float]:
    """The figures by which predictions are judged."""
    memory = np.array([memory_gb(m, rates, cluster) / m.memory_gb - 1 for m in measured])
    useful = [m for m in measured if m.mfu_pct >= USEFUL_MFU]
    tokens = np.array([speed(m, rates, cluster) / m.tokens_per_s_per_gpu - 1 for m in useful])
    cells = defaultdict(list)
    for m in measured:
        cells[m.model, m.nodes].append((m.tokens_per_s_per_gpu, speed(m, rates, cluster)))
    ranks = [_rank_correlation(*zip(*cell, strict=True)) for cell in cells.values() if len(cell) >= 10]
    slow = [m for m in measured if m.mfu_pct < 5]
    found = [100 * _mfu(m, rates, cluster) < 8 for m in slow]
    return {
        "runs": len(measured),
        "memory, median error": float(np.median(abs(memory))),
        "memory, nine in ten within": float(np.quantile(abs(memory), 0.9)),
        "tokens/s, median error": float(np.median(abs(tokens))),
        "tokens/s, nine in ten within": float(np.quantile(abs(tokens), 0.9)),
        "rank correlation in a cell, median": float(np.median(ranks)) if ranks else float("nan"),
        "of runs below 5 % MFU, predicted below 8 %": float(np.mean(found)) if found else float("nan"),
        "worst yield of the fastest": worst_yield(measured, rates, cluster),
        "worst yield of the least memory near it": worst_yield(measured, rates, cluster, TOLD_APART),
    }


def worst_yield(measured: Sequence[Measured], rates: Rates, cluster: Cluster, told_apart: float = 0.0) -> float:
    """Of the cells (a model on a number of nodes), the least measured speed of what is chosen, over the best measured.

    told_apart   of runs predicted so near to the fastest (a share of its speed), the one with the least memory
    """
    cells, yields = defaultdict(list), []
    for m in measured:
        cells[m.model, m.nodes].append(m)
    for cell in cells.values():
        predicted = [speed(m, rates, cluster) for m in cell]
        near = [m for m, one in zip(cell, predicted, strict=True) if one >= (1 - told_apart) * max(predicted)]
        chosen = min(near, key=lambda m: memory_gb(m, rates, cluster))
        yields.append(chosen.tokens_per_s_per_gpu / max(m.tokens_per_s_per_gpu for m in cell))
    return min(yields)


def _mfu(one: Measured, rates: Rates, cluster: Cluster) -> float:
    return speed(one, rates, cluster) * nanotron.counted_flops_per_token(one.run) / cluster.gpu.bf16_flops


def _rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    places = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*places)[0, 1])


def draw(measured: Sequence[Measured], rates: Rates, cluster: Cluster, path: Path) -> None:
    """Predicted against measured, memory and tokens/s, coloured by what takes most of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    kinds = [nanotron.memory_of(m.run, cluster, rates, m.nodes) for m in measured]
    parts = [nanotron.seconds_of(m.run, cluster, rates, m.nodes) for m in measured]
    panels = [
        (
            left,
            kinds,
            [m.memory_gb for m in measured],
            [memory_gb(m, rates, cluster) for m in measured],
            "peak GiB a GPU",
        ),
        (
            right,
            parts,
            [m.tokens_per_s_per_gpu for m in measured],
            [speed(m, rates, cluster) for m in measured],
            "tokens/s a GPU",
        ),
    ]
    for axes, spent, x, y, label in panels:
        largest = [max(one, key=one.get) for one in spent]
        for name in sorted(set(largest)):
            chosen = [index for index, kind in enumerate(largest) if kind == name]
            axes.scatter([x[i] for i in chosen], [y[i] for i in chosen], s=9, alpha=0.6, label=f"mostly {name}")
        ends = [min(x + y), max(x + y)]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"measured {label}", ylabel=f"predicted {label}")
        axes.legend(fontsize=8)
    figure.savefig(path)


def main(
    runs: Positional[Path], models: Path, nodes_link: str = "efa", seq: int = 4096, picture: Path | None = None
) -> None:
    """Fit, print the rates and the errors, and draw them.

    Args:
        runs: CSV of measured runs
        models: JSON with the shapes of its models
        nodes_link: the network between nodes
        seq: tokens of a sequence
        picture: an SVG of predicted against measured
    """
    device = gpu("h100")
    cluster = Cluster(device, link(device.link), link(nodes_link))
    measured = read_measured(runs, read_models(models, seq), seq)
    rates = fit(measured, cluster)
    for name, value in asdict(rates).items():
        print(f"{name:36s}{value:10.3f}   plausible {RANGES[name][0]:g} to {RANGES[name][1]:g}")
    rows = {"fitted to all": errors(measured, rates, cluster), "the package's": errors(measured, RATES, cluster)}
    for model in sorted({m.model for m in measured}):
        others, own = ([m for m in measured if (m.model == model) == is_own] for is_own in (False, True))
        rows[f"{model} left out"] = errors(own, fit(others, cluster), cluster)
    for name, row in rows.items():
        print(f"\n{name}")
        for what, value in row.items():
            print(f"    {what:46s}{value:8.3f}" if isinstance(value, float) else f"    {what:46s}{value:8d}")
    if picture:
        draw(measured, rates, cluster, picture)


if __name__ == "__main__":
    tyro.cli(main)
