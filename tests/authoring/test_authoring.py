"""The normal form of notebooks, exercises from solutions, and every rule of `notebook_problems` by a planted fault."""

import tomllib
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from solved import load_solution

from course_lib import authoring
from course_lib.authoring.__main__ import move_to
from course_lib.authoring.address import install_source
from course_lib.authoring.columns import narrowed
from course_lib.authoring.form import WIDGET_VIEW, format_notebooks, without_solutions
from course_lib.authoring.links import navigation, with_links
from course_lib.authoring.rules import width_problems

ADDRESS = "https://github.com/somebody/their-copy"
SOLUTION = """def double(x):
    \"\"\"Twice x.\"\"\"
    if x:
        ### BEGIN SOLUTION
        y = 2 * x
        return y
        ### END SOLUTION
    return 0"""


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def chapter(*cells):
    start = [new_markdown_cell("# Title", id="title"), new_code_cell(install_source(None), id="install")]
    return new_notebook(cells=[*start, new_code_cell("import os", id="setup", metadata={"tags": ["setup"]}), *cells])


@pytest.fixture
def root(tmp_path):
    for folder in ("notebooks", "solutions", "exercises"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "course-lib"\n')
    return tmp_path


def problems_of(root, *cells):
    path = root / "notebooks" / "00_x.ipynb"
    authoring.write(with_links(authoring.normalise(chapter(*cells)), path, root), path)
    return authoring.notebook_problems(path, root)


def test_what_a_cell_prints_is_at_most_100_characters_wide():
    fits, wide = (new_code_cell("f()", id="f", outputs=[stream("ok\n" + "x" * size + "\n")]) for size in (100, 101))
    says = "cell f: prints a line of 101 characters; print at most 100 on a line"
    assert width_problems(fits) == [] and width_problems(wide) == [says]
    data = new_output("execute_result", data={"text/plain": "y" * 101}, execution_count=1)
    assert width_problems(new_code_cell("y", id="f", outputs=[data])) == [says]


# The normal form


def test_normalise_counts_from_one_and_forgets_how_and_when_the_notebook_ran():
    cell = new_code_cell("print(1)", id="one", execution_count=17, outputs=[stream("1\n")])
    cell.metadata = {"execution": {"iopub.execute_input": "2026-01-01"}, "tags": ["widget", "setup"], "scrolled": True}
    nb = new_notebook(cells=[new_markdown_cell("text", id="t"), cell, new_code_cell("  ", id="empty")])
    nb.metadata = {"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.11.7"}}
    normal = authoring.normalise(nb)
    assert normal.cells[1].execution_count == 1
    assert dict(normal.cells[1].metadata) == {"tags": ["setup", "widget"], "jupyter": {"source_hidden": True}}
    assert len(normal.cells) == 2, "an empty cell goes"
    assert set(normal.metadata) == {"kernelspec", "language_info"} and normal.metadata.language_info == {
        "name": "python"
    }
    assert authoring.normalise(normal) == normal
    nbformat.validate(normal)
    assert cell.execution_count == 17, "the argument is left alone"


def test_normalise_merges_streams_as_nbval_does_and_keeps_the_last_state_of_a_bar():
    outputs = [stream("a\n"), stream("0%\r50%\r", "stderr"), stream("b\n"), stream("100%\n", "stderr")]
    normal = authoring.normalise(new_notebook(cells=[new_code_cell("f()", id="f", outputs=outputs)]))
    streams = [(output.name, output.text) for output in normal.cells[0].outputs]
    assert streams == [("stdout", "a\nb\n"), ("stderr", "100%\n")]


def test_normalise_drops_views_of_widgets_whose_state_is_not_stored():
    view = new_output("display_data", data={WIDGET_VIEW: {"model_id": "1"}, "text/plain": "IntSlider()"})
    normal = authoring.normalise(new_notebook(cells=[new_code_cell("w", id="w", outputs=[view, stream("x")])]))
    assert [output.output_type for output in normal.cells[0].outputs] == ["stream"]


def test_normalise_keeps_the_first_picture_of_a_widget_with_its_size_and_its_words():
    words = {"alt": "Bars of memory.", "width": 680, "height": 200}
    data = {WIDGET_VIEW: {"model_id": "1"}, "image/png": "aa", "text/plain": "VBox()"}
    view = new_output("display_data", data=data, metadata={"image/png": words | {"needs": 1}, "isolated": True})
    normal = authoring.normalise(new_notebook(cells=[new_code_cell("w", id="w", outputs=[view])]))
    (output,) = normal.cells[0].outputs
    assert output.data == {"image/png": "aa", "text/plain": "VBox()"} and output.metadata == {"image/png": words}
    drawn = {WIDGET_VIEW: {"model_id": "1"}, "image/svg+xml": "<svg/>", "text/plain": "Bars."}
    cell = new_code_cell("w", id="w", outputs=[new_output("display_data", data=drawn)])
    (output,) = authoring.normalise(new_notebook(cells=[cell])).cells[0].outputs
    assert output.data.keys() == {"image/svg+xml", "text/plain"}


