"""A kernel whose ports were taken is started again, by nbval too; nbval's kernels are forks of a warm process."""

import os
import subprocess
import sys

import pytest
from jupyter_kernels import still_there
from kernel_starts import started
from nbformat import v4, write
from warm_kernels import is_possible

from course_lib import authoring


class Start:
    """A start that raises the given errors, one a call, and then returns a kernel."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return "kernel"


DEAD = RuntimeError("Kernel died before replying to kernel_info")


@pytest.mark.filterwarnings("ignore:try 1")
def test_a_kernel_that_dies_twice_is_started_a_third_time():
    with pytest.warns(UserWarning, match="try 2 of 3 to start a kernel: Kernel died"):
        assert started(Start(DEAD, DEAD)) == "kernel"


@pytest.mark.filterwarnings("ignore:try")
def test_the_third_death_is_the_error():
    with pytest.raises(RuntimeError, match="Kernel died"):
        started(Start(DEAD, DEAD, DEAD))


def test_another_error_is_raised_at_once():
    start = Start(FileNotFoundError("no kernel of that name"), DEAD)
    with pytest.raises(FileNotFoundError):
        started(start)
    assert start.errors == [DEAD]


PROGRAM = """
import sys
import pytest
from nbval import kernel
from tests import kernel_starts

once, calls = kernel.start_new_kernel, []

def dies_once(*args, **options):
    calls.append(args)
    if len(calls) == 1:
        raise RuntimeError("Kernel died before replying to kernel_info")
    return once(*args, **options)

kernel.start_new_kernel = dies_once
code = pytest.main(sys.argv[1:])
assert len(calls) == 2, calls
sys.exit(code)
"""


@pytest.mark.programs
def test_nbval_starts_a_kernel_again_with_the_plugin(tmp_path):
    path = tmp_path / "one.ipynb"
    write(v4.new_notebook(cells=[v4.new_code_cell("one = 1", id="one")]), path)
    flags = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "tests.kernel_starts", "--nbval"]
    command = [sys.executable, "-c", PROGRAM, *flags, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=authoring.ROOT, timeout=120)
    assert "1 passed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]


WARM = {
    "warm": ('import os, sys\nprint("torch" in sys.modules, "course_lib.model" in sys.modules)', "True False\n"),
    "place": ('from pathlib import Path\nprint(Path("pids").exists(), sys.argv[0])', "False ipykernel_launcher.py\n"),
    "ranks": ("from course_lib.launch import _processes, launch\nprint(list(launch(lambda: 1, 2)))", "[1, 1]\n"),
    "server": (
        "server = _processes._server._process\n"
        'print(Path("pids").write_text(f"{os.getpid()} {server.pid}") > 0, type(server).__name__)',
        "True Forked\n",
    ),
    "lost": ("server.kill()\nserver.wait()\nprint(list(launch(lambda: 2, 1)))", "[2]\n"),
}


@pytest.mark.programs
@pytest.mark.skipif(not is_possible(), reason="kernels are forked where pidfd is: on Linux")
def test_a_warm_kernel_launches_draws_and_leaves_no_process(tmp_path):
    cells = [
        v4.new_code_cell(
            source, id=name, execution_count=1, outputs=[v4.new_output("stream", name="stdout", text=text)]
        )
        for name, (source, text) in WARM.items()
    ]
    figure = {"image/png": "", "text/plain": ["<Figure size 640x480 with 1 Axes>"]}
    source = "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()"
    drawn = v4.new_code_cell(
        source, id="drawn", execution_count=1, outputs=[v4.new_output("display_data", data=figure)]
    )
    write(v4.new_notebook(cells=[*cells, drawn]), tmp_path / "one.ipynb")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "tests.kernel_starts"]
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    run = subprocess.run(
        [*command, "--nbval", "--nbval-current-env", str(tmp_path / "one.ipynb")],
        capture_output=True,
        text=True,
        cwd=authoring.ROOT,
        env=environment,
        timeout=120,
    )
    assert "6 passed" in run.stdout, run.stdout[-3000:] + run.stderr[-2000:]
    assert not any(still_there(int(pid)) for pid in (tmp_path / "pids").read_text().split())
