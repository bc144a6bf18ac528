"""The Korean edition, cell by cell: a gettext catalogue for each notebook, and the notebooks that the catalogues give.

`ko/locale/notebooks/05_tensor_parallel.po` has an entry for each markdown cell of that notebook and for each
comment of its code; `msgctxt` is the cell's id. Code, outputs, tags and ids stay those of the English notebook.
A text whose English changed is English again, and marked, until its entry is translated anew.
"""

import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import polib

from course_lib.authoring.address import BADGES, add_address
from course_lib.authoring.columns import narrowed, without_magics
from course_lib.authoring.exercises import exercise_from
from course_lib.authoring.form import ROOT, notebook_paths, read, write
from course_lib.authoring.links import NAVIGATION

EDITION = "ko"
FOLDERS = ("notebooks", "solutions")  # exercises are made from solutions, here too
NOT_TRANSLATED = "*(아직 번역되지 않았거나 영어 원문이 바뀐 부분입니다.)*"
LINKS = {"Index": "차례", "Lesson": "레슨", "Chapter": "챕터", "Previous": "이전", "Next": "다음"}
LINKS |= {"In depth": "심화", "Exercises": "연습 문제", "Solutions": "풀이"}
_LINK = re.compile(rf"\[({'|'.join(LINKS)})( \w+)?\]")
_FOR_PROGRAMS = re.compile(r"#( ?(mirrors:|noqa|fmt|ruff|type:|%%|@)|##)")  # and nbgrader's ### BEGIN SOLUTION
_WORD = re.compile(r"[A-Za-z]{2}")


def catalogue_path(path: Path, root: Path = ROOT) -> Path:
    """Where the catalogue of a notebook lies."""
    return root / EDITION / "locale" / path.parent.name / f"{path.stem}.po"


def comments_of(source: str) -> list[tuple[range, int, str]]:
    """The comments of a cell that a reader reads: their lines (from 0), their column and their text.

    Lines of comment below each other are one text.
    """
    lines, found = source.split("\n"), []
    for token in tokenize.generate_tokens(io.StringIO(without_magics(source)).readline):
        if token.type != tokenize.COMMENT or _FOR_PROGRAMS.match(token.string) or not _WORD.search(token.string):
            continue
        number, column, text = token.start[0] - 1, token.start[1], token.string.lstrip("#").strip()
        alone = not lines[number][:column].strip()
        if found and alone and found[-1][0].stop == number and found[-1][1] == column and _is_alone(lines, found[-1]):
            before = found.pop()
            found.append((range(before[0].start, number + 1), column, f"{before[2]} {text}"))
        else:
            found.append((range(number, number + 1), column, text))
    return found


def _is_alone(lines: list[str], comment: tuple[range, int, str]) -> bool:
    return not lines[comment[0].start][: comment[1]].strip()


def texts_of(cell) -> list[str]:
    """What of a cell is translated: all of its markdown, or the comments of its code."""
    if cell.cell_type == "code":
        return [text for _, _, text in comments_of(cell.source)]
    return [] if cell["id"] in NAVIGATION else [BADGES.sub("", cell.source)]


def updated(path: Path, root: Path = ROOT) -> polib.POFile:
    """The catalogue of a notebook with an entry for each of its texts; what was translated from other words is fuzzy."""
    place = catalogue_path(path, root)
    known = polib.pofile(str(place)) if place.exists() else polib.POFile()
    by_text = {(entry.msgctxt, entry.msgid): entry for entry in known}
    new = polib.POFile(wrapwidth=0)
    new.metadata = {"Language": EDITION, "MIME-Version": "1.0", "Content-Type": "text/plain; charset=utf-8"}
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


def missing(path: Path, root: Path = ROOT) -> list[tuple[str, str]]:
    """Cell ids and texts of a notebook that have no translation, or one of other words."""
    entries = updated(path, root)
    return [(entry.msgctxt, entry.msgid) for entry in entries if not entry.translated()]


def korean(path: Path, root: Path = ROOT):
    """The Korean notebook of an English one of notebooks/ or solutions/."""
    translated = {(entry.msgctxt, entry.msgid): entry.msgstr for entry in updated(path, root) if entry.translated()}
    nb = read(path)
    for cell in nb.cells:

        def told(text: str, name: str = cell["id"]) -> str | None:
            return translated.get((name, text))

        if cell["id"] in NAVIGATION:
            cell.source = _LINK.sub(lambda found: f"[{LINKS[found[1]]}{found[2] or ''}]", cell.source)
        elif cell.cell_type == "code":
            cell.source = narrowed(_with_comments(cell.source, told))
        else:
            (text,) = texts_of(cell)
            cell.source = told(text) or f"{NOT_TRANSLATED}\n\n{text}"
    add_address(nb, root / EDITION / path.parent.name / path.name, root)
    return nb


def _with_comments(source: str, told: Callable[[str], str | None]) -> str:
    """The source of a cell with the comments that have a translation in Korean."""
    lines = source.split("\n")
    for numbers, column, text in reversed(comments_of(source)):
        if words := told(text):
            lines[numbers.start : numbers.stop] = [f"{lines[numbers.start][:column]}# {words}"]
    return "\n".join(lines)


def write_catalogues(root: Path = ROOT) -> list[Path]:
    """Give each notebook a catalogue with an entry for each of its texts; returns the catalogues that changed."""
    changed = []
    for path in notebook_paths(*FOLDERS, root=root):
        place, text = catalogue_path(path, root), str(updated(path, root)) + "\n"
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
            changed.append(place)
    return changed


def write_korean(root: Path = ROOT) -> list[Path]:
    """Write ko/ from the English notebooks and the catalogues; returns the files that changed."""
    changed = write_catalogues(root)
    for path in notebook_paths(*FOLDERS, root=root):
        nb = korean(path, root)
        made = {path.parent.name: nb} | ({"exercises": exercise_from(nb)} if path.parent.name == "solutions" else {})
        for folder, notebook in made.items():
            place = root / EDITION / folder / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            changed += [place] if write(notebook, place) else []
    return changed


def status(root: Path = ROOT) -> list[str]:
    """A line for each text that is not in Korean yet: file, cell, its first words."""
    return [
        f"{path.parent.name}/{path.name} [{name}]: {text.splitlines()[0][:70]}"
        for path in notebook_paths(*FOLDERS, root=root)
        for name, text in missing(path, root)
    ]
