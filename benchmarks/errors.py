"""How far estimates are off: fit the clock's seven constants, and write docs/PREDICTOR.md.

    python benchmarks/errors.py runs.csv --models models.json --fit-rates   # print constants, each model left out once
    python benchmarks/errors.py runs.csv --models models.json --write       # docs/PREDICTOR.md and its pictures

runs.csv has measured runs of nanotron: the columns that `course predict` reads, and status, mfu_pct, tok_s_gpu, mem_gb.
published_runs.csv has runs of papers and projects, each with its source. Where a source does not tell how long its
pipeline's chunks are or how many micro-batches it takes, the row is our choice: Llama 3 interleaved by 4, NeMo's long
sequences with 4 million tokens a step. NeMo AutoModel is FSDP2 with Transformer Engine's fused kernels, and so stands
as torchtitan does. Narayanan 2021 tells TFLOP/s: its equation 3, with recomputation, makes tokens/s of them.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import simulated  # beside this file
import tyro
from scipy.optimize import least_squares
from tyro.conf import Positional

from course_lib.engines import ENGINES
from course_lib.estimate import Estimate, estimate
from course_lib.estimate.table import read_rows, run_of
from course_lib.hardware import GIB, Cluster, gpu, link
from course_lib.run import Run
from course_lib.shapes import read_models
from course_lib.timing import RATES, Rates, step_time
from course_lib.timing.rates import RANGES

HERE, DOCUMENT = Path(__file__).parent, Path(__file__).parents[1] / "docs" / "PREDICTOR.md"
LEFT_OUT = HERE / "left_out.json"  # constants by the model that they were fitted without
USEFUL_MFU = 0.1  # below, a run mostly waits
ENOUGH = 10  # runs of a cell: a model on a number of nodes
SLOW_WEIGHT = 0.3  # of runs below USEFUL_MFU in the fit


@dataclass(frozen=True)
class Told:
    """A run, and what was measured or published of it."""

    source: str
    engine: str
    run: Run
    cluster: Cluster
    tokens_per_s_per_gpu: float
    memory_gib: float | None
    mfu: float = 1.0

    @property
    def nodes(self) -> int:
        return -(-self.run.layout.world_size // self.cluster.gpus_per_node)

    @property
    def cell(self) -> tuple[str, int]:
        return self.source, self.nodes

    def estimate(self, rates: Rates = RATES) -> Estimate:
        return estimate(self.run, self.cluster, self.engine, rates)

    def speed(self, rates: Rates = RATES) -> float:
        return step_time(self.run, self.cluster, self.engine, rates).tokens_per_s_per_gpu


def read_measured(path: Path, models: Path, engine: str = "nanotron") -> list[Told]:
    """The runs of a table that finished: their source is their model."""
    shapes, cluster = read_models(models, 4096), Cluster(gpu("h100"), link("nvlink4"), link("efa"))
    return [
        Told(
            row["model"],
            engine,
            run_of(row, shapes, 4096, "nanotron"),
            cluster,
            float(row["tok_s_gpu"]),
            float(row["mem_gb"]),
            float(row["mfu_pct"]) / 100,
        )
        for row in read_rows(path)
        if row["status"] == "ok"
    ]


def read_published(path: Path = HERE / "published_runs.csv") -> list[Told]:
    """The published runs, with the shapes of published_models.json."""
    models = read_models(HERE / "published_models.json", 4096)
    with path.open(newline="") as file:
        return [_published(row, models) for row in csv.DictReader(file)]


def _published(row: dict[str, str], models: dict) -> Told:
    device, run = gpu(row["gpu"]), run_of(row, models, 4096, row["recipe"])
    if run.layout.recompute == "selective" or row["source"].startswith(("Korthikanti", "Narayanan")):
        run = replace(run, attention="standard")  # before flash kernels
    cluster = Cluster(device, link(device.link), link(row["nodes_link"]))
    memory = float(row["mem_gib"]) if row["mem_gib"] else None
    return Told(row["source"], row["recipe"], run, cluster, float(row["tok_s_gpu"]), memory)


# ---- the fit


def fit(measured: Sequence[Told], published: Sequence[Told]) -> Rates:
    """Fit the seven constants to all these runs at once; outliers count little."""
    names = list(RANGES)
    least, most = (np.log([RANGES[name][side] for name in names]) for side in (0, 1))
    told = [*measured, *published]
    weights = np.array([1.0 if one.mfu >= USEFUL_MFU else SLOW_WEIGHT for one in told])
    speeds = np.array([one.tokens_per_s_per_gpu for one in told])

    def rates_of(logs: np.ndarray) -> Rates:
        return replace(RATES, **dict(zip(names, map(float, np.exp(np.clip(logs, least, most))), strict=True)))

    def off(logs: np.ndarray) -> np.ndarray:
        rates = rates_of(logs)
        return weights * np.log(np.array([one.speed(rates) for one in told]) / speeds)

    start = np.clip(np.log([getattr(RATES, name) for name in names]), least + 1e-6, most - 1e-6)
    found = least_squares(off, start, bounds=(least, most), loss="cauchy", f_scale=0.06, diff_step=0.01, max_nfev=12)
    return rates_of(found.x)


def fit_left_out(measured: Sequence[Told], published: Sequence[Told]) -> dict[str, Rates]:
    """Of each model the constants that are fitted without its runs."""
    models = dict.fromkeys(one.source for one in measured)
    return {model: fit([one for one in measured if one.source != model], published) for model in models}


def left_out(measured: Sequence[Told]) -> list[Estimate]:
    """Of each run the estimate by constants that were fitted without its model, as left_out.json has them."""
    rates = {model: Rates(**values) for model, values in json.loads(LEFT_OUT.read_text()).items()}
    return [one.estimate(rates[one.source]) for one in measured]


# ---- figures


def quantiles(ratios: Sequence[float]) -> tuple[float, float]:
    """Median and nine-in-ten of how far ratios are from 1."""
    off = np.abs(np.array(ratios) - 1)
    return float(np.median(off)), float(np.quantile(off, 0.9))


def figures(told: Sequence[Told], found: Sequence[Estimate]) -> dict[str, tuple[float, ...]]:
    """The figures by which estimates of measured runs are judged."""
    speed = [new.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu for one, new in zip(told, found, strict=True)]
    memory = [new.logged_bytes / GIB / one.memory_gib for one, new in zip(told, found, strict=True)]
    useful = [ratio for one, ratio in zip(told, speed, strict=True) if one.mfu >= USEFUL_MFU]
    cells = defaultdict(list)
    for one, ratio in zip(told, speed, strict=True):
        cells[one.cell].append((one.tokens_per_s_per_gpu, one.tokens_per_s_per_gpu * ratio, one.mfu))
    large = {cell: runs for cell, runs in cells.items() if len(runs) >= ENOUGH}
    ranks = [_rank_correlation(*zip(*((run[0], run[1]) for run in runs), strict=True)) for runs in large.values()]
    first = [_yield(runs, USEFUL_MFU) for runs in cells.values() if _useful(runs) >= ENOUGH]
    few = [_yield(runs, 0.0) for (_, nodes), runs in large.items() if nodes <= 32]
    inside = [_is_inside(one, new) for one, new in zip(told, found, strict=True)]
    most = [hit for one, hit in zip(told, inside, strict=True) if one.nodes == 64]
    return {
        "memory": quantiles(memory),
        "useful": quantiles(useful),
        "all": quantiles(speed),
        "rank": (float(np.median(ranks)),),
        "first": (float(np.median(first)), min(first)) if first else (float("nan"),) * 2,
        "few": (float(np.mean(few)),),
        "bar": (float(np.mean(inside)), float(np.mean(most)) if most else float("nan")),
        "fits": (sum(new.may_run for new in found), sum(new.room == "fits" for new in found)),
    }


def _useful(runs: Sequence[tuple]) -> int:
    return sum(mfu >= USEFUL_MFU for *_, mfu in runs)


def _yield(runs: Sequence[tuple], least_mfu: float) -> float:
    """What the run that is estimated to be the fastest reached, of the best that was measured."""
    chosen = max((run for run in runs if run[2] >= least_mfu), key=lambda run: run[1])
    return chosen[0] / max(run[0] for run in runs)


def _is_inside(one: Told, new: Estimate) -> bool:
    low, high = new.speed_range
    return low <= one.tokens_per_s_per_gpu <= high


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    places = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*places)[0, 1])


def pairs_of_micro_batches(told: Sequence[Told], found: Sequence[Estimate]) -> tuple[float, float, float]:
    """Of runs that differ in the micro-batch alone, how much faster the larger one is: measured, estimated, and how far
    off the estimate of a pair is; medians, of which the first two are of pairs in different places."""
    alike = defaultdict(list)
    for one, new in zip(told, found, strict=True):
        layout = one.run.layout
        alike[one.source, replace(layout, micro_batch=1, micro_batches=1)].append((layout.micro_batch, one, new))
    ratios = []
    for runs in alike.values():
        runs.sort(key=lambda run: run[0])
        for (_, one, new), (_, other, other_new) in pairwise(runs):
            if one.mfu >= USEFUL_MFU:
                measured = other.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu
                estimated = other_new.tokens_per_s_per_gpu / new.tokens_per_s_per_gpu
                ratios.append((measured, estimated, estimated / measured))
    return tuple(float(np.median(column)) for column in zip(*ratios, strict=True))


def spreads(told: Sequence[Told], found: Sequence[Estimate], kind: Callable) -> dict[str, tuple]:
    """Of each kind of run the nearest factors on the estimate between which nine in ten lay: memory, and speed."""
    groups = defaultdict(lambda: ([], []))
    for one, new in zip(told, found, strict=True):
        memory, speed = groups[kind(one)]
        speed.append(one.tokens_per_s_per_gpu / new.tokens_per_s_per_gpu)
        if one.memory_gib is not None:
            memory.append(one.memory_gib * GIB / new.logged_bytes)
    return {
        name: (len(speed), *(_nearest(one) if one else () for one in (memory, speed)))
        for name, (memory, speed) in groups.items()
    }


def _nearest(ratios: Sequence[float]) -> tuple[float, float]:
    """The ends of the shortest interval, in factors, that has 1 and nine in ten of the ratios in it."""
    values, most = sorted(ratios), len(ratios) // 10
    ends = [(min(1.0, values[below]), max(1.0, values[below - most - 1])) for below in range(most + 1)]
    low, high = min(ends, key=lambda pair: pair[1] / pair[0])
    return round(low, 2), round(high, 2)


# ---- the document


def percent(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.1f} %" for value in values)


def measured_line(name: str, told: Sequence[Told], found: Sequence[Estimate]) -> str:
    """A line of the table of measured runs."""
    of = figures(told, found)
    cells = [
        f"{len(told)}",
        percent(of["memory"]),
        percent(of["useful"]),
        percent(of["all"]),
        f"{of['rank'][0]:.3f}",
        ", ".join(f"{value:.2f}" for value in of["first"]),
        f"{of['few'][0]:.2f}",
        ", ".join(f"{100 * value:.0f} %" for value in of["bar"]),
    ]
    return f"| {name} | {' | '.join(cells)} |".replace("nan %", "").replace("nan", "")


def published_lines(told: Sequence[Told], found: Sequence[Estimate]) -> list[str]:
    """Lines of the table of published runs: of each engine, then of each source."""
    groups: dict[str, list[tuple[Told, Estimate]]] = {"**all**": list(zip(told, found, strict=True))}
    for name in ENGINES:
        groups[f"**{name}**"] = [pair for pair in groups["**all**"] if pair[0].engine == name]
    for one, new in groups["**all**"]:
        groups.setdefault(one.source, []).append((one, new))
    return [_published_line(name, pairs) for name, pairs in groups.items() if pairs]


def _published_line(name: str, pairs: Sequence[tuple[Told, Estimate]]) -> str:
    speed = [new.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu for one, new in pairs]
    memory = [new.logged_bytes / GIB / one.memory_gib for one, new in pairs if one.memory_gib]
    told_memory = f"{percent(quantiles(memory))} ({len(memory)})" if memory else ""
    rooms = [sum(new.room == room for _, new in pairs) for room in ("fits", "tight", "does not fit")]
    return f"| {name} | {len(pairs)} | {percent(quantiles(speed))} | {told_memory} | {', '.join(map(str, rooms))} |"


def rates_lines(rates: Rates) -> list[str]:
    """A line for each constant: value, plausible range."""
    ranges = {name: f"{least:g} to {most:g}" for name, (least, most) in RANGES.items()}
    values = asdict(rates).items()
    return [f"| {name} | {value:.4g} | {ranges.get(name, 'read off pairs of runs')} |" for name, value in values]


def document(measured: Sequence[Told], published: Sequence[Told]) -> str:
    """docs/PREDICTOR.md: the text of predictor.md with every figure in its place."""
    unseen = left_out(measured)
    by_fit, default = ([replace(one, engine=name).estimate() for one in measured] for name in ("nanotron", "course"))
    lines = [measured_line("all, fitted to all", measured, by_fit)]
    for model in sorted({one.source for one in measured}):
        of_model = [pair for pair in zip(measured, unseen, strict=True) if pair[0].source == model]
        lines.append(measured_line(f"{model} left out", *map(list, zip(*of_model, strict=True))))
    lines.append(measured_line("**each model left out**", measured, unseen))
    lines.append(measured_line("the default (`course`)", [replace(one, engine="course") for one in measured], default))
    pairs = pairs_of_micro_batches(measured, unseen)
    found = [one.estimate() for one in published]
    values = {
        "MEASURED": "\n".join(lines),
        "PAIRS": f"{100 * pairs[0] - 100:.1f} % faster in the median; estimated are {100 * pairs[1] - 100:.1f} %. "
        f"Pair by pair the estimate is {100 * pairs[2] - 100:+.1f} % off in the median",
        "FITS": f"{figures(measured, by_fit)['fits'][0]} of {len(measured)}",
        "SIMULATED": "\n".join(map(simulated.line, simulated.FAMILIES)),
        "PUBLISHED": "\n".join(published_lines(published, found)),
        "RATES": "\n".join(rates_lines(RATES)),
    }
    text = (HERE / "predictor.md").read_text()
    for name, value in values.items():
        text = text.replace(f"<{name}>", value)
    return text


def draw(measured: Sequence[Told], published: Sequence[Told], path: Path) -> None:
    """Estimated against measured and published: memory, and tokens/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
    memory, speed = figure.subplots(1, 2)
    groups = {"nanotron, measured": measured}
    for one in published:
        groups.setdefault(f"{one.engine}, published", []).append(one)
    for label, told in groups.items():
        points = [(one, one.estimate()) for one in told]
        style = {"s": 14, "alpha": 0.6, "label": label}
        with_memory = [(one.memory_gib, new.logged_bytes / GIB) for one, new in points if one.memory_gib]
        if with_memory:
            memory.scatter(*zip(*with_memory, strict=True), **style)
        speeds = [(one.tokens_per_s_per_gpu, new.tokens_per_s_per_gpu) for one, new in points]
        speed.scatter(*zip(*speeds, strict=True), **style)
    for axes, name in ((memory, "peak GiB a GPU"), (speed, "tokens/s a GPU")):
        ends = [min(axes.get_xlim()[0], 1), axes.get_xlim()[1]]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xlabel=f"measured or published {name}", ylabel=f"estimated {name}")
        axes.legend(fontsize=8)
    speed.set(xscale="log", yscale="log")
    figure.savefig(path)


