"""Documents that are written: docs/MAP.md's map, from the docstring of course_lib; docs/CLAIMS.md, from the ledger."""

import ast
from pathlib import Path

from course_lib.authoring.address import write_text
from course_lib.authoring.form import ROOT
from course_lib.claims import claims_page

START, STOP = "<!-- map: written by make fmt from course_lib/__init__.py -->\n", "<!-- end of the map -->"


def package_map(root: Path = ROOT) -> str:
    """The parts and files of course_lib, one line a folder, as its docstring lists them."""
    doc = ast.get_docstring(ast.parse((root / "course_lib" / "__init__.py").read_text(encoding="utf-8")))
    return doc[doc.index("\n0. ") + 1 :].rstrip("\n")


def _with_map(document: str, root: Path = ROOT) -> str:
    """A document's text with the map as it is now between its two marks."""
    before, _, rest = document.partition(START)
    return f"{before}{START}```\n{package_map(root)}\n```\n{STOP}{rest.partition(STOP)[2]}"


def write_map(root: Path = ROOT) -> list[Path]:
    """Write the map into docs/MAP.md; returns it if it changed."""
    path = root / "docs" / "MAP.md"
    return write_text(_with_map(path.read_text(encoding="utf-8"), root), path)


def write_claims(root: Path = ROOT) -> list[Path]:
    """Write docs/CLAIMS.md; returns it if it changed."""
    return write_text(claims_page(), root / "docs" / "CLAIMS.md")