@pytest.mark.parametrize(
    ("source", "slug"),
    [
        ("## 3.2 Averaging costs two trips, not N", "averaging-costs-two-trips"),
        ("def ring_all_reduce(x_P, group):\n    ...", "ring-all-reduce"),
        ("!!", "cell"),
    ],
)
def test_random_ids_become_slugs_from_what_the_cell_says(source, slug):
    kind = new_code_cell if source.startswith("def") else new_markdown_cell
    nb = new_notebook(cells=[kind(source, id="3f2a9c01"), kind(source, id="8d1f0a2b-0c3d-4e5f-8a9b-0123456789ab")])
    normal = authoring.normalise(nb)
    assert [cell["id"] for cell in normal.cells] == [slug, f"{slug}-2"]


# Links


@pytest.fixture
def course(root):
    """A course of an index, two chapters, of which the second has a second reading and exercises."""
    names = ("index", "00_ranks", "01_zero", "01_zero_in_depth")
    for path in [root / "notebooks" / f"{name}.ipynb" for name in names] + [root / "solutions" / "01_zero.ipynb"]:
        path.write_text("{}")
    return root


@pytest.mark.parametrize(
    ("path", "links"),
    [
        ("notebooks/index.ipynb", "[Next](00_ranks.ipynb)"),
        (
            "notebooks/01_zero.ipynb",
            "[Index](index.ipynb) · [Previous](00_ranks.ipynb) · [In depth](01_zero_in_depth.ipynb) · "
            "[Exercises](../exercises/01_zero.ipynb) · [Solutions](../solutions/01_zero.ipynb)",
        ),
    ],
)
def test_navigation_leads_to_the_neighbours_the_exercises_and_the_second_reading(course, path, links):
    assert navigation(course / path, course) == links


@pytest.fixture
def lettered(course):
    """A course whose chapter 1 has two lessons, one second reading and one notebook of exercises."""
    (course / "notebooks" / "01_zero.ipynb").unlink()
    for name in ("01a_first", "01b_second", "02_next"):
        (course / "notebooks" / f"{name}.ipynb").write_text("{}")
    return course


@pytest.mark.parametrize(
    ("path", "links"),
    [
        ("notebooks/00_ranks.ipynb", "[Index](index.ipynb) · [Previous](index.ipynb) · [Next](01a_first.ipynb)"),
        (
            "notebooks/01b_second.ipynb",
            "[Index](index.ipynb) · [Previous](01a_first.ipynb) · [Next](02_next.ipynb) · "
            "[In depth](01_zero_in_depth.ipynb) · "
            "[Exercises](../exercises/01_zero.ipynb) · [Solutions](../solutions/01_zero.ipynb)",
        ),
        (
            "notebooks/01_zero_in_depth.ipynb",
            "[Index](index.ipynb) · [Lesson 1a](01a_first.ipynb) · [Lesson 1b](01b_second.ipynb) · "
            "[Previous](00_ranks.ipynb) · [Next](02_next.ipynb) · "
            "[Exercises](../exercises/01_zero.ipynb) · [Solutions](../solutions/01_zero.ipynb)",
        ),
        (
            "solutions/01_zero.ipynb",
            "[Index](../notebooks/index.ipynb) · [Chapter 1a](../notebooks/01a_first.ipynb) · "
            "[Chapter 1b](../notebooks/01b_second.ipynb) · [Exercises](../exercises/01_zero.ipynb)",
        ),
    ],
)
def test_navigation_of_a_chapter_with_several_lessons(lettered, path, links):
    assert navigation(lettered / path, lettered) == links


def test_an_exercise_links_to_its_solution(course):
    path = course / "solutions" / "01_zero.ipynb"
    exercise = authoring.exercise_from(with_links(chapter(), path, course))
    for cell in (exercise.cells[1], exercise.cells[-1]):
        assert "[Solutions](../solutions/01_zero.ipynb)" in cell.source and "[Exercises]" not in cell.source


