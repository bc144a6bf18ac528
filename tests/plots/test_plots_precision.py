"""Pictures of precision: ticks are the numbers that torch has, panels count what torch rounds, widths are bytes."""

import pytest
import torch
from pictures import overlapping_texts

from course_lib.memory.states import RECIPES
from course_lib.plots import precision
from course_lib.plots.formats import FORMATS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", DTYPES)
def test_ticks_are_all_numbers_that_torch_has_there(name):
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[name]).double()
    inside = every[(every >= 0.98) & (every <= 1.03)]
    assert precision.numbers_between(FORMATS[name], 0.98, 1.03) == sorted(inside.tolist())


def test_a_range_that_no_format_has_is_refused():
    with pytest.raises(ValueError, match="low below high"):
        precision.numbers_between(FORMATS["bf16"], 2.0, 1.0)


def test_panels_count_what_torch_makes_of_gradients():
    gradients = 10 ** torch.linspace(-12, 6, 10_000)
    (panel,) = precision.magnitude_panels({"all": gradients}, FORMATS["fp16"])
    low = gradients.half()
    assert panel.lost == pytest.approx((low == 0).double().mean().item(), abs=1e-12)
    assert sum(panel.shares.values()) == pytest.approx(1)
    below = (gradients.double() < torch.finfo(torch.float16).smallest_normal).double().mean().item()
    assert panel.subnormal == pytest.approx(below - panel.lost)
    assert panel.largest == gradients.double().max().item()


def test_widths_of_a_step_are_the_bytes_of_the_recipe():
    boxes, recipe = precision.mixed_step_boxes(), RECIPES["bf16-master"]
    widths = {name: box.width for name, box in boxes.items()}
    assert widths == {
        "parameters": recipe.param_bytes,
        "gradients": recipe.grad_bytes,
        "moments": recipe.moment_bytes,
        "masters": recipe.master_bytes,
    }


def test_pictures_can_be_read(shown):
    precision.show_numbers(("bf16", "fp16"), 0.985, 1.03, 1.001)
    precision.show_magnitudes({"as they are": 10 ** torch.linspace(-9, 0, 100)}, "fp16")
    precision.show_mixed_step()
    precision.show_mixed_step(scaled=True)
    assert len(shown) == 4 and [overlapping_texts(figure) for figure in shown] == [[]] * 4
