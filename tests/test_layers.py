"""The map in course_lib/__init__.py: it names every folder once, and imports go downward along it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import course_lib
from course_lib.authoring import ROOT

PACKAGE = ROOT / "course_lib"
DRAWING = {"matplotlib", "ipywidgets"}
DRAWING_FOLDERS = {"plots", "widgets"}
TIMINGS = {"sharded_timing.py", "context_timing.py", "pipeline_timing.py", "five_d_timing.py"}


def read_map(text: str) -> dict[str, int]:
    """Folder or file at the top of the package -> its floor."""
    floors, floor = {}, -1
    for line in text.splitlines():
        if heading := re.match(r"(\d)\. ", line):
            floor = int(heading.group(1))
        elif entry := re.match(r"    (\w+(?:/|\.py))\s+\S", line):
            assert entry.group(1) not in floors, f"{entry.group(1)} stands twice in the map"
            floors[entry.group(1)] = floor
    return floors


FLOORS = read_map(course_lib.__doc__)


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """(folders and files at the top of the package, other packages) that a file imports, functions' own imports too."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written from course_lib on"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            (own.add(rest[0]) if rest else None) if top == "course_lib" else others.add(top)
    return own, others


def floor_of(name: str, floors: dict[str, int]) -> int:
    """The floor of a folder or file, by its name without an ending."""
    return floors.get(f"{name}/", floors.get(f"{name}.py", 0))


def violations(package: Path, floors: dict[str, int]) -> list[str]:
    """Each import that goes upward, or draws outside of the folders that draw."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        top = path.relative_to(package).parts[0].removesuffix(".py")
        own, others = imports_of(path)
        if top in ("__init__", "__main__"):
            continue
        found += [f"{name} imports {other}" for other in sorted(own) if floor_of(other, floors) > floor_of(top, floors)]
        if top not in DRAWING_FOLDERS:
            found += [f"{name} imports {drawing}" for drawing in sorted(others & DRAWING)]
    return found


def test_the_map_names_every_folder_and_file_at_the_top_and_no_other():
    at_the_top = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"} - TIMINGS
    at_the_top |= {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert at_the_top == set(FLOORS)


@pytest.mark.parametrize("init", sorted(PACKAGE.glob("*/**/__init__.py")), ids=lambda path: path.parent.name)
def test_each_folder_names_its_files(init):
    doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    names = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
    assert {name for name in names if name not in doc} == set(), "give each a line in the folder's __init__.py"
    assert set(re.findall(r"(?m)^ *(\w+\.py)\s", doc)) - names == set(), "these are in the map alone"


def test_no_file_imports_upward_and_only_pictures_import_matplotlib():
    assert violations(PACKAGE, FLOORS) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from course_lib.high.tracker import MemoryTracker", "low.py imports high"),
        ("import course_lib.high.tracker", "low.py imports high"),
        ("def f():\n    from course_lib import high", "low.py imports high"),
        ("import matplotlib.pyplot as plt", "low.py imports matplotlib"),
        ("import os", None),
    ],
)
def test_a_planted_import_is_found(tmp_path, line, found):
    for name in ("__init__.py", "low.py", "high/__init__.py", "high/tracker.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "low.py").write_text(line)
    floors = read_map("1. Low\n    low.py  text\n3. High\n    high/  text")
    assert violations(tmp_path, floors) == ([found] if found else [])


def test_everything_but_the_widgets_imports_without_jupyter():
    """In a process where ipywidgets, IPython and JupyterLab cannot be imported."""
    no_test_extra = ("widgets/", "authoring/")  # they need ipywidgets, and nbformat, which is an extra
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    modules = [
        "course_lib." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in files
        if "/" in name and not name.startswith(no_test_extra) and "__main__" not in name
    ]
    code = "import importlib, sys\n"
    code += "for name in ('ipywidgets', 'IPython', 'jupyterlab', 'nbformat', 'nbclient'): sys.modules[name] = None\n"
    code += f"for name in {modules}: importlib.import_module(name)\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
