"""Each exercise: the reference passes, named wrong answers fail with a message of their own, an undone one says so.

For the writer of a chapter: beside `solutions/NN_stem.ipynb`, with a cell `check_x(answer)` below each exercise, write
`tests/wrong/chNN.py`:

    from course_lib.checks.ranks import check_ring_all_reduce

    def one_trip_only(x_P, group): ...          # the name says what is wrong with it

    WRONG = {
        "ring_all_reduce": {                     # the answer's name, as in the solution's check cell
            "check": check_ring_all_reduce,
            "answers": [(one_trip_only, "only your own piece"), ...],     # (answer, a part of its message)
        },
    }

At least three answers an exercise; each part is found in the message of its own answer and in no other's. An answer may
also be a number or a class. The references are read from the solution notebook (`load_solution`), the undone
exercises from exercises/; both run without a kernel.
"""

import ast
import importlib
import importlib.util
import random
import re

import cloudpickle
import nbclient
import pytest
from harness import sampled
from solved import load_solution

from course_lib.authoring import ROOT, code_cells, is_check_cell, notebook_paths, read, tags_of, without_magics
from course_lib.checks.core import CheckFailed
from course_lib.checks.table import pairs

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


def wrong_answers(stem: str) -> dict:
    answers = {}
    if importlib.util.find_spec(f"wrong.ch{stem[:2]}"):
        module = importlib.import_module(f"wrong.ch{stem[:2]}")
        cloudpickle.register_pickle_by_value(module)  # ranks do not have tests/ on their path
        answers |= module.WRONG
    for _, check_name, answer in (exercise for exercise in EXERCISES if exercise[0] == stem):
        check = grader_of(stem, check_name)
        if check.wrong is not None:
            told = {**check.wrong, **getattr(check, "breaks", {})}
            answers[answer] = {"check": check, "answers": [(wrong, part) for part, wrong in pairs(told)]}
    return answers


def definitions(path: str) -> dict:
    if path not in LOADED:
        LOADED[path] = load_solution(ROOT / path)
    return LOADED[path]


# Their wrong answers are all for make test-exhaustive; their references pass in the solutions' own notebooks.
LONG = {"MyZero3", "MyZero2", "MyTensorParallel", "MySequenceParallel", "MyDDP", "MyPipeline", "my_choice"}


def one_of(stem: str, answer: str) -> int:
    """Which wrong answer make test gives to the grader; make test-exhaustive gives it the others."""
    return random.Random(answer).randrange(len(wrong_answers(stem)[answer]["answers"]))


@pytest.mark.parametrize(
    ("stem", "check_name", "answer"), sampled([case for case in EXERCISES if case[2] not in LONG], 28)
)
def test_the_reference_passes_and_a_wrong_answer_fails_with_its_own_message(stem, check_name, answer, capsys):
    entry = wrong_answers(stem)[answer]
    entry["check"](definitions(f"solutions/{stem}.ipynb")[answer])
    assert capsys.readouterr().out == f"{check_name}: passed\n"
    fails_with_its_own_message(entry, one_of(stem, answer))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stem", "check_name", "answer"), EXERCISES)
def test_every_other_wrong_answer_fails_with_its_own_message(stem, check_name, answer):
    entry = wrong_answers(stem)[answer]
    if grader_of(stem, check_name).wrong is not None:
        return  # tests/checks/test_tables.py
    seen = set() if answer in LONG else {one_of(stem, answer)}
    for number in set(range(len(entry["answers"]))) - seen:
        fails_with_its_own_message(entry, number)


def fails_with_its_own_message(entry: dict, number: int) -> None:
    wrong, own = entry["answers"][number]
    with pytest.raises(CheckFailed) as failure:
        entry["check"](wrong)
    found = list(dict.fromkeys(part for _, part in entry["answers"] if part in str(failure.value)))
    assert found == [own], f"{getattr(wrong, '__name__', wrong)}: {failure.value}"


@pytest.mark.parametrize(("stem", "check_name", "answer"), EXERCISES)
def test_a_grader_has_three_wrong_answers_each_with_its_own_message(stem, check_name, answer):
    entry = wrong_answers(stem)[answer]
    assert entry["check"].__name__ == check_name
    parts = [part for _, part in entry["answers"]]
    assert len(parts) >= 3 and (grader_of(stem, check_name).wrong is not None or len(set(parts)) == len(parts))


@pytest.mark.parametrize(("stem", "check_name", "answer"), EXERCISES)
def test_an_exercise_that_is_not_done_says_so(stem, check_name, answer):
    undone = definitions(f"exercises/{stem}.ipynb").get(answer)  # None where the whole cell is to be written
    with pytest.raises(NotImplementedError, match="your code goes here"):
        wrong_answers(stem)[answer]["check"](undone)


@pytest.mark.parametrize("stem", [path.stem for path in notebook_paths("solutions")])
def test_a_chapter_has_four_exercises_or_more_and_no_wrong_answers_without_one(stem):
    answers = [answer for name, _, answer in EXERCISES if name == stem]
    assert len(answers) >= 4
    assert set(wrong_answers(stem)) == set(answers)


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
def test_a_check_cell_imports_the_grader_that_it_calls_and_the_setup_cell_imports_none(path):
    cells = code_cells(read(path))
    chapter = importlib.import_module(f"course_lib.checks.ch{path.name[:2]}")
    for cell in filter(is_check_cell, cells):
        imported, call = ast.parse(cell.source).body
        [name] = imported.names
        assert (imported.module, name.asname) == (chapter.__name__, None)
        assert ast.unparse(call.value.func) == name.name and callable(getattr(chapter, name.name))
    [setup] = [cell.source for cell in cells if "setup" in tags_of(cell)]
    assert "course_lib.checks" not in setup and len(list(filter(is_check_cell, cells))) >= 4


def test_an_answer_that_puts_other_checks_under_their_names_gets_no_point():
    nb = read(ROOT / "exercises" / "03_data_parallel.ipynb")
    first = next(cell for cell in code_cells(nb) if "nbgrader" in cell.metadata)
    first.source = (
        "for _n in [k for k in globals() if k.startswith('check_')]: globals()[_n] = lambda *a, **k: None\n"
        "check_accumulation = check_buckets = check_ddp = print\n"
        "my_accumulation = None"
    )
    nbclient.execute(nb, allow_errors=True, kernel_name="python3")
    ended = [[output.output_type for output in cell.outputs] for cell in filter(is_check_cell, nb.cells)]
    assert ended == [["error"]] * 7
