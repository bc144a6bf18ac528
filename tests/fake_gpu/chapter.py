"""Chapters on fake GPUs: every function that they launch runs as rank 0 of its world, in this process.

    python tests/fake_gpu/chapter.py notebooks/03_data_parallel.ipynb ...    # -> a JSON line a launch, on stdout

Of the cells only those statements run on which a launch depends: its own, and what defines the names that it uses.
What a launch returns is what rank 0 returned, for all ranks.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from unittest import mock

os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).parents[1]))

import cloudpickle
import fake_cuda
import torch
from statements import names, needed, statements
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from course_lib.launch import RankError, launcher
from course_lib.training import TrainConfig

LAUNCHERS = (  # by name, in notebooks
    "launch",
    "train_side_by_side",
    "measure_five_d",
    "on_ranks",
)
REAL_LAUNCH = launcher.launch
STEPS = 2  # of a training that has more
PROCESSES = 2  # at once


class WithoutAsserts(ast.NodeTransformer):
    """What cells assert of numbers is not so where no other rank exists; what an assertion launches still runs."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [ast.copy_location(one, node) for one in (ast.Pass(), *map(ast.Expr, launcher_calls(node)))]


# --- running them


class FakeLaunch:
    """`launch` for one process: rank 0 runs here on a fake GPU, and its answer stands for all ranks."""

    def __init__(self, path: str):
        self.path, self.cell, self.answers, self.reached = path, None, {}, set()

    def report(self, **record) -> None:
        print(json.dumps({"notebook": self.path, "cell": self.cell} | record), file=sys.__stdout__, flush=True)

    def __call__(self, fn, world_size, *args, backend="auto", **options):
        args = shortened(fn, args)
        self.reached |= {(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())}
        key = (kind_of(fn), tuple(map(kind_of, args)), world_size > 1)
        if key not in self.answers:
            self.answers[key] = self.run(fn, world_size, args, backend)
        answer = self.answers[key]
        if isinstance(answer, fake_cuda.NotFaked):  # on the CPU, so that what comes next has its results
            return REAL_LAUNCH(fn, world_size, *args, **options | {"backend": "gloo", "quiet": True})
        if isinstance(answer, Exception):
            raise RankError(str(answer)) from answer
        value, lines = answer
        of_ranks = [[one] * world_size for one in (value, lines, lines, 1.0, 1)]
        return launcher.Results(*of_ranks[:3], 1.0, *of_ranks[3:], "nccl", "")

    def run(self, fn, world_size: int, args: tuple, backend: str) -> Exception | tuple[object, list[str]]:
        """What rank 0 answers and prints, or the exception that it raises; a line on stdout says how it went."""
        record = {"function": name_of(fn), "ranks": world_size}
        start_s, said = time.process_time(), io.StringIO()
        try:
            if backend == "gloo":
                raise fake_cuda.NotFaked("it asks for the CPU by name")
            payload = launcher._dump_function(fn, args)
            cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # or the notebook's own classes would change
            few = mock.patch.object(launcher, "progress", first_steps)
            with few, fake_cuda.cuda_rank(0, world_size), contextlib.redirect_stdout(said):
                function, arguments = cloudpickle.loads(payload)
                value = tree_map(on_the_cpu, function(*arguments))
            answer = value, said.getvalue().splitlines()
        except Exception as error:
            answer, kind = error, "left_out" if isinstance(error, fake_cuda.NotFaked) else "error"
            record |= {kind: f"{type(error).__name__}: {error}"[:600], "where": where(error)}
        self.report(**record, seconds=round(time.process_time() - start_s, 2))
        return answer


def name_of(fn) -> str:
    """A function's name; of a program that `on_ranks` tries, the trial's."""
    fn = getattr(fn, "func", fn)
    if isinstance(fn, FunctionType) and "trial" in fn.__code__.co_freevars:
        fn = inspect.getclosurevars(fn).nonlocals["trial"]
    return getattr(fn, "__name__", repr(fn))


def shortened(fn, args: tuple) -> tuple:
    """A training of a few steps for one of many; of cases that differ in nothing but sizes, one."""
    names = [] if isinstance(fn, partial) else list(inspect.signature(fn).parameters)
    names += [""] * (len(args) - len(names))  # of *arguments
    return tuple(shortened_argument(name, argument) for name, argument in zip(names, args, strict=False))


