"""docs/TEACHING.md tells minutes, checks and points as the notebooks do, docs/GRADING.md their sums."""

import re

import nbformat
import pytest

from course_lib.authoring import ROOT, code_cells, is_check_cell

ROWS = {
    row[1]: [int(cell) for cell in row[2].split("|")]
    for row in re.finditer(
        r"(?m)^\| (\d\d) [^|]+\| ([\d |]+) \|$", (ROOT / "docs" / "TEACHING.md").read_text(encoding="utf-8")
    )
}
TIME = r"\*\*Time:\*\* (\d+) minutes.*?(\d+)( more)? (?:for|with) (?:widget|game)"


def heading(path) -> str:
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells[:2])


def minutes_of_exercises(path) -> int:
    """The sum over headings; of "40 to 55" the middle."""
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    spans = re.findall(r"(?m)^\*(\d+)(?: to (\d+))? minutes, (?:easy|medium|hard)", text)
    return sum((int(low) + int(high or low)) // 2 for low, high in spans)


@pytest.mark.parametrize("chapter", [f"{number:02}" for number in range(14)])
def test_the_table_has_the_minutes_checks_and_points_of_the_notebooks(chapter):
    lesson, whole, exercises, checks, points = ROWS[chapter]
    lessons = [path for path in (ROOT / "notebooks").glob(f"{chapter}*.ipynb") if "in_depth" not in path.stem]
    told = [re.search(TIME, heading(path)) for path in lessons]
    assert lesson == sum(int(one[1]) for one in told)
    assert whole == sum(int(one[2]) + (int(one[1]) if one[3] else 0) for one in told)
    (solved,) = (ROOT / "solutions").glob(f"{chapter}*.ipynb")
    cells = code_cells(nbformat.read(solved, as_version=4))
    assert checks == sum(map(is_check_cell, cells))
    assert points == sum(cell.metadata.get("nbgrader", {}).get("points", 0) for cell in cells)
    assert exercises == minutes_of_exercises(solved)


def test_the_sums_of_checks_and_points_stand_where_a_class_is_graded():
    text = (ROOT / "docs" / "GRADING.md").read_text(encoding="utf-8")
    checks, points = (sum(row[column] for row in ROWS.values()) for column in (3, 4))
    assert f"{len(ROWS)} notebooks, {checks} checks, {points} points" in text
