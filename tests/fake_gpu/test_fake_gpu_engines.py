"""Engines, Measure buttons and `make bench` on GPUs without a GPU: rank 0 of their worlds on fake CUDA tensors.

A tensor on the wrong device raises there as it would on a GPU (tests/fake_cuda.py). They run in a process of their own,
since the accelerator that stands in for CUDA cannot be taken back. What chapters launch: test_fake_gpu_chapters.py.
"""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from course_lib.authoring import ROOT
from course_lib.labs.table import LABS
from course_lib.layout import Layout
from course_lib.train import log as train_log
from course_lib.train.step_clock import PARTS

CHAPTER = ROOT / "tests" / "fake_gpu" / "chapter.py"
LIMIT_S = 1200  # on a machine that does much else; alone it takes under a minute
LAYOUTS = [
    "pp=2,dp=2,tp=2,sequence_parallel=true,zero_stage=1,micro_batches=2",
    "cp=2,dp=2,zero_stage=3",
    "cp=2,dp=2,zero_stage=2",
    "cp=2,cp_method=all_gather",
    "cp=2,cp_method=ulysses,recompute=full",
    "dp=4,dp_replicate=2,zero_stage=3",
    "pp=2,schedule=afab,micro_batches=2",
    "pp=2,schedule=interleaved,v=2,micro_batches=2",
    "pp=2,schedule=zb_h1,micro_batches=4",
    "pp=2,schedule=zb_h2,micro_batches=4",
    "pp=2,schedule=zbv,v=2,micro_batches=4",
    "pp=2,schedule=dualpipe_v,v=2,micro_batches=4",
]
BENCHED = {  # -> what of PyTorch's own cannot run on fake tensors; the test fails if it does
    "zero": "",
    "tensor": "",
    "sequence": "",
    "expert": "DDP's reducer is written in C++",  # for what is not an expert
    "data": "DDP's reducer is written in C++",
    "pipeline": "PyTorch's pipelines ask their neighbours for shapes",
    "context": "mixed torch.Tensor and DTensor",  # which attention it takes is chosen in C++, for the stand-in
}


def launches(notebook) -> list[dict]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(CHAPTER), str(notebook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [record for record in records if "function" in record]


def notebook_of(folder, cells: list[str]):
    path = folder / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells]), path)
    return path


@pytest.mark.exhaustive
def test_engines_and_measure_buttons_keep_to_the_device_of_their_rank(tmp_path):
    head = """from course_lib.compare.five_d_profile import _one_rank
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout"""
    cells = [
        f"launch(_one_rank, {Layout.parse(text).world_size}, preset('toy'), Layout.parse('{text}'), 64)"
        for text in LAYOUTS
    ]
    cells.append("launch(_one_rank, 4, preset('toy-moe'), Layout.parse('dp=2,tp=2,ep=2'), 64)")
    found = launches(notebook_of(tmp_path, [head, *cells]))
    assert len(found) == len(cells)
    assert [record for record in found if "error" in record or "left_out" in record] == []


@pytest.mark.exhaustive
def test_the_trainer_logs_what_each_part_of_a_step_takes_on_a_gpu(tmp_path):
    cell = f"""from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.train import log as train_log
from course_lib.train.step_clock import PARTS
from course_lib.train import Logs, TrainPlan, trainer
layout, plan = Layout.parse('dp=2,tp=2,zero_stage=1'), TrainPlan(steps=2, seq_len=64)
launch(trainer.train, 4, preset('toy'), layout, plan, None, Logs({str(tmp_path)!r}))"""
    (found,) = launches(notebook_of(tmp_path, [cell]))
    assert "error" not in found and "left_out" not in found, found
    lines = [line for line in train_log.read(train_log.log_path(tmp_path, 0)) if "loss" in line]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert all(line[part] > 0 for part in PARTS) and sum(line[part] for part in PARTS) <= line["seconds"]


@pytest.mark.exhaustive
def test_the_bench_keeps_to_the_device_of_its_ranks(tmp_path):
    head = """from course_lib.compare import bench
from course_lib.launch import launch
bench.WARM_UP_ROUNDS = 0"""
    found = launches(notebook_of(tmp_path, [head, *(f"launch(bench.times, 2, '{name}', 1)" for name in BENCHED)]))
    for record, why in zip(found, BENCHED.values(), strict=True):
        ended = record.get("error") or record.get("left_out", "")
        assert bool(why) == bool(ended) and why in ended, record


@pytest.mark.exhaustive
def test_cells_for_gpus_keep_to_the_device_of_their_ranks(tmp_path):
    head = """from course_lib.config import preset
from course_lib.labs import measure, table
from course_lib.launch import launch
table.DENSE, table.EXPERTS, table.SEQ_LEN, measure.SUMMED_BYTES = preset('toy'), preset('toy-moe'), 64, 1 << 12"""
    cells = [f"launch(measure.run_lab, {min(lab.ranks)}, '{chapter}', 1)" for chapter, lab in LABS.items()]
    found = launches(notebook_of(tmp_path, [head, *cells]))
    assert len(found) == len(cells)
    assert [record for record in found if "error" in record] == []


def test_a_tensor_on_the_wrong_device_is_found(tmp_path):
    """Otherwise the tests above could pass for any cell."""
    slips = {
        "model_on_the_cpu": "build(preset('toy'), device='cpu')(torch.zeros(1, 4, dtype=torch.int64))",
        "index_on_the_gpu": "torch.zeros(3, device='cpu')[torch.arange(2)]",
        "numpy_of_the_gpu": "torch.zeros(3).numpy()",
        "right": "build(preset('toy'))(torch.zeros(1, 4, dtype=torch.int64)).sum().item()",
    }
    head = "import torch\nfrom course_lib.config import preset\nfrom course_lib.launch import launch\n"
    head += "from course_lib.model import build\n"
    cells = [f"def {name}():\n    return {slip}\nlaunch({name}, 2)" for name, slip in slips.items()]
    wrong = {record["function"] for record in launches(notebook_of(tmp_path, [head, *cells])) if "error" in record}
    assert wrong == set(slips) - {"right"}
