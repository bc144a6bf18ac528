"""What lessons tell to do stands beside a cell that asks `estimate` or the search for that job, on two networks."""

import re

import nbformat
import pytest

from course_lib.authoring.form import ROOT, notebook_paths
from course_lib.authoring.lessons import calls_of
from course_lib.hardware import LINKS

ASKS = ("estimate", "search", "work_out", "choose", "first_choice")
CONCLUSIONS = [  # lesson, cell that asserts, what the prose after it says
    ("00_ranks_and_collectives", "nodes-estimate", "*So measure your network, and work with the eight cards of a node"),
    ("04_zero", "scaling-estimate", "*So HSDP is for networks on which"),
    ("04_zero", "which-stage-run", "*So take the lowest stage that fits"),
    ("05_tensor_parallel", "cost-run", "*So keep $tp$ inside one node.*"),
    ("06_sequence_parallel", "time-estimate", "*So use SP wherever TP is used, for its memory*"),
    ("07_context_parallel", "length-run", "*So cut the sequence, not the matrices"),
    ("07_context_parallel", "hide-estimate", "*So give each rank of a ring"),
    ("07_context_parallel", "which-run", "Choose in this order"),
    ("08_pipeline_parallel", "zero3-estimate", "*So take as few stages as fit."),
    ("09b_expert_parallel", "hides-run", "*So keep wide experts in a node"),
    ("10_five_d", "ways-networks", "*So take the largest micro-batch that fits*"),
    ("10_five_d", "ways-networks", "*So measure the network before you choose.*"),
    ("10_five_d", "experts-choose", "*So where GPUs outrun the network (H100), keep ep inside a node"),
    ("11_finding_a_configuration", "sensitivity", "*So measure before you trust a planner"),
    ("11_finding_a_configuration", "tp-networks", "*So tp goes inside a node, dp or pp between nodes.*"),
    ("12_on_a_cluster", "two-hosts-estimate", "*So dp may cross, tp may not, pp where layers or network allow.*"),
    ("13a_inside_a_gpu", "small-estimate", "*So give each pass 2,048 tokens or more.*"),
    ("13b_eight_bits", "worth-estimate", "*So use FP8 products where wide products fill the step"),
]


def lesson(stem):
    return nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", 4).cells


@pytest.mark.parametrize(("stem", "asserting", "says"), CONCLUSIONS, ids=lambda value: str(value)[:24])
def test_a_conclusion_stands_beside_the_cell_that_asks_for_it_on_two_networks(stem, asserting, says):
    cells = lesson(stem)
    (place,) = [place for place, cell in enumerate(cells) if cell["id"] == asserting]
    source = cells[place].source
    assert any(calls_of(source, name) for name in ASKS), "the cell asks neither estimate nor the search"
    assert "assert " in source
    links = sum(f'"{key}"' in source for key in LINKS) + source.count("achieved_share=")  # a link, at other rates
    assert "CLUSTERS" in source or links > 1, "one network is not enough"
    beside = [cell.source for cell in cells[place + 1 : place + 3] if cell.cell_type == "markdown"]
    assert sum(says in text for text in beside) == 1


def test_every_conclusion_of_a_lesson_is_in_the_list():
    listed = {stem: [says for other, _, says in CONCLUSIONS if other == stem] for stem, _, _ in CONCLUSIONS}
    for path in notebook_paths("notebooks"):
        prose = [cell.source for cell in lesson(path.stem) if cell.cell_type == "markdown"]
        for conclusion in re.findall(r"\*So [^*]+\*", "\n".join(prose)):
            found = [says for says in listed.get(path.stem, ()) if conclusion.startswith(says.rstrip("*"))]
            assert found or path.stem.endswith("_in_depth"), f"{path.stem}: {conclusion} has no cell in CONCLUSIONS"
