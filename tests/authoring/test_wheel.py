"""The wheel for Colab: small, whole as a wheel, and an installation of it says how to get what it lacks; no network."""

import subprocess
import sys
import sysconfig
import zipfile

import pytest
from places.environments import build_wheel, run

from course_lib.authoring import notebook_paths
from course_lib.authoring.wheel import FOR_AUTHORS, in_small, packed, write_small
from course_lib.validate import PACKAGE_ALONE

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The whole wheel and the small one."""
    whole = build_wheel(tmp_path_factory.mktemp("wheel"))
    return whole, write_small(whole, whole.parent / "colab")


@pytest.fixture
def python(tmp_path):
    """A Python with the packages of this one except the course, which cannot connect to anything."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    inside = tmp_path / "venv" / "bin" / "python"
    site = run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    with open(f"{site}/others.pth", "w") as file:
        file.write(f"{sysconfig.get_path('purelib')}\nimport socket; socket.socket.connect = None\n")
    return inside


def install(python, wheel):
    options = ("--quiet", "--no-deps", "--no-index", "--force-reinstall", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)


def asked(python, folder, *command):
    return subprocess.run([python, "-I", *command], cwd=folder, capture_output=True, text=True, timeout=300)


SPOKEN = "from course_lib.language import spoken, told\nwith spoken('ko'): print(told('Index'))"
LOAD = "from course_lib.weights.base import load_base; print(type(load_base()[0]).__name__)"


def test_the_small_wheel_lacks_notebooks_weights_and_what_authors_run_and_nothing_else(wheels):
    whole, small = (zipfile.ZipFile(wheel) for wheel in wheels)
    assert small.testzip() is None
    assert {packed(name, b"")[0] for name in whole.namelist() if in_small(name)} == set(small.namelist())
    missing = [name for name in whole.namelist() if not in_small(name) and not name.startswith(FOR_AUTHORS)]
    assert len(missing) == len(notebook_paths("notebooks", "exercises", "solutions")) + 3
    (record,) = [name for name in small.namelist() if name.endswith("RECORD")]
    assert {line.split(",")[0] for line in small.read(record).decode().splitlines()} == set(small.namelist())
    assert wheels[1].stat().st_size < 1_000_000  # Python and small tables: a file a module, packed each by itself


def test_where_the_small_one_is_installed_the_rest_is_named_and_the_whole_one_brings_it(wheels, python, tmp_path):
    whole, small = wheels
    install(python, small)
    new = asked(python, tmp_path, "-m", "course_lib", "new", "mine")
    assert new.returncode == 2 and PACKAGE_ALONE in new.stderr and not (tmp_path / "mine" / "notebooks").exists()
    load = asked(python, tmp_path, "-c", LOAD)
    assert load.returncode == 1 and PACKAGE_ALONE in load.stderr
    plan = asked(
        python, tmp_path, "-m", "course_lib", "plan", "llama-3.1-8b", "--gpus", "64", "--seq", "8K", "--batch", "4M"
    )
    assert plan.returncode == 0, plan.stderr
    assert asked(python, tmp_path, "-c", SPOKEN).stdout == "차례\n"
    install(python, whole)
    new = asked(python, tmp_path, "-m", "course_lib", "new", "mine")
    assert new.returncode == 0, new.stderr
    written = {path.name for path in (tmp_path / "mine" / "notebooks").iterdir()}
    assert written == {path.name for path in notebook_paths("notebooks")}
    assert asked(python, tmp_path, "-c", LOAD).stdout == "Llama\n"


def test_another_file_is_refused(tmp_path):
    (tmp_path / "course_lib-1.whl").write_text("no zip")
    with pytest.raises(ValueError, match="is not a wheel of course_lib outside .*; make one: pip wheel --no-deps"):
        write_small(tmp_path / "course_lib-1.whl", tmp_path / "colab")
