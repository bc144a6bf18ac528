"""The Korean edition: a gettext catalogue for each notebook and one for the package, and the notebooks that they give.

`ko/locale/notebooks/05_tensor_parallel.po` has an entry for each markdown cell of that notebook and for each
comment of its code; `msgctxt` is the cell's id. Code, outputs, tags and ids stay those of the English notebook.
`course_lib/locale/ko.po` has what the package says to people. A text whose English changed is English again, and
marked, until its entry is translated anew.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from html import unescape
from importlib import import_module
from itertools import count
from pathlib import Path

import polib
from nbformat import NotebookNode

from course_lib.authoring.address import BADGES, badges, repository, write_text
from course_lib.authoring.columns import narrowed, without_magics
from course_lib.authoring.exercises import exercise_from
from course_lib.authoring.form import ROOT, notebook_paths, read, write
from course_lib.authoring.links import NAVIGATION
from course_lib.claims import claims_page
from course_lib.language import CATALOGUE, SVG_TEXT, spoken, told
from course_lib.web.page import said_by_page

EDITION, PACKAGE = "ko", ROOT / "course_lib"
FOLDERS = ("notebooks", "solutions")  # exercises are made from solutions, here too
NOT_TRANSLATED = "(This part is not translated yet, or its English text has changed.)"
TABLES = ("claims/ledger.toml", "model_types.toml", "labs/labs.toml")  # and of each the names of what people read
FOR_PEOPLE = ("claim", "condition", "title", "aim", "asks", "answer", "say", "half", "none", "note")
_FOR_PROGRAMS = re.compile(r"#( ?(mirrors:|noqa|fmt|ruff|type:|%%|@)|##)")  # and nbgrader's ### BEGIN SOLUTION
SITE, _TOLD = ROOT / "docs" / "site" / "conf.py", re.compile(r"told\([\"']([^\"']+)[\"']\)")
_WORD = re.compile(r"[A-Za-z]{2,}")
SILENT = ("authoring", "hardware.py", "kernels", "web", "native")  # for developers, or names and sources
_CODE = re.compile(r"<[a-z/]|\\|\n    |\(\?|^ ?[\w-]+=\"|^svg\.|[a-z]_( |$)|^\s*(def|class|import|from \w+ import|@) ")


def catalogue_path(path: Path, root: Path = ROOT) -> Path:
    """Where the catalogue of a notebook lies."""
    return root / EDITION / "locale" / path.parent.name / f"{path.stem}.po"


def comments_of(source: str) -> list[tuple[range, int, str]]:
    """The comments of a cell that a reader reads, those below each other as one: lines (from 0), column, text."""
    lines, found = source.split("\n"), []
    for token in tokenize.generate_tokens(io.StringIO(without_magics(source)).readline):
        if token.type != tokenize.COMMENT or _FOR_PROGRAMS.match(token.string):
            continue
        (number, column), text = token.start, token.string.lstrip("#").strip()
        first, is_alone = number - 1, not lines[number - 1][:column].strip()
        if is_alone and found and (found[-1][0].stop, found[-1][1]) == (first, column):
            numbers, _, words = found.pop()
            first, text = numbers.start, f"{words} {text}"
        found.append((range(first, number), column, text))
    return [comment for comment in found if _WORD.search(comment[2])]


def texts_of(cell) -> list[str]:
    """What of a cell is translated: all of its markdown, or the comments of its code."""
    if cell.cell_type == "code":
        return [text for _, _, text in comments_of(cell.source)]
    return [] if cell["id"] in NAVIGATION else [BADGES.sub("", cell.source)]


def updated(path: Path, root: Path = ROOT) -> polib.POFile:
    """A notebook's catalogue with an entry for each of its texts."""
    cells = {cell["id"]: texts_of(cell) for cell in read(path).cells}
    return _catalogue(catalogue_path(path, root), {(name, text): "" for name in cells for text in cells[name]})


def _catalogue(place: Path, texts: dict[tuple[str | None, str], str]) -> polib.POFile:
    """What is to lie there: (cell, text) -> the file that has it; what was a cell's text in other words is fuzzy."""
    known = {(entry.msgctxt, entry.msgid): entry for entry in (polib.pofile(str(place)) if place.exists() else [])}
    before = {
        cell: known[cell, text] for cell, text in known.keys() - texts.keys() if cell and known[cell, text].msgstr
    }
    new = polib.POFile(wrapwidth=0)
    new.metadata = {"Language": EDITION, "MIME-Version": "1.0", "Content-Type": "text/plain; charset=utf-8"}
    for (cell, text), name in texts.items():
        entry = known.get((cell, text), polib.POEntry(msgctxt=cell, msgid=text))
        if not entry.msgstr and cell in before:
            entry.msgstr, entry.flags, entry.previous_msgid = before[cell].msgstr, ["fuzzy"], before[cell].msgid
        entry.occurrences = [(name, "")] if name else []
        new.append(entry)
    return new


