"""What takes long or installs other programs: run before a release, and when what it touches has changed.

    python tests/nightly.py                   # run what has changed since it last passed, and note each result
    python tests/nightly.py test-slurm        # run this, changed or not
    python tests/nightly.py --list            # say what has changed; run nothing

docs/NIGHTLY.md holds the last result of each, with a fingerprint of the files that it touches.
"""

import argparse
import hashlib
import platform
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "NIGHTLY.md"
PACKAGE, NOTEBOOKS = "course_lib", "notebooks"


def _lib(*names: str) -> tuple[str, ...]:
    """Paths of folders and files of the package."""
    return tuple(f"{PACKAGE}/{name}" for name in names)


TOUCHES = {  # target of make -> what it hangs on, beside the Makefile's pins
    "test-exhaustive": (PACKAGE, "tests"),
    "test-programs": ("tests", *_lib("authoring", "cli", "cluster", "labs", "launch", "train")),
    "test-fake-gpu": (
        *_lib("compare", "native", "parallel", "train", "kernels", "devices.py"),
        *(NOTEBOOKS, "tests/fake_cuda.py", "tests/fake_gpu", "tests/gpu"),
    ),
    "test-processors": (NOTEBOOKS,),
    "test-browser": (*_lib("widgets", "panels", "web"), NOTEBOOKS, "exercises", "docs/site", "tests/browser"),
    "site": (PACKAGE, NOTEBOOKS, "exercises", "ko", *(f"docs/{name}" for name in ("site", "labs", "TEACHING.md"))),
    "test-grading": ("course_lib/checks", "solutions", "tests/test_grading.py"),
    "test-slurm": ("course_lib/launch", "course_lib/cluster", "course_lib/train", "tests/slurm"),
    "test-kernels": ("course_lib/kernels", "tests/kernels", "notebooks/13a_inside_a_gpu.ipynb"),
    "test-deepspeed": ("course_lib/native", "tests/native"),
    "test-newest": ("pyproject.toml", PACKAGE, NOTEBOOKS, "tests/places"),
    "test-colab": ("pyproject.toml", PACKAGE, NOTEBOOKS, "tests/places"),
    "test-jupyterhub": ("course_lib/launch", "tests/places"),
    "quick-newer": (PACKAGE, "tests"),
}
HEAD = """# Last results of `make nightly`

Written by `make nightly`; `.ci/run` prints which of them hang on files that have changed since.

| target | result | date | with | seconds | fingerprint |
|---|---|---|---|--:|---|
"""


@dataclass(frozen=True)
class Result:
    """The last run of a target: `fingerprint` is of the files that it touches, as they were."""

    target: str
    result: str
    date: str
    versions: str
    seconds: str
    fingerprint: str


def fingerprint(target: str, root: Path = ROOT) -> str:
    """Ten digits of what git holds in HEAD of the files that a target touches."""
    tree = subprocess.run(
        ["git", "ls-tree", "HEAD", "constraints.txt", *TOUCHES[target]], cwd=root, capture_output=True, check=True
    )
    return hashlib.sha256(tree.stdout).hexdigest()[:10]


def read(page: Path = PAGE) -> dict[str, Result]:
    """The results of the page, by target."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return {row[0]: Result(*row) for row in cells}


def written(results: dict[str, Result]) -> str:
    """The page with these results, in the order of TOUCHES; what never ran has a line too."""
    never = {target: Result(target, "not run", "", "", "", "") for target in TOUCHES}
    rows = [(never | results)[target] for target in TOUCHES]
    return HEAD + "".join(f"| `{row.target}` | {' | '.join(astuple(row)[1:])} |\n" for row in rows)


def changed(results: dict[str, Result], root: Path = ROOT) -> list[str]:
    """The targets that have not passed with the files as they are."""
    found = {target: (one.result, one.fingerprint) for target, one in results.items()}
    return [target for target in TOUCHES if found.get(target) != ("passed", fingerprint(target, root))]


def run(target: str) -> Result:
    """Run one target of make and say how it ended."""
    before, started = fingerprint(target), time.monotonic()
    status = subprocess.run(["make", target], cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    result = "failed" if status else "passed"
    return Result(target, result, time.strftime("%Y-%m-%d"), versions, f"{time.monotonic() - started:.0f}", before)


def main(argv: list[str]) -> int:
    """The command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TOUCHES)}")
    parser.add_argument("--list", action="store_true", help="say what has changed since it passed; run nothing")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.targets) - set(TOUCHES))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such target; take of {', '.join(TOUCHES)}")
    results = read()
    targets = options.targets or changed(results)
    if options.list:
        print(f"make nightly would run: {', '.join(targets) or 'nothing'}")
        return 0
    for target in targets:
        results[target] = run(target)
        PAGE.write_text(written(results), encoding="utf-8")
    failed = [target for target in targets if results[target].result != "passed"]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(targets) or 'nothing to run'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
