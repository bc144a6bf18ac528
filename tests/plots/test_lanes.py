"""Lanes and curves: the numbers that they draw, and that no text lies on another."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
from harness import sampled

matplotlib.use("Agg")

from pictures import look, overlapping_texts

from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plots import curves, timeline
from course_lib.run import Run
from course_lib.span import Span
from course_lib.timing import tensor_parallel_layer_spans


def test_numbers_of_points_give_way_to_other_points():
    first = {1: 20.0, 2: 100.0}
    assert curves.value_labels_of([first, {1: 30.0}]) == [(1, 20.0, False), (2, 100.0, True), (1, 30.0, True)]
    assert curves.value_labels_of([first, {1: 60.0}]) == [(1, 20.0, True), (2, 100.0, True), (1, 60.0, False)]
    assert curves.value_labels_of([first, {2: 99.0}]) == [(1, 20.0, True), (2, 100.0, True)]  # one number for both


def test_a_bar_carries_as_much_of_its_name_as_it_has_room_for():
    assert timeline.label_for("attention backward", 0.25) == "attention backward"
    assert timeline.label_for("sum attention", 0.12) == "attention"
    assert timeline.label_for("attention", 0.075) == ""
    assert timeline.label_for("gather 3", 0.02) == "3" and timeline.label_for("forward", 0.02) == ""


def test_a_name_without_room_becomes_a_letter_and_the_letters_are_listed():
    spans = [Span(0, "compute", "forward", 0, 8), Span(0, "communication", "sum", 8, 9), Span(0, "compute", "b", 9, 10)]
    late = [Span(0, "communication", "gather", 0, 0.2), Span(0, "communication", "sum", 1, 1.1)]
    keys = timeline.keys_for([timeline.overlap_picture(each) for each in (spans, late)])
    assert keys == {"gather": "a", "forward": "forward", "sum": "b", "b": "b"}
    many = [Span(0, "compute", f"block {index}", index, index + 1) for index in range(30)]
    with pytest.raises(ValueError, match="30 names have no room in their bars"):
        timeline.keys_for([timeline.overlap_picture(many)])
    assert timeline.wrap_entries(["a: one", "b: two", "c: three"], 15) == ["a: one   b: two", "c: three"]


# ---------------------------------------------------------------- every picture can be drawn, and read

PUBLISHED = {"TP": {2: 13923, 4: 12421, 8: 10903, 16: 6246, 32: 2146},
             "TP + SP": {2: 14167, 4: 13460, 8: 10889, 16: 6159, 32: 3610}}  # fmt: skip
MODELS = {"TP, modelled": {2: 14e3, 8: 12e3, 32: 2e3}, "TP + SP, modelled": {2: 14e3, 8: 12e3, 32: 3e3}}
CLUSTER = Cluster(gpu("h100"), link("nvlink4"), link("efa"))
RUN = Run(preset("llama-3.1-8b"), Layout(tp=8), 4096)
LAYERS = {label: tensor_parallel_layer_spans(RUN, CLUSTER, overlap=overlap)
          for label, overlap in (("one by one", False), ("gradient sums behind weight gradients", True))}  # fmt: skip
PICTURES = {
    "a layer in time": lambda: timeline.show_overlap(LAYERS, "t"),
    "a layer in time, with letters": lambda: timeline.show_overlap(LAYERS, "t", keys=True),
    "step times": lambda: timeline.show_step_times(
        {"tp 1": (0.5, 0.0), "tp 8": (0.06, 0.03), "tp 32": (0.02, 0.05)}, "t"
    ),
    "throughput": lambda: curves.show_curves(MODELS, PUBLISHED, "t", "GPUs", "tokens per second and GPU"),
}


@pytest.mark.parametrize("name", sampled([*PICTURES], 3))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 80_000)


def test_the_eye_for_overlaps_sees_one():
    figure, axes = plt.subplots()
    axes.text(0.5, 0.5, "one")
    axes.text(0.5, 0.51, "other")
    assert overlapping_texts(figure) == [("one", "other")]
    plt.close(figure)
