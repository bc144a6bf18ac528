"""What every grader is made of: fresh numbers at each run, real ranks, a message that names the likely misconception.

A grader is a function of the learner's answer and of a random.Random, under `@grader`:

    @grader
    def check_mean_of_ranks(student, rng):
        world_size, seed = rng.choice([2, 3, 4]), fresh_seed(rng)
        got = run_ranks(_mean_on_this_rank, world_size, student, seed)
        expect_close(got[0], want, "the mean on rank 0", {"summed, not averaged": want * world_size})

The learner calls `check_mean_of_ranks(my_mean)` and reads `check_mean_of_ranks: passed`, or one sentence.
"""

import functools
import math
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
            raise NotWritten(f"{name}: {missing}") from None
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
    if limit := re.search(r"time limit: after (\S+) s", text):
        places = "\n".join(line for line in text.splitlines() if line.startswith("rank "))
        return f"your ranks wait for each other for ever (stopped after {float(limit[1]):.0f} s). {hang}\n{places}"
    if "Received data size doesn't match" in text:
        return f"a message is longer than the tensor it was received into: its two ends disagree on its length.\n{text}"
    return text


# What graders compare ------------------------------------------------------------------------------------------------


def fail(message: str) -> None:
    """Say that the answer is wrong, in a sentence of the grader's own."""
    raise CheckFailed(message)


def expect_shape(got: Tensor, shape: tuple[int, ...], what: str) -> None:
    """The answer is a tensor of this shape."""
    if got is None:
        raise CheckFailed(f"{what} is None; does your function return it?")
    if not isinstance(got, Tensor):
        raise CheckFailed(f"{what} must be a tensor, got {type(got).__name__}")
    if tuple(got.shape) != tuple(shape):
        raise CheckFailed(f"{what} has shape {tuple(got.shape)}, and {tuple(shape)} is right")


def expect_close(
    got: Tensor,
    want: Tensor,
    what: str,
    misconceptions: dict[str, Tensor] | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
) -> None:
    """The answer is a tensor equal to `want` up to rounding; a wrong one is looked for among the misconceptions.

    misconceptions   message -> the value that somebody who believes it would get; the first that matches is told
    """
    if isinstance(got, Tensor) and got.shape != want.shape:
        _tell_misconception(got, misconceptions, what, rtol, atol)
    expect_shape(got, want.shape, what)
    if got.dtype != want.dtype:
        raise CheckFailed(f"{what} is {got.dtype}, and {want.dtype} is right")
    if torch.allclose(got, want, rtol=rtol, atol=atol):
        return
    _tell_misconception(got, misconceptions, what, rtol, atol)
    difference = (got - want).abs().max().item()
    raise CheckFailed(f"{what} is wrong: it differs by up to {difference:.3g} from the right one")


def _tell_misconception(got: Tensor, misconceptions: dict[str, Tensor] | None, what: str, rtol: float, atol: float):
    for message, value in (misconceptions or {}).items():
        if value.shape == got.shape and torch.allclose(got, value.to(got.dtype), rtol=rtol, atol=atol):
            raise CheckFailed(f"{what}: {message}")


def expect_equal(got: Any, want: Any, what: str, misconceptions: dict[str, Any] | None = None) -> None:
    """The answer is exactly this number (bytes, counts, shapes, orders); misconceptions as in `expect_close`."""
    if got is None:
        raise CheckFailed(f"{what} is None; does your function return it?")
    if got == want:
        return
    for message, value in (misconceptions or {}).items():
        if got == value:
            raise CheckFailed(f"{what} is {_shown(got)}, and {_shown(want)} is right: {message}")
    raise CheckFailed(f"{what} is {_shown(got)}, and {_shown(want)} is right")


def expect_number(
    got: Any, want: float, where: str, misconceptions: dict[str, float], rtol: float = 1e-9, form: str = ".4g"
) -> None:
    """The answer is this number up to rounding; misconceptions as in `expect_close`, `form` as in an f-string."""
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise CheckFailed(f"{where}: it returned {got!r}; return a number")
    if math.isclose(got, want, rel_tol=rtol):
        return
    said = f"{where}: it returned {got:{form}}, and {want:{form}} is right"
    told = next((text for text, value in misconceptions.items() if math.isclose(got, value, rel_tol=rtol)), None)
    raise CheckFailed(f"{said}: {told}" if told else said)


def fail_by_belief(got: list, want: list, cases: list, beliefs: dict[str, Callable], tell: Callable) -> None:
    """Fail with the misconception that explains every answer given, or else with the first case that is wrong."""
    if got == want:
        return
    for message, believed in beliefs.items():
        if got == [believed(*case) for case in cases]:
            fail(message)
    for case, mine, right in zip(cases, got, want, strict=True):
        if mine != right:
            fail(f"{tell(*case)}: it returned {_shown(mine)}, and {_shown(right)} is right")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)


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
