"""The command `course`: its subcommands and their options. Modules that need torch are imported when a command runs.

`course run --help` tells options. Only `run` needs Jupyter.
"""

import errno
import functools
import importlib.metadata
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes
from tyro.extras import SubcommandApp

from course_lib.cli.claims import list_claims
from course_lib.cli.cluster import cluster
from course_lib.cli.gpu_report import gpu_report
from course_lib.cli.grade import grade
from course_lib.cli.help import speak_help
from course_lib.cli.lab import lab
from course_lib.cli.notebooks import new_course, run_chapter
from course_lib.cli.plan import plan_layout
from course_lib.cli.predict import calibrate_cluster, predict_runs
from course_lib.cli.simulate import simulate_layout
from course_lib.cli.watch import watch
from course_lib.language import language, speak, told
from course_lib.train.options import Options

_DESCRIPTION = """How large language models are trained on many GPUs.

`course --version` tells the version. `course --max-ranks 8 run 05`, before any command that starts ranks, has at most 8
run at once on this machine; others wait. COURSE_MAX_RANKS in the environment says the same for a whole site.
Completion by the shell: source <(course --tyro-print-completion bash)
"""


def _doctor() -> int:
    """Tell what this machine can run, chapter by chapter, after a real launch of two ranks."""
    from course_lib.cli.doctor import doctor

    return doctor()


def _demo() -> int:
    """Print one table: the same tiny Llama trained by 1, 2 and 4 ranks."""
    from course_lib.cli.demo import demo

    return demo()


def _bench(json: bool = False, check: bool = False, rounds: int = 30) -> int:
    """Time the course's own implementations against PyTorch's, in one run.

    Args:
        json: the same as JSON
        check: exit 1 if a ratio is below 0.9
        rounds: how often both sides take a step
    """
    from course_lib.compare.bench import main as bench

    return bench(as_json=json, check=check, rounds=rounds)


def _train(options: OmitArgPrefixes[Options]) -> int:
    """Train a model under any layout; `torchrun -m course_lib.train` starts as many ranks as it needs."""
    from course_lib.train.__main__ import run_as_script

    run_as_script(options)


COMMANDS = {
    "doctor": _doctor,
    "new": new_course,
    "run": run_chapter,
    "demo": _demo,
    "bench": _bench,
    "simulate": simulate_layout,
    "predict": predict_runs,
    "plan": plan_layout,
    "calibrate": calibrate_cluster,
    "claims": list_claims,
    "watch": watch,
    "cluster": cluster,
    "lab": lab,
    "gpu-report": gpu_report,
    "grade": grade,
    "train": _train,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; what cannot be is one line that says what to do, and exit code 2."""
    if language() != "en":
        speak_help()
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"course {importlib.metadata.version('course-lib')}")
        return 0
    try:
        argv = _with_limit(argv)
        if not _is_somewhere():
            raise ValueError("the current folder has been removed; cd to one that is there")
        if empty := [word for word in argv if re.fullmatch(r"(--[\w-]+=)?\s*", word)]:
            raise ValueError(f"{empty[0]!r} among the arguments is empty; give a value, or leave it out")
        command = _read(argv)
        speak()
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has seen enough: course claims | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        if not _is_told(error):
            raise
        advice = "; make room, or give a place on another disk" if isinstance(error, OSError) else ""
        print(told(f"course {argv[0]}: {error}{advice}"), file=sys.stderr)
        return 2


def help_texts() -> list[str]:
    """Return all that the helps of the commands say: the Korean catalogue has an entry for each."""
    from docstring_parser import parse  # tyro's; who only runs commands never needs it

    texts = speak_help()
    for words in ([], *([name] for name in COMMANDS), ["cluster", "init"], ["cluster", "check"]):
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            main([*words, "--help"])
    for command in COMMANDS.values():
        texts += (argument.description for argument in parse(command.__doc__).params)
    return [text for text in dict.fromkeys(texts) if " " in text]


def _with_limit(argv: list[str]) -> list[str]:
    """Put what comes before the command, --max-ranks N, where launches of this process and of its kernels read it."""
    if not argv or argv[0].partition("=")[0] != "--max-ranks":
        return argv
    value, rest = (argv[0].partition("=")[2], argv[1:]) if "=" in argv[0] else ("".join(argv[1:2]), argv[2:])
    if not re.fullmatch("[1-9][0-9]{0,5}", value):
        raise ValueError(f"{value!r} is no number of ranks; give a whole number of at least 1")
    os.environ["COURSE_MAX_RANKS"] = value
    return rest


def _is_somewhere() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _read(argv: list[str]) -> Callable[[], int]:
    """The command with its options, to be called.

    Raises   ValueError where a record of the course refuses them, SystemExit (2) with tyro's own text otherwise
    """
    app = SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(_later(command), name=name)
    read = partial(app.cli, prog="course", description=_DESCRIPTION, args=argv, config=(FlagCreatePairsOff,))
    try:
        with redirect_stderr(io.StringIO()):
            return read()
    except SystemExit as end:
        error = end.__context__ and end.__context__.__context__
        if isinstance(error, ValueError) and "course_lib" in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise ValueError(*error.args) from None  # tyro puts its own name for the record before the text
        if not end.code:
            raise
    return read()


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """The same command, which only notes its options."""

    @functools.wraps(command)
    def note(*args, **options) -> Callable[[], int]:
        return partial(command, *args, **options)

    return note


def _is_told(error: Exception) -> bool:
    """Whether an error says by itself what to do. A RankError is one; its module needs torch, and was imported then."""
    launch = sys.modules.get("course_lib.launch")
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or isinstance(error, ValueError) or (launch is not None and isinstance(error, launch.RankError))
