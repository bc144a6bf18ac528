"""Exercises from their one source, solutions/, and the definitions of a solution for the graders' tests."""

import ast
import linecache
import re
from pathlib import Path

import nbformat

from course_lib.authoring.address import write_address
from course_lib.authoring.columns import without_magics
from course_lib.authoring.form import (
    BEGIN,
    END,
    ROOT,
    code_cells,
    format_notebooks,
    normalise,
    notebook_paths,
    read,
    tags_of,
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
        if cell["id"] in NAVIGATION:
            cell.source = cell.source.replace("[Exercises](../exercises/", "[Solutions](../solutions/")
    for cell in code_cells(nb):
        cell.source = without_solutions(cell.source)
        cell.outputs, cell.execution_count = [], None
    return nb


def load_solution(path_or_stem: str | Path, root: Path = ROOT) -> dict:
    """The names that a solution (or exercise) notebook defines, without its launches, prints and checks.

    Of each code cell run: imports, functions, classes, and assignments that call nothing. In the setup cell and in
    cells with solution marks assignments may call. Everything else is left out, magics too.
    """
    path = Path(path_or_stem)
    path = path if path.suffix == ".ipynb" else root / "solutions" / f"{path}.ipynb"
    namespace: dict = {"__name__": "__main__"}  # so that cloudpickle sends its functions to ranks by value
    for cell in code_cells(read(path)):
        source = without_magics(cell.source)
        may_call = "setup" in tags_of(cell) or BEGIN in source
        run_definitions(source, namespace, f"{path.parent.name}/{path.stem}#{cell['id']}", may_call)
    return namespace


def run_definitions(source: str, namespace: dict, filename: str, may_call: bool = False) -> None:
    """Execute the definitions of one cell in a namespace (see `load_solution` for which statements those are)."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if _is_definition(node, may_call)]
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(tree, filename, "exec"), namespace)


def _is_definition(node: ast.stmt, may_call: bool) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return may_call or not any(isinstance(inner, ast.Call) for inner in ast.walk(node))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


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


def move_to(address: str, root: Path = ROOT) -> list[Path]:
    """Make this the course of a GitHub repository: its address, every notebook's install cell, every badge."""
    return write_address(address, root) + format_notebooks(root) + write_exercises(root)
