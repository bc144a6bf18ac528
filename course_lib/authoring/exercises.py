"""Exercises from their one source, solutions/."""

import re
from pathlib import Path

import nbformat

from course_lib.authoring.address import write_address
from course_lib.authoring.form import (
    BEGIN,
    END,
    ROOT,
    code_cells,
    format_notebooks,
    normalise,
    notebook_paths,
    read,
    write,
)
from course_lib.authoring.links import NAVIGATION, chapters_of, exercises_of


def without_solutions(source: str) -> str:
    """Code with each marked solution replaced by a NotImplementedError that names what is to be written."""
    out, inside, name = [], False, "this"
    for line in source.split("\n"):
        mark = line.strip()
        if mark == BEGIN:
            if inside:
                raise ValueError(f"two {BEGIN} marks in a row; close the first with {END}")
            inside = True
            out.append(f'{line[: line.index("#")]}raise NotImplementedError("{name}: your code goes here")')
        elif mark == END:
            if not inside:
                raise ValueError(f"{END} without {BEGIN}")
            inside = False
        elif not inside:
            defined = re.match(r"\s*(?:def|class) (\w+)", line)
            name = defined.group(1) if defined else name
            out.append(line)
    if inside:
        raise ValueError(f"{BEGIN} is never closed; add {END}")
    return "\n".join(out)


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


def move_to(address: str, root: Path = ROOT, hub: str | None = None) -> list[Path]:
    """Make this the course of a GitHub repository: its address, every notebook's install cell, every badge."""
    return write_address(address, root, hub) + format_notebooks(root) + write_exercises(root)
