"""Colab, as far as packages go: the wheel replaces nothing of theirs, chapters run, graders answer in a sentence."""

import os
import re
from pathlib import Path

import pytest
from places.environments import environment
from test_exercises import EXERCISES as ALL

from course_lib.authoring import ROOT, code_cells, is_check_cell, read
from course_lib.authoring.links import chapters_of
from course_lib.checks import ch00

CHAPTERS = [Path(name).stem for name in chapters_of(ROOT / "notebooks") if name[:2] in ("00", "01", "02")]  # lessons
EXERCISE = "00_ranks_and_collectives.ipynb"
FIRST = "next(iter({}.wrong.values()))"  # the answer of the first message


@pytest.fixture(scope="module")
def colab(wheel, tmp_path_factory):
    python = os.environ.get("COLAB_PYTHON")
    if not python:
        pytest.skip("no Python 3.12 or 3.13 with venv here; COLAB_PYTHON=/path/to/python names one")
    yield from environment(python, "colab", wheel, tmp_path_factory.mktemp("colab"))


def test_the_wheel_adds_packages_and_replaces_none(colab):
    assert {name: colab.after[name] for name in colab.before} == colab.before
    assert "course-lib" in colab.after and colab.before["torch"].startswith("2.11.")
    assert colab.before["ipython"] == "7.34.0" and colab.before["ipywidgets"] == "7.7.1"


def test_new_writes_every_chapter_and_exercise_from_the_wheel(colab):
    assert ROOT not in colab.course.parents
    for folder in ("notebooks", "exercises"):
        written = {path.name: path.read_bytes() for path in (colab.course / folder).iterdir()}
        assert written == {path.name: path.read_bytes() for path in (ROOT / folder).glob("*.ipynb")}


def failures(nb) -> dict[str, list[str]]:
    """Of each cell that ended in an error, the lines that a learner sees."""
    errors = [(cell.id, output) for cell in code_cells(nb) for output in cell.outputs if output.output_type == "error"]
    return {cell: "\n".join(error.traceback).splitlines() for cell, error in errors}


def expected_failures(nb) -> set[str]:
    return {cell.id for cell in code_cells(nb) if "raises-exception" in cell.metadata.get("tags", [])}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_with_the_packages_of_colab(colab, chapter):
    path = colab.course / "notebooks" / f"{chapter}.ipynb"
    nb = colab.execute(read(path), path.parent)
    found = failures(nb)
    assert found.keys() == expected_failures(nb), found
    for cell, lines in found.items():
        assert len(lines) < 25 and not any("course_lib/launch" in line for line in lines), (cell, lines)


def exercise_with(colab, answers: dict[str, str]):
    """What the check cells of exercise 00 answer after each undone cell has got its source from `answers`."""
    nb = read(colab.course / "exercises" / EXERCISE)
    for cell in code_cells(nb):
        cell.source = answers.get(cell.id, cell.source)
    nb = colab.execute(nb, colab.course / "exercises")
    checks = [cell for cell in code_cells(nb) if is_check_cell(cell)]
    return nb, checks


def name_of(cell) -> str:
    """The grader that a check cell calls."""
    return re.search(r"check_\w+", cell.source).group()


def solved() -> dict[str, str]:
    """The reference of each exercise, by cell."""
    cells = code_cells(read(ROOT / "solutions" / EXERCISE))
    return {cell.id: cell.source for cell in cells if "BEGIN SOLUTION" in cell.source}


def test_right_answers_pass(colab):
    nb, checks = exercise_with(colab, solved())
    assert failures(nb) == {}
    assert [cell.outputs[0].text for cell in checks] == [f"{name_of(cell)}: passed\n" for cell in checks]


def test_an_exercise_as_handed_out_says_so_in_one_line(colab):
    nb, checks = exercise_with(colab, {})
    found = failures(nb)
    assert len(checks) >= 4
    for cell in checks:
        (line,) = found[cell.id]
        assert "your code goes here" in line


def test_a_wrong_answer_gets_the_message_of_its_grader_and_no_traceback(colab):
    graders = {answer: name for stem, name, answer in ALL if stem == Path(EXERCISE).stem}
    cells = {}
    for cell_id, source in solved().items():
        answer = next(answer for answer in graders if re.search(rf"\b{answer}\b", source))
        cells[cell_id] = (
            f"from course_lib.checks.ch00 import {graders[answer]}\n{answer} = {FIRST.format(graders[answer])}"
        )
    nb, checks = exercise_with(colab, cells)
    found = failures(nb)
    for cell in checks:
        check = getattr(ch00, name_of(cell))
        assert next(iter(check.wrong)) in " ".join(found[cell.id]), found[cell.id]
        # One sentence and the seed; of a deadlock also where each rank stood.
        assert len(found[cell.id]) < 10 and not any("Traceback" in line for line in found[cell.id])
