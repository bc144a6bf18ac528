"""docs/TEACHING.md tells minutes and checks as the notebooks do."""

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
def test_the_table_has_the_minutes_and_checks_of_the_notebooks(chapter):
    lesson, whole, exercises, checks = ROWS[chapter]
    lessons = [path for path in (ROOT / "notebooks").glob(f"{chapter}*.ipynb") if "in_depth" not in path.stem]
    told = [re.search(TIME, heading(path)) for path in lessons]
    assert lesson == sum(int(one[1]) for one in told)
    assert whole == sum(int(one[2]) + (int(one[1]) if one[3] else 0) for one in told)
    (solved,) = (ROOT / "solutions").glob(f"{chapter}*.ipynb")
    assert checks == sum(map(is_check_cell, code_cells(nbformat.read(solved, as_version=4))))
    assert exercises == minutes_of_exercises(solved)
