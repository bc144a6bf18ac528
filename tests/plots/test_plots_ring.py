"""Pictures of the first lesson: collectives as tiles, the ring as a ring, a node with its wires."""

import pytest
from pictures import look

from course_lib.hardware import GPUS, LINKS, Cluster
from course_lib.plots import collectives, node, ring

POWERS = [[10.0**rank] * 4 for rank in range(4)]
H100 = Cluster(GPUS["h100"], LINKS["nvlink4"], LINKS["efa"])
TILES = [{"all-gather": ([1], [1, 2]), "gather": ([1], [1, 2])}, {"all-gather": ([2], [1, 2]), "gather": ([2], None)}]


def test_the_tiles_of_a_collective_know_where_each_value_came_from():
    before, after = collectives.collective_pairs(TILES)["all-gather"]
    assert [(cell.rank, cell.value) for cell in before] == [(0, 1), (1, 2)]
    assert [cell.origin for cell in after] == [0, 1, 0, 1]
    assert {cell.rank for cell in collectives.collective_pairs(TILES)["gather"][1]} == {0}
    with pytest.raises(ValueError, match="give every rank the same names"):
        collectives.collective_pairs([TILES[0], {"gather": ([2], None)}])


def test_each_rank_sends_the_piece_to_which_it_added_last():
    start, before_gather, end = ring.ring_views(POWERS, [0, 3, 6])
    assert start.sends == [3, 0, 1, 2]  # rank r sends piece r - 1 first
    assert before_gather.sends == [0, 1, 2, 3]
    assert [before_gather.values[rank][rank] for rank in range(4)] == [1111] * 4
    assert end.sends == [None] * 4 and end.values == [[1111] * 4] * 4
    with pytest.raises(ValueError, match="numbers of steps from 0 to 6"):
        ring.ring_views(POWERS, [7])


def test_the_right_neighbour_is_the_next_clockwise():
    assert ring.place_on_circle(0) == pytest.approx((0, ring.RADIUS))
    assert ring.place_on_circle(0.25) == pytest.approx((ring.RADIUS, 0))


def test_wires_are_as_wide_as_their_bytes_per_second():
    wires = node.wires_of_node(H100, LINKS["pcie5"])
    assert [wire.bytes_per_s / 1e9 for wire in wires] == [450, 63, 63, 50]
    assert all(wire.width / wires[0].width == pytest.approx(wire.bytes_per_s / 450e9) for wire in wires)


@pytest.mark.slow
@pytest.mark.parametrize(
    "show",
    [
        lambda: collectives.show_collectives(TILES, "t"),
        lambda: ring.show_ring(POWERS, [0, 3], "t"),
        lambda: node.show_node(H100, LINKS["pcie5"], "t"),
    ],
    ids=["tiles", "ring", "node"],
)
def test_a_picture_is_shown_once_without_text_on_text_and_closed(show, monkeypatch):
    look(show, monkeypatch, max_bytes=90_000)
