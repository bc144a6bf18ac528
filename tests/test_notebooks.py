"""Every notebook of the repository is as `authoring.notebook_problems` wants it, and strict nbval really compares.

What counts as compared: a code cell counts as uncompared if it is tagged nbval-ignore-output or nbval-skip, or if it
shows pictures alone and asserts nothing (nbval does not look at pictures). At most a fifth of a notebook's code cells.
"""

import re
import subprocess
import sys

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from course_lib import authoring

NOTEBOOKS = authoring.notebook_paths("notebooks", "solutions")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_notebook_is_as_the_course_wants_it(path):
    assert authoring.notebook_problems(path) == []


LINK = re.compile(r"\[([^\]\[]+)\]\(([^)#\s:]+\.ipynb)\)(?:\)?,? (?:section )?(\d+[a-c]?\.\d+))?")
NUMBER = re.compile(r"(?:[Cc]hapter |[Ll]esson )?0?(\d+)([a-c]?)")


def markdown_of(path):
    return "\n".join(cell.source for cell in authoring.read(path).cells if cell.cell_type == "markdown")


def wrong_links(path, text):
    """Links that name another chapter than they lead to, or a section that is not there."""
    for name, target, section in LINK.findall(text):
        goal = (path.parent / target).resolve()
        number, lesson = NUMBER.fullmatch(name), re.match(r"0?(\d+)([a-c]?)_", goal.name)
        if (
            number
            and lesson
            and not (
                number[1] == lesson[1]
                and (
                    number[2] == lesson[2] or (not number[2] and lesson[1] != "2")
                )  # lessons 02a to 02c share no topic
            )
        ):
            yield f"{name!r} leads to {target}"
        if section and not re.search(rf"^#+ {re.escape(section)} ", markdown_of(goal), re.MULTILINE):
            yield f"{target} has no section {section}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_link_leads_to_the_chapter_and_the_section_that_it_names(path):
    assert not list(wrong_links(path, markdown_of(path)))


def test_links_to_another_chapter_or_section_are_found():
    path = authoring.ROOT / "notebooks" / "07_context_parallel.ipynb"
    right = "[chapter 9](09a_mixture_of_experts.ipynb) [in depth](08_pipeline_parallel_in_depth.ipynb), 8.7"
    assert not list(wrong_links(path, right))
    wrong = "[chapter 2](02a_precision.ipynb) [02b](02a_precision.ipynb) [depth](08_pipeline_parallel.ipynb), 8.99"
    assert len(list(wrong_links(path, wrong))) == 3


ANNOUNCED = re.compile(r"\bThe (?:next cell|cell below) (?s:.*)^##+ ", re.MULTILINE)


def test_a_cell_that_a_text_announces_comes_before_the_next_heading():
    early = "The next cell runs it.\n\n## 2.6 Another subject"
    assert ANNOUNCED.search(early) and not ANNOUNCED.search("## 2.6 A subject\n\nThe next cell runs it.")
    texts = [(path.name, cell) for path in NOTEBOOKS for cell in authoring.read(path).cells]
    assert [(name, cell["id"]) for name, cell in texts if ANNOUNCED.search(cell.source)] == []


def test_every_chapter_has_its_exercises_and_they_are_what_the_solutions_give():
    assert authoring.exercise_problems() == []


def test_nothing_else_lies_beside_the_notebooks():
    for folder in ("notebooks", "solutions", "exercises"):
        for path in (authoring.ROOT / folder).glob("*"):
            known = path.name in (".ipynb_checkpoints", ".ruff.toml", "index.ipynb")
            assert known or re.fullmatch(r"\d\d[a-z]?_[a-z0-9_]+\.ipynb", path.name), path


def nbval_flags() -> list[str]:
    makefile = (authoring.ROOT / "Makefile").read_text()
    return re.search(r"^NBVAL := (.*) -n ", makefile, re.MULTILINE).group(1).split()


@pytest.mark.long
def test_the_flags_of_make_find_a_corrupted_number_a_missing_output_and_an_error(tmp_path):
    printed = [new_output("stream", name="stdout", text="41\n")]
    cells = [
        new_code_cell("print(41)", id="right", outputs=printed),
        new_code_cell("print(42)", id="corrupted", outputs=printed),
        new_code_cell("print(41)", id="missing"),
        new_code_cell("1 / 0", id="error"),
    ]
    path = tmp_path / "planted.ipynb"
    authoring.write(authoring.normalise(new_notebook(cells=cells)), path)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={tmp_path}", *nbval_flags(), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=authoring.ROOT, timeout=120)
    assert run.returncode == 1
    assert "3 failed, 1 passed" in run.stdout, run.stdout[-2000:]
