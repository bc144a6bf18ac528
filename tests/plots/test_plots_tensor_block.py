"""Pictures of tensor parallelism: where f and g stand, what they send, and the numbers of a loss from parts."""

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F

from course_lib.plots import tensor_block
from course_lib.plots.tensor_block import block_regions_and_borders, loss_columns


@pytest.mark.parametrize(("direction", "sending"), [("forward", "g"), ("backward", "f")])
def test_a_block_has_two_all_reduces_in_each_direction(direction, sending):
    regions, borders = block_regions_and_borders(direction)
    assert [border.name for border in borders] == ["f", "g", "f", "g"]
    assert [border.sends for border in borders] == ["all-reduce" if b.name == sending else "" for b in borders]
    assert [region.is_cut for region in regions] == [False, True, True, True, False, True, True, True, False]
    for f, g in (borders[:2], borders[2:]):  # all that is cut lies between f and g
        inside = [region for region in regions if f.at < region.left < g.at]
        assert len(inside) == 3 and all(region.is_cut for region in inside)


def test_an_unknown_direction_is_refused():
    with pytest.raises(ValueError, match="choose forward or backward"):
        block_regions_and_borders("sideways")


@pytest.mark.parametrize(("logits", "target", "tp_size"), [([1.0, 2, 4, 1], 3, 2), ([900.0, -3, 5, 7, 899.5, 0], 4, 3)])
def test_the_three_quantities_give_the_cross_entropy(logits, target, tp_size):
    columns, loss = loss_columns(logits, target, tp_size)
    assert loss == pytest.approx(F.cross_entropy(torch.tensor(logits), torch.tensor(target)).item())
    largest, exponentials, of_target = columns
    assert largest.result == max(largest.of_ranks) == max(logits)
    assert exponentials.result == pytest.approx(sum(exponentials.of_ranks))
    assert sum(value != 0 for value in of_target.of_ranks) == 1


def test_a_target_outside_and_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="choose 0 to 3"):
        loss_columns([1.0, 2, 4, 1], 4, 2)
    with pytest.raises(ValueError, match="leave a rank of 4 with none"):
        loss_columns([1.0, 2.0], 0, 4)
    with pytest.raises(ValueError, match="room for 4"):
        tensor_block.show_f_and_g(5)


@pytest.mark.parametrize(
    "show", [tensor_block.show_f_and_g, lambda: tensor_block.show_vocab_loss([1.0, 2, 4, 1], 3, 2)]
)
def test_both_pictures_name_their_all_reduces(show, shown):
    show()
    texts = [text.get_text() for axes in shown[0].axes for text in axes.texts]
    assert any("all-reduce" in text for text in texts)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_residuals_pass_f_and_g_by_and_end_at_the_sums_forward(direction):
    figure, axes = plt.subplots()
    tensor_block.draw_block(axes, direction)
    sums = [region.left for region in block_regions_and_borders(direction)[0] if "+" in region.name]
    tops = [text.xy for text in axes.texts if hasattr(text, "xy") and text.xy[1] == 2]  # arrows onto the upper lane
    assert [text.get_text() for text in axes.texts].count("residual") == len(tops) == 2
    at_sums = [any(left < x < left + 0.4 for left in sums) for x, _ in tops]
    assert at_sums == [direction == "forward"] * 2
    plt.close(figure)
