"""The techniques of the index and of a sheet: one table, with the numbers of the formulas and of nothing else."""

from functools import cache

import pytest

from course_lib.authoring import ROOT
from course_lib.authoring.columns import OUTPUT_COLUMNS
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.plan.techniques import TECHNIQUES, costs_gb, technique_table, techniques_of
from course_lib.tensors import count_parameters

table = cache(technique_table)
EIGHT = techniques_of(preset("mixtral-8x7b"), 8, 8)


@pytest.mark.slow
def test_the_table_fits_a_page_and_has_a_line_for_every_parallel_chapter():
    title, heads, *lines = table().split("\n")
    assert max(map(len, [title, heads, *lines])) <= OUTPUT_COLUMNS
    assert [line[:2] for line in lines] == [one.chapter for one in TECHNIQUES[:-1]] + ["03", "09"]
    places = {heads.index(word) + len(word) for word in ("states", "saved", "peak", "sent")}
    assert all(line[place - 1].isdigit() and line[place] == " " for line in lines for place in places)


def test_every_layout_has_all_gpus_and_the_same_sequences_in_a_step():
    assert {one.chapter for one in EIGHT} == {f"{number:02}" for number in range(1, 10)}
    for one in EIGHT:
        layout = Layout.parse(one.layout)
        assert layout.world_size == (1 if one.splits == "nothing" else 8), one.name
        assert layout.sequences_per_step == 8, one.name


def test_the_numbers_are_what_the_chapters_derive():
    llama = preset("llama-3.1-8b")
    layouts = {one.name: Layout.parse(one.layout) for one in techniques_of(llama, 8, 8)}
    states, saved, _, sent = ({n: costs_gb(llama, x)[i] * 1e9 for n, x in layouts.items()} for i in range(4))
    psi = count_parameters(llama)
    assert sent["one GPU"] == 0
    assert states["one GPU"] == pytest.approx(16 * psi) == states["data parallel, dp 8"]
    assert sent["data parallel, dp 8"] == pytest.approx(2 * 2 * psi * 7 / 8)
    assert states["ZeRO-1"] == pytest.approx((2 + 2 + 12 / 8) * psi)
    assert states["ZeRO-3"] == pytest.approx(16 / 8 * psi)
    assert sent["ZeRO-3"] == pytest.approx(1.5 * sent["ZeRO-1"])
    assert saved["one GPU, recomputation"] < saved["one GPU"] / 7
    assert sent["and sequence parallel"] - sent["tp 8, ZeRO-1"] < 2e6  # the norms' gradients


def test_the_index_prints_this_table():
    stored = (ROOT / "notebooks" / "index.ipynb").read_text()
    assert all(line in stored for line in table().split("\n"))
