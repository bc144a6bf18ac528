"""The map in course_lib/__init__.py names every folder once, import-linter's contracts hold, arithmetic is quick."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from course_lib.authoring import ROOT
from course_lib.web.page import floors

PACKAGE = ROOT / "course_lib"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


FLOORS = {floor: {name.removesuffix(".py").strip("/") for name in names} for floor, names in floors().items()}


def lint(root: Path) -> str:
    """What import-linter says of the package in a folder."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=root).stdout


def test_the_map_names_every_folder_and_file_at_the_top_and_no_other():
    at_the_top = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    at_the_top |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert at_the_top == set().union(*FLOORS.values())
    layers = CONTRACTS[0]["layers"]
    assert [set(re.findall(r"course_lib\.(\w+)", layer)) for layer in reversed(layers)] == list(FLOORS.values())
    assert {name.removeprefix("course_lib.") for name in CONTRACTS[2]["source_modules"]} == FLOORS["0"]


@pytest.mark.parametrize("init", sorted(PACKAGE.glob("*/**/__init__.py")), ids=lambda path: path.parent.name)
def test_each_folder_names_its_files(init):
    doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    names = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
    assert {name for name in names if name not in doc} == set(), "give each a line in the folder's __init__.py"
    assert set(re.findall(r"(?m)^ *(\w+\.py)\s", doc)) - names == set(), "these are in the map alone"


def test_every_contract_on_imports_is_kept():
    said = lint(ROOT)
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in said, said[-3000:]


def test_a_planted_import_breaks_each_contract(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in [
        ("config.py", "def up():\n    from course_lib import launch"),
        ("layout/partition.py", "from course_lib.layout.mesh import Mesh\nfrom course_lib.layout import check"),
        ("hardware.py", "import torch"),
        ("model/latent.py", "import matplotlib.pyplot as plt"),
    ]:
        path = tmp_path / "course_lib" / file
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    said = lint(tmp_path)
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in said, said[-3000:]


def test_arithmetic_imports_without_torch_numpy_and_yaml_in_a_third_of_a_second(tmp_path):
    """In processes of their own; CPU seconds, so that other work on the machine does not count. A browser has none.

    With byte code, as an installed package has it: the first process writes it.
    """
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    floor = [f"course_lib.{name}" for name in sorted(FLOORS["0"])]
    names = floor + [f"course_lib.{name}.{path.stem}" for name in FLOORS["0"] for path in (PACKAGE / name).glob("*.py")]
    block = "import importlib, sys, time\nfor name in ('torch', 'numpy', 'yaml', 'tyro'): sys.modules[name] = None\n"
    load = (
        "start = time.process_time()\nfor name in {}: importlib.import_module(name)\nprint(time.process_time() - start)"
    )

    def seconds(names: list[str]) -> float:
        command = [sys.executable, "-c", block + load.format(names)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=compiled)
        assert run.returncode == 0, run.stderr[-3000:]
        return float(run.stdout)

    seconds([name for name in names if not name.endswith("__init__")])  # every file of them
    assert min(seconds(["course_lib.layout"]) for _ in range(3)) < 0.2
    assert min(seconds([name for name in floor if name != "course_lib.claims"]) for _ in range(3)) < 0.3


@pytest.mark.long
def test_all_but_the_widgets_imports_without_jupyter_and_they_say_what_to_install():
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
    code += "import course_lib.widgets"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert "pip install 'ipywidgets>=7.7.1,<9'" in run.stderr.splitlines()[-1], run.stderr[-3000:]
