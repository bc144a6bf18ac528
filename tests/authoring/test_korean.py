"""The Korean edition has the English notebooks' code, outputs, tags and ids; its words keep numbers, code and links."""

import ast
import re
import shutil
from collections import Counter

import polib
import pytest

from course_lib.authoring import without_magics
from course_lib.authoring.form import ROOT, notebook_paths, read
from course_lib.authoring.korean import EDITION, FOLDERS, catalogue_path, comments_of, edition, korean, status, updated
from course_lib.language import CATALOGUE

NOTEBOOKS = notebook_paths(*FOLDERS)
CATALOGUES = [*map(catalogue_path, NOTEBOOKS), CATALOGUE]
_FENCE, _CODE, _NUMBER = re.compile(r"```.*?```", re.S), re.compile(r"`[^`\n]+`"), re.compile(r"\d[\d,]*(?:\.\d+)?")
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+?\$", re.S)
_LINK, _TAG, _FIELD = re.compile(r"\]\(([^)\s]+)\)"), re.compile(r"</?\w+[^>]*>"), re.compile(r"\{\d+\}")


def _glossary() -> list[tuple[str, str]]:
    """(word that is not written, word that is) of the glossary's table."""
    table = (ROOT / EDITION / "docs" / "GLOSSARY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (.*?) \| .*? \| (.*?) \|$", table, re.M)
    return [(word, written) for written, words in rows[2:] for word in words.split(", ") if word]


def _by_path(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: f"{path.parent.name}/{path.stem}")


@_by_path(NOTEBOOKS)
def test_all_but_words_is_that_of_the_english_notebook(path):
    english, there = read(path), read(ROOT / EDITION / path.parent.name / path.name)
    assert [cell["id"] for cell in there.cells] == [cell["id"] for cell in english.cells]
    for cell, wanted in zip(there.cells, english.cells, strict=True):
        assert (cell.cell_type, cell.metadata) == (wanted.cell_type, wanted.metadata), cell["id"]
        if cell.cell_type == "code":
            assert cell.outputs == wanted.outputs, cell["id"]
            assert _program(cell.source) == _program(wanted.source), cell["id"]


def _program(source: str) -> str:
    magics = [line for line in source.split("\n") if line.startswith(("%", "!"))]
    return ast.dump(ast.parse(without_magics(source))) + "\n".join(magics)


@_by_path(NOTEBOOKS)
def test_it_is_what_the_catalogues_give(path):
    for folder, nb in edition(path, updated(path)).items():
        assert read(ROOT / EDITION / folder / path.name) == nb, "run `make korean`"


@_by_path(CATALOGUES)
def test_numbers_values_code_formulas_and_links_are_those_of_the_english_words(path):
    for entry in polib.pofile(str(path)):
        if entry.translated():
            english, there = _parts(entry.msgid), _parts(entry.msgstr)
            assert there[:-1] == english[:-1], f"{entry.msgctxt}: {entry.msgid[:200]}"
            assert not english[-1] - there[-1], f"{entry.msgctxt}: numbers of {entry.msgid[:200]}"
            assert set(_FIELD.findall(entry.msgstr)) <= set(_FIELD.findall(entry.msgid)), "a value that it has not"


def _parts(text: str) -> tuple:
    """Code, formulas without their words, links, tags, headings, tables, values, and numbers of a text."""
    fences, text = len(_FENCE.findall(text)), _FENCE.sub(" ", text)
    code, text = Counter(_CODE.findall(text)), _CODE.sub(" ", text)
    formulas = Counter(re.sub(r"\\(text|mathrm)\{[^}]*\}|\s", "", one) for one in _FORMULA.findall(text))
    text = _FORMULA.sub(" ", text)
    links, text = Counter(_LINK.findall(text)), _LINK.sub("] ", text)
    headings = [found.strip() for found in re.findall(r"^#+ *[\d.]*", text, re.M)]
    tables = [line.count("|") for line in text.split("\n") if line.startswith("|")]
    text = _FIELD.sub(" ", text)  # of a message: a value may move, or be left out where Korean has no plural
    numbers = Counter(number.strip(",.") for number in _NUMBER.findall(text))
    return fences, code, formulas, links, Counter(_TAG.findall(text)), headings, tables, numbers


def test_a_line_of_a_text_of_several_lines_has_an_entry_of_its_own():
    entries = [entry for entry in polib.pofile(str(CATALOGUE)) if entry.msgid.count("\n") == entry.msgstr.count("\n")]
    known = {_FIELD.sub("{}", entry.msgid).strip(".:") for entry in entries}
    for entry in entries:
        for line, korean_line in zip(entry.msgid.split("\n"), entry.msgstr.split("\n"), strict=True):
            if re.search("[가-힣]", korean_line) and len(re.findall("[A-Za-z]{2,}", line)) > 3:
                assert _FIELD.sub("{}", line.strip()).strip(".:") in known, "what prints it line by line needs it"


def test_the_korean_readme_has_the_commands_of_the_english_one():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.ko.md", "README.md")]
    there, english = (re.findall(r"^(?:make|course) [^#\n]*?(?= *#|$)", text, re.M) for text in texts)
    assert there == english


@_by_path(CATALOGUES)
def test_terms_are_those_of_the_glossary(path):
    for entry in polib.pofile(str(path)):
        prose = _CODE.sub("", _FENCE.sub("", entry.msgstr))
        for word, written in _glossary():
            assert word not in prose, f"{entry.msgctxt}: {word}; the glossary has {written}"


def test_a_cell_whose_english_changed_is_english_again_marked_and_listed(tmp_path):
    original = ROOT / "notebooks" / "02a_precision.ipynb"
    path = tmp_path / "notebooks" / original.name
    for file, source in ((path, original), (catalogue_path(path, tmp_path), catalogue_path(original))):
        file.parent.mkdir(parents=True)
        shutil.copy(source, file)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changed = path.read_text("utf-8").replace("## 2a.1 Which numbers", "## 2a.1 Now, which numbers")
    assert changed != path.read_text("utf-8")
    path.write_text(changed, "utf-8")
    catalogue = updated(path, tmp_path)
    cell = next(cell for cell in korean(path, catalogue, tmp_path).cells if "2a.1" in cell.source)
    assert cell.source.startswith("*(") and "## 2a.1 Now, which numbers" in cell.source
    (line,) = [line for line in status(tmp_path) if "2a.1" in line]
    assert line.startswith("notebooks/02a_precision.ipynb [formats]: ## 2a.1 Now")
    entry = next(entry for entry in catalogue if entry.msgctxt == "formats")
    assert entry.fuzzy and "## 2a.1" in entry.msgstr and "Now" not in entry.previous_msgid


def test_lines_of_comment_below_each_other_are_one_text():
    source = "# one\n# text\nx = 1  # another\n# mirrors: y\ny = 2  # 3\n"
    assert [(text, list(lines)) for lines, _, text in comments_of(source)] == [("one text", [0, 1]), ("another", [2])]
