"""A folder that computes in a reader's browser, with this package's own arithmetic; any web server can serve it.

    python -m course_lib.web.page build/page --pyodide build/npm/node_modules/pyodide

The arithmetic needs no torch (floor 0 of docs/MAP.md), so Pyodide, which is CPython as WebAssembly, runs it as it is.
Pictures of the start are stored, so that there is something to see before Python has come. What is
large travels packed, and is unpacked there: such files end in .packed, as a server that sees .gz may say so in a
header, and the browser unpacks once more.
"""

import argparse
import ast
import gzip
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import course_lib
from course_lib.claims import claims
from course_lib.claims.page import NAMES, as_record
from course_lib.language import CATALOGUE, spoken, told
from course_lib.panels.asked import PANELS, described

PAGE = ("index.html", "page.css", "page.js", "worker.js")
LOCK, STDLIB = "pyodide-lock.json", "python_stdlib.zip"
LOADER = "pyodide.mjs"
FROM_NPM = ("pyodide.asm.mjs", "pyodide.asm.wasm", LOCK)
# Parts of Python's own library that arithmetic never asks for; a test imports all that the page uses without them.
LEFT_OUT = tuple((files("course_lib.web") / "left_out.txt").read_text().split())
WORDS = re.compile(r"told\(\"([^\"]+)\"|>([^<>]*[A-Za-z]{2}[^<>]*)</")  # that the page itself says
KEPT = tuple(f"encodings/{name}" for name in ("__init__", "aliases", "ascii", "cp437", "latin_1", "utf_8"))


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
    inside = [path for part in parts for path in ([part] if part.is_file() else part.rglob("*"))]
    read = (".py", ".toml", ".csv", ".args", ".yaml", ".json", ".sbatch", ".sh")  # code, tables, files for programs
    found = {path: path.relative_to(package.parent) for path in inside if path.suffix in read}
    of_yaml = Path(yaml.__file__).parent
    found |= {path: path.relative_to(of_yaml.parent) for path in of_yaml.glob("*.py")}
    return _zipped(
        {name.as_posix(): without_words(name.name, path.read_bytes()) for path, name in sorted(found.items())}
    )


def without_words(name: str, content: bytes) -> bytes:
    """Return what a file is to hold: of Python no comments and docstrings, a quarter of it."""
    if not name.endswith(".py"):
        return content
    tree = ast.parse(content)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body[0].value = ast.Constant("")
    return ast.unparse(tree).encode()


def slim(stdlib: bytes) -> bytes:
    """Return Python's library without what the page never asks for."""
    with zipfile.ZipFile(io.BytesIO(stdlib)) as whole:
        names = [name for name in whole.namelist() if name.startswith(KEPT) or not name.startswith(LEFT_OUT)]
        return _zipped({name: whole.read(name) for name in names if not name.endswith("/")})


