"""Grade submissions: the checks are read from the release, the answers from the submission, in other processes.

The cells of a submission that stand where the release has its checks are not run, and nothing is asked of its kernel.
docs/GRADING.md says what this protects, and what it does not.
"""

import ast
import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.checks.apart import Apart, Workers, run_cells
from course_lib.checks.core import CheckFailed, NotWritten

_CHECKS = "course_lib.checks."


@dataclass(frozen=True)
class Points:
    """What one check gives a submission, and what it says: "passed", or why not."""

    student: str
    notebook: str
    exercise: str
    points: float
    max_points: float
    said: str


@dataclass(frozen=True)
class Check:
    """A check cell of the release: its id for nbgrader, its grader, the name of the answer, and its points."""

    exercise: str
    grader: Callable
    answer: str
    max_points: float


def grade_class(release: Path, submitted: Path) -> Iterator[Points]:
    """Yield the points of every check of the release, for each student and notebook.

    submitted   students' folders, each with the notebooks or with a folder of the release's name, as nbgrader has them;
                or one folder with notebooks
    Raises      ValueError if the release has no checks, or nothing is handed in
    """
    notebooks = {path.name: checks_of(path) for path in sorted(release.glob("*.ipynb"))}
    notebooks = {name: checks for name, checks in notebooks.items() if checks}
    if not notebooks:
        raise ValueError(
            f"no notebook in {release} has a check cell; give a folder that nbgrader released, or exercises/"
        )
    folders = _folders_of_students(submitted, release.name, set(notebooks))
    if not folders:
        raise ValueError(f"{submitted} has none of the notebooks of {release}, nor folders of students that have one")
    for student, folder in folders.items():
        with Workers() as workers:
            for name, checks in notebooks.items():
                yield from _grade_notebook(checks, folder / name, student, workers)


def _folders_of_students(submitted: Path, assignment: str, names: set[str]) -> dict[str, Path]:
    places = [("", submitted)] if any((submitted / name).is_file() for name in names) else []
    for folder in sorted(path for path in submitted.glob("*") if path.is_dir()):
        inner = folder / assignment
        places.append((folder.name, inner if inner.is_dir() else folder))
    return {
        student or folder.name: folder for student, folder in places if any((folder / name).is_file() for name in names)
    }


def checks_of(path: Path) -> list[Check]:
    """Return the checks of a release's notebook: cells that nbgrader gives points for, each with its own grader.

    Raises   ValueError if such a cell is anything but the import of a grader of the course and its call
    """
    checks = []
    for cell in _code_cells(path):
        mark = cell["metadata"].get("nbgrader", {})
        if mark.get("grade"):
            checks.append(_check(path, mark, _source(cell)))
    return checks


def _check(path: Path, mark: dict, source: str) -> Check:
    try:
        imported, statement = ast.parse(source).body
        [name], [answer] = imported.names, statement.value.args
        is_call = ast.unparse(statement.value.func) == name.name and isinstance(answer, ast.Name)
        if not is_call or not imported.module.startswith(_CHECKS):
            raise ValueError
        grader = getattr(importlib.import_module(imported.module), name.name)
    except (ValueError, AttributeError, SyntaxError, ImportError):
        raise ValueError(
            f"{path}, cell {mark['grade_id']}: a check must be `from {_CHECKS}chNN import check_x` and `check_x(my_x)`"
        ) from None
    return Check(mark["grade_id"], grader, answer.id, float(mark["points"]))


def _grade_notebook(checks: list[Check], path: Path, student: str, workers: Workers) -> Iterator[Points]:
    """Yield the points of one submitted notebook, which may not be there."""
    packed, missing = {}, "not handed in"
    if path.is_file():
        try:
            packed, missing = _answers(path, checks, workers), ""
        except Exception as error:  # of a file that is no notebook, or of a worker that is not to be trusted
            missing = _in_a_line(error)
    for check in checks:
        said = missing or _said(check, packed.get(check.answer), workers)
        points = check.max_points if said == "passed" else 0.0
        yield Points(student, path.stem, check.exercise, points, check.max_points, said)


def _answers(path: Path, checks: list[Check], workers: Workers) -> dict[str, bytes | str]:
    """Each answer that the submission's cells define, as bytes, or why there is none."""
    names = [check.answer for check in checks]
    try:
        found = workers.ask("cells", run_cells, _own_cells(path, checks), names)
    finally:
        workers.end("cells")
    return {name: found[name] for name in names if isinstance(found[name], bytes | str)}


def _said(check: Check, code: bytes | str | None, workers: Workers) -> str:
    """What the grader says; "passed" only if it came to its end. Whatever it is given, an error gives no point."""
    if not isinstance(code, bytes):
        return code or f"{check.answer}: your code goes here"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check.grader(Apart(code))
    except (CheckFailed, NotWritten) as failure:
        return str(failure).partition("\n(to repeat")[0]
    except Exception as error:
        return f"the check ended in {_in_a_line(error)}"
    finally:
        workers.end("calls")
    return "passed"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _own_cells(path: Path, checks: list[Check]) -> list[tuple[str, str]]:
    """The submission's cells in their order, without those that stand for the release's checks."""
    graded = {check.exercise for check in checks}
    cells = [(cell["metadata"].get("nbgrader", {}).get("grade_id"), cell) for cell in _code_cells(path)]
    return [(str(name or cell.get("id", "")), _source(cell)) for name, cell in cells if name not in graded]


def _code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def _source(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
