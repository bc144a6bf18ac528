"""`course grade`: points of a class, from the release's checks and the submissions' answers."""

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from course_lib.validate import writable_file


def grade(
    release: Positional[Path], submitted: Positional[Path], out: Path | None = None, gradebook: Path | None = None
) -> int:
    """Grade submissions without their kernels' word; docs/GRADING.md says what is protected.

    Args:
        release: a folder of notebooks that nbgrader released, or exercises/; its check cells count
        submitted: the students' folders (nbgrader's submitted/), or one folder of notebooks
        out: points by student, notebook and exercise, as .csv or .json
        gradebook: nbgrader's gradebook.db, which `nbgrader autograde` makes; the points are written into it
    """
    from course_lib.checks.outside import Points, grade_class

    for name, folder in (("release", release), ("submitted", submitted)):
        if not folder.is_dir():
            raise ValueError(f"{name} is {str(folder)!r}, and no folder; give one with notebooks")
    if out is not None:
        if out.suffix not in (".csv", ".json"):
            raise ValueError(f"--out is {str(out)!r}; end it in .csv or .json")
        writable_file("--out", out)
    if gradebook is not None and not gradebook.is_file():
        raise ValueError(f"--gradebook is {str(gradebook)!r}, which is not there; `nbgrader autograde` makes it")
    found: list[Points] = []
    for points in grade_class(release, submitted):
        found.append(points)
        where = f"{points.student}  {points.notebook}  {points.exercise}"
        print(f"{where}: {points.points:g} of {points.max_points:g}, {points.said.splitlines()[0]}", flush=True)
    for student in sorted({points.student for points in found}):
        own = [points for points in found if points.student == student]
        print(f"{student}: {sum(p.points for p in own):g} of {sum(p.max_points for p in own):g} points")
    if out is not None:
        _write(out, found)
    if gradebook is not None:
        _write_gradebook(gradebook, release.name, found)
    return 0


def _write(path: Path, found: Sequence) -> None:
    rows = [dataclasses.asdict(points) for points in found]
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".json":
            json.dump(rows, file, indent=1)
            return
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _write_gradebook(path: Path, assignment: str, found: Sequence) -> None:
    """Put the points where nbgrader's own autograding puts them."""
    try:
        from nbgrader.api import Gradebook
    except ModuleNotFoundError as error:
        raise ValueError("--gradebook needs nbgrader: pip install nbgrader") from error
    with Gradebook(f"sqlite:///{path.resolve()}") as book:
        for points in found:
            cell = book.find_grade(points.exercise, points.notebook, assignment, points.student)
            cell.auto_score, cell.needs_manual_grade = points.points, False
        book.db.commit()
