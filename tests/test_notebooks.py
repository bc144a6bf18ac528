"""Every notebook of the repository is as `authoring.notebook_problems` wants it, and strict nbval really compares.

What counts as compared: a code cell counts as uncompared if it is tagged nbval-ignore-output or nbval-skip, or if it
shows pictures alone and asserts nothing (nbval does not look at pictures). At most a fifth of a notebook's code cells.
"""

import re
import subprocess
import sys

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from course_lib import authoring

NOTEBOOKS = authoring.notebook_paths("notebooks", "solutions")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_notebook_is_as_the_course_wants_it(path):
    assert authoring.notebook_problems(path) == []


def test_every_chapter_has_its_exercises_and_they_are_what_the_solutions_give():
    assert authoring.exercise_problems() == []


def test_nothing_else_lies_beside_the_notebooks():
    for folder in ("notebooks", "solutions", "exercises"):
        for path in (authoring.ROOT / folder).glob("*"):
            known = path.name in (".ipynb_checkpoints", ".ruff.toml", "index.ipynb")
            assert known or re.fullmatch(r"\d\d[a-z]?_[a-z0-9_]+\.ipynb", path.name), path


def nbval_flags() -> list[str]:
    makefile = (authoring.ROOT / "Makefile").read_text()
    return re.search(r"^NBVAL := (.*) -n ", makefile, re.MULTILINE).group(1).split()


@pytest.mark.long
def test_the_flags_of_make_find_a_corrupted_number_a_missing_output_and_an_error(tmp_path):
    printed = [new_output("stream", name="stdout", text="41\n")]
    cells = [
        new_code_cell("print(41)", id="right", outputs=printed),
        new_code_cell("print(42)", id="corrupted", outputs=printed),
        new_code_cell("print(41)", id="missing"),
        new_code_cell("1 / 0", id="error"),
    ]
    path = tmp_path / "planted.ipynb"
    authoring.write(authoring.normalise(new_notebook(cells=cells)), path)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={tmp_path}", *nbval_flags(), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=authoring.ROOT, timeout=120)
    assert run.returncode == 1
    assert "3 failed, 1 passed" in run.stdout, run.stdout[-2000:]