def updated_messages() -> polib.POFile:
    """The package's catalogue: what it says to people, sentences and names of two words or more."""
    by_hand = [entry.msgid for entry in polib.pofile(str(CATALOGUE)) if entry.occurrences == [("edition", "")]]
    said = [("edition", by_hand), ("page", said_by_page())]  # by hand: single words, those of the site's theme, of tyro
    said.append(("site", _TOLD.findall(SITE.read_text(encoding="utf-8"))))
    modules, pictures = sorted(PACKAGE.rglob("*.py")), sorted(PACKAGE.glob("plots/svg/*.svg"))
    for path in (*modules, *pictures, *map(PACKAGE.joinpath, TABLES)):
        if path.relative_to(PACKAGE).parts[0] not in SILENT:
            said.append((path.relative_to(PACKAGE).as_posix(), _texts_of_file(path)))
    said.append(("cli", import_module("course_lib.cli.commands").help_texts()))  # which imports this package
    found = {(None, text): name for name, texts in reversed(said) for text in texts}  # the first has the name
    return _catalogue(CATALOGUE, {(None, text): found[None, text] for _, texts in said for text in texts})


def _texts_of_file(path: Path) -> list[str]:
    """What a module, a picture or a table says in two words or more, its values by number."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        texts = [text for text in _texts(ast.parse(content)) if " " in text.strip() and not _CODE.search(text)]
    elif path.suffix == ".svg":
        texts = [unescape(text) for _, text in SVG_TEXT.findall(content)]
    else:
        texts = _values(tomllib.loads(content))
    return [text for text in map(_numbered, texts) if len(_WORD.findall(text)) > 1]


def _texts(node: ast.AST) -> Iterator[str]:
    """The strings of a module, without docstrings."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Expr | ast.JoinedStr) and isinstance(child, ast.Constant)):  # docstrings, parts
            yield from _texts(child)


def _values(table: dict) -> Iterator[str]:
    """What people read of a table of TOML and of the tables in it."""
    yield from (table[name] for name in FOR_PEOPLE if isinstance(table.get(name), str))
    for value in table.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _values(part)


def _numbered(text: str) -> str:
    """A text that str.format fills, with its values by number: "{peak_gb:.0f} GB" is "{0} GB"."""
    numbers = count()
    return re.sub(r"\{([a-z_][^{}]*)?\}", lambda _: f"{{{next(numbers)}}}", text.strip())


@spoken(EDITION)
def korean(path: Path, catalogue: polib.POFile, root: Path = ROOT) -> NotebookNode:
    """An English notebook of notebooks/ or solutions/ with the texts of its catalogue; its line of links is English."""
    translated = {(entry.msgctxt, entry.msgid): entry.msgstr for entry in catalogue if entry.translated()}
    nb = read(path)
    for cell in nb.cells:
        if cell.cell_type == "code":
            lines = cell.source.split("\n")
            for numbers, column, text in reversed(comments_of(cell.source)):
                if words := translated.get((cell["id"], text)):
                    lines[numbers.start : numbers.stop] = [f"{lines[numbers.start][:column]}# {words}"]
            cell.source = narrowed("\n".join(lines))
        elif cell["id"] not in NAVIGATION:
            (text,) = texts_of(cell)
            cell.source = translated.get((cell["id"], text)) or f"*{told(NOT_TRANSLATED)}*\n\n{text}"
    if address := repository(root):
        nb.cells[0].source += "\n\n" + badges(address, f"{EDITION}/{path.parent.name}/{path.name}")
    return nb


@spoken(EDITION)
def edition(path: Path, catalogue: polib.POFile) -> dict[str, NotebookNode]:
    """Folder of ko/ -> the notebook that is written there, with the mark that a kernel reads: of a solution two."""
    nb = korean(path, catalogue)
    made = {path.parent.name: nb} | ({"exercises": exercise_from(nb)} if path.parent.name == "solutions" else {})
    for nb in made.values():
        nb.metadata["course_language"] = EDITION
        for cell in nb.cells:
            if cell["id"] in NAVIGATION:
                cell.source = re.sub(r"(?<=\[)[A-Z][a-z ]+", lambda word: told(word[0]), cell.source)
                cell.source = cell.source.replace("[한국어](../ko/", "[English](../../")
    return made


@spoken(EDITION)
def write_korean() -> list[Path]:
    """Write ko/ and its catalogues from the English notebooks; returns the files that changed."""
    changed = write_text(f"{updated_messages()}\n", CATALOGUE)
    changed += write_text(claims_page(), ROOT / EDITION / "docs" / "CLAIMS.md")
    for path in notebook_paths(*FOLDERS):
        catalogue = updated(path)
        changed += write_text(f"{catalogue}\n", catalogue_path(path))
        made = {ROOT / EDITION / folder / path.name: nb for folder, nb in edition(path, catalogue).items()}
        changed += [file for file, nb in made.items() if write(nb, file)]
    return changed


def status(root: Path = ROOT) -> list[str]:
    """A line for each text that is not in Korean yet: file, cell, its first words."""
    entries = [(f"course_lib/{entry.occurrences[0][0]}", entry) for entry in updated_messages()]
    for path in notebook_paths(*FOLDERS, root=root):
        entries += [(f"{path.parent.name}/{path.name} [{entry.msgctxt}]", entry) for entry in updated(path, root)]
    return [f"{place}: {entry.msgid.splitlines()[0][:70]}" for place, entry in entries if not entry.translated()]
