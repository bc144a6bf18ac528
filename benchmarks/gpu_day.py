"""The first day on GPUs: everything of the course that needs one, most important first, in a few minutes.

    python benchmarks/gpu_day.py --out runs/gpu-day.json                   # all parts, in at most 9 minutes
    python benchmarks/gpu_day.py --out runs/gpu-day.json --parts kernels   # again, in place of its earlier rows

Each part is a process of pytest with a limit of its own. Its tests add their rows to the table as they go, so a stop at
any moment loses none. A Python that lacks packages is given them as wheels in a folder (make gpu-day-wheels).
`course gpu-report runs/gpu-day.json` makes docs/GPU.md of the table.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BUDGET_S = 530  # of 9 minutes: what is left starts and ends this program
LEAST_S = 8  # in which a process of pytest begins; no part is started with less


@dataclass(frozen=True)
class Part:
    """Tests of tests/gpu in one process: `workers` of pytest-xdist where nothing is timed, 0 where something is."""

    name: str
    files: tuple[str, ...]
    limit_s: float
    workers: int = 0
    kernels: str = "torch"


PARTS = (  # by importance
    Part("models", ("models",), 110),
    Part("kernels", ("kernels",), 60, kernels="gpu"),
    Part("eight bits", ("eight_bits",), 30),
    Part("slow rank", ("step_clock",), 60),
    Part("launch", ("launch",), 45),
    Part("memory", ("memory",), 60),
    Part("cells", ("cells",), 75),
    Part("shared GPU", ("sharded", "five_d", "context_pipeline_expert"), 150, workers=5),
    Part("simulated ranks", ("fake_cluster",), 60, workers=3),
    Part("offload", ("offload_states",), 40),
    Part("several GPUs", ("chapters",), 600),  # one GPU skips them all
)


def command(part: Part) -> list[str]:
    """The process of a part: pytest over its files."""
    files = [f"tests/gpu/test_{name}_gpu.py" for name in part.files]
    workers = ["-n", str(part.workers)] if part.workers else []
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:nbval", *workers, *files]


def run_part(part: Part, table: Path, seconds: float, site: Path | None = None) -> str:
    """Run a part for so many seconds at most, add the row that ends it, and return its outcome."""
    from course_lib.labs.gpu_day import add_row, drop_part

    drop_part(table, part.name)
    paths = os.pathsep.join(map(str, filter(None, (site, ROOT, os.environ.get("PYTHONPATH")))))
    told = {"COURSE_GPU_TABLE": str(table), "COURSE_GPU_PART": part.name, "COURSE_KERNELS": part.kernels}
    start = time.monotonic()
    with table.with_suffix(".log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(part), cwd=ROOT, env=os.environ | told | {"PYTHONPATH": paths}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        status = wait_or_end(process, seconds)
    outcome = "stopped" if status is None else "failed" if status else "passed"
    reason = {None: f"its limit of {seconds:.0f} s was over", 0: ""}.get(status, f"pytest ended with {status}")
    row = {"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "reason": reason}
    add_row(table, part=part.name, name="the part", **row)
    return outcome


def wait_or_end(process: subprocess.Popen, seconds: float) -> int | None:
    """Return the exit status of a process, or None if it took longer and was ended with all that it started."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(3)
                break
            except subprocess.TimeoutExpired:
                continue
        return None


def run_all(parts: tuple[Part, ...], table: Path, budget_s: float, site: Path | None = None) -> list[str]:
    """Run parts until the budget is spent; those for which nothing is left have a row that says so."""
    from course_lib.labs.gpu_day import add_row

    end, outcomes = time.monotonic() + budget_s, []
    for part in parts:
        seconds = min(part.limit_s, end - time.monotonic())
        if seconds < LEAST_S:
            outcomes.append("not run")
            add_row(table, part=part.name, name="the part", outcome="not run", reason="no time was left")
        else:
            outcomes.append(run_part(part, table, seconds, site))
        print(f"{part.name:16} {outcomes[-1]:8} {max(0, end - time.monotonic()):4.0f} s left", flush=True)
    return outcomes


def install(wheels: Path, site: Path) -> None:
    """Unpack the wheels of a folder, from which alone their packages come, into a folder of this run."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if found:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), *found], check=True)


def main(argv: list[str] | None = None) -> int:
    """The command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-day.json", help="the table")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="the budget of all parts together")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these alone")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that this Python lacks")
    options = parser.parse_args(argv)
    start, site = time.monotonic(), options.out.parent / "gpu-day-site"
    if options.wheels:
        install(options.wheels, site)
        sys.path.insert(0, str(site))
    from course_lib.labs.gpu_day import gpu_is_here, read_rows, summary

    if not gpu_is_here():
        print("make gpu-day needs a CUDA GPU, and torch sees none; nothing was run", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table = options.out.resolve()
    parts = tuple(part for part in PARTS if not options.parts or part.name in options.parts)
    outcomes = run_all(parts, table, options.seconds - (time.monotonic() - start), site)
    print(f"{table}: {summary(read_rows(table))}")
    return int(set(outcomes) != {"passed"})


if __name__ == "__main__":
    sys.exit(main())
