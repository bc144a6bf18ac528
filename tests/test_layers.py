"""Imports go strictly downward, along the map in course_lib/__init__.py, which names every file once."""

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
DRAWING_LAYER = 6


def read_map(text: str) -> dict[str, int]:
    """File of the package -> number of its part, in reading order."""
    layers, part = {}, 0
    for line in text.splitlines():
        if heading := re.match(r"(\d)\. ", line):
            part = int(heading.group(1))
        elif entry := re.match(r"    (\S+\.py)\s+\S", line):
            assert entry.group(1) not in layers, f"{entry.group(1)} stands twice in the map"
            layers[entry.group(1)] = part
    return layers


LAYERS = read_map(course_lib.__doc__)


def file_of(module: str, package: Path) -> str | None:
    """`course_lib.memory.states` -> `memory/states.py`; None for a name that is not a module of the package."""
    inside = Path(*module.split(".")[1:])
    for candidate in (inside.with_suffix(".py") if inside.name else inside, inside / "__init__.py"):
        if candidate.suffix and (package / candidate).is_file():
            return candidate.as_posix()
    return None


def imports_of(path: Path, package: Path) -> tuple[set[str], set[str]]:
    """(files of the package, top-level names of other packages) that a file imports, functions' own imports too."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written from course_lib on"
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "course_lib":
                own.add(file_of(name, package))
            else:
                others.add(name.split(".")[0])
    return own - {None, "__init__.py"}, others


def violations(package: Path, layers: dict[str, int]) -> list[str]:
    """Each import that goes upward, or draws outside of the drawing part."""
    found = []
    for name, layer in layers.items():
        own, others = imports_of(package / name, package)
        upward = [file for file in sorted(own) if layers.get(file, 0) > layer]
        found += [f"{name} ({layer}) imports {file} ({layers[file]})" for file in upward]
        if layer != DRAWING_LAYER:
            found += [f"{name} ({layer}) imports {drawing}" for drawing in sorted(others & DRAWING)]
    return found


def test_the_map_names_every_file_of_the_package_and_no_other():
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"__init__.py"}
    assert files - set(LAYERS) == set(), "give each a line in course_lib/__init__.py"
    assert set(LAYERS) - files == set(), "these are in the map alone"


def test_no_file_imports_upward_and_only_pictures_import_matplotlib():
    assert violations(PACKAGE, LAYERS) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from course_lib.measure.tracker import MemoryTracker", "low.py (1) imports memory/tracker.py (3)"),
        ("import course_lib.measure.tracker", "low.py (1) imports memory/tracker.py (3)"),
        ("from course_lib.memory import tracker", "low.py (1) imports memory/tracker.py (3)"),
        ("def f():\n    from course_lib import memory", "low.py (1) imports memory/__init__.py (3)"),
        ("import matplotlib.pyplot as plt", "low.py (1) imports matplotlib"),
        ("import os", None),
    ],
)
def test_a_planted_import_is_found(tmp_path, line, found):
    for name in ("__init__.py", "low.py", "memory/__init__.py", "memory/tracker.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "low.py").write_text(line)
    layers = read_map("1. Low\n    low.py  text\n3. High\n    memory/__init__.py  text\n    memory/tracker.py  text")
    assert (found in violations(tmp_path, layers)) if found else violations(tmp_path, layers) == []


def test_everything_but_the_widgets_imports_without_jupyter():
    """In a process where ipywidgets, IPython and JupyterLab cannot be imported."""
    no_test_extra = {"authoring/", "hf_weights.py"}  # they need nbformat and transformers, which are extras
    modules = [
        "course_lib." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in LAYERS
        if not name.startswith(("widgets/", *no_test_extra)) and "__main__" not in name
    ]
    code = "import importlib, sys\n"
    code += "for name in ('ipywidgets', 'IPython', 'jupyterlab', 'nbformat', 'nbclient'): sys.modules[name] = None\n"
    code += f"for name in {modules}: importlib.import_module(name)\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
