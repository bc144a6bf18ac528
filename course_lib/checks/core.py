"""What every grader is made of: fresh numbers at each run, real ranks, a failure or "not written" told in a sentence.

A grader that is no table (table.py) is a function of the learner's answer and of a random.Random, under `@grader`:

    @grader(right=in_one_loop, wrong={"a message was never waited for": never_waits})
    def check_overlap(student, rng):
        if run_ranks(_never_waited, rng.choice([2, 3, 4]), student, fresh_seed(rng))[0]:
            fail("a message was never waited for; its tensor may be read too early")

The learner calls `check_overlap(my_overlap)` and reads `check_overlap: passed`, or one sentence.
"""

import functools
import random
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from course_lib.launch import RankError, Results, launch

NOT_WRITTEN = re.compile(r"^NotImplementedError(?:: (.*your code goes here))?$", re.M)
OWN_FRAME = re.compile(r'  File "[^"\n]*/course_lib/checks/[^"\n]*", line .*\n(?:    .*\n)*')
RANK_SECONDS = 30.0  # a grader's launch takes under a second; a deadlock must not cost the learner two minutes
apart: Any = None  # while a class is graded: the Workers (apart.py) in which answers run


class CheckFailed(AssertionError):
    """The answer is wrong; the text says how, and what the likely misconception is."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, without the grader's own lines."""
        return str(self).splitlines()


class NotWritten(NotImplementedError):
    """The exercise is still as it was handed out."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows."""
        return [str(self)]


def grader(
    body: Callable[[Any, random.Random], None] | None = None, *, right: Any = None, wrong: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Turn `body(student, rng)` into a check that prints one line or raises CheckFailed.

    Every call draws a new seed; the message of a failure tells it, and `check_...(answer, seed=...)` repeats that run.

    right    an unusual right answer, and wrong: a part of its message -> a wrong answer, or several; for the test
    """
    if body is None:
        return functools.partial(grader, right=right, wrong=wrong)
    name = body.__name__

    @functools.wraps(body)
    def check(student, seed: int | None = None) -> None:
        used = random.SystemRandom().randrange(2**31) if seed is None else seed
        if student is None or student is ...:
            raise NotWritten(f"{name}: your code goes here")
        try:
            body(student, random.Random(used))
        except CheckFailed as failure:
            raise CheckFailed(f"{name}: {failure}\n(to repeat this very run: seed={used})") from None
        except NotImplementedError as missing:
            raise NotWritten(f"{name}: {str(missing) or 'your code goes here'}") from None
        except Exception as error:
            if not raised_in(student, error):
                raise
            raise CheckFailed(f"{name}: {own_lines(student, error)}\n(to repeat this very run: seed={used})") from None
        print(f"{name}: passed")

    check.right, check.wrong = right, wrong
    return check


def fresh_seed(rng: random.Random) -> int:
    """A seed that can travel to the ranks; the same for the same run of the grader."""
    return rng.randrange(2**31)


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


def run_ranks(fn: Callable, world_size: int, *args, timeout: float = RANK_SECONDS, backend: str = "auto") -> Results:
    """`launch`, for graders: nothing printed; a rank that fails is the answer's failure, told with its rank."""
    with rank_errors_as_failures(world_size):
        return launched(launch, fn, world_size, *args, timeout=timeout, backend=backend, quiet=True)


def launched(launches: Callable, *args, **kwargs) -> Any:
    """Return launches(*args), a function that starts ranks on an answer."""
    return launches(*args, **kwargs) if apart is None else apart.launched(launches, *args, **kwargs)


def observed(look: Callable, answer: Any, *args) -> Any:
    """Return look(answer, *args): what an answer does to objects that are not plain data, as plain data."""
    return look(answer, *args) if apart is None else apart.observed(look, answer, *args)


@contextmanager
def in_this_process() -> Iterator[None]:
    """Inside, code of the course's own runs here also while a class is graded."""
    global apart
    before, apart = apart, None
    try:
        yield
    finally:
        apart = before


@contextmanager
def rank_errors_as_failures(world_size: int) -> Iterator[None]:
    """Turn the error of a rank into a failure of the answer, or into "not written yet"."""
    try:
        yield
    except RankError as error:
        missing = NOT_WRITTEN.search(str(error))
        if missing:
            raise NotImplementedError(missing.group(1) or "your code goes here") from None
        raise CheckFailed(f"your code failed on {world_size} ranks:\n{OWN_FRAME.sub('', str(error))}") from None


def hang_in_words(text: str, hang: str) -> str:
    """The launcher's error with the likely reason of a hang first."""
    if "time limit: after " in text:
        places = "\n".join(line for line in text.splitlines() if line.startswith("rank "))
        return f"your ranks wait for each other for ever, until they are stopped. {hang}\n{places}"
    if "Received data size doesn't match" in text:
        return f"a message is longer than the tensor it was received into: its two ends disagree on its length.\n{text}"
    return text


def fail(message: str) -> None:
    """Say that the answer is wrong, in a sentence of the grader's own."""
    raise CheckFailed(message)


# Errors of the answer's own code, raised in the notebook's process ---------------------------------------------------


def _file_of(student: Any) -> str | None:
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
