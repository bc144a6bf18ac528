"""Environments as people have them elsewhere, the built wheel installed into them, notebooks run by their kernels.

An environment is made once, in .venv-colab, .venv-newest (each some 5 GB with PyTorch's CUDA libraries) or
.venv-jupyterhub of the clone, and is left as it was made: what the wheel's installation added is removed at the end.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from nbclient import NotebookClient

from course_lib.authoring import ROOT

CELL_SECONDS = 300


def run(*command: str | Path, **options) -> str:
    """What a command printed; a failure shows it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel of this clone in a folder, built from a copy: a build leaves its traces there."""
    copy = folder / "clone"
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("course_lib", "notebooks", "exercises", "solutions"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, copy)
    (built,) = folder.glob("course_lib-*.whl")
    return built


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel in it; `before` and `after` are its packages around that installation."""

    python: Path
    before: dict[str, str]
    after: dict[str, str]
    course: Path  # the folder that `course new` wrote, outside the clone

    def execute(self, nb, folder: Path):
        """Run a notebook object in this environment's kernel, to its end whatever its cells raise."""
        client = NotebookClient(nb, timeout=CELL_SECONDS, kernel_name=self.kernel, allow_errors=True)
        client.resources = {"metadata": {"path": str(folder)}}
        return client.execute()

    @property
    def kernel(self) -> str:
        return self.python.parents[1].name.removeprefix(".venv-")


def packages_of(python: Path) -> dict[str, str]:
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"))
    return {package["name"]: package["version"] for package in listed}


def made_environment(python: str, name: str) -> Path:
    """The Python of the environment of `name`.txt, made if it is not there yet."""
    requirements, place = Path(__file__).with_name(f"{name}.txt"), ROOT / f".venv-{name}"
    inside, made = place / "bin" / "python", place / ".made-from"
    if not made.exists() or made.read_text() != requirements.read_text():
        run(python, "-m", "venv", "--clear", place)
        run(inside, "-m", "pip", "install", "--quiet", "--no-compile", "-r", requirements)
        made.write_text(requirements.read_text())
    return inside


def environment(python: str, name: str, wheel: Path, folder: Path):
    """The environment of `name`.txt; the wheel is in it while a test module runs."""
    inside = made_environment(python, name)
    before = packages_of(inside)
    run(inside, "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    after = packages_of(inside)
    run(inside, "-m", "course_lib", "new", folder / "mine", cwd=folder)
    spec = {"argv": [str(inside), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": name}
    kernel = folder / "jupyter" / "kernels" / name
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(json.dumps(spec | {"language": "python", "env": {"PYTHONPATH": ""}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        yield Environment(inside, before, after, folder / "mine")
    run(inside, "-m", "pip", "uninstall", "--quiet", "--yes", *sorted(after.keys() - before.keys()))
