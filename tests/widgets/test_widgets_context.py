"""The explorer of context parallelism: its numbers are those of the formulas, and moving a control redraws it."""

import pytest
from widget_tree import control, shown, texts

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.memory.budget import budgets
from course_lib.memory.ranks import for_length
from course_lib.run import Run
from course_lib.timing import attention_time
from course_lib.widgets.context import ContextChoice, context_explorer, explore_context

LLAMA_8B = preset("llama-3.1-8b")


def test_the_view_is_the_budget_and_the_modelled_layer():
    view = explore_context(ContextChoice(tp=2))
    layouts = [Layout(cp=cp, tp=2, sequence_parallel=True, zero_stage=1) for cp in (1, 4)]
    totals = [budgets(Run(LLAMA_8B, layout, 131_072))[0].total_bytes for layout in layouts]
    assert [bar.total_bytes for bar in view.bars] == totals
    cluster = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
    ring = attention_time(Run(LLAMA_8B, Layout(cp=4, tp=2), 131_072), cluster)
    assert view.times["ring"] == ring and set(view.times) == {"ring", "all_gather", "ulysses"}
    assert view.share_of_ideal == 1.0 and "32,768 tokens" in view.text and "NVLink" in view.text


def test_a_full_node_of_tp_sends_a_ring_between_nodes_and_leaves_ulysses_no_heads():
    view = explore_context(ContextChoice(tp=8))
    assert "InfiniBand" in view.text and "Ulysses is not possible" in view.text and "ulysses" not in view.times
    assert explore_context(ContextChoice(sequence_sharding="contiguous")).share_of_ideal < 0.58
    assert view.bars[1].fits and not view.bars[0].fits
    long = explore_context(ContextChoice(seq_len=2**20, cp=32))
    assert long.bars[1].fits and for_length(LLAMA_8B, 2**20).max_seq_len == 2**20
    assert explore_context(ContextChoice(cp=1)).times == {}


@pytest.mark.slow
def test_a_move_redraws_and_an_impossible_choice_is_told():
    box = context_explorer()
    (before,) = shown(box)
    control(box, "cp").value = 8
    (after,) = shown(box)
    assert before[:8] == after[:8] == b"\x89PNG\r\n\x1a\n" and before != after and "16,384 tokens" in texts(box)
    control(box, "model").value = "gpt2"  # 12 heads
    assert "Not possible" in texts(box) and shown(box) == []
