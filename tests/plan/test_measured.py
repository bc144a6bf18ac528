"""Of the configurations that were measured on a cluster, the planner's first choice against the fastest."""

import json
import os
import statistics
import sys
from pathlib import Path

import pytest

from course_lib.hardware import Cluster, gpu, link
from course_lib.plan import Job, Option, work_out
from course_lib.plan.search import advised
from course_lib.shapes import read_models

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fit_rates  # noqa: E402 - a script beside the package

TABLE = Path(os.environ.get("MEASURED_RUNS", ROOT.parent / "shared" / "data" / "cluster_runs.csv"))
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
LARGE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 14336, "vocab": 131072, "tied": False}
SMALL = LARGE | {"layers": 16, "hidden": 2048, "ffn": 8192, "tied": True}
SHAPES = {
    "1B": SMALL,
    "3B": SMALL | {"layers": 28, "hidden": 3072},
    "8B": LARGE,
    "80B": LARGE | {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 28672},
}


def option_of(one) -> Option:
    """A measured layout as the planner has it."""
    layout = one.run.layout
    tokens = layout.sequences_per_step * 4096
    job = Job(one.run.config, CLUSTER, layout.world_size, 4096, tokens, framework="nanotron")
    return work_out(job, layout)


def first_choice(options: list[Option]) -> Option:
    """As `search` takes it."""
    return advised(sorted(options, key=lambda option: (-option.tokens_per_s, option.memory_bytes)))


def slowest(options: list[Option]) -> Option:
    return min(options, key=lambda option: option.tokens_per_s)


def shares_of_cells(measured, choose) -> dict[str, float]:
    """(model, nodes) -> what the first choice reached, over the fastest that was measured there."""
    cells = {}
    for one in measured:
        cells.setdefault(f"{one.model} on {one.nodes}", []).append(one)
    shares = {}
    for name, runs in cells.items():
        if len(runs) > 1:
            options = [option_of(run) for run in runs]
            chosen = choose([option for option in options if option.fits])
            reached = next(run for run, option in zip(runs, options, strict=True) if option is chosen)
            shares[name] = reached.tokens_per_s_per_gpu / max(one.tokens_per_s_per_gpu for one in runs)
    return shares


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured runs is not here (MEASURED_RUNS={TABLE})")
def test_the_first_choice_is_nearly_the_fastest_that_was_measured(capsys, tmp_path):
    (tmp_path / "models.json").write_text(json.dumps(SHAPES))
    measured = fit_rates.read_measured(TABLE, read_models(tmp_path / "models.json", 4096), 4096)
    shares = shares_of_cells(measured, first_choice)
    with capsys.disabled():
        print({name: round(share, 3) for name, share in shares.items()})
        print(f"{len(shares)} cells: median {statistics.median(shares.values()):.3f}, worst {min(shares.values()):.3f}")
    assert statistics.median(shares.values()) >= 0.98
    assert min(shares.values()) >= 0.85
    turned_round = shares_of_cells(measured, slowest)
    assert statistics.median(turned_round.values()) < 0.5
