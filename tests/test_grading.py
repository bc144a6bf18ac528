"""nbgrader takes solutions/ as its source; `course grade` gives the points of all chapters. Run by `make test-grading`.

Students hand in every chapter: one the solutions, one what was released, and one that cheats in each answer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib import authoring
from course_lib.authoring.form import BEGIN
from course_lib.cli import main

pytest.importorskip("nbgrader", reason="nbgrader is not installed; make test-grading installs it")


def nbgrader(course: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "nbgrader", *arguments, f"--CourseDirectory.root={course}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic by its name
    environment = {**os.environ, "PATH": path}
    run = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stderr


NAMES = """for _n in [k for k in globals() if k.startswith("check_")]:
    globals()[_n] = lambda *a, **k: None
"""
CHEAT = """import sys
def patch():
    for module in [m for n, m in sys.modules.items() if n.startswith("course_lib.checks")]:
        for name in [n for n in vars(module) if n.startswith(("check_", "expect_", "_expect_", "fail"))]:
            setattr(module, name, lambda *args, **kwargs: None)
class Cheat:
    def __init__(self, *args, **kwargs):
        patch()
def cheat(*args, **kwargs):
    patch()
    return 1
"""
STUDENTS = {"chapters": ("right", "untouched", "cheat"), "third": ("right", "untouched", "names", "cheat")}
LIMIT = "--Execute.timeout=300"  # nbgrader gives a cell 30 s


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course whose assignments are every solution notebook, and chapter 03 by itself, with three submissions."""
    root = tmp_path_factory.mktemp("course")
    for assignment, pattern in (("chapters", "*"), ("third", "03_*")):
        source = root / "source" / assignment
        source.mkdir(parents=True)
        for path in authoring.ROOT.glob(f"solutions/{pattern}.ipynb"):
            shutil.copy(path, source)
        nbgrader(root, "generate_assignment", assignment)
        for student in STUDENTS[assignment]:
            shutil.copytree(root / "release" / assignment, root / "submitted" / student / assignment)
            for path in (root / "submitted" / student / assignment).glob("*.ipynb"):
                hand_in(student, source / path.name, path)
    return root


def hand_in(student: str, solution: Path, path: Path) -> None:
    """Write a student's answers into the released notebook."""
    nb, solved = authoring.read(path), authoring.read(solution)
    answers = [cell.source[:-1].partition("(")[2] for cell in solved.cells if authoring.is_check_cell(cell)]
    for ours, theirs in zip(solved.cells, nb.cells, strict=True):
        if BEGIN in ours.source and student == "right":
            theirs.source = ours.source
        if BEGIN in ours.source and student in ("names", "cheat"):
            theirs.source = (
                NAMES
                + CHEAT * (student == "cheat")
                + "cheat = Cheat = None\n" * (student == "names")
                + "".join(f"{name} = {'Cheat' if name[0] == 'M' else 'cheat'}\n" for name in answers)
            )
    authoring.write(nb, path)


def scores(course: Path) -> dict[tuple[str, str], float]:
    """The points in nbgrader's gradebook, as it exports them, by assignment and student."""
    nbgrader(course, "export")
    rows = [line.split(",") for line in (course / "grades.csv").read_text().splitlines()]
    assignment, student, score = (rows[0].index(name) for name in ("assignment", "student_id", "score"))
    return {(row[assignment], row[student]): float(row[score]) for row in rows[1:]}


def points(pattern: str) -> float:
    """The points of all checks of these chapters' solutions."""
    cells = [cell for path in authoring.ROOT.glob(f"solutions/{pattern}.ipynb") for cell in authoring.read(path).cells]
    return sum(cell.metadata.nbgrader.points for cell in cells if authoring.is_check_cell(cell))


def test_the_release_hides_every_solution_and_locks_every_check(course):
    released = sorted((course / "release" / "chapters").glob("*.ipynb"))
    assert len(released) == len(authoring.notebook_paths("solutions"))
    for path in released:
        source = authoring.read(course / "source" / "chapters" / path.name)
        for ours, theirs in zip(source.cells, authoring.read(path).cells, strict=True):
            if BEGIN in ours.source:
                assert "raise NotImplementedError" in theirs.source and "SOLUTION" not in theirs.source
            if ours.metadata.get("nbgrader", {}).get("grade"):
                assert theirs.source == ours.source and theirs.metadata.editable is False


def test_nbgrader_itself_grades_a_chapter_and_a_check_under_another_name_gets_no_point(course):
    nbgrader(course, "autograde", "third", LIMIT)
    found = scores(course)
    assert [found["third", student] for student in ("right", "untouched", "names")] == [points("03_*"), 0.0, 0.0]
    assert found["third", "cheat"] > 0  # what a kernel says cannot be trusted, as docs/GRADING.md tells


def test_every_chapter_gets_full_points_from_outside_if_right_and_none_if_untouched_or_a_cheat(course):
    nbgrader(course, "autograde", "chapters", "--no-execute")
    folders, book = (str(course / name) for name in ("release/chapters", "submitted")), str(course / "gradebook.db")
    assert main(["grade", *folders, "--gradebook", book, "--out", str(course / "points.csv")]) == 0
    found = scores(course)
    every = points("*")
    assert every > 400
    assert [found["chapters", student] for student in ("right", "untouched", "cheat")] == [every, 0.0, 0.0], (
        course / "points.csv"
    ).read_text()
