"""A kernel whose ports were taken is started again, by nbval too."""

import subprocess
import sys

import pytest
from kernel_starts import started
from nbformat import v4, write

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


@pytest.mark.long
def test_nbval_starts_a_kernel_again_with_the_plugin(tmp_path):
    path = tmp_path / "one.ipynb"
    write(v4.new_notebook(cells=[v4.new_code_cell("one = 1", id="one")]), path)
    flags = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "tests.kernel_starts", "--nbval"]
    command = [sys.executable, "-c", PROGRAM, *flags, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=authoring.ROOT, timeout=120)
    assert "1 passed" in run.stdout, run.stdout[-2000:] + run.stderr[-2000:]
