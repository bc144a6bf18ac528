"""nbgrader takes solutions/ as its source and grades with the course's own checks. Run by `make test-grading`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from course_lib import authoring

pytest.importorskip("nbgrader", reason="nbgrader is not installed; make test-grading installs it")

PLANTED = [
    new_code_cell("def double(x):\n    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION", id="double"),
    new_code_cell("def check_double(answer):\n    assert answer(4) == 8", id="checker"),
    new_code_cell("check_double(double)", id="check-double"),
]


def nbgrader(course: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "nbgrader", *arguments, f"--CourseDirectory.root={course}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic by its name
    environment = {**os.environ, "PATH": path}
    run = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stderr


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course whose one assignment is every solution notebook, and a planted one."""
    root = tmp_path_factory.mktemp("course")
    source = root / "source" / "chapters"
    source.mkdir(parents=True)
    for path in authoring.notebook_paths("solutions"):
        shutil.copy(path, source)
    authoring.write(authoring.normalise(new_notebook(cells=PLANTED)), source / "planted.ipynb")
    nbgrader(root, "generate_assignment", "chapters")
    return root


def test_the_release_hides_every_solution_and_locks_every_check(course):
    released = sorted((course / "release" / "chapters").glob("*.ipynb"))
    assert len(released) == len(authoring.notebook_paths("solutions")) + 1
    for path in released:
        source = authoring.read(course / "source" / "chapters" / path.name)
        for ours, theirs in zip(source.cells, authoring.read(path).cells, strict=True):
            if authoring.BEGIN in ours.source:
                assert "raise NotImplementedError" in theirs.source and "SOLUTION" not in theirs.source
            if ours.metadata.get("nbgrader", {}).get("grade"):
                assert theirs.source == ours.source and theirs.metadata.editable is False


def test_a_right_answer_gets_its_point_and_an_undone_one_none(course):
    for student in ("right", "undone"):
        folder = course / "submitted" / student / "chapters"
        shutil.copytree(course / "release" / "chapters", folder)
        for path in folder.glob("0*.ipynb"):
            path.unlink()  # the chapters' own answers are run by make nbval
        if student == "right":
            nb = authoring.read(folder / "planted.ipynb")
            nb.cells[0].source = "def double(x):\n    return x + x"
            nbformat.write(nb, folder / "planted.ipynb")
    nbgrader(course, "autograde", "chapters")
    nbgrader(course, "export")
    rows = [line.split(",") for line in (course / "grades.csv").read_text().splitlines()]
    score, who = rows[0].index("score"), rows[0].index("student_id")
    assert {row[who]: float(row[score]) for row in rows[1:]} == {"right": 1.0, "undone": 0.0}