def main(
    runs: Positional[Path | None] = None, models: Path | None = None, fit_rates: bool = False, write: bool = False
) -> None:
    """Print each published run beside its estimate; with measured runs fit, or write the document.

    Args:
        runs: CSV of measured runs
        models: JSON with the shapes of its models
        fit_rates: fit the constants, print them and error bars, and write left_out.json
        write: write docs/PREDICTOR.md and its picture
    """
    published = read_published()
    if runs is None:
        for one in published:
            new = one.estimate()
            speed = new.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu - 1
            memory = f", memory {new.logged_bytes / GIB / one.memory_gib - 1:+.0%}" if one.memory_gib else ""
            what = f"{one.run.config.name:15s}{one.run.seq_len:8d}"
            print(f"{one.source:28s}{what}  tokens/s {speed:+5.0%}{memory}  {new.room}")
        print("\n".join(published_lines(published, [one.estimate() for one in published])))
        return
    measured = read_measured(runs, models)
    if fit_rates:
        print("\n".join(rates_lines(fit(measured, published))))
        told = {model: asdict(rates) for model, rates in fit_left_out(measured, published).items()}
        LEFT_OUT.write_text(json.dumps(told, indent=2) + "\n")
        unseen = left_out(measured)
        print(measured_line("each model left out", measured, unseen))
        for name, spread in spreads(measured, unseen, _kind).items():
            print(name, *spread)
        for name, spread in spreads(published, [one.estimate() for one in published], _kind).items():
            print("published", name, *spread)
    if write:
        DOCUMENT.write_text(document(measured, published))
        draw(measured, published, DOCUMENT.with_name("predictor_errors.png"))


def _kind(one: Told) -> str:
    kind = "one stage" if one.run.layout.pp == 1 else "pipeline"
    return f"{kind}, {one.nodes if one.cluster.between.by_nodes else 'other'} nodes"


if __name__ == "__main__":
    tyro.cli(main)
