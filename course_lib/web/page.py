"""A folder that computes in a reader's browser, with this package's own arithmetic; any web server can serve it.

    python -m course_lib.web.page build/page --pyodide build/npm/node_modules/pyodide

The arithmetic needs no torch (floor 0 of docs/MAP.md), so Pyodide, which is CPython as WebAssembly, runs it as it is.
Pictures of the start are stored, so that there is something to see before Python has come. Large files travel packed;
the page unpacks them.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import shutil
import zipfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import course_lib
from course_lib.claims import claims
from course_lib.claims.page import NAMES, as_record
from course_lib.panels.asked import PANELS, described

PAGE = ("page.css", "page.js", "worker.js")
FROM_NPM = {  # files of npm's package: whether they travel packed
    "pyodide.mjs": False, "pyodide.asm.mjs": True, "pyodide.asm.wasm": True, "pyodide-lock.json": True,
}  # fmt: skip
STDLIB = "python_stdlib.zip"
# Parts of Python's own library that arithmetic never asks for; a test imports all that the page uses without them.
LEFT_OUT = (
    "_pyrepl", "ctypes", "curses", "dbm", "doctest",
    "email", "ensurepip", "ftplib", "http", "idlelib", "imaplib", "lib2to3", "logging/handlers", "mailbox",
    "multiprocessing", "nntplib", "pdb", "pickletools", "poplib", "profiling", "pydoc", "smtplib", "sqlite3",
    "tarfile", "test", "tkinter", "turtle", "unittest", "urllib/request", "venv", "wsgiref", "xml", "xmlrpc",
    "webbrowser",
)  # fmt: skip


def floors(doc: str = course_lib.__doc__) -> dict[str, list[str]]:
    """Number of a floor -> its folders and files, as the map names them: "plan/", "run.py"."""
    found: dict[str, list[str]] = {}
    for line in doc.splitlines():
        if heading := re.match(r"(\d)\. ", line):
            found[heading.group(1)] = []
        elif entry := re.match(r"    ((?:\w+(?:/|\.py)[, ] *)+)\S", line):
            found[max(found)] += re.findall(r"\w+(?:/|\.py)", entry.group(1))
    return found


def arithmetic(package: Path) -> bytes:
    """Return a zip of floor 0 as Python imports it, and of PyYAML, which some files for other programs need."""
    import yaml  # pure Python; the page's Python has none

    parts = [*(package / name for name in ("__init__.py", *floors()["0"], "templates")), *package.glob("*.toml")]
    found = {path: path.relative_to(package.parent) for part in parts for path in _inside(part)}
    of_yaml = Path(yaml.__file__).parent
    found |= {path: path.relative_to(of_yaml.parent) for path in of_yaml.glob("*.py")}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as into:
        for path, name in sorted(found.items()):
            into.writestr(zipfile.ZipInfo(name.as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return packed.getvalue()


def _inside(part: Path) -> list[Path]:
    """The files of a part that Python reads: code, tables, templates of files for other programs."""
    paths = [part] if part.is_file() else part.rglob("*")
    return [path for path in paths if path.suffix in (".py", ".toml", ".csv", ".args", ".yaml", ".json", ".sbatch")]


def slim(stdlib: bytes) -> bytes:
    """Return Python's library without what the page never asks for."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stdlib)) as whole, zipfile.ZipFile(packed, "w") as into:
        for one in whole.infolist():
            if not one.filename.startswith(LEFT_OUT):
                into.writestr(one, whole.read(one), zipfile.ZIP_DEFLATED, 9)
    return packed.getvalue()


def asked_first() -> dict:
    """All panels as they start, and all claims: what the page shows before Python has come."""
    told = ("id", "topic", "claim", "verdict", "condition", "answer", "say", "source", "chapters")
    ledger = [{name: as_record(claim)[name] for name in told} for claim in claims()]
    return {
        "version": version("course-lib"),
        "panels": {name: described(name) for name in PANELS},
        "claims": ledger,
        "topics": NAMES,
    }


def write_page(folder: Path, pyodide: Path) -> list[Path]:
    """Write the page into a folder, which is made anew; return its files.

    pyodide   npm's package, unpacked
    Raises    ValueError if it lacks a file, or the folder holds something else than a page
    """
    if missing := [name for name in (*FROM_NPM, STDLIB) if not (pyodide / name).is_file()]:
        raise ValueError(f"{pyodide} lacks {', '.join(missing)}; give the folder of npm's package pyodide")
    if folder.exists() and any(folder.iterdir()) and not (folder / "worker.js").is_file():
        raise ValueError(f"{folder} holds something else than a page; give an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    here = files("course_lib.web")
    for name in PAGE:
        (folder / name).write_bytes((here / name).read_bytes())
    first = json.dumps(asked_first(), ensure_ascii=False).replace(
        "<", "\\u003c"
    )  # no tag ends the script that holds it
    page = (here / "index.html").read_text(encoding="utf-8").replace("@FIRST@", first)
    (folder / "index.html").write_text(page, encoding="utf-8")
    (folder / "arithmetic.zip").write_bytes(arithmetic(Path(course_lib.__file__).parent))
    for name, is_packed in FROM_NPM.items():
        content = (pyodide / name).read_bytes()
        _write(folder / "pyodide" / name, content, is_packed)
    (folder / "pyodide" / STDLIB).write_bytes(slim((pyodide / STDLIB).read_bytes()))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(path: Path, content: bytes, is_packed: bool) -> None:
    """Packed files end in .packed: a server that sees .gz may say so in a header, and the browser unpacks once more."""
    if is_packed:
        path.with_name(f"{path.name}.packed").write_bytes(gzip.compress(content, 9, mtime=0))
    else:
        path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course_lib.web.page", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pyodide", type=Path, required=True, help="npm's package, unpacked")
    asked = parser.parse_args()
    try:
        written = write_page(asked.folder, asked.pyodide)
    except ValueError as error:
        parser.error(str(error))
    size = sum(path.stat().st_size for path in written)
    print(f"{asked.folder}: {len(written)} files, {size / 1e6:.1f} MB")
    print(
        f"look at it: python -m http.server --bind 127.0.0.1 --directory {asked.folder} 8000, then http://127.0.0.1:8000"
    )


if __name__ == "__main__":
    main()
