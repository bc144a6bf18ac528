"""Of the configurations that were measured on a cluster, the planner's choice against the fastest, and other rules.

`measured_runs.csv` is in the package; MEASURED_RUNS names a larger table of the same cluster, where there is one.
"""

import csv
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.config import ModelConfig
from course_lib.estimate import Estimate
from course_lib.layout import Layout
from course_lib.plan import Job, work_out
from course_lib.plan.measured import CLUSTER, MODELS, measured_job, measured_runs
from course_lib.plan.search import TOLD_APART, advised, ranked_s

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(os.environ.get("MEASURED_RUNS", ROOT.parent / "shared" / "data" / "cluster_runs.csv"))
SMALL = ModelConfig("1B", 16, 2048, 32, 32, 8192, 131_072, 4096, tied=True)
SHAPES = MODELS | {"1B": SMALL, "3B": replace(SMALL, name="3B", num_layers=28, d_model=3072)}
Cells = dict[str, list[tuple[Estimate, float]]]  # a model on so many GPUs -> what was measured there, tokens/s of a GPU


def fastest(options: list[Estimate]) -> Estimate:
    return min(options, key=lambda option: option.step_s)


def least_memory(options: list[Estimate]) -> Estimate:
    """Of those within 5 % of the fastest."""
    near = [option for option in options if option.step_s <= fastest(options).step_s / 0.95]
    return min(near, key=lambda option: option.memory_bytes)


def as_search(options: list[Estimate]) -> Estimate:
    return advised(sorted(options, key=lambda option: (ranked_s(option), option.memory_bytes)))


def slowest(options: list[Estimate]) -> Estimate:
    return max(options, key=lambda option: option.step_s)


def shares(cells: Cells, choose: Callable[[list[Estimate]], Estimate]) -> list[float]:
    """Of each cell what the choice reached, over the fastest that was measured there."""
    found = []
    for runs in cells.values():
        chosen = choose([option for option, _ in runs if option.fits])
        reached = next(speed for option, speed in runs if option is chosen)
        found.append(reached / max(speed for _, speed in runs))
    return found


def told(cells: Cells) -> dict[str, tuple[float, float, float]]:
    """Median, mean and worst for each rule."""
    found = {}
    for rule in (fastest, least_memory, as_search):
        reached = shares(cells, rule)
        found[rule.__name__] = (statistics.median(reached), statistics.mean(reached), min(reached))
    return found


def cells_of_the_package() -> Cells:
    found = {}
    for model, num_gpus in (("8B", 8), ("8B", 64), ("80B", 128)):
        job = measured_job(model, num_gpus)
        runs = measured_runs(model, num_gpus)
        found[f"{model} on {num_gpus}"] = [(work_out(job, run.layout), run.tokens_per_s_per_gpu) for run in runs]
    return found


def cells_of_the_table(least_mfu: float) -> Cells:
    """Cells of two runs and more that finished."""
    found = {}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "ok" and float(row["mfu_pct"]) >= least_mfu:
                layout = Layout(
                    **{axis: int(row[axis]) for axis in ("dp", "tp", "pp")},
                    zero_stage=int(row["zero"]),
                    micro_batch=int(row["mbs"]),
                    micro_batches=int(row["grad_acc"]),
                    sequence_parallel=int(row["tp"]) > 1,
                )
                tokens = layout.sequences_per_step * 4096
                job = Job(SHAPES[row["model"]], CLUSTER, layout.world_size, 4096, tokens, engine="nanotron")
                runs = found.setdefault(f"{row['model']} on {row['gpus']}", [])
                runs.append((work_out(job, layout), float(row["tok_s_gpu"])))
    return {name: runs for name, runs in found.items() if len(runs) > 1}


def test_the_choice_is_nearly_the_fastest_that_was_measured(capsys):
    cells = cells_of_the_package()
    with capsys.disabled():
        print(told(cells))
    reached = shares(cells, as_search)
    assert statistics.mean(reached) >= statistics.mean(shares(cells, fastest))
    assert min(reached) >= 0.9 and statistics.median(reached) >= 0.97
    assert statistics.median(shares(cells, slowest)) < 0.5


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured runs is not here (MEASURED_RUNS={TABLE})")
@pytest.mark.parametrize("least_mfu", [10.0, 0.0])
def test_on_the_larger_table_the_choice_beats_the_plain_fastest_and_the_least_memory(least_mfu, capsys):
    cells = cells_of_the_table(least_mfu)
    found = told(cells)
    with capsys.disabled():
        print(f"{len(cells)} cells of MFU >= {least_mfu}: {found}")
    means = {name: figures[1] for name, figures in found.items()}
    assert means["as_search"] >= means["fastest"] and means["as_search"] > means["least_memory"]
    assert found["as_search"][0] >= 0.97


def test_what_cannot_be_told_apart_is_less_than_the_error_of_the_clock():
    cells = cells_of_the_package()
    off = [abs(option.tokens_per_s_per_gpu / speed - 1) for runs in cells.values() for option, speed in runs]
    assert statistics.median(off) > TOLD_APART