def test_a_notebook_without_its_links_is_found_and_make_fmt_writes_them(root):
    path = root / "notebooks" / "00_x.ipynb"
    cells = [new_markdown_cell("As before.", id="text"), new_code_cell("x = 1", id="x")]
    authoring.write(authoring.normalise(chapter(*cells)), path)
    assert "not in its normal form" in "\n".join(authoring.notebook_problems(path, root))
    format_notebooks(root)
    assert authoring.notebook_problems(path, root) == []
    assert format_notebooks(root) == []


# Columns


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"x = 1  # {'word ' * 20}end", f"# {'word ' * 17}\n# word word word end\nx = 1"),
        (f"    # {'word ' * 20}end", f"    # {'word ' * 16}\n    # word word word word end"),
        (f"# mirrors: {'c.name, ' * 9}f, {'g' * 9}", f"# mirrors: {'c.name, ' * 9}f\n# mirrors: {'g' * 9}"),
        (f"f = 1{' ' * 80} # noqa: E731", f"f = 1{' ' * 80} # noqa: E731"),
        ("%magic " + "x" * 90, "%magic " + "x" * 90),
    ],
)
def test_long_comments_are_wrapped_and_stand_above_the_code(source, expected):
    tidy = [line.rstrip() for line in expected.split("\n")]
    assert [line.rstrip() for line in narrowed(source).split("\n")] == tidy


def test_long_docstrings_are_wrapped_and_mirrors_still_agree():
    source = f'def f():\n    """{"word " * 20}end."""\n    return "{"text " * 20}"'
    narrow = narrowed(source)
    assert narrow.split("\n")[1:3] == [f'    """{"word " * 15}word', '    word word word word end."""']
    assert narrowed(narrow) == narrow and 'text "' in narrow, "strings are for people to break"


# Exercises


def test_a_solution_becomes_an_error_that_names_what_is_to_be_written():
    text = without_solutions(SOLUTION)
    assert '        raise NotImplementedError("double: your code goes here")\n    return 0' in text
    assert "2 * x" not in text and "SOLUTION" not in text and '"""Twice x."""' in text


@pytest.mark.parametrize("marks", ["### BEGIN SOLUTION", "### END SOLUTION", "### BEGIN SOLUTION\n### BEGIN SOLUTION"])
def test_marks_that_do_not_pair_are_refused(marks):
    with pytest.raises(ValueError, match="SOLUTION"):
        without_solutions(marks)


def test_an_exercise_has_no_outputs_and_carries_what_nbgrader_needs(root):
    cells = [new_code_cell(SOLUTION, id="double"), new_code_cell("check_double(double)", id="check-double")]
    cells[1].outputs = [stream("check_double: passed\n")]
    exercise = authoring.exercise_from(chapter(*cells))
    nbformat.validate(exercise)
    assert all(not cell.outputs and cell.execution_count is None for cell in authoring.code_cells(exercise))
    written, checked = (cell.metadata.nbgrader for cell in exercise.cells[3:])
    assert written.solution and not written.grade and written.grade_id == "double"
    assert checked.grade and checked.locked and checked.points == 1 and not checked.solution


@pytest.mark.parametrize(
    ("heading", "points"),
    [
        ("*5 minutes, easy.*", 1),
        ("*12 minutes, easy.*", 3),
        ("*20 minutes, medium.*", 5),
        ("*40 to 55 minutes, hard.*", 12),
        ("of no length", 1),
    ],
)
def test_an_exercise_has_a_point_for_each_five_minutes_and_more_if_it_is_hard(heading, points):
    cells = [new_markdown_cell(f"## Exercise\n\n{heading} Write it."), new_code_cell(SOLUTION, id="double")]
    once = [*cells, new_code_cell("check_double(double)", id="check-double")]
    assert worth(once) == [points]
    earlier = [new_markdown_cell("*10 minutes, easy.*"), new_code_cell("check_x(x)", id="check-x")]
    if "minutes" in heading:
        assert worth([*earlier, *once]) == [2, points]


def test_the_checks_of_an_exercise_share_its_points():
    cells = [new_code_cell(SOLUTION, id="double"), new_code_cell("check_a(a)"), new_code_cell("check_b(b)")]
    assert worth([new_markdown_cell("*15 minutes, easy.*"), *cells]) == [1.5, 1.5]


def worth(cells) -> list[float]:
    """The points that nbgrader reads in the cells of an exercise."""
    found = authoring.exercise_from(chapter(*cells)).cells
    return [cell.metadata.nbgrader.points for cell in found if cell.metadata.get("nbgrader", {}).get("grade")]