def shortened_argument(name: str, argument):
    if isinstance(argument, TrainConfig) and argument.steps > STEPS:
        return dataclasses.replace(argument, steps=STEPS)
    if name == "steps" and isinstance(argument, int):
        return min(argument, STEPS)
    if isinstance(argument, list) and argument and all(isinstance(case, tuple) for case in argument):
        return list({kind_of(case): case for case in reversed(argument)}.values())[::-1]
    return argument


def first_steps(iterable, description=None) -> Iterator:
    """Of a loop that shows its progress in a rank."""
    return itertools.islice(iterable, STEPS)


def kind_of(argument) -> object:
    """What makes a launch another one: functions by where they stand, other arguments by what they are, sizes not."""
    if isinstance(argument, partial):
        return kind_of(argument.func), *map(kind_of, argument.args), *map(kind_of, argument.keywords.values())
    if isinstance(argument, FunctionType):
        cells = [cell.cell_contents for cell in argument.__closure__ or ()]
        return argument.__code__.co_filename, argument.__code__.co_firstlineno, *map(kind_of, cells)
    if isinstance(argument, float) or (isinstance(argument, int) and argument > 3):  # below: a stage, a choice
        return type(argument)
    if isinstance(argument, list | tuple):
        return tuple(map(kind_of, argument))
    return repr(argument)


def on_the_cpu(leaf):
    return fake_cuda.numbers_of_tensor(leaf) if isinstance(leaf, FakeTensor) else leaf


def where(error: Exception) -> list[str]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    return [f"{Path(frame.filename).name}:{frame.lineno} {frame.line}" for frame in frames[-4:]]


def run(path: str) -> None:
    """Report each launch, and each statement that could not go on after its launches."""
    fake = FakeLaunch(path)
    for module in [*sys.modules.values()]:
        if isinstance(getattr(module, "launch", None), FakeLaunch) or getattr(module, "launch", None) is REAL_LAUNCH:
            module.launch = fake
    space = {"__name__": "__main__"}
    for cell, statement in needed(path, {*LAUNCHERS} | {name for name in names_of(path) if name.startswith("check_")}):
        fake.cell = cell
        module = ast.fix_missing_locations(WithoutAsserts().visit(ast.Module([statement], [])))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(module, f"cell {cell}", "exec"), space)
        except Exception as error:
            fake.report(after=f"{type(error).__name__}: {error}"[:300], where=where(error))
    for fake.cell, call in launches_of(path):
        if not any((f"cell {fake.cell}", line) in fake.reached for line in range(call.lineno, call.end_lineno + 1)):
            fake.report(missed=ast.unparse(call))


def launches_of(path: str) -> Iterator[tuple[int, ast.Call]]:
    """Where a notebook launches ranks."""
    for cell, statement in statements(path):
        yield from ((cell, call) for call in launcher_calls(statement))


def launcher_calls(node: ast.AST) -> list[ast.Call]:
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name))
    return [call for call in calls if call.func.id in LAUNCHERS]


def names_of(path: str) -> set[str]:
    """Names that a notebook of solutions uses: its graders launch ranks, too."""
    used = (names(statement, ast.Load) for _, statement in statements(path))
    return set().union(*used) if "solutions" in path else set()


def run_all(paths: list[str], at_once: int = PROCESSES) -> int:
    """Run a process for each notebook, those with most launches first, and return how many failed.

    They are forked from this one, which has imported what all of them need.
    """
    waiting = sorted(paths, key=lambda path: len(list(launches_of(path))))
    running, failed = 0, 0
    while waiting or running:
        if waiting and running < at_once:
            path = waiting.pop()
            running += 1
            if os.fork() == 0:
                run_and_end(path)
        else:
            failed += os.wait()[1] != 0
            running -= 1
    return failed


def run_and_end(path: str) -> None:
    status = 1
    try:
        fake_cuda.become_able()  # before autograd starts a thread for each device that it knows
        torch.manual_seed(0)
        run(path)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # the threads of the stand-in's autograd do not end by themselves


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
