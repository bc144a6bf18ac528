"""Chapters on GPUs without a GPU: what they launch runs as rank 0 of its world on fake CUDA tensors.

A tensor on the wrong device raises there as it would on a GPU (tests/fake_cuda.py). Each chapter has a process of its
own, since the accelerator that stands in for CUDA cannot be taken back.
"""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from course_lib.authoring import ROOT
from course_lib.layout import Layout

CHAPTER = ROOT / "tests" / "fake_cuda_chapter.py"
NOTEBOOKS = [next((ROOT / "notebooks").glob(f"{chapter}_*.ipynb")) for chapter in ("00", "05")]
LIMIT_S = 1200  # on a machine that does much else; alone a chapter takes under a minute


def launches(notebook) -> list[dict]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, str(CHAPTER), str(notebook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [record for record in records if "function" in record]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_every_function_that_a_chapter_launches_keeps_to_the_device_of_its_rank(notebook):
    found = launches(notebook)
    assert found
    assert [record for record in found if "error" in record] == []


def notebook_of(folder, cells: list[str]):
    path = folder / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells]), path)
    return path


def test_engines_and_measure_buttons_keep_to_the_device_of_their_rank(tmp_path):
    head = """from course_lib.compare.five_d_profile import _one_rank
from course_lib.compare.sharded_profile import Sizes, _tensor_rank, _zero_rank
from course_lib.config import preset
from course_lib.launch import launch
from course_lib.layout import Layout"""
    layouts = (
        "pp=2,dp=2,tp=2,sequence_parallel=true,zero_stage=1,micro_batches=2",
        "cp=2,dp=2,zero_stage=3",
        "dp=2,cp=2,zero_stage=2",
    )
    cells = [f"launch(_zero_rank, 2, preset('toy'), {stage}, 'fp32', Sizes(), 'none')" for stage in range(4)]
    cells += [f"launch(_tensor_rank, 2, preset('toy'), {sp}, False, Sizes(), 'none')" for sp in (False, True)]
    cells += [
        f"launch(_one_rank, {Layout.parse(text).world_size}, preset('toy'), Layout.parse('{text}'), 64)"
        for text in layouts
    ]
    cells.append("launch(_one_rank, 4, preset('toy-moe'), Layout.parse('dp=2,tp=2,ep=2'), 64)")
    found = launches(notebook_of(tmp_path, [head, *cells]))
    assert {record["function"] for record in found} == {"_zero_rank", "_tensor_rank", "_one_rank"}
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
