"""Pictures of one GPU and of precision: squares are counted, formats are torch's, shares are what torch makes."""

from collections import Counter

import pytest
import torch

from course_lib.float_formats import FORMATS
from course_lib.plots import precision, tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
          "fp8 e5m2": torch.float8_e5m2, "fp8 e4m3": torch.float8_e4m3fn}  # fmt: skip


def test_every_kind_has_as_many_squares_as_it_has_numbers(shown):
    kinds = {"parameters": 40, "gradients": 40, "optimizer": 13}
    tiles.show_squares(kinds, "one square: 4 bytes", "Kinds")
    places = [(*box.get_facecolor(), box.get_xy()) for box in shown[0].axes[0].patches]
    assert len(places) == len(set(places)) == 93
    assert sorted(Counter(place[:4] for place in places).values()) == [13, 40, 40]
    assert [text.get_text() for text in shown[0].axes[0].texts] == ["40", "40", "13"]
    with pytest.raises(ValueError, match="have no colour"):
        tiles.show_squares({"weights": 3}, "c", "t")


@pytest.mark.parametrize("name", DTYPES)
def test_formats_agree_with_torch(name):
    fmt, info = FORMATS[name], torch.finfo(DTYPES[name])
    assert (fmt.bits, fmt.largest, fmt.smallest_normal) == (info.bits, info.max, info.smallest_normal)
    assert fmt.epsilon == info.eps


def test_panels_count_what_torch_makes_of_gradients():
    gradients = 10 ** torch.linspace(-12, 6, 10_000)
    (panel,) = precision.magnitude_panels({"all": gradients}, FORMATS["fp16"])
    assert panel.lost == pytest.approx((gradients.half() == 0).double().mean().item(), abs=1e-12)
    assert sum(panel.shares.values()) == pytest.approx(1)
    below = (gradients.double() < torch.finfo(torch.float16).smallest_normal).double().mean().item()
    assert panel.subnormal == pytest.approx(below - panel.lost)
    assert panel.largest == gradients.double().max().item()
