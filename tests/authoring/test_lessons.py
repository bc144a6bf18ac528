"""The limits of a lesson: each is found by a planted fault, and counted as a reader would count."""

import copy

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib.authoring import ROOT, read
from course_lib.authoring.lessons import (
    FEWEST_BREAKS,
    SECTIONS,
    code_lines,
    count_words,
    imported_names,
    lesson_problems,
)
from course_lib.authoring.links import chapters_of, second_reading

PICTURE = new_output("display_data", data={"image/png": "aGk="})


@pytest.fixture
def lesson():
    """A lesson as short as one can be, without a problem."""
    text = "\n".join(f"## {name}" for name in SECTIONS) + "<details></details>" * FEWEST_BREAKS + "랭크"
    cells = [new_code_cell("import math", id="setup", metadata={"tags": ["setup"]})]
    cells += [new_code_cell("play()", id="widget", metadata={"tags": ["widget"]})]
    cells += [new_code_cell("draw()", id="picture", outputs=[copy.deepcopy(PICTURE)])]
    return new_notebook(cells=[new_markdown_cell(text, id="text"), *cells])


def test_a_short_lesson_has_no_problem(lesson):
    assert lesson_problems(lesson) == []
    lesson.cells[2].metadata = {}
    assert lesson_problems(lesson) == [], "a picture is enough"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (new_markdown_cell("word " * 3001), "words; a lesson has at most 3,000"),
        (new_code_cell("x = 1\n" * 301), "lines of code; a lesson has at most 300"),
        (new_code_cell("x = 1\n" * 31, id="long"), "cell long has 31 lines; a cell has at most 30"),
        (new_code_cell("predict('?', unit='')\n" * 9), "9 predictions; a lesson has at most 8"),
        (
            new_code_cell("from a import " + ", ".join("abcdefghijklmnopqrst"), metadata={"tags": ["setup"]}),
            "21 names imported in the setup cell; a lesson has at most 20",
        ),
        (
            new_code_cell(
                "print(25)",
                id="shown",
                metadata={"jupyter": {"outputs_hidden": True}},
                outputs=[new_output("stream", text="25\n")],
            ),
            "cell shown: JupyterLab shows the first line of a folded output",
        ),
        (new_code_cell("guess.compare(3)", id="open"), "cell open compares a prediction, but its output is not folded"),
    ],
)
def test_a_planted_fault_is_told(lesson, cell, said):
    lesson.cells.append(cell)
    assert any(said in problem for problem in lesson_problems(lesson)), lesson_problems(lesson)


def test_what_is_missing_is_told(lesson):
    lesson.cells[-1].outputs = []
    text = lesson.cells[0].source.replace("## Recap", "").replace("<details>", "", 1).replace("랭크", "")
    lesson.cells[0].source, lesson.cells[2].metadata = text, {}
    assert lesson_problems(lesson) == [
        "neither a picture nor a widget; show what answers the lesson's question",
        "no section is called 'Recap'",
        "the table of names has no Korean",
        "3 folded invitations under 'Break it'; a lesson has at least 4",
    ]


def test_most_cells_must_be_short(lesson):
    lesson.cells += [new_code_cell("x = 1\n" * 13) for _ in range(8)]
    assert "fewer than half of the code cells have at most 12 lines" in lesson_problems(lesson)


def test_a_folded_answer_is_no_problem(lesson):
    lesson.cells.append(new_code_cell("guess.compare(3)", metadata={"jupyter": {"outputs_hidden": True}}))
    assert lesson_problems(lesson) == []


def test_lines_without_code_and_words_without_letters_do_not_count():
    assert code_lines('# a comment\n\ndef f():\n    """What it\n    does."""\n    return 1  # so') == 2
    assert imported_names("import a\nfrom b import c, d") == 3
    assert count_words(new_notebook(cells=[new_markdown_cell("| one | 2 |\n|---|---|")])) == 1


@pytest.mark.parametrize("name", chapters_of(ROOT / "notebooks"))
def test_every_lesson_is_short_and_has_a_second_reading(name):
    in_depth = second_reading(name, ROOT)
    assert in_depth != name and (ROOT / "notebooks" / in_depth).exists()
    assert lesson_problems(read(ROOT / "notebooks" / name)) == []
