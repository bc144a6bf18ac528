"""Pictures of recomputation and of FlashAttention's tiles: the numbers that they draw; no text lies on another."""

from itertools import pairwise

import matplotlib
import pytest

matplotlib.use("Agg")

from pictures import look

from course_lib.config import preset
from course_lib.memory.activations import block_terms
from course_lib.minimal.passes import PASS_CONFIG
from course_lib.plots import flash, recompute


def test_the_tensors_of_the_graph_are_what_a_block_saves():
    tensors = recompute.saved_tensors(PASS_CONFIG, 1024, 256)
    assert sum(tensor.nbytes for tensor in tensors) == 1024 * sum(block_terms(PASS_CONFIG, 256, "standard").values())


def test_each_mode_keeps_what_the_formula_says():
    tensors = recompute.saved_tensors(PASS_CONFIG, 1024, 256)
    kept = {
        mode: [t.name for t, keep in zip(tensors, recompute.kept_names(mode, tensors), strict=True) if keep]
        for mode in ("none", "selective", "full")
    }
    assert len(kept["none"]) == len(tensors) and kept["full"] == ["input"]
    assert set(kept["none"]) - set(kept["selective"]) == {"attention\nweights"}


def test_widths_are_true_to_bytes_and_boxes_do_not_touch():
    tensors = recompute.saved_tensors(PASS_CONFIG, 1024, 256)
    boxes = recompute.graph_boxes("full", tensors)
    for box, tensor in zip(boxes, tensors, strict=True):
        assert box.width == tensor.nbytes / tensors[0].nbytes
    assert all(b.left - (a.left + a.width) == pytest.approx(recompute.STEP) for a, b in pairwise(boxes))


def test_tiles_run_row_by_row_up_to_the_diagonal():
    tiles = flash.flash_tiles(3, now=4)
    turns = {(tile.query_block, tile.key_block): tile.turn for tile in tiles}
    assert turns == {(0, 0): 1, (0, 1): 0, (0, 2): 0, (1, 0): 2, (1, 1): 3, (1, 2): 0, (2, 0): 4, (2, 1): 5, (2, 2): 6}
    assert [t.state for t in tiles if t.turn in (3, 4, 5)] == [flash.DONE, flash.NOW, flash.TO_COME]
    assert all((tile.state == flash.SKIPPED) == (tile.key_block > tile.query_block) for tile in tiles)


def test_what_has_no_room_or_no_meaning_is_refused():
    with pytest.raises(ValueError, match="3 blocks have tiles 1 to 6"):
        flash.flash_tiles(3, now=7)
    with pytest.raises(ValueError, match="give at most 32 tokens"):
        flash.show_tiles(8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [lambda: recompute.show_graph(PASS_CONFIG, 1024, 256), flash.show_tiles])
def test_pictures_are_readable(draw, monkeypatch):
    look(draw, monkeypatch, 60_000)


def test_the_graph_of_a_large_model_has_room_for_its_names(monkeypatch):
    look(lambda: recompute.show_graph(preset("llama-3.1-8b"), 4096, 4096), monkeypatch, 60_000)