def _zipped(files: dict[str, bytes]) -> bytes:
    """A zip whose files are stored as they are: packed together they take less than each by itself."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as into:
        for name, content in files.items():
            into.writestr(zipfile.ZipInfo(name), content)
    return written.getvalue()


def asked_first() -> dict:
    """All panels as they start, and all claims: what the page shows before Python has come."""
    kept = ("id", "topic", "verdict", "answer", "say", "source", "chapters")
    panels = {name: described(name) for name in PANELS}
    ledger = [
        {name: as_record(claim)[name] for name in kept}
        | {"claim": told(claim.claim), "condition": told(claim.condition)}
        for claim in claims()
    ]
    names = [name for panel in panels.values() for name in (*panel["buttons"], *panel["presets"])]
    return {
        "version": version("course-lib"),
        "panels": panels,
        "claims": ledger,
        "topics": {name: told(text) for name, text in NAMES.items()},
        "words": {text: told(text) for text in (*said_by_page(), *names)},
    }


def said_by_page() -> list[str]:
    """The texts of the page itself: between its tags, and those that its script tells."""
    texts = [(files("course_lib.web") / name).read_text(encoding="utf-8") for name in ("index.html", "page.js")]
    return [script or html for text in texts for script, html in WORDS.findall(text)]


def _korean(page: str) -> dict[str, bytes]:
    """The files of the page's Korean edition, which takes all others from the folder above."""
    import polib  # pure Python, and nothing else that reads the catalogue

    with spoken("ko"):
        first = json.dumps(asked_first(), ensure_ascii=False)
        page = WORDS.sub(lambda found: found[0].replace(found[2], told(found[2])) if found[2] else found[0], page)
    for name in ("page.css", "page.js"):
        page = page.replace(f'"{name}"', f'"../{name}"')
    page = page.replace(
        '"ko/index.html" hreflang="ko" lang="ko">한국어', '"../index.html" hreflang="en" lang="en">English'
    )
    words = {
        "course_lib/locale/ko.po": CATALOGUE.read_bytes(),
        "polib.py": without_words("polib.py", Path(polib.__file__).read_bytes()),
    }
    return {
        "index.html": page.replace('<html lang="en">', '<html lang="ko">').encode(),
        "first.json.packed": gzip.compress(first.encode(), 9, mtime=0),
        "words.zip.packed": gzip.compress(_zipped(words), 9, mtime=0),
    }


def write_page(folder: Path, pyodide: Path) -> list[Path]:
    """Write the page into a folder made anew, of npm's `pyodide`; raises ValueError as `require` and `make_anew`."""
    require(pyodide, (LOADER, *FROM_NPM, STDLIB), "package pyodide")
    make_anew(folder, "worker.js", "a page")
    (folder / "pyodide").mkdir()
    here = files("course_lib.web")
    for name in PAGE:
        (folder / name).write_bytes((here / name).read_bytes())
    shutil.copy(pyodide / LOADER, folder / "pyodide")
    packed = {"first.json": json.dumps(asked_first(), ensure_ascii=False).encode()}
    packed["arithmetic.zip"] = arithmetic(Path(course_lib.__file__).parent)
    packed |= {f"pyodide/{name}": (pyodide / name).read_bytes() for name in FROM_NPM}
    lock = {"info": json.loads(packed[f"pyodide/{LOCK}"])["info"], "packages": {}}  # the page takes none of them
    packed[f"pyodide/{LOCK}"] = json.dumps(lock).encode()
    packed[f"pyodide/{STDLIB}"] = slim((pyodide / STDLIB).read_bytes())
    for name, content in packed.items():
        (folder / f"{name}.packed").write_bytes(gzip.compress(content, 9, mtime=0))
    (folder / "ko").mkdir()
    for name, content in _korean((here / "index.html").read_text(encoding="utf-8")).items():
        (folder / "ko" / name).write_bytes(content)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def require(npm: Path, names: Iterable[str], packages: str) -> None:
    """Raises ValueError if npm's packages lack a file."""
    if missing := [name for name in names if not (npm / name).exists()]:
        raise ValueError(f"{npm} lacks {', '.join(missing)}; give the folder of npm's {packages}")


def make_anew(folder: Path, sign: str, what: str) -> None:
    """Empty a folder; a former one is known by its file `sign`, and ValueError is raised for something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / sign).is_file():
        raise ValueError(f"{folder} holds something else than {what}; give an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def run(write: Callable[[Path, Path], list[Path]], option: str, doc: str) -> None:
    """The command line of what is written into a folder from npm's packages, which the option names."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(option, type=Path, required=True, dest="npm", help="npm's packages, unpacked")
    asked = parser.parse_args()
    try:
        written = write(asked.folder, asked.npm)
    except ValueError as error:
        parser.error(str(error))
    size = sum(path.stat().st_size for path in written)
    print(f"{asked.folder}: {len(written)} files, {size / 1e6:.1f} MB")
    print(f"look at it: python -m http.server --bind 127.0.0.1 -d {asked.folder} 8000, then http://127.0.0.1:8000")


if __name__ == "__main__":
    run(write_page, "--pyodide", __doc__)
