"""Bytes of one collective: hand values, and what all ranks send together."""

import pytest

from course_lib.traffic import Call, ring_all_reduce_bytes, sent_bytes
from course_lib.traffic.collectives import collective_bytes


def test_ring_all_reduce_is_two_phases_without_one_piece_each():
    assert ring_all_reduce_bytes(40_000_000, 4) == 60_000_000  # claim C160: 2 (N - 1) / N * 40 MB
    assert ring_all_reduce_bytes(40_000_000, 64) == 78_750_000
    assert ring_all_reduce_bytes(40_000_000, 1) == 0


def test_a_reduce_scatter_and_an_all_gather_are_one_all_reduce():
    for payload, size, itemsize in ((40, 4, 4), (84, 4, 4), (6, 4, 2), (0, 3, 4)):
        for rank in range(size):
            halves = collective_bytes("reduce_scatter", payload, size, rank, itemsize)
            halves += collective_bytes("all_gather", payload, size, rank, itemsize)
            assert halves == ring_all_reduce_bytes(payload, size, rank, itemsize)


def test_ranks_together_send_whole_payloads():
    size, payload = 4, 41 * 8  # 41 numbers do not divide by 4

    for name, times in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1), ("broadcast", 1)):
        call = Call("here", name, payload, size, 8, src=2 * (name == "broadcast"))
        assert sum(sent_bytes([call], rank) for rank in range(size)) == times * (size - 1) * payload, name


def test_ranks_differ_by_a_number_or_two_where_the_payload_does_not_divide():
    # 5 numbers on 4 ranks: pieces of 2, 1, 1, 1; rank 3 sends all but piece 3, then all but piece 0
    assert [ring_all_reduce_bytes(20, 4, rank) for rank in range(4)] == [28, 32, 32, 28]


def test_payloads_of_broken_numbers_are_refused():
    with pytest.raises(ValueError, match="give the itemsize of the dtype"):
        ring_all_reduce_bytes(6, 4)


def test_C247_a_ring_of_512_ranks_sends_a_seventh_more_than_one_of_8():
    few, many = (ring_all_reduce_bytes(512_000_000, size) for size in (8, 512))
    assert few == 1.75 * 512e6 and many / few == pytest.approx(1.14, abs=0.005)
