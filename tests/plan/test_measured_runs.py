"""The measured runs in the package are whole, and are what their columns say; the table as published holds them all."""

import csv
import os
from pathlib import Path

import pytest

from course_lib.plan import work_out
from course_lib.plan.measured import MODELS, SEQUENCES, measured_job, measured_runs

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(os.environ.get("MEASURED_RUNS", ROOT.parent / "shared" / "data" / "cluster_runs.csv"))
ALL = [run for model in MODELS for run in measured_runs(model)]


def test_every_run_has_the_batch_and_is_there_once():
    assert len(ALL) == 58 and len({(run.model, run.layout) for run in ALL}) == 58
    for run in ALL:
        assert run.layout.sequences_per_step == SEQUENCES
        assert work_out(measured_job(run.model, run.num_gpus), run.layout).step_s > 0


def test_mfu_and_tokens_of_a_run_say_the_same():
    for run in ALL:  # 8.86 billion parameters, and attention's scores
        flops = {"8B": 59.6e9, "80B": 512e9}[run.model]
        assert run.tokens_per_s_per_gpu * flops / 989e12 == pytest.approx(run.mfu, rel=0.15, abs=0.003)


def test_runs_come_fastest_first_and_unknown_counts_are_named():
    speeds = [run.tokens_per_s_per_gpu for run in measured_runs("8B", 64)]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 28 and speeds[0] == 6539
    with pytest.raises(ValueError, match="8, 16, 32, 64, 128, 256, 512 GPUs"):
        measured_runs("8B", 24)


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured runs is not here (MEASURED_RUNS={TABLE})")
def test_every_run_stands_in_the_published_table():
    with TABLE.open(newline="") as file:
        names = ("model", "gpus", "dp", "tp", "pp", "zero", "mbs", "grad_acc", "tok_s_gpu", "mfu_pct", "mem_gb")
        published = {tuple(row[name] for name in names) for row in csv.DictReader(file) if row["status"] == "ok"}
    with (ROOT / "course_lib" / "plan" / "measured_runs.csv").open(newline="") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file)]
    assert len(rows) == 58 and set(rows) <= published
