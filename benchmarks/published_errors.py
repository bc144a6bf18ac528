"""How far predictions are from runs that frameworks' authors published: torchtitan, Megatron, NeMo, Llama 3.

    python benchmarks/published_errors.py --fit-rates --picture docs/predictor_published.png

published_runs.csv has the columns that `course predict` reads, and source, recipe, gpu, nodes_link, tok_s_gpu, mem_gib.
Rows of the sample "fit" set three rates, `fused_passes`, `fp8_speedup` and `width_gain`; rows of the sample "check" set
none. Where a source does not tell how long its pipeline's chunks are or how many micro-batches it takes, the row is our
choice: Llama 3 interleaved by 4, NeMo's long sequences with 4 million tokens a step. NeMo AutoModel is FSDP2 with
Transformer Engine's fused kernels, and so stands as torchtitan does.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from scipy.optimize import least_squares

from course_lib.hardware import GIB, Cluster, gpu, link
from course_lib.predict import RATES, Prediction, Rates, predict
from course_lib.predict.frameworks import FRAMEWORKS, How, seconds_of
from course_lib.predict.rates import RANGES
from course_lib.predict.table import how_of, run_of
from course_lib.run import Run
from course_lib.shapes import read_models

HERE = Path(__file__).parent
SHARED = ("fused_passes", "fp8_speedup", "width_gain")


@dataclass(frozen=True)
class Published:
    """One run of a paper's table; memory is not always told."""

    source: str
    sample: str
    recipe: str
    run: Run
    how: How
    cluster: Cluster
    tokens_per_s_per_gpu: float
    memory_gib: float | None

    def predicted(self, rates: Rates = RATES) -> Prediction:
        return predict(self.run, self.cluster, self.recipe, rates, self.how)

    def step_s(self, rates: Rates) -> float:
        """The predicted step alone, which takes less long than memory."""
        return sum(seconds_of(self.run, self.cluster, FRAMEWORKS[self.recipe], rates, self.how).values())

    @property
    def published_step_s(self) -> float:
        layout = self.run.layout
        return layout.sequences_per_step * self.run.seq_len / layout.world_size / self.tokens_per_s_per_gpu


def read_published(path: Path = HERE / "published_runs.csv") -> list[Published]:
    """The published runs, with the shapes of published_models.json."""
    models = read_models(HERE / "published_models.json", 4096)
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            device = gpu(row["gpu"])
            run = run_of(row, models, 4096)
            if run.layout.recompute == "selective" or row["source"].startswith("Korthikanti"):
                run = replace(run, attention="standard")  # before flash kernels
            found.append(
                Published(
                    row["source"],
                    row["sample"],
                    row["recipe"],
                    run,
                    how_of(row),
                    Cluster(device, link(device.link), link(row["nodes_link"])),
                    float(row["tok_s_gpu"]),
                    float(row["mem_gib"]) if row["mem_gib"] else None,
                )
            )
    return found


def errors_of(one: Published, rates: Rates = RATES) -> tuple[float, float | None]:
    """Of the step's seconds, and of memory where it is told: predicted over published, less 1."""
    step = one.step_s(rates) / one.published_step_s - 1
    return step, None if one.memory_gib is None else one.predicted(rates).memory_bytes / GIB / one.memory_gib - 1


def fit(published: Sequence[Published]) -> Rates:
    """Fit the three shared rates to the rows of the sample "fit"; the others stay."""
    rows = [one for one in published if one.sample == "fit"]
    start = [max(0.1, getattr(RATES, name)) for name in SHARED]

    def off(values: np.ndarray) -> list[float]:
        rates = Rates(**asdict(RATES) | dict(zip(SHARED, map(float, values), strict=True)))
        return [np.log(one.step_s(rates) / one.published_step_s) for one in rows]

    bounds = [[RANGES[name][side] for name in SHARED] for side in (0, 1)]
    found = least_squares(off, start, bounds=bounds, loss="soft_l1", f_scale=0.05, diff_step=0.02)
    return Rates(**asdict(RATES) | dict(zip(SHARED, map(float, found.x), strict=True)))


def summary(published: Sequence[Published], errors: Sequence[tuple[float, float | None]]) -> dict[str, tuple]:
    """Of each sample and source: runs, median and nine-in-ten error of the step, runs with memory, the same of it."""
    groups: dict[str, list[tuple[float, float | None]]] = {}
    for one, found in zip(published, errors, strict=True):
        for name in (f"sample {one.sample}", one.source):
            groups.setdefault(name, []).append(found)
    return {name: _figures(found) for name, found in groups.items()}


def _figures(found: Sequence[tuple[float, float | None]]) -> tuple:
    steps, memory = [abs(step) for step, _ in found], [abs(size) for _, size in found if size is not None]
    of_memory = (np.median(memory), np.quantile(memory, 0.9)) if memory else (None, None)
    return (len(steps), np.median(steps), np.quantile(steps, 0.9), len(memory), *of_memory)


def draw(published: Sequence[Published], errors: Sequence[tuple[float, float | None]], path: Path) -> None:
    """Predicted against published, memory and tokens/s, coloured by framework."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
    panels = zip(figure.subplots(1, 2), ("peak GiB a GPU", "tokens/s a GPU"), strict=True)
    for axes, label in panels:
        of_memory = label.startswith("peak")
        chosen = [pair for pair in zip(published, errors, strict=True) if not of_memory or pair[0].memory_gib]
        rows = [one for one, _ in chosen]
        both = [
            (one.memory_gib, one.memory_gib * (1 + memory))
            if of_memory
            else (one.tokens_per_s_per_gpu, one.tokens_per_s_per_gpu / (1 + step))
            for one, (step, memory) in chosen
        ]
        for recipe in sorted({one.recipe for one in rows}):
            points = [pair for pair, one in zip(both, rows, strict=True) if one.recipe == recipe]
            axes.scatter(*zip(*points, strict=True), s=18, alpha=0.7, label=recipe)
        ends = [min(map(min, both)), max(map(max, both))]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        if not of_memory:
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=f"published {label}", ylabel=f"predicted {label}")
        axes.legend(fontsize=8)
    figure.savefig(path)


def main(fit_rates: bool = False, picture: Path | None = None) -> None:
    """Print each published run beside its prediction, and the errors by source.

    Args:
        fit_rates: fit the three shared rates first, and print them
        picture: a PNG of predicted against published
    """
    published = read_published()
    if fit_rates:
        rates = fit(published)
        print(", ".join(f"{name} {getattr(rates, name):.3f}" for name in SHARED))
    errors = [errors_of(one) for one in published]
    for one, (step, memory) in zip(published, errors, strict=True):
        text = "" if memory is None else f"memory {memory:+.0%}"
        print(f"{one.source:28s}{one.run.config.name:15s}{one.run.seq_len:8d}  step {step:+5.0%}  {text}".rstrip())
    print(f"\n{'':28s}{'runs':>5s}{'step: median':>14s}{'nine in ten':>12s}{'memory: median':>16s}{'nine in ten':>12s}")
    for name, (count, median, most, _, of_memory, most_memory) in summary(published, errors).items():
        told = "" if of_memory is None else f"{of_memory:16.1%}{most_memory:12.1%}"
        print(f"{name:28s}{count:5d}{median:14.1%}{most:12.1%}{told}")
    if picture:
        draw(published, errors, picture)


if __name__ == "__main__":
    tyro.cli(main)