def test_make_exercises_writes_what_differs_and_the_check_finds_what_is_stale(root):
    path = root / "solutions" / "00_x.ipynb"
    authoring.write(authoring.normalise(chapter(new_code_cell(SOLUTION, id="double"))), path)
    assert "make exercises" in authoring.exercise_problems(root)[0]
    assert authoring.write_exercises(root) == [root / "exercises" / "00_x.ipynb"]
    assert authoring.write_exercises(root) == []
    assert authoring.exercise_problems(root) == ["00_x.ipynb stands in only one of notebooks/ and solutions/"] + [
        "00_x.ipynb stands in only one of notebooks/ and exercises/"
    ]


def test_load_solution_defines_and_launches_nothing(root):
    launches = "def helper(x):\n    return double(x)\n\n\nresults = launch(helper, 2)\nprint(results)\nSIZE = 3"
    cells = [new_code_cell(SOLUTION, id="double"), new_code_cell(launches, id="l"), new_code_cell("%time 1", id="m")]
    path = root / "solutions" / "00_x.ipynb"
    authoring.write(authoring.normalise(chapter(*cells)), path)
    for given in (path, "00_x"):
        names = load_solution(given, root)
        assert names["helper"](4) == 8 and names["SIZE"] == 3 and "results" not in names
        assert names["double"].__module__ == "__main__", "so that it travels to ranks by value"


# Every rule, by a planted fault


def test_a_right_notebook_has_no_problems(root):
    assert problems_of(root, new_code_cell("print(1)", id="one", outputs=[stream("1\n")])) == []


@pytest.mark.parametrize(
    ("cell", "fragment"),
    [
        (new_code_cell("x = 1", id="x", metadata={"tags": ["slow"]}), "unknown tags ['slow']"),
        (new_code_cell("print(1)", id="x"), "no output is stored"),
        (new_code_cell("f", id="x", outputs=[stream("<f at 0x7f0011223344>")]), "memory address"),
        (new_code_cell("w", id="x", metadata={"tags": ["widget"]}), "tag it nbval-ignore-output as well"),
        (new_code_cell("1/0", id="x", outputs=[new_output("error", ename="E", evalue="", traceback=[])]), "an error"),
        (new_code_cell("x", id="x", metadata={"tags": ["nbval-skip"]}), "more than a fifth of 3"),
        (new_code_cell("x", id="x", outputs=[new_output("display_data", {"image/png": "aa"})]), "more than a fifth"),
        (new_code_cell("x", id="x", outputs=[new_output("display_data", {"image/png": "aa"})]), "without a sentence"),
        (
            new_code_cell("x", id="x", outputs=[new_output("display_data", {"image/svg+xml": "<svg/>"})]),
            "without a sentence",
        ),
        (new_code_cell("import os", id="x", metadata={"tags": ["setup"]}), "exactly one cell must carry the tag setup"),
        (new_code_cell(f"x = '{'long' * 22}'", id="x"), "a line has 94 characters"),
        (new_code_cell("from course_lib.comm.collectives import _op", id="x"), "collectives._op, which is private"),
        (new_code_cell("from course_lib.launch._slurm import x", id="x"), "launch._slurm.x, which is private"),
        (new_code_cell("print(os.sep)", id="x", metadata={"tags": ["widget"]}), "may run it alone, and os comes from"),
        (new_markdown_cell("### Too deep", id="x"), "headings go from level 1 to 3"),
        (new_markdown_cell("## 3.1 A\n## 3.3 B", id="x"), "section 3.1 is followed by 3.3"),
        (new_markdown_cell("## 2c.8 A\n## 2c.7 B", id="x"), "section 2c.8 is followed by 2c.7"),
        (new_markdown_cell("## 3.16 A\n## 3.16 B", id="x"), "section 3.16 is followed by 3.16"),
        (new_markdown_cell("# Another title", id="x"), "one heading `#`"),
        (new_markdown_cell("[there](../nowhere.md)", id="x"), "a link leads to ../nowhere.md"),
        (new_markdown_cell("It is simply a sum.", id="x"), "prose has simply"),
        (new_markdown_cell("A sum!", id="x"), "prose has an exclamation mark"),
        (new_markdown_cell("A sum \U0001f600", id="x"), "prose has an emoji"),
    ],
)
def test_a_planted_fault_is_found(root, cell, fragment):
    assert fragment in "\n".join(problems_of(root, cell))


@pytest.mark.parametrize("order", ["Press Shift and Enter in the cell below.", "In the next cell, choose a model."])
def test_a_cell_that_the_text_sends_the_reader_to_runs_alone(root, order):
    needs_another = new_code_cell("def f():\n    return later + 1\n\n\nf()", id="x")
    alone = new_code_cell("import os\n\nlater = 1\n[later for x in os.sep]", id="x")
    assert "alone, and later comes" in "\n".join(problems_of(root, new_markdown_cell(order, id="m"), needs_another))
    assert problems_of(root, new_markdown_cell(order, id="m"), alone) == []
    assert problems_of(root, new_markdown_cell("Now it runs.", id="m"), needs_another) == []


