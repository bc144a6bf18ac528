"""Each exercise: one that is not done says so, and its notebook has what a learner and a grader need.

That solutions pass, and that wrong answers are told why, is in tests/checks/test_tables.py.
"""

import ast
import importlib
import re

import pytest
from solved import load_solution

from course_lib.authoring import ROOT, code_cells, notebook_paths, read, tags_of, without_magics

pytestmark = pytest.mark.launches


def check_calls(stem: str) -> list[tuple[str, str]]:
    """(name of the check, name of the answer) for each check cell of a solution notebook."""
    calls = []
    for cell in code_cells(read(ROOT / "solutions" / f"{stem}.ipynb")):
        for node in ast.parse(without_magics(cell.source)).body:
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if call is not None and ast.unparse(call.func).startswith("check_"):
                calls.append((ast.unparse(call.func), ast.unparse(call.args[0])))
    return calls


EXERCISES = [(path.stem, *call) for path in notebook_paths("solutions") for call in check_calls(path.stem)]
LOADED: dict[str, dict] = {}


def grader_of(stem: str, check_name: str):
    return getattr(importlib.import_module(f"course_lib.checks.ch{stem[:2]}"), check_name)


def definitions(path: str) -> dict:
    if path not in LOADED:
        LOADED[path] = load_solution(ROOT / path)
    return LOADED[path]


@pytest.mark.parametrize(("stem", "check_name", "answer"), EXERCISES)
def test_an_exercise_that_is_not_done_says_so(stem, check_name, answer):
    undone = definitions(f"exercises/{stem}.ipynb").get(answer)  # None where the whole cell is to be written
    with pytest.raises(NotImplementedError, match="your code goes here"):
        grader_of(stem, check_name)(undone)


@pytest.mark.parametrize("stem", [path.stem for path in notebook_paths("solutions")])
def test_a_chapter_has_four_exercises_or_more_and_no_grader_without_one(stem):
    names = [name for of, name, _ in EXERCISES if of == stem]
    chapter = importlib.import_module(f"course_lib.checks.ch{stem[:2]}")
    assert len(names) >= 4
    assert {name for name in vars(chapter) if name.startswith("check_")} == set(names)


@pytest.mark.parametrize("stem", [path.stem for path in notebook_paths("solutions")])
def test_an_exercise_says_its_minutes_and_its_difficulty_and_each_check_has_three_hints(stem):
    cells = [cell.source for cell in read(ROOT / "solutions" / f"{stem}.ipynb").cells]
    for exercise in re.split(r"^## (?=Exercise)", "\n".join(cells), flags=re.M)[1:]:
        title = exercise.partition("\n")[0]
        assert re.search(r"\*[^*]*\d minutes[^*]*(easy|medium|hard)", exercise), title
        hints = re.findall(r"<summary>Hint (\d)", exercise)
        assert hints == ["1", "2", "3"] * len(re.findall(r"^check_\w+\(", exercise, flags=re.M)), title
    assert re.search(r"^## Exercise .*from an empty cell$", "\n".join(cells), re.M), "no exercise builds its subject"


@pytest.mark.parametrize(
    "path", notebook_paths("solutions", "exercises"), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_the_setup_cell_imports_no_grader(path):
    """Each check cell imports its own: tests/checks/test_outside.py reads them."""
    [setup] = [cell.source for cell in code_cells(read(path)) if "setup" in tags_of(cell)]
    assert "course_lib.checks" not in setup
