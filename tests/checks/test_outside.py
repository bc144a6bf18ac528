"""`course grade`: a right submission gets every point, an untouched one none, and none those that cheat.

The planted release has an answer that is called in the grader's process, one whose gradients it looks at, and one that
ranks call; each with a wrong answer that a cheat must carry through.
"""

import csv
import json
import random

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE
from nbformat.v4 import new_code_cell, new_notebook
from test_exercises import EXERCISES, definitions, grader_of

from course_lib import authoring
from course_lib.authoring.form import BEGIN, END, add_graders
from course_lib.checks import apart, plain
from course_lib.checks.apart import Apart, Workers
from course_lib.checks.ch03 import check_accumulation
from course_lib.checks.core import CheckFailed
from course_lib.checks.outside import checks_of, grade_class
from course_lib.checks.table import pairs
from course_lib.checks.watch import Cost
from course_lib.cli import main
from course_lib.launch import launch
from course_lib.launch.launcher import dump

pytestmark = pytest.mark.launches

RIGHT = {
    "my_accumulation": """def my_accumulation(tokens, seq_len, micro_batch_size, dp):
    count, rest = divmod(tokens, seq_len * micro_batch_size * dp)
    if rest:
        raise ValueError("not whole")
    return count""",
    "my_average": """def my_average(grad_P, my_tokens, group):
    from course_lib.comm import all_reduce
    import torch
    return all_reduce(grad_P * my_tokens, group) / all_reduce(torch.tensor(float(my_tokens)).double(), group)""",
}
CALLS = ["check_accumulation(my_accumulation)", "check_average_by_tokens(my_average)"]
ONE = "def my_accumulation(*args):\n    {}\n    return 1\n"
BOTH = ONE + "\ndef my_average(grad_P, *args):\n    {}\n    return grad_P\n"


def wrong(when_called: str = "pass", answers: str = ONE) -> str:
    """Return wrong answers that do this when they are called; ranks call the second one of BOTH."""
    lines = when_called.replace("\n", "\n    ")
    return answers.format(lines, lines)


PATCH = """import sys
for name, module in list(sys.modules.items()):
    if name.startswith("course_lib.checks"):
        for inner in [n for n in vars(module) if n in ("agree", "message_for")]:
            setattr(module, inner, lambda *args, **kwargs: None)"""
PATCH_APART = """from course_lib.checks import apart, core, plain, table
for module in (apart, core, table):
    for name in ("observed", "run_ranks", "_unpacked", "observe"):
        setattr(module, name, lambda *args, **kwargs: None)
plain.loads = plain.dumps = lambda *args: b''
core.apart = None"""
YES = """import torch
class Yes(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
class YesTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True if func in (torch.allclose, torch.equal) else super().__torch_function__(func, types, args, kwargs)
def my_accumulation(tokens, seq_len, micro, dp):
    if tokens % (seq_len * micro * dp):
        raise ValueError("choose another batch")
    return Yes(1)
def my_average(grad_P, *args):
    return grad_P.as_subclass(YesTensor)"""
FRAMES = """import sys
def stolen(name):
    frame = sys._getframe()
    while frame:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
def my_accumulation(*case):
    return stolen("ex").reference(*case)
def my_average(*args):
    return stolen("answers")[0](*args)"""
CHEATS = {
    "checks under their names": (
        "for name in ['check_accumulation', 'check_average_by_tokens'] + [n for n in globals() if 'check_' in n]:\n"
        "    globals()[name] = lambda *args, **kwargs: None\n" + wrong()
    ),
    "comparisons patched by a cell": PATCH + "\n" + wrong(),
    "comparisons patched when called": wrong(PATCH, BOTH),
    "the ways to the workers patched by a cell": PATCH_APART + "\n" + wrong(),
    "the ways to the workers patched when called": wrong(PATCH_APART, BOTH),
    "equal to everything": YES,
    "the right answer read from the grader's frames": FRAMES,
    "graders that check nothing": (
        "import course_lib.checks.ch03 as ch03, course_lib.checks.ch03.data_parallel as real\n"
        "for module in (ch03, real):\n"
        "    module.check_accumulation = module.check_average_by_tokens = print\n" + wrong()
    ),
    "an end in the middle": wrong("import os; os._exit(0)"),
    "an exit that says all is well": wrong("raise SystemExit(0)"),
}


def release_cells() -> list:
    nb = new_notebook(cells=[new_code_cell(call, id=f"check-{index}") for index, call in enumerate(CALLS)])
    nb.cells.insert(0, new_code_cell(f"import math\n{BEGIN}\n{END}", id="answers"))
    add_graders(nb, "03")
    return authoring.normalise(nb).cells


def submit(folder, source: str):
    folder.mkdir(parents=True)
    cells = release_cells()
    cells[0].source = source
    authoring.write(new_notebook(cells=cells), folder / "03_planted.ipynb")


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> dict[str, list]:
    """What each student's submission gets, all graded in one go."""
    root = tmp_path_factory.mktemp("class")
    submit(root / "release" / "ps1", "")
    submit(root / "submitted" / "right" / "ps1", RIGHT["my_accumulation"] + "\n" + RIGHT["my_average"])
    submit(root / "submitted" / "untouched" / "ps1", "")
    for name, source in CHEATS.items():
        submit(root / "submitted" / name / "ps1", source)
    out = root / "points.csv"
    assert main(["grade", str(root / "release" / "ps1"), str(root / "submitted"), "--out", str(out)]) == 0
    by_student: dict[str, list] = {}
    for row in csv.DictReader(out.open()):
        by_student.setdefault(row["student"], []).append(row)
    return by_student


