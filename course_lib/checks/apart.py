"""Answers in processes of their own, for grading a class: the grader's process never runs them, nor reads a pickle.

A table looks at an answer by `observed(look, answer, ...)` or by `run_ranks(...)`. While a class is graded, the answer
is an `Apart`, and both run elsewhere (`Workers`); what comes back is read by plain.py.

cells    executes the submission's cells, and packs each answer as bytes
calls    one process for each check: loads the answer, and looks at it
ranks    one process for a submission: launches, whose ranks call the answer

All are forked from a server that has imported the course and runs no answer. No frame of these processes belongs to
the grader, so that a right result stands nowhere on their stacks.
"""

import functools
import io
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from course_lib.checks import core, plain
from course_lib.checks.core import CheckFailed
from course_lib.launch import RankError
from course_lib.launch.launcher import dump

SECONDS = {"cells": 300.0, "calls": 60.0, "ranks": 300.0}
CELL_SECONDS = 60
_MOST_BYTES = 1 << 30  # of one answer
_CPU_SECONDS = 1800  # of a worker in all; one that is left behind in a loop ends then
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Apart:
    """An answer that this process holds as bytes alone; a worker loads it."""

    code: bytes


@functools.cache
def _unpacked(code: bytes) -> Any:
    """The answer, in a worker: loaded once."""
    return cloudpickle.loads(code)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Apart):
            return _unpacked, (obj.code,)
        return super().reducer_override(obj)


class Workers:
    """The processes of one submission; a context manager, which ends them."""

    def __init__(self) -> None:
        self._alive: dict[str, tuple] = {}
        self._home = tempfile.mkdtemp(prefix="course_grade_")

    def __enter__(self) -> "Workers":
        core.apart = self
        return self

    def __exit__(self, *_: object) -> None:
        core.apart = None
        for name in list(self._alive):
            self.end(name)
        shutil.rmtree(self._home, ignore_errors=True)

    def ask(self, name: str, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return fn(*args) of a worker; its error is raised here, as the same one or as a CheckFailed."""
        payload = io.BytesIO()
        _Pickler(payload).dump((fn, args, kwargs))
        _, connection = self._alive.get(name) or self._start(name)
        try:
            connection.send_bytes(payload.getvalue())
            if not connection.poll(SECONDS[name]):
                self.end(name)
                raise CheckFailed(f"your code did not end in {SECONDS[name]:g} s")
            data = connection.recv_bytes(_MOST_BYTES)
        except (EOFError, OSError):
            self.end(name)
            raise CheckFailed("the process that ran your code ended before it answered") from None
        try:
            how, value = plain.loads(data)
        except Exception as error:  # whatever a worker that is not to be trusted may send
            raise CheckFailed(f"what your code gave back cannot be read ({type(error).__name__})") from None
        if how == "returned":
            return value
        raise _error(str(how), str(value))

    def end(self, name: str) -> None:
        """End a worker with all that it started in its session; the next question starts another."""
        process, connection = self._alive.pop(name, (None, None))
        if process is None:
            return
        connection.close()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()

    def _start(self, name: str) -> tuple:
        ours, theirs = _context().Pipe()
        process = _context().Process(target=_work, args=(theirs, self._home))
        process.start()
        theirs.close()
        self._alive[name] = process, ours
        return self._alive[name]


@functools.cache
def _context() -> multiprocessing.context.BaseContext:
    """Forks of a server without an answer and without threads."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch", "IPython.core.interactiveshell"])
    return context


def _error(kind: str, text: str) -> Exception:
    for known in (CheckFailed, RankError, NotImplementedError):
        if kind == known.__name__:
            return known(text)
    return CheckFailed(f"your code raised {kind}: {text}")


# In a worker ---------------------------------------------------------------------------------------------------------


def _work(connection: Any, home: str) -> None:
    """Answer questions until the grader's end is closed."""
    import resource

    os.setsid()
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | {"HOME": home, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    os.chdir(home)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        try:
            fn, args, kwargs = cloudpickle.loads(payload)
            answered = "returned", fn(*args, **kwargs)
        except (Exception, SystemExit) as error:
            answered = type(error).__name__, str(error)
        connection.send_bytes(plain.dumps(answered))


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"the cell ran longer than {CELL_SECONDS} s")


def run_cells(cells: list[tuple[str, str]], names: list[str]) -> dict[str, bytes | str | None]:
    """Execute (id, source) of each cell as a kernel does; return each named answer as bytes.

    In place of an answer that is not there stands None, or the error that may be the reason. A cell that fails does not
    stop the next one.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell, errors = InteractiveShell.instance(config=config), []
    signal.signal(signal.SIGALRM, _out_of_time)
    for cell_id, source in cells:
        signal.alarm(CELL_SECONDS)
        done = shell.run_cell(source, store_history=False)
        signal.alarm(0)
        if error := done.error_before_exec or done.error_in_exec:
            errors.append(f"cell {cell_id}: {type(error).__name__}: {error}")
    return {name: _packed(name, shell.user_ns.get(name), errors) for name in names}


def _packed(name: str, answer: Any, errors: list[str]) -> bytes | str | None:
    if answer is None or answer is ...:
        return f"{name} is not defined; {'; '.join(errors)}" if errors else None
    try:
        return dump(answer)
    except Exception as error:  # pickling runs code of any class
        return f"{name} cannot be sent to another process ({type(error).__name__}: {error})"
