"""What a lesson's stored panel writes beside its colours is explained in the lesson, or in the lesson that it names."""

import re

import pytest

from course_lib.authoring import ROOT, read
from course_lib.authoring.links import chapters_of

HARD = ("launches", "update", "temporary", "no tensor")


def prose_of(stem: str) -> str:
    return "\n".join(
        cell.source for cell in read(ROOT / "notebooks" / f"{stem}.ipynb").cells if cell.cell_type == "markdown"
    )


@pytest.mark.parametrize("stem", [name.removesuffix(".ipynb") for name in chapters_of(ROOT / "notebooks")])
def test_each_hard_label_of_a_panel_is_in_the_prose(stem):
    cells = read(ROOT / "notebooks" / f"{stem}.ipynb").cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    shown = "".join(output.get("data", {}).get("image/svg+xml", "") for output in outputs)
    prose = prose_of(stem)
    if named := re.search(r"For the labels see \[[\d.]+\]\((\w+)\.ipynb\)", prose):
        prose += prose_of(named[1])
    assert [label for label in HARD if f">{label}<" in shown and label not in prose.lower()] == []
