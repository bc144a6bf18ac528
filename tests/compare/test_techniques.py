"""The index's table: every technique of the course, with the numbers of the formulas and of nothing else."""

from functools import cache

import pytest

from course_lib.authoring import ROOT
from course_lib.authoring.columns import OUTPUT_COLUMNS
from course_lib.compare.techniques import TECHNIQUES, cost_of, technique_table
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.memory.states import count_parameters

table = cache(technique_table)


@pytest.mark.slow
def test_the_table_fits_a_page_and_has_a_line_for_every_parallel_chapter():
    title, heads, *lines = table().split("\n")
    assert max(map(len, [title, heads, *lines])) <= OUTPUT_COLUMNS
    assert [int(line[:2]) for line in lines] == [technique.chapter for technique in TECHNIQUES]
    assert {technique.chapter for technique in TECHNIQUES} == set(range(1, 10))
    places = {heads.index(word) + len(word) for word in ("states", "saved", "peak", "sent")}
    assert all(line[place - 1].isdigit() and line[place] == " " for line in lines for place in places)


def test_every_layout_has_eight_gpus_and_the_same_sequences_in_a_step():
    for technique in TECHNIQUES[2:]:
        layout = Layout.parse(technique.layout)
        assert layout.world_size == 8 and layout.sequences_per_step == 8, technique.name
    assert Layout.parse(TECHNIQUES[0].layout).world_size == 1


def test_the_numbers_are_what_the_chapters_derive():
    costs = {technique.name: cost_of(technique) for technique in TECHNIQUES}
    psi = count_parameters(preset("llama-3.1-8b"))
    assert costs["one GPU"].sent_bytes == 0
    assert costs["one GPU"].states_bytes == costs["data parallel"].states_bytes == 16 * psi
    assert abs(costs["data parallel"].sent_bytes / (2 * 2 * psi * 7 / 8) - 1) < 1e-6
    for stage, by_rank in ((1, 2 + 2 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        assert abs(costs[f"ZeRO-{stage}"].states_bytes / (by_rank * psi) - 1) < 1e-6
    assert abs(costs["ZeRO-3"].sent_bytes / costs["ZeRO-1"].sent_bytes - 1.5) < 1e-6
    assert costs["recomputation"].saved_bytes < costs["one GPU"].saved_bytes / 7
    assert costs["and sequence parallel"].sent_bytes - costs["tensor parallel"].sent_bytes < 2e6  # the norms' gradients


def test_the_index_prints_this_table():
    stored = (ROOT / "notebooks" / "index.ipynb").read_text()
    assert all(line in stored for line in table().split("\n"))
