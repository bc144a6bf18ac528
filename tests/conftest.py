"""What all tests share: no display, one thread a process, why gpu tests are skipped, which tests start processes."""

import os
import sys
import tempfile

os.environ.setdefault("MPLBACKEND", "Agg")
# Two test processes with two threads each on two cores wait for each other: small steps took thirty times as long.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["COURSE_LAUNCHES"] = tempfile.mkdtemp(prefix="launches-")  # what runs beside the tests delays none of them
# nbformat imports jsonschema, and that a grammar of internet addresses: 3 s of a process, for a check nobody asks for.
sys.modules["rfc3987_syntax"] = None  # jsonschema goes without it

import subprocess
from pathlib import Path

import pytest
import torch

from course_lib import launch


def pytest_collection_modifyitems(config, items):
    """Mark the tests of files that start processes, and put them first; mark those of the core; skip what needs a GPU
    where there is none."""
    for item in items:
        name = Path(item.path).relative_to(Path(__file__).parent).as_posix()
        if name.startswith(STARTING_FOLDERS) or STARTERS & {id(value) for value in vars(item.module).values()}:
            item.add_marker(pytest.mark.launches)
        if name.startswith(CORE):
            item.add_marker(pytest.mark.core)
    # Workers take file after file (make's --no-loadscope-reorder): the long ones first, and the end is short for all.
    items.sort(key=lambda item: item.get_closest_marker("launches") is None)
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA GPU; torch {torch.__version__} sees none on this machine"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


STARTERS = {id(launch.launch), id(subprocess)}  # what a test file imports to start processes
STARTING_FOLDERS = ("browser/", "gpu/", "places/", "slurm/")
# Beside what starts no process, `make test` runs these: they found every bug that was planted in the core.
CORE = (
    "checkpoint/",
    "launch/test_network.py",
    "parallel/test_parallel_data.py",
    "parallel/test_parallel_five_d.py",
    "parallel/test_parallel_tensor.py",
    "parallel/test_ring.py",
    "schedules/",
    "traffic/",
)


@pytest.fixture(autouse=True)
def _only_marked_tests_start_processes(request, monkeypatch):
    """`make quick` leaves out what is marked; so a test that is not marked may not start a process."""
    if request.node.get_closest_marker("launches"):
        return

    def refuse(*args, **options):
        raise AssertionError(f"{Path(request.node.path).name} starts a process: mark its tests with launches")

    monkeypatch.setattr("course_lib.launch._processes.World", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
