"""The program of a day on GPUs keeps its limits: parts are stopped with all that they started, and rows stay."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from course_lib.labs.gpu_day import read_rows

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("gpu_day_program", ROOT / "benchmarks" / "gpu_day.py")
program = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = program
SPEC.loader.exec_module(program)

ADD = (
    "import os; from course_lib.labs.gpu_day import add_row; "
    "add_row(os.environ['COURSE_GPU_TABLE'], part=os.environ['COURSE_GPU_PART'], name='one', outcome='measured')"
)
CHILD = ["sleep", f"987.{os.getpid()}"]  # of this process's test alone
STUBS = {
    "good": ADD,
    "slow": "import subprocess, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    f"subprocess.Popen({CHILD!r}); {ADD}; time.sleep(987)",
    "bad": "raise SystemExit(3)",
    "late": ADD,
}


def test_every_file_of_gpu_tests_is_in_a_part_and_the_important_fit_the_budget():
    files = {
        Path(path).name for part in program.PARTS for path in program.command(part) if path.startswith("tests/gpu")
    }
    assert files == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert sum(part.limit_s for part in program.PARTS[:7]) <= program.BUDGET_S <= 540


def test_a_slow_part_is_stopped_with_its_processes_and_what_it_measured_stays(tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.json"
    wait_or_end = program.wait_or_end

    def counted_from_its_row(process, seconds):  # a busy machine takes half a minute to import torch
        earlier = read_rows(table)
        while process.poll() is None and read_rows(table) == earlier:
            time.sleep(0.1)
        return wait_or_end(process, seconds)

    monkeypatch.setattr(program, "wait_or_end", counted_from_its_row)
    monkeypatch.setattr(program, "LEAST_S", 0.2)
    monkeypatch.setattr(program, "command", lambda part: [sys.executable, "-c", STUBS[part.name]])
    limits = {"good": 60.0, "slow": 0.5, "bad": 60.0}
    parts = [program.Part(name, (), limit) for name, limit in limits.items()]
    outcomes = program.run_all(tuple(parts), table, budget_s=900)
    assert outcomes == ["passed", "stopped", "failed"]
    rows = [(row["part"], row["name"], row["outcome"]) for row in read_rows(table)]
    assert rows == [
        ("good", "one", "measured"), ("good", "the part", "passed"), ("slow", "one", "measured"),
        ("slow", "the part", "stopped"), ("bad", "the part", "failed"),
    ]  # fmt: skip
    children = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == CHILD]
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert program.run_all((program.Part("late", (), 60.0),), table, budget_s=0.1) == ["not run"]
    assert read_rows(table)[-1]["reason"] == "no time was left"
    assert program.run_all((parts[0],), table, budget_s=60) == ["passed"]  # again: in place of its earlier rows
    assert [row["part"] for row in read_rows(table)] == ["slow", "slow", "bad", "late", "good", "good"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_leaves_nothing(tmp_path):
    call = [sys.executable, "benchmarks/gpu_day.py", "--out", str(tmp_path / "table.json")]
    run = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "sees none; nothing was run" in run.stderr
    assert list(tmp_path.iterdir()) == []
