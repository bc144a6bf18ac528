"""The records behind the pictures of what a pipeline is; and that each picture draws."""

from dataclasses import replace

import pytest
from pictures import drawn

from course_lib.plots import pipeline_concepts as plots
from course_lib.schedules import make, simulate


def test_each_layer_stands_in_one_stage_and_the_ends_have_more():
    boxes = plots.cut_boxes(4, 2)
    assert [box.text for box in boxes] == ["embedding\nlayer 0\nlayer 1", "layer 2\nlayer 3\nnorm, head"]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="num_stages is 5; give 2 to 4 for 4 layers"):
        plots.cut_boxes(4, 5)


def test_each_cut_has_one_message_a_micro_batch_each_way_and_none_comes_before_it_is_sent():
    arrows = plots.message_arrows(simulate(make("1f1b", 3, 4)))
    assert sum(arrow.op == "F" and arrow.dst == arrow.src + 1 for arrow in arrows) == 2 * 4
    assert sum(arrow.op == "B" and arrow.dst == arrow.src - 1 for arrow in arrows) == 2 * 4
    assert len(arrows) == 16 and all(arrow.sent_s <= arrow.used_s for arrow in arrows)


def test_each_layer_has_a_forward_and_both_halves():
    assert sorted(box.op for box in plots.half_boxes(2)) == ["F", "F", "I", "I", "W", "W"]


def test_dualpipe_holds_two_different_stages_and_each_stage_twice():
    of_ranks = plots.placements(4)["DualPipe (two directions)"]
    assert of_ranks == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert plots.placements(4)["V (ZBV, DualPipeV)"] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_what_ranks_did_is_drawn_in_its_order_whatever_its_seconds(monkeypatch):
    naive = make("naive", 2, 1)
    slow = [
        [replace(span, start_s=span.start_s**3, stop_s=span.stop_s**3) for span in row] for row in simulate(naive).rows
    ]
    pictures = []
    monkeypatch.setattr(plots, "draw_schedule", lambda axes, picture: pictures.append(picture))
    monkeypatch.setattr(plots, "legend_below", lambda axes, handles: pictures.append(axes.get_xlabel()))
    plots.show_trace(naive, slow, "title")
    picture, label = pictures
    assert label == "order of events, not time" and picture.bubble_of_total == 1 / 2
    assert sorted((box.start_s, box.stop_s) for box in picture.boxes) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_the_pictures_draw_what_they_are_given(monkeypatch):
    assert {"rank 3", "x_BSD", "its grad"} <= set(drawn(monkeypatch, plots.show_cut, 8, 4))
    assert {"F0", "B1"} <= set(drawn(monkeypatch, plots.show_messages, simulate(make("afab", 2, 2)), "title"))
    naive = make("naive", 2, 1)
    assert {"F0", "B0"} <= set(drawn(monkeypatch, plots.show_trace, naive, simulate(naive).rows, "title"))
    assert {"dW2 = dz xᵀ", "first half I"} <= set(drawn(monkeypatch, plots.show_halves))
    assert {"stage 7", "DualPipe (two directions)\n4 stages"} <= set(drawn(monkeypatch, plots.show_placements))
    with pytest.raises(ValueError, match="room for 2 to 8 ranks"):
        plots.show_placements(9)
