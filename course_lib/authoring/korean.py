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
from collections.abc import Iterable, Iterator
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
from course_lib.claims.record import ledger
from course_lib.labs import LABS
from course_lib.language import CATALOGUE, spoken, told
from course_lib.shapes import KINDS
from course_lib.web.page import said_by_page

EDITION = "ko"
FOLDERS = ("notebooks", "solutions")  # exercises are made from solutions, here too
NOT_TRANSLATED = "(This part is not translated yet, or its English text has changed.)"
LINKS = ("Index", "Lesson", "Chapter", "Previous", "Next", "In depth", "Exercises", "Solutions")
_FOR_PROGRAMS = re.compile(r"#( ?(mirrors:|noqa|fmt|ruff|type:|%%|@)|##)")  # and nbgrader's ### BEGIN SOLUTION
SITE, _TOLD = ROOT / "docs" / "site" / "conf.py", re.compile(r"told\([\"']([^\"']+)[\"']\)")
_WORD = re.compile(r"[A-Za-z]{2,}")
SILENT = ("authoring", "hardware.py", "kernels", "web", "native")  # for developers, or names and sources
_SVG_TEXT = re.compile(r"<(?:text|tspan|title|desc)\b[^>]*>([^<]+)<")
_CODE = re.compile(  # markup, patterns, programs, names of collectives
    r"</?\w+[ >/]|\\|^\s*(def|class|import|from \w+ import|@) |\n    |\(\?|^ ?[\w-]+=\"|^svg\."
    r"|^(_?(all|reduce|broadcast|gather|barrier|monitored|i?send|i?recv)\w* ?)+$"
)


def catalogue_path(path: Path, root: Path = ROOT) -> Path:
    """Where the catalogue of a notebook lies."""
    return root / EDITION / "locale" / path.parent.name / f"{path.stem}.po"


def comments_of(source: str) -> list[tuple[range, int, str]]:
    """The comments of a cell that a reader reads: their lines (from 0), their column and their text.

    Lines of comment below each other are one text.
    """
    lines, found = source.split("\n"), []
    for token in tokenize.generate_tokens(io.StringIO(without_magics(source)).readline):
        if token.type != tokenize.COMMENT or _FOR_PROGRAMS.match(token.string):
            continue
        (number, column), text = token.start, token.string.lstrip("#").strip()
        is_alone = not lines[number - 1][:column].strip()
        if is_alone and found and (found[-1][0].stop, found[-1][1]) == (number - 1, column):
            numbers, _, words = found.pop()
            found.append((range(numbers.start, number), column, f"{words} {text}"))
        else:
            found.append((range(number - 1, number), column, text))
    return [comment for comment in found if _WORD.search(comment[2])]


def texts_of(cell) -> list[str]:
    """What of a cell is translated: all of its markdown, or the comments of its code."""
    if cell.cell_type == "code":
        return [text for _, _, text in comments_of(cell.source)]
    return [] if cell["id"] in NAVIGATION else [BADGES.sub("", cell.source)]


def updated(path: Path, root: Path = ROOT) -> polib.POFile:
    """A notebook's catalogue with an entry for each of its texts; what was translated from other words is fuzzy."""
    place, entries = catalogue_path(path, root), []
    known = polib.pofile(str(place)) if place.exists() else []
    by_text = {(entry.msgctxt, entry.msgid): entry for entry in known}
    for cell in read(path).cells:
        before = [entry for entry in known if entry.msgctxt == cell["id"] and entry.msgstr]
        for text in dict.fromkeys(texts_of(cell)):
            entry = polib.POEntry(msgctxt=cell["id"], msgid=text)
            if cell.cell_type == "markdown" and before:
                entry.msgstr, entry.flags, entry.previous_msgid = before[0].msgstr, ["fuzzy"], before[0].msgid
            entries.append(by_text.get((cell["id"], text), entry))
    return _catalogue(entries)


def _catalogue(entries: Iterable[polib.POEntry]) -> polib.POFile:
    new = polib.POFile(wrapwidth=0)
    new.metadata = {"Language": EDITION, "MIME-Version": "1.0", "Content-Type": "text/plain; charset=utf-8"}
    new.extend(entries)
    return new


def updated_messages() -> polib.POFile:
    """The package's catalogue: what it says to people, sentences and names of two words or more, and panels' labels."""
    known = polib.pofile(str(CATALOGUE))
    # by hand: single words, those of the site's theme, of tyro
    found = {entry.msgid: "edition" for entry in known if entry.occurrences == [("edition", "")]}
    found |= dict.fromkeys(said_by_page(), "page")
    found |= dict.fromkeys(_TOLD.findall(SITE.read_text(encoding="utf-8")), "site")
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        name = path.relative_to(ROOT / "course_lib")
        if name.parts[0] not in SILENT:
            for text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(text, name.as_posix())
    for path in sorted((ROOT / "course_lib" / "plots" / "svg").glob("*.svg")):
        for text in map(unescape, _SVG_TEXT.findall(path.read_text(encoding="utf-8"))):
            if len(_WORD.findall(text)) > 1:
                found.setdefault(text.strip(), f"plots/svg/{path.name}")
    said = []
    for claim in ledger():
        said += [("claims/ledger.toml", text) for text in (claim.claim, claim.condition, claim.answer, claim.say)]
    said += [("model_types.toml", kind.note) for kind in KINDS.values()]
    for lab in LABS.values():
        said += [("labs/labs.toml", text) for text in (lab.title, lab.aim)]
        said += [
            ("labs/labs.toml", text) for one in lab.questions for text in (one.asks, one.answer, one.half, one.none)
        ]
    # by name: course_lib.cli imports this package
    said += [("cli", text) for text in import_module("course_lib.cli.commands").help_texts()]
    for name, text in said:
        if len(_WORD.findall(numbered := _numbered(text))) > 1:
            found.setdefault(numbered, name)
    words = {entry.msgid: entry.msgstr for entry in known}
    return _catalogue(
        polib.POEntry(msgid=text, msgstr=words.get(text, ""), occurrences=[(name, "")]) for text, name in found.items()
    )


def _texts(node: ast.AST, is_label: bool = False) -> Iterator[str]:
    """What a module says, without docstrings and what is no text; within a panel's call one word is a text."""
    is_label = is_label or (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Control", "Panel"))
    text = ""
    if isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = _numbered(node.value)
    words = len(_WORD.findall(text))
    if ((words > 1 and " " in text.strip()) or (words and is_label)) and not _CODE.search(text):
        yield _numbered(text.strip())
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Expr | ast.JoinedStr) and isinstance(child, ast.Constant)):  # docstrings, parts
            yield from _texts(child, is_label)


def _numbered(text: str) -> str:
    """A text that str.format fills, with its values by number: "{peak_gb:.0f} GB" is "{0} GB"."""
    numbers = count()
    return re.sub(r"\{([a-z_][^{}]*)?\}", lambda _: f"{{{next(numbers)}}}", text)


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
                for word in LINKS:
                    cell.source = cell.source.replace(f"[{word}", f"[{told(word)}")
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
