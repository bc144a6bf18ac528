"""`python -m course_lib.authoring fmt | mirrors | exercises | quotes | korean | check | korean-status | address`."""

import argparse
import sys
from pathlib import Path

import course_lib
from course_lib.authoring.address import write_address, write_text
from course_lib.authoring.exercises import exercise_problems, write_exercises
from course_lib.authoring.form import ROOT, format_notebooks, notebook_paths
from course_lib.authoring.korean import status, write_korean
from course_lib.authoring.mirrors import rewrite_mirrors
from course_lib.authoring.quotes import write_quotes
from course_lib.authoring.rules import notebook_problems
from course_lib.claims import claims_page

START, STOP = "<!-- map: written by make fmt from course_lib/__init__.py -->\n", "<!-- end of the map -->"


def package_map() -> str:
    """The parts and files of course_lib, one line a folder, as its docstring lists them."""
    doc = course_lib.__doc__
    return doc[doc.index("\n0. ") + 1 :].rstrip("\n")


def check() -> list[str]:
    """What notebooks, solutions and exercises lack, without running them."""
    paths = notebook_paths("notebooks", "solutions")
    return [problem for path in paths for problem in notebook_problems(path)] + exercise_problems()


def fmt() -> list[Path]:
    """Write notebooks and solutions in their normal form, the map of docs/MAP.md, docs/CLAIMS.md, and ko/."""
    map_page = ROOT / "docs" / "MAP.md"
    before, _, rest = map_page.read_text(encoding="utf-8").partition(START)
    mapped = f"{before}{START}```\n{package_map()}\n```\n{STOP}{rest.partition(STOP)[2]}"
    written = write_text(mapped, map_page) + write_text(claims_page(), ROOT / "docs" / "CLAIMS.md")
    return format_notebooks() + written + write_korean()


def move_to(address: str, root: Path = ROOT, hub: str | None = None) -> list[Path]:
    """Make this the course of a GitHub repository: its address, every notebook's install cell, every badge."""
    return write_address(address, root, hub) + format_notebooks(root) + write_exercises(root)


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
