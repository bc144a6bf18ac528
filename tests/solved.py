"""The definitions of a solution notebook, for the graders' tests."""

import ast
import linecache
from pathlib import Path

from course_lib.authoring import ROOT, code_cells, read, tags_of, without_magics
from course_lib.authoring.form import BEGIN


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
