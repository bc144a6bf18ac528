"""What every table is made of: fresh numbers at each run, real ranks, a failure or "not written" told in a sentence."""

import functools
import inspect
import random
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from course_lib.language import told
from course_lib.launch import RankError, launch

_NOT_WRITTEN = re.compile(r"^NotImplementedError(?:: (.*your code goes here))?$", re.M)
_OWN_FRAME = re.compile(r'  File "[^"\n]*/course_lib/checks/[^"\n]*", line .*\n(?:    .*\n)*')
_RANK_SECONDS = 30.0  # a grader's launch takes under a second; a deadlock must not cost the learner two minutes
apart: Any = None  # while a class is graded: the Workers (apart.py) in which answers run


class CheckFailed(AssertionError):
    """The answer is wrong; the text says how, and what the likely misconception is."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, without the grader's own lines."""
        return told(str(self)).splitlines()


class NotWritten(NotImplementedError):
    """The exercise is still as it was handed out."""

    _render_traceback_ = CheckFailed._render_traceback_


def fresh_seed(rng: random.Random) -> int:
    """A seed that can travel to the ranks; the same for the same run of the grader."""
    return rng.randrange(2**31)


def ranks_and_seeds(rng: random.Random) -> list[tuple[int, int]]:
    """Two cases of a table on ranks: 2 of them, then 3 or 4, each with a seed."""
    return [(size, fresh_seed(rng)) for size in (2, rng.choice([3, 4]))]


def fresh_generator(rng: random.Random) -> torch.Generator:
    """A torch generator for this run of the grader."""
    return torch.Generator().manual_seed(fresh_seed(rng))


def numbers(source: random.Random | torch.Generator | int, *shape: int) -> Tensor:
    """Normal numbers in float64, drawn by a run of the grader, by a generator, or from a seed that all ranks know."""
    if isinstance(source, random.Random):
        source = fresh_generator(source)
    if isinstance(source, int):
        source = torch.Generator().manual_seed(source)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def but(base: type, **changed) -> type:
    """Return the class with other attributes and methods: most wrong answers differ from a right one in one alone."""
    return type(f"Changed{base.__name__}", (base,), changed)


def run_ranks(fn: Callable, world_size: int, *args, timeout: float = _RANK_SECONDS, backend: str = "auto") -> list:
    """`launch`, for graders: nothing printed; a rank that fails is the answer's failure, told with its rank.

    Raises   NotImplementedError if the answer is not written yet, else CheckFailed
    """
    launches = _launched if apart is None else functools.partial(apart.ask, "ranks", _launched)
    try:
        return launches(fn, world_size, *args, timeout=timeout, backend=backend, quiet=True)
    except RankError as error:
        missing = _NOT_WRITTEN.search(str(error))
        if missing:
            raise NotImplementedError(missing.group(1) or "your code goes here") from None
        raise CheckFailed(f"your code failed on {world_size} ranks:\n{_OWN_FRAME.sub('', str(error))}") from None


def _launched(*args, **kwargs) -> list:
    return list(launch(*args, **kwargs))


def observed(look: Callable, *args) -> Any:
    """Return look(*args), which looks at an answer, as plain data."""
    return look(*args) if apart is None else apart.ask("calls", look, *args)


@contextmanager
def in_this_process() -> Iterator[None]:
    """Inside, code of the course's own runs here also while a class is graded."""
    global apart
    before, apart = apart, None
    try:
        yield
    finally:
        apart = before


# Errors of the answer's own code, raised in the notebook's process ---------------------------------------------------


def _file_of(student: Any) -> str | None:
    student = inspect.unwrap(student)  # a kernel is a function behind `jit`
    code = getattr(student, "__code__", None) or getattr(getattr(student, "__init__", None), "__code__", None)
    return code.co_filename if code else None


def raised_in(student: Any, error: Exception) -> bool:
    """Whether the answer's own code stood on the stack when the error came up, or could not be called as it was."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename == _file_of(student) for frame in frames) or "positional argument" in str(error)


def own_lines(student: Any, error: Exception) -> str:
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _file_of(student)]
    place = f" in {own[-1].name}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    return f"your code raised {type(error).__name__}: {error}{place}"
