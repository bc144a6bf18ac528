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
from collections.abc import Callable
from functools import cache
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
from course_lib.language import CATALOGUE, spoken
from course_lib.shapes import KINDS
from course_lib.web.page import said_by_page

EDITION = "ko"
FOLDERS = ("notebooks", "solutions")  # exercises are made from solutions, here too
NOT_TRANSLATED = "(This part is not translated yet, or its English text has changed.)"
LINKS = ("Index", "Lesson", "Chapter", "Previous", "Next", "In depth", "Exercises", "Solutions")
_LINK = re.compile(rf"\[({'|'.join(LINKS)})( \w+)?\]")
_FOR_PROGRAMS = re.compile(r"#( ?(mirrors:|noqa|fmt|ruff|type:|%%|@)|##)")  # and nbgrader's ### BEGIN SOLUTION
SITE, _TOLD = ROOT / "docs" / "site" / "conf.py", re.compile(r"told\([\"']([^\"']+)[\"']\)")
_WORD = re.compile(r"[A-Za-z]{2,}")
SILENT = ("authoring", "hardware.py", "engines.py", "kernels", "web", "native")  # for developers, or names and sources
_NAMES = re.compile(r"(_?(all|reduce|broadcast|gather|barrier|monitored|i?send|i?recv)\w* ?)+")  # of collectives
_SVG_TEXT = re.compile(r"<(?:text|tspan|title|desc)\b[^>]*>([^<]+)<")
_VALUE = re.compile(r"\{([a-z_][^{}]*)?\}")
_CODE = re.compile(
    r"</?\w+[ >/]|\\|^\s*(def|class|import|from \w+ import|@) |\n    |\(\?|=\"|^svg\."
)  # markup, patterns, programs


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
        number, column, text = token.start[0] - 1, token.start[1], token.string.lstrip("#").strip()
        alone = not lines[number][:column].strip()
        if found and alone and found[-1][0].stop == number and found[-1][1] == column and _is_alone(lines, found[-1]):
            before = found.pop()
            found.append((range(before[0].start, number + 1), column, f"{before[2]} {text}"))
        else:
            found.append((range(number, number + 1), column, text))
    return [comment for comment in found if _WORD.search(comment[2])]


def _is_alone(lines: list[str], comment: tuple[range, int, str]) -> bool:
    return not lines[comment[0].start][: comment[1]].strip()


def texts_of(cell) -> list[str]:
    """What of a cell is translated: all of its markdown, or the comments of its code."""
    if cell.cell_type == "code":
        return [text for _, _, text in comments_of(cell.source)]
    return [] if cell["id"] in NAVIGATION else [BADGES.sub("", cell.source)]


def updated(path: Path, root: Path = ROOT) -> polib.POFile:
    """A notebook's catalogue with an entry for each of its texts; what was translated from other words is fuzzy."""
    place = catalogue_path(path, root)
    known = polib.pofile(str(place)) if place.exists() else polib.POFile()
    by_text = {(entry.msgctxt, entry.msgid): entry for entry in known}
    new = _empty()
    for cell in read(path).cells:
        for text in dict.fromkeys(texts_of(cell)):
            entry = by_text.get((cell["id"], text))
            if entry is None:
                entry = polib.POEntry(msgctxt=cell["id"], msgid=text)
                before = [other for other in known if other.msgctxt == cell["id"] and other.msgstr]
                if cell.cell_type == "markdown" and before:
                    entry.msgstr, entry.flags, entry.previous_msgid = before[0].msgstr, ["fuzzy"], before[0].msgid
            new.append(entry)
    return new


@cache
def messages(package: Path = ROOT / "course_lib") -> list[tuple[str, str]]:
    """(file, text) of what the package says to people: sentences and names of two words or more, and panels' labels.

    A value that a text is filled with is `{0}`, `{1}`, ... in it.
    """
    kept = [entry.msgid for entry in polib.pofile(str(CATALOGUE)) if entry.occurrences == [("edition", "")]]
    found = {text: "edition" for text in kept}  # single words, those of the site's theme, of tyro: by hand
    found |= {text: "page" for text in said_by_page()}
    found |= {text: "site" for text in _TOLD.findall(SITE.read_text(encoding="utf-8"))}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in SILENT:
            texts = _Texts()
            texts.visit(ast.parse(path.read_text(encoding="utf-8")))
            for text in texts.found:
                found.setdefault(text, name.as_posix())
    for path in sorted((package / "plots" / "svg").glob("*.svg")):  # single words: by hand
        texts = (unescape(text).strip() for text in _SVG_TEXT.findall(path.read_text(encoding="utf-8")))
        found = {text: f"plots/svg/{path.name}" for text in texts if len(_WORD.findall(text)) > 1} | found
    for claim in ledger():
        for text in filter(None, (claim.claim, claim.condition, claim.answer, claim.say)):
            if _WORD.search(words := _VALUE.sub("", text)) and (words == text or len(_WORD.findall(words)) > 1):
                found.setdefault(_numbered(text), "claims/ledger.toml")
    found |= {kind.note: "model_types.toml" for kind in KINDS.values() if kind.note}
    for lab in LABS.values():
        answers = (text for one in lab.questions for text in (one.asks, one.answer, one.half, one.none))
        found |= {_numbered(text): "labs/labs.toml" for text in (lab.title, lab.aim, *answers) if " " in text}
    for text in import_module("course_lib.cli.commands").help_texts():  # by name: course_lib.cli imports this package
        found.setdefault(text, "cli")
    return [(name, text) for text, name in found.items()]


