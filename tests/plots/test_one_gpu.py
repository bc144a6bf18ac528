"""Pictures of one GPU, of precision and of fine-tuning: areas and widths are true to what they stand for."""

from itertools import pairwise

import pytest
import torch
from course_lib.minimal.passes import PASS_CONFIG

from course_lib.config import preset
from course_lib.memory.activations import block_terms
from course_lib.memory.states import RECIPES
from course_lib.minimal.memory import block_saved_bytes
from course_lib.panels.precision import FORMATS
from course_lib.plots import precision, single_gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
          "fp8 e5m2": torch.float8_e5m2, "fp8 e4m3": torch.float8_e4m3fn}  # fmt: skip


def test_every_kind_has_as_many_squares_as_it_has_numbers(shown):
    kinds = {"parameters": 40, "gradients": 40, "optimizer": 13}
    single_gpu.show_squares(kinds, "one square: 4 bytes", "Kinds")
    places = [(*box.get_facecolor(), box.get_xy()) for box in shown[0].axes[0].patches]
    assert len(places) == len(set(places)) == 93
    assert sorted(map(len, ([p for p in places if p[:4] == color] for color in {p[:4] for p in places}))) == [
        13,
        40,
        40,
    ]
    assert [text.get_text() for text in shown[0].axes[0].texts] == ["40", "40", "13"]
    with pytest.raises(ValueError, match="have no colour"):
        single_gpu.show_squares({"weights": 3}, "c", "t")


@pytest.mark.parametrize("name", ["toy", "llama-3.1-8b", "llama-3.1-70b"])
def test_edges_of_a_block_are_what_it_saves(name):
    config = preset(name)
    statistics = 4 * (config.num_heads + 2)  # one FP32 number per norm and per head
    elements = sum(elements for _, elements, *_ in single_gpu.block_edges(config))
    assert 2 * elements + statistics == sum(block_saved_bytes(config, 2).values())


def test_each_counter_sees_what_the_one_before_sees_and_more():
    counts = list(single_gpu.COUNTERS.values())
    assert counts == sorted(set(counts)) and counts[-1] == len(single_gpu.LAYERS)


def test_the_graph_has_the_tensors_of_a_block_as_wide_as_their_bytes():
    tensors = single_gpu.saved_tensors(PASS_CONFIG, 1024, 256)
    assert sum(tensor.nbytes for tensor in tensors) == 1024 * sum(block_terms(PASS_CONFIG, 256, "standard").values())
    assert all(tensor.width == tensor.nbytes / tensors[0].nbytes for tensor in tensors)
    assert all(b.left - (a.left + a.width) == pytest.approx(single_gpu.STEP) for a, b in pairwise(tensors))
    dropped = {
        mode: {t.name for t, kept in zip(tensors, single_gpu.kept_names(mode, tensors), strict=True) if not kept}
        for mode in ("none", "selective", "full")
    }
    assert dropped["none"] == set() and dropped["selective"] == {"attention\nweights"}
    assert dropped["full"] == {tensor.name for tensor in tensors[1:]}


def test_tiles_run_row_by_row_up_to_the_diagonal():
    assert single_gpu.turns() == [[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]]


@pytest.mark.parametrize("name", DTYPES)
def test_formats_agree_with_torch(name):
    fmt, info = FORMATS[name], torch.finfo(DTYPES[name])
    assert (fmt.bits, fmt.largest, fmt.smallest_normal) == (info.bits, info.max, info.smallest_normal)
    assert fmt.epsilon == info.eps and len(precision.format_bits(fmt)) == info.bits
    assert precision.format_bits(fmt).count("mantissa") == fmt.mantissa_bits


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_ticks_are_all_numbers_that_torch_has_there(name):
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[name]).double()
    inside = every[(every >= 0.98) & (every <= 1.03)]
    assert precision.numbers_between(FORMATS[name], 0.98, 1.03) == sorted(inside.tolist())
    with pytest.raises(ValueError, match="low below high"):
        precision.numbers_between(FORMATS[name], 2.0, 1.0)


def test_panels_count_what_torch_makes_of_gradients():
    gradients = 10 ** torch.linspace(-12, 6, 10_000)
    (panel,) = precision.magnitude_panels({"all": gradients}, FORMATS["fp16"])
    assert panel.lost == pytest.approx((gradients.half() == 0).double().mean().item(), abs=1e-12)
    assert sum(panel.shares.values()) == pytest.approx(1)
    below = (gradients.double() < torch.finfo(torch.float16).smallest_normal).double().mean().item()
    assert panel.subnormal == pytest.approx(below - panel.lost)
    assert panel.largest == gradients.double().max().item()


def test_widths_of_a_step_are_the_bytes_of_the_recipe():
    recipe = RECIPES["bf16-master"]
    widths = {name: width for name, (_, _, width, _, _) in precision.STEP_BOXES.items()}
    assert widths == {"parameters": recipe.param_bytes, "gradients": recipe.grad_bytes,
                      "moments": recipe.moment_bytes, "masters": recipe.master_bytes}  # fmt: skip


def test_the_product_of_the_thin_matrices_has_the_shape_of_the_frozen_one():
    (w, b, a) = precision.LORA.values()
    assert (b[0], a[1]) == w[:2] and b[1] == a[0] and [one[2] for one in (w, b, a)] == ["frozen", "trained", "trained"]


def test_every_choice_is_reached_from_the_question():
    reached = {"large"}
    for start, end in precision.STEPS:
        assert start in reached and precision.CHOICES[start][1] < precision.CHOICES[end][1]
        reached.add(end)
    assert reached == set(precision.CHOICES)
