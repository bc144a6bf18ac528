"""The command `course`: its subcommands and their options. Modules that need torch are imported when a command runs.

`course run --help` tells options. Only `run` needs Jupyter.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional
from tyro.extras import SubcommandApp

from course_lib.cli.claims import list_claims
from course_lib.cli.cluster import cluster
from course_lib.cli.grade import grade
from course_lib.cli.lab import lab
from course_lib.cli.plan import plan
from course_lib.cli.predict import calibrate_cluster, predict
from course_lib.cli.simulate import simulate
from course_lib.cli.watch import watch
from course_lib.train.options import Options

DESCRIPTION = """How large language models are trained on many GPUs.

`course --version` tells the version. Completion by the shell: source <(course --tyro-print-completion bash)
"""
app = SubcommandApp()


@app.command(name="doctor")
def _doctor(json: bool = False) -> int:
    """Tell what this machine can run, chapter by chapter, after a real launch of two ranks.

    Args:
        json: the same as JSON
    """
    from course_lib.cli.doctor import doctor

    return doctor(json)


@app.command(name="new")
def _new(folder: Positional[str], force: bool = False, with_solutions: bool = False) -> int:
    """Write chapters and exercises into a folder of your own, where what you change stays.

    Args:
        folder: made if it is not there; a notebook in it that differs from the course's is kept
        force: overwrite notebooks that differ
        with_solutions: the solutions of the exercises too
    """
    from course_lib.cli.notebooks import new_course

    if not folder.strip():
        raise ValueError("folder is empty; give the name of a folder, such as runs/mine")
    return new_course(Path(folder), force, with_solutions)


@app.command(name="run")
def _run(chapter: Positional[str], timeout: float = 120.0, save: bool = False) -> int:
    """Execute a chapter without a browser; say which cell failed.

    Args:
        chapter: a number (03), a stem, or the path of a notebook
        timeout: most seconds for one cell
        save: store the outputs in the notebook; without it the file is left alone
    """
    from course_lib.cli.notebooks import find_notebook, run_chapter

    return run_chapter(find_notebook(chapter), timeout, save)


@app.command(name="demo")
def _demo() -> int:
    """Print one table: the same tiny Llama trained by 1, 2 and 4 ranks."""
    from course_lib.cli.demo import demo

    return demo()


@app.command(name="bench")
def _bench(json: bool = False, check: bool = False, rounds: int = 30) -> int:
    """Time the course's own implementations against PyTorch's, in one run.

    Args:
        json: the same as JSON
        check: exit 1 if a ratio is below 0.9
        rounds: how often both sides take a step
    """
    from course_lib.compare.bench import main as bench

    return bench(as_json=json, check=check, rounds=rounds)


app.command(simulate, name="simulate")
app.command(predict, name="predict")
app.command(plan, name="plan")
app.command(calibrate_cluster, name="calibrate")
app.command(list_claims, name="claims")
app.command(watch, name="watch")
app.command(cluster, name="cluster")
app.command(lab, name="lab")
app.command(grade, name="grade")


@app.command(name="train")
def _train(options: OmitArgPrefixes[Options]) -> int:
    """Train a model under any layout; `torchrun -m course_lib.train` starts as many ranks as it needs."""
    from course_lib.train.__main__ import run_as_script

    run_as_script(options)


def main(argv: list[str] | None = None) -> int:
    """Run one command; what cannot be is one line that says what to do, and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"course {importlib.metadata.version('course-lib')}")
        return 0
    try:
        code = app.cli(prog="course", description=DESCRIPTION, args=argv, config=(FlagCreatePairsOff,))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads has seen enough: course claims | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 0
    except (ValueError, RuntimeError) as error:
        if not _is_told(error):
            raise
        print(f"course {argv[0]}: {error}", file=sys.stderr)
        return 2


def _is_told(error: Exception) -> bool:
    """Whether an error says by itself what to do. A RankError is one; its module needs torch, and was imported then."""
    launch = sys.modules.get("course_lib.launch")
    return isinstance(error, ValueError) or (launch is not None and isinstance(error, launch.RankError))
