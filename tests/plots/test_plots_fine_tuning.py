"""Pictures of fine-tuning: areas are elements, every choice is reached, and no text lies on another."""

import pytest
import torch
from pictures import overlapping_texts

from course_lib.minimal.quantize import dynamic_code, normal_code
from course_lib.plots import fine_tuning


def test_areas_are_the_elements_of_the_matrices_and_the_product_has_the_shape_of_w():
    w, b, a = fine_tuning.lora_boxes(d_out=48, d_in=64, rank=4)
    assert [box.rows * box.columns for box in (w, b, a)] == [48 * 64, 48 * 4, 4 * 64]
    assert (b.rows, a.columns) == (w.rows, w.columns) and b.columns == a.rows == 4
    assert [box.trained for box in (w, b, a)] == [False, True, True]
    assert w.x + w.columns < b.x and b.x + b.columns < a.x


def test_every_choice_is_reached_from_the_question():
    reached = {"large"}
    for start, end in fine_tuning.STEPS:
        assert start in reached and fine_tuning.CHOICES[start].x < fine_tuning.CHOICES[end].x
        reached.add(end)
    assert reached == set(fine_tuning.CHOICES)


@pytest.mark.slow
def test_pictures_can_be_read(shown):
    fine_tuning.show_lora()
    fine_tuning.show_codes({"dynamic": dynamic_code().tolist(), "NF4": normal_code().tolist()})
    numbers = torch.linspace(-1, 2, 12).tolist()
    fine_tuning.show_blocks(numbers, {"one scale": [0.0] * 12, "blocks": numbers}, block_size=4)
    fine_tuning.show_choices()
    assert [overlapping_texts(figure) for figure in shown] == [[]] * 4
