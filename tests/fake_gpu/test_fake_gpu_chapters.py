"""Chapters on GPUs without a GPU: what they launch runs as rank 0 of its world on fake CUDA tensors.

A tensor on the wrong device raises there as it would on a GPU (tests/fake_cuda.py). It takes minutes, so that it has a
target of its own: make test-fake-gpu. Engines and Measure buttons are in test_fake_gpu_engines.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.authoring import ROOT
from course_lib.cli import doctor

CHAPTER = ROOT / "tests" / "fake_gpu" / "chapter.py"
CHAPTERS = ("00", "03", "04", "05", "06", "07", "08", "09", "09b", "10", "11", "12")
ON_GLOO = (
    "12_on_a_cluster",
    "12_on_a_cluster_in_depth",
)  # every launch of theirs asks for gloo, whose errors they show
NOTEBOOKS = [
    path
    for chapter in CHAPTERS
    for path in sorted((ROOT / "notebooks").glob(f"{chapter}_*.ipynb"))
    if path.stem not in ON_GLOO
]
LIMIT_S = 3600  # on a machine that does much else

# (chapter, function) -> what keeps it from running on fake tensors. None of it is a device.
DDP = "DDP's reducer is written in C++ and reads addresses"
ASKED = "it asks for the CPU by name"
NO_MESH = "Expects the parameter to already be moved to device standin"  # FSDP2, no mesh given
LEFT_OUT = {
    ("00", "swap_and_hang"): ASKED,
    ("00", "only_some_take_part"): ASKED,
    ("00", "another_operation"): ASKED,
    ("00", "two_dtypes"): ASKED,
    ("00_in_depth", "wait_with_a_limit"): ASKED,
    ("00_in_depth", "call_another_collective"): ASKED,
    ("00_in_depth", "on_the_wire"): ASKED,
    ("03", "as_traced_trainer"): ASKED,
    ("03", "train_with_ddp"): DDP,
    ("03_in_depth", "<lambda>"): DDP,
    ("03_in_depth", "as_trainer"): DDP,
    ("03_in_depth", "as_traced_trainer"): ASKED,
    ("03_in_depth", "count_graphs"): "torch.compile traces with fake tensors of its own",  # the last of three
    ("03_in_depth", "try_ddp"): DDP,
    ("03_in_depth", "first_gradient"): DDP,
    ("03_in_depth", "try_unused"): DDP,
    ("03_in_depth", "how_many"): ASKED,
    ("03_in_depth", "accelerated"): "Accelerate looks at the machine itself for GPUs",
    ("04", "save_and_load"): NO_MESH,
    ("04_in_depth", "most_memory"): NO_MESH,
    ("04_in_depth", "try_native"): DDP,  # the last of four
    ("04_in_depth", "accelerated"): ASKED,
    ("06", "save"): "PyTorch's checkpoints write storages themselves",
    ("06", "load"): "to set the storage of a tensor",  # and read them
    ("09b", "train_step"): DDP,
    ("08", "as_pipeline"): ASKED,
    ("08", "as_traced_pipeline"): ASKED,
    ("08", "train_step"): "PyTorch's pipelines ask their neighbours for shapes",
    ("08_in_depth", "native_all"): "PyTorch's pipelines ask their neighbours for shapes",
    ("08_in_depth", "as_pipeline"): ASKED,
    ("10", "backward_once"): "Expects DTensor to be moved to cuda but got standin",  # FSDP2's own check
    ("10_in_depth", "train_some"): "storages themselves",
    ("07", "as_context_step"): "got mixed torch.Tensor and DTensor",  # the last of its calls: PyTorch's ring
    ("07_in_depth", "both_rings"): "got mixed torch.Tensor and DTensor",  # PyTorch's ring, under the fake group
}


def chapter_of(notebook: Path) -> str:
    """A chapter's number, and whether it is its second reading."""
    return notebook.stem.partition("_")[0] + ("_in_depth" if notebook.stem.endswith("_in_depth") else "")


@pytest.fixture(scope="module")
def records() -> list[dict]:
    """A record of each launch."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(CHAPTER), *map(str, NOTEBOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=chapter_of)
def test_every_function_that_a_chapter_launches_keeps_to_the_device_of_its_rank(notebook, records):
    mine = [record for record in records if record["notebook"] == str(notebook)]
    assert [record for record in mine if "missed" in record] == []
    ended = {r["function"]: r.get("error") or r["left_out"] for r in mine if "error" in r or "left_out" in r}
    expected = {function: why for (chapter, function), why in LEFT_OUT.items() if chapter == chapter_of(notebook)}
    assert ended.keys() == expected.keys(), ended
    assert all(why in ended[function] for function, why in expected.items()), ended


def test_the_doctor_knows_how_many_ranks_a_chapter_starts(records):
    most = {chapter.stem: chapter.ranks for chapter in doctor.CHAPTERS}
    for notebook in NOTEBOOKS:
        ranks = [r["ranks"] for r in records if r["notebook"] == str(notebook) and "ranks" in r]
        assert max(ranks, default=1) == most[notebook.stem]
