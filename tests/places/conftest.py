"""The wheel of the course, which these tests install elsewhere."""

import shutil
import sys
from pathlib import Path

import pytest
from places.environments import run

from course_lib.authoring import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The course as it is in this clone, built from a copy: a build leaves its traces there."""
    copy = tmp_path_factory.mktemp("build") / "clone"
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("course_lib", "notebooks", "exercises", "solutions"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", copy.parent, copy)
    (built,) = copy.parent.glob("course_lib-*.whl")
    return built