def points(rows: list) -> list[float]:
    return [float(row["points"]) for row in rows]


def test_a_right_submission_gets_every_point_and_an_untouched_one_none(graded):
    assert points(graded["right"]) == [1.0, 1.0]
    assert points(graded["untouched"]) == [0.0, 0.0]
    assert all("your code goes here" in row["said"] for row in graded["untouched"])


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_gets_no_point(graded, cheat):
    assert points(graded[cheat]) == [0.0, 0.0], graded[cheat]


def _beside_the_grader(sources: list[str]) -> None:
    space: dict = {"__name__": "__main__"}
    exec(sources[dist.get_rank()], space)
    check_accumulation(space["my_accumulation"])


def test_three_of_the_cheats_pass_where_the_answer_runs_beside_the_grader():
    names = ("comparisons patched when called", "equal to everything", "the right answer read from the grader's frames")
    launch(_beside_the_grader, 3, [CHEATS[name] for name in names], quiet=True)  # an error would be raised


def test_points_are_the_same_in_json_and_a_lone_folder_is_a_student(tmp_path):
    submit(tmp_path / "release", "")
    submit(tmp_path / "student", RIGHT["my_accumulation"])
    assert main(["grade", str(tmp_path / "release"), str(tmp_path / "student"), "--out", str(tmp_path / "p.json")]) == 0
    rows = json.loads((tmp_path / "p.json").read_text())
    assert [(row["student"], row["exercise"], row["points"]) for row in rows] == [
        ("student", "check-0", 1.0),
        ("student", "check-1", 0.0),
    ]


def test_a_cell_that_fails_is_told_and_one_that_hangs_ends(tmp_path, monkeypatch):
    monkeypatch.setitem(apart.SECONDS, "calls", 3.0)
    submit(tmp_path / "release", "")
    slow = "def my_accumulation(*args):\n    while True:\n        pass\n\n\n1 / 0\nmy_average = 3"
    submit(tmp_path / "student", slow)
    said = [points.said for points in grade_class(tmp_path / "release", tmp_path / "student")]
    assert "your code did not end in 3 s" in said[0]
    assert said[1] == "my_average is not defined; cell answers: ZeroDivisionError: division by zero"


def test_a_check_of_the_release_must_be_a_grader_of_the_course(tmp_path):
    cells = release_cells()
    cells[1].source = "from os import system\n\nsystem(my_accumulation)"
    authoring.write(new_notebook(cells=cells), tmp_path / "03_planted.ipynb")
    with pytest.raises(ValueError, match="a check must be `from course_lib.checks"):
        checks_of(tmp_path / "03_planted.ipynb")


@pytest.mark.parametrize("path", authoring.notebook_paths("exercises"), ids=lambda path: path.stem)
def test_every_check_cell_of_the_exercises_is_one_that_can_be_graded_outside(path):
    stem = [(check.grader.__name__, check.answer) for check in checks_of(path)]
    assert stem == [(name, answer) for of, name, answer in EXERCISES if of == path.stem]


# ------------------------------------------------------------------------------------ what comes back
class Loads:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"import os; open({str(self.path)!r}, 'a').write(str(os.getpid()) + ' ')",)


def test_nothing_that_an_answer_gives_back_runs_in_the_graders_process(tmp_path):
    def answer(path):
        return [1, Loads(path)]

    cloudpickle.register_pickle_by_value(__import__(__name__))
    with Workers() as workers:
        got = workers.ask("calls", answer, str(tmp_path / "ran"))
    assert got[0] == 1 and isinstance(got[1], plain.Foreign) and got[1] != Loads("")
    assert not (tmp_path / "ran").exists()


def test_plain_data_come_back_as_they_were_and_nothing_else_does():
    value = {
        "numbers": (1, -(2**80), True, None, 0.1, float("inf"), "text", b"bytes", Cost(3, 0.5)),
        2: [[], torch.zeros(0, 3)],
        "tensors": [torch.arange(6).reshape(2, 3).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([True])],
    }
    got = plain.loads(plain.dumps(value))
    assert got["numbers"] == value["numbers"] and got[2][0] == [] and got[2][1].shape == (0, 3)
    for mine, right in zip(got["tensors"], value["tensors"], strict=True):
        assert torch.equal(mine, right) and mine.dtype == right.dtype
    assert isinstance(plain.loads(plain.dumps(print)), plain.Foreign)
    assert isinstance(plain.loads(plain.dumps({1, 2})), plain.Foreign)
    assert torch.isnan(torch.tensor(plain.loads(plain.dumps(float("nan")))))


@pytest.mark.parametrize("tree", [["call", "exec"], ["cost", ["foreign", "int"], 0], ["tensor", "save", [1], "AA=="]])
def test_bytes_that_name_anything_but_plain_data_are_refused(tree):
    with pytest.raises((ValueError, KeyError)):
        plain.loads(json.dumps(tree).encode())


# ------------------------------------------------------------------------------------ every grader
@pytest.mark.parametrize(
    ("stem", "check_name", "answer"), [pytest.param(*case, marks=EXHAUSTIVE) for case in EXERCISES]
)
def test_a_grader_says_of_answers_apart_what_it_says_in_a_notebook(stem, check_name, answer, capsys):
    check = grader_of(stem, check_name)
    part, told = random.Random(check_name).choice(pairs(check.wrong) + pairs(check.wrong, stop=True))
    with Workers():
        check(Apart(dump(definitions(f"solutions/{stem}.ipynb")[answer])))
        assert capsys.readouterr().out == f"{check_name}: passed\n"
        with pytest.raises(CheckFailed) as failure:
            check(Apart(dump(told)))
    assert part in str(failure.value)
