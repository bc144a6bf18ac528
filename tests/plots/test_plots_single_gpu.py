"""Pictures of one GPU: areas and widths are true to bytes, and no text lies on another."""

from collections import Counter

import matplotlib
import pytest

matplotlib.use("Agg")

from pictures import look

from course_lib.config import preset
from course_lib.minimal.memory import block_saved_bytes
from course_lib.plots import single_gpu

ROWS = {"fp32": {"parameters": 4, "gradients": 4, "optimizer": 8}, "mixed": {"parameters": 2, "optimizer": 13}}


def test_every_kind_has_as_many_squares_as_it_has_units_and_none_lies_on_another():
    drawn = single_gpu.squares(ROWS, height=2)
    assert Counter((one.row, one.kind) for one in drawn) == {
        (row, kind): count for row, counts in ROWS.items() for kind, count in counts.items()
    }
    assert len({(one.row, one.x, one.y) for one in drawn}) == len(drawn)
    assert max(one.y for one in drawn) == 1


def test_a_kind_without_a_colour_is_refused():
    with pytest.raises(ValueError, match="have no colour"):
        single_gpu.squares({"": {"weights": 3}})


@pytest.mark.parametrize("name", ["toy", "llama-3.1-8b", "llama-3.1-70b"])
def test_edges_of_a_block_are_what_it_saves_and_as_thick_as_their_bytes(name):
    config = preset(name)
    edges = single_gpu.block_edges(config)
    statistics = 4 * (config.num_heads + 2)  # one FP32 number per norm and per head
    assert 2 * sum(edge.elements for edge in edges) + statistics == sum(block_saved_bytes(config, 2).values())
    points = single_gpu.edge_points(edges)
    assert max(points) == 20
    for edge, width in zip(edges, points, strict=True):
        assert width / edge.elements == pytest.approx(points[0] / edges[0].elements)


def test_each_counter_sees_what_the_one_before_sees_and_more():
    shares = list(single_gpu.counted_shares().values())
    assert shares == sorted(set(shares)) and shares[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda: single_gpu.show_squares(ROWS, "one square: 1 byte", "One parameter"),
        lambda: single_gpu.show_squares({"": {"parameters": 40, "activations": 24}}, "4 bytes", "Kinds", height=8),
        lambda: single_gpu.show_block(preset("llama-3.1-8b")),
        lambda: single_gpu.show_counters(),
    ],
    ids=["bytes", "elements", "block", "counters"],
)
def test_pictures_are_drawn_and_no_text_lies_on_another(draw, monkeypatch):
    look(draw, monkeypatch, 90_000)
