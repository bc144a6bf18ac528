"""`python -m course_lib.authoring fmt | mirrors | exercises | quotes | korean | check | korean-status | address`."""

import argparse
import sys
from pathlib import Path

from course_lib.authoring.exercises import exercise_problems, move_to, write_exercises
from course_lib.authoring.form import ROOT, format_notebooks, notebook_paths
from course_lib.authoring.korean import status, write_korean
from course_lib.authoring.mirrors import rewrite_mirrors
from course_lib.authoring.quotes import write_quotes
from course_lib.authoring.readme import write_claims, write_map
from course_lib.authoring.rules import notebook_problems


def check() -> list[str]:
    """What notebooks, solutions and exercises lack, without running them."""
    paths = notebook_paths("notebooks", "solutions")
    return [problem for path in paths for problem in notebook_problems(path)] + exercise_problems()


def fmt() -> list[Path]:
    """Write notebooks and solutions in their normal form, the map of docs/MAP.md, docs/CLAIMS.md, and ko/."""
    return format_notebooks() + write_map() + write_claims() + write_korean()


def main(argv: list[str] | None = None) -> int:
    """The command line: see the module's docstring."""
    commands = {"fmt": fmt, "mirrors": rewrite_mirrors, "exercises": write_exercises, "quotes": write_quotes}
    lists = {"check": check, "korean-status": status}
    commands |= {"korean": write_korean} | lists
    parser = argparse.ArgumentParser(prog="python -m course_lib.authoring", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, function in commands.items():
        subparsers.add_parser(name, help=function.__doc__.splitlines()[0])
    address = subparsers.add_parser("address", help=move_to.__doc__)
    address.add_argument("repository", metavar="https://github.com/owner/name")
    address.add_argument("--hub", help="a JupyterHub with nbgitpuller, where the site opens notebooks")
    options = parser.parse_args(argv)
    if options.command in lists:
        problems = lists[options.command]()
        print("\n".join(problems) or "nothing is missing")
        return 1 if problems else 0
    try:
        if options.command == "address":
            changed = move_to(options.repository, hub=options.hub)
        else:
            changed = commands[options.command]()
    except ValueError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path.relative_to(ROOT)}" for path in changed) or "nothing to change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
