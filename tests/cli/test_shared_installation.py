"""One installation for all, as a class has it: read-only, a home that cannot be written, a folder with any name."""

import os
import subprocess
import sys

import nbformat
import pytest
from namespaces import NOBODY, as_another_user
from nbformat.v4 import new_code_cell, new_notebook

from course_lib import authoring

pytestmark = [pytest.mark.launches, pytest.mark.programs]

CELLS = """import torch, torch.distributed as dist
from course_lib.launch import launch
def work():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
print(list(launch(work, 2)))
---
import matplotlib.pyplot as plt
plt.plot([1, 2], label="순위"); plt.show()
---
import course_lib, os
assert not os.access(course_lib.__file__, os.W_OK) and not os.access(os.path.expanduser("~"), os.W_OK)
"""


@as_another_user
def test_a_learner_without_a_home_writes_the_course_and_runs_a_notebook_in_a_folder_with_a_korean_name(tmp_path):
    mine = tmp_path / "나의 수업 1"
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    cells = [new_code_cell(text, id=f"cell-{index}") for index, text in enumerate(CELLS.split("---\n"))]
    nbformat.write(new_notebook(cells=cells), mine / "첫 시간.ipynb")

    def course(*words):
        command = [*NOBODY, "HOME=/nonexistent", sys.executable, "-m", "course_lib", *words]
        done = subprocess.run(command, cwd=mine, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    told = course("new", "강의 자료")
    assert "start with notebooks/index.ipynb" in told
    written = {path.relative_to(mine / "강의 자료").as_posix() for path in mine.glob("강의 자료/*/*.ipynb")}
    assert written == {
        path.relative_to(authoring.ROOT).as_posix() for path in authoring.notebook_paths("notebooks", "exercises")
    }
    assert "첫 시간: 3 code cells ran" in course("--max-ranks", "2", "run", "첫 시간.ipynb")
