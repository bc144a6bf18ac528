"""Exercises from their one source, solutions/."""

from pathlib import Path

import nbformat

from course_lib.authoring.form import ROOT, code_cells, normalise, notebook_paths, read, without_solutions, write
from course_lib.authoring.links import NAVIGATION, chapters_of, exercises_of


def exercise_from(nb):
    """The notebook that a learner opens: a solution notebook without its solutions and without outputs."""
    nb = normalise(nb)
    nb.cells[0].source = nb.cells[0].source.replace("/blob/main/solutions/", "/blob/main/exercises/")
    for cell in nb.cells:
        cell.metadata.pop("quotes", None)
        if cell["id"] in NAVIGATION:
            cell.source = cell.source.replace("[Exercises](../exercises/", "[Solutions](../solutions/")
            cell.source = cell.source.replace("](../ko/solutions/", "](../ko/exercises/")
    for cell in code_cells(nb):
        cell.source = without_solutions(cell.source)
        cell.outputs, cell.execution_count = [], None
    return nb


def exercise_problems(root: Path = ROOT) -> list[str]:
    """Where exercises/ is not what solutions/ gives."""
    problems = []
    for path in notebook_paths("solutions", root=root):
        exercise = root / "exercises" / path.name
        wanted = nbformat.writes(exercise_from(read(path))).rstrip("\n") + "\n"
        if not exercise.exists() or exercise.read_text(encoding="utf-8") != wanted:
            problems.append(f"exercises/{path.name}: not what solutions/ gives; `make exercises` writes it")
    wanted = {exercises_of(name, root) for name in chapters_of(root / "notebooks")}
    for folder in ("solutions", "exercises"):
        for name in sorted(wanted ^ set(chapters_of(root / folder))):
            problems.append(f"{name} stands in only one of notebooks/ and {folder}/")
    return problems


def write_exercises(root: Path = ROOT) -> list[Path]:
    """Write exercises/ from solutions/; returns the notebooks that changed."""
    paths = notebook_paths("solutions", root=root)
    return [root / "exercises" / p.name for p in paths if write(exercise_from(read(p)), root / "exercises" / p.name)]