class _Texts(ast.NodeVisitor):
    """Collects the texts of a module in its order, without docstrings and what is no text."""

    def __init__(self):
        self.found: list[str] = []
        self.labels = 0  # how many calls of Control and Panel stand around: one word is a text there

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # no docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        is_panel = getattr(node.func, "id", "") in ("Control", "Panel")
        self.labels += is_panel
        self.generic_visit(node)
        self.labels -= is_panel

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(_numbered(node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        names = {value: f"{{{number}}}" for number, value in enumerate(values)}
        self._add("".join(names.get(part) or part.value for part in node.values))
        for value in values:
            self.visit(value.value)

    def _add(self, text: str) -> None:
        words = len(_WORD.findall(text))
        words = 0 if words < 2 and "}{" in text else words  # of a picture's or a table's numbers
        is_sentence = words > 1 or " is {1}" in text
        if (
            not _CODE.search(text)
            and not _NAMES.fullmatch(text)
            and ((is_sentence and " " in text.strip()) or (words and self.labels))
        ):
            self.found.append(text.strip())


def _numbered(text: str) -> str:
    """A text that str.format fills, with its values by number: "{peak_gb:.0f} GB" is "{0} GB"."""
    numbers = count()
    return _VALUE.sub(lambda _: f"{{{next(numbers)}}}", text)


@cache
def updated_messages() -> polib.POFile:
    """The package's catalogue with an entry for each of its texts."""
    known = {entry.msgid: entry for entry in polib.pofile(str(CATALOGUE))} if CATALOGUE.exists() else {}
    new = _empty()
    for name, text in messages():
        entry = polib.POEntry(msgid=text, msgstr=known[text].msgstr if text in known else "", occurrences=[(name, "")])
        new.append(entry)
    return new


def _empty() -> polib.POFile:
    new = polib.POFile(wrapwidth=0)
    new.metadata = {"Language": EDITION, "MIME-Version": "1.0", "Content-Type": "text/plain; charset=utf-8"}
    return new


def korean(path: Path, catalogue: polib.POFile, root: Path = ROOT) -> NotebookNode:
    """An English notebook of notebooks/ or solutions/ with the texts of its catalogue; its line of links is English."""
    translated = {(entry.msgctxt, entry.msgid): entry.msgstr for entry in catalogue if entry.translated()}
    said = {entry.msgid: entry.msgstr or entry.msgid for entry in updated_messages()}
    nb = read(path)
    for cell in nb.cells:

        def told(text: str, name: str = cell["id"]) -> str | None:
            return translated.get((name, text))

        if cell.cell_type == "code":
            cell.source = narrowed(_with_comments(cell.source, told))
        elif cell["id"] not in NAVIGATION:
            (text,) = texts_of(cell)
            cell.source = told(text) or f"*{said[NOT_TRANSLATED]}*\n\n{text}"
    if address := repository(root):
        nb.cells[0].source += "\n\n" + badges(address, f"{EDITION}/{path.parent.name}/{path.name}")
    return nb


def edition(path: Path, catalogue: polib.POFile, root: Path = ROOT) -> dict[str, NotebookNode]:
    """Folder of ko/ -> the notebook that is written there: of a solution the exercise too."""
    nb = korean(path, catalogue, root)
    made = {path.parent.name: nb} | ({"exercises": exercise_from(nb)} if path.parent.name == "solutions" else {})
    return {folder: _finished(one) for folder, one in made.items()}


def _finished(nb: NotebookNode) -> NotebookNode:
    """A notebook of the edition with its line of links in Korean, and the mark that a kernel reads."""
    said = {entry.msgid: entry.msgstr or entry.msgid for entry in updated_messages()}
    for cell in nb.cells:
        if cell["id"] in NAVIGATION:
            line = _LINK.sub(lambda found: f"[{said[found[1]]}{found[2] or ''}]", cell.source)
            cell.source = line.replace("[한국어](../ko/", "[English](../../")
    nb.metadata["course_language"] = EDITION
    return nb


def _with_comments(source: str, told: Callable[[str], str | None]) -> str:
    """The source of a cell with the comments that have a translation in Korean."""
    lines = source.split("\n")
    for numbers, column, text in reversed(comments_of(source)):
        if words := told(text):
            lines[numbers.start : numbers.stop] = [f"{lines[numbers.start][:column]}# {words}"]
    return "\n".join(lines)


def write_korean(root: Path = ROOT) -> list[Path]:
    """Write ko/ and its catalogues from the English notebooks; returns the files that changed."""
    changed = write_text(f"{updated_messages()}\n", CATALOGUE) if root == ROOT else []
    with spoken(EDITION):
        changed += write_text(claims_page(), root / EDITION / "docs" / "CLAIMS.md")
    for path in notebook_paths(*FOLDERS, root=root):
        catalogue, place = updated(path, root), catalogue_path(path, root)
        made = {root / EDITION / name / path.name: nb for name, nb in edition(path, catalogue, root).items()}
        for file in (place, *made):
            file.parent.mkdir(parents=True, exist_ok=True)
        changed += write_text(f"{catalogue}\n", place) + [file for file in made if write(made[file], file)]
    return changed


def status(root: Path = ROOT) -> list[str]:
    """A line for each text that is not in Korean yet: file, cell, its first words."""
    lines = [f"course_lib/{one.occurrences[0][0]}: {one.msgid[:70]}" for one in updated_messages() if not one.msgstr]
    for path in notebook_paths(*FOLDERS, root=root):
        missing = [entry for entry in updated(path, root) if not entry.translated()]
        lines += [
            f"{path.parent.name}/{path.name} [{one.msgctxt}]: {one.msgid.splitlines()[0][:70]}" for one in missing
        ]
    return lines