def test_code_and_formulas_are_not_prose():
    assert authoring.prose_problems("`a != b`, $n!$, ![picture](x.png)\n```python\nprint('just!')\n```") == []


# The address: install cell and badges


def test_an_install_cell_that_is_missing_or_changed_is_found_and_written_before_all_other_code(root):
    path = root / "notebooks" / "00_x.ipynb"
    for install in ([], [new_code_cell("import course_lib", id="install")]):
        nb = chapter()
        nb.cells[1:2] = install
        authoring.write(with_links(authoring.normalise(nb), path, root), path)
        assert "install cell" in "\n".join(authoring.notebook_problems(path, root))
        format_notebooks(root)
        first = authoring.code_cells(authoring.read(path))[0]
        assert first.source == install_source(None) and first.metadata.jupyter.source_hidden
        assert first.metadata.cellView == "form", "Colab folds it too"


def test_the_address_gives_every_notebook_its_badges_and_its_install_cell(root):
    for folder in ("notebooks", "solutions"):
        authoring.write(authoring.normalise(chapter()), root / folder / "00_x.ipynb")
    format_notebooks(root)
    authoring.write_exercises(root)
    notebooks = [root / folder / "00_x.ipynb" for folder in ("notebooks", "solutions", "exercises")]
    assert not any("badge" in path.read_text() or "git+" in path.read_text() for path in notebooks), "none without one"
    assert move_to(ADDRESS, root) == [root / "pyproject.toml", *notebooks]
    for path in notebooks:
        title, _, install = authoring.read(path).cells[:3]
        here = f"somebody/their-copy/blob/main/{path.parent.name}/00_x.ipynb"
        assert title.source.count(f"](https://colab.research.google.com/github/{here})") == 1
        assert title.source.count(f"src=https://github.com/{here})") == 1 and "Internet" in title.source
        assert f"course-lib@git+{ADDRESS}" in install.source
    assert move_to(ADDRESS, root) == []
    other = "https://github.com/another/copy"
    assert move_to(other, root) == [root / "pyproject.toml", *notebooks]
    assert not any("their-copy" in path.read_text() for path in (root / "pyproject.toml", *notebooks))


def test_the_address_says_where_the_site_the_changes_and_a_hub_are_and_leaves_the_rest_as_it_is(root):
    path = root / "pyproject.toml"
    path.write_text(path.read_text() + "\n[project.urls]\nRepository = 'x'\n\n[tool.other]\nline = 1\n")
    move_to(ADDRESS, root, hub="https://hub.example.org/")
    told = tomllib.loads(path.read_text())
    assert told["tool"]["other"] == {"line": 1} and told["project"]["urls"] == {
        "Repository": ADDRESS,
        "Documentation": "https://somebody.github.io/their-copy/",
        "Changelog": f"{ADDRESS}/blob/main/docs/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
        "JupyterHub": "https://hub.example.org",
    }
    before = path.read_text()
    move_to(ADDRESS, root, hub="https://hub.example.org/")
    assert path.read_text() == before


@pytest.mark.parametrize("address", ["", "owner/name", "https://example.org/owner/name", f"{ADDRESS}/"])
def test_an_address_that_badges_cannot_lead_to_is_refused(root, address):
    with pytest.raises(ValueError, match=r"must be https://github\.com/owner/name"):
        move_to(address, root)
    assert move_to(ADDRESS, root) == [root / "pyproject.toml"]


def run_install_cell(address, monkeypatch, found):
    """What the install cell asks IPython to do, where course_lib is found or not."""
    asked = []
    shell = SimpleNamespace(run_line_magic=lambda name, line: asked.append(f"%{name} {line}"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    exec(install_source(address), {"get_ipython": lambda: shell})
    return asked


def test_the_install_cell_installs_only_what_is_missing_and_without_an_address_says_how(monkeypatch):
    for address in (None, ADDRESS):
        assert run_install_cell(address, monkeypatch, found=True) == []
    assert run_install_cell(ADDRESS, monkeypatch, found=False) == [f"%pip install -q course-lib@git+{ADDRESS}"]
    with pytest.raises(ModuleNotFoundError, match=r"Upload its wheel .*%pip install \./course_lib-\*\.whl"):
        run_install_cell(None, monkeypatch, found=False)
