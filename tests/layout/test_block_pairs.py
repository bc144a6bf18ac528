"""Work per rank and step: counted on the mask itself, hand values, claims by their ids."""

from itertools import pairwise

import pytest

from course_lib.hardware import PUBLISHED_RING_SHARE
from course_lib.layout import SEQUENCE_SHARDINGS
from course_lib.layout.sequence_sharding import pairs, pairs_of_ranks, share_of_ideal, step_pairs
from course_lib.parallel.positions import positions


def _counted(sequence_sharding, seq_len, cp, causal):
    """Every pair of the mask, one by one."""
    held = [positions(sequence_sharding, seq_len, cp, rank).tolist() for rank in range(cp)]
    return [
        [sum(not causal or k <= q for q in held[r] for k in held[(r - step) % cp]) for step in range(cp)]
        for r in range(cp)
    ]


@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_work_is_what_the_mask_allows_pair_by_pair(sequence_sharding):
    for seq_len, cp in ((16, 1), (12, 2), (32, 4), (18, 3), (8, 4)):
        for causal in (True, False):
            table = pairs(sequence_sharding, seq_len, cp, causal)
            assert table == _counted(sequence_sharding, seq_len, cp, causal)
            assert sum(pairs_of_ranks(table)) == (seq_len * (seq_len + 1) // 2 if causal else seq_len**2)


def test_striped_ranks_differ_by_the_diagonal_alone():
    table = pairs("striped", 64, 4)
    totals = pairs_of_ranks(table)
    assert [b - a for a, b in pairwise(totals)] == [16] * 3  # s = 16 tokens more for each rank
    assert step_pairs(table) == [16 * 17 // 2] * 4
    assert {row[step] for row in table for step in range(1, 4)} == {16 * 17 // 2, 16 * 15 // 2}


def test_a_contiguous_ring_reaches_n_over_2_n_minus_1_of_ideal():
    for cp in (2, 4, 8, 16):
        share = share_of_ideal(pairs("contiguous", 65_536, cp))
        assert share == pytest.approx(cp / (2 * cp - 1), rel=1e-3)
        assert share_of_ideal(pairs("zigzag", 65_536, cp)) == 1
        s = 65_536 // cp
        assert share_of_ideal(pairs("striped", 65_536, cp)) == pytest.approx((cp * s + 1) / (cp * (s + 1)))
    for sequence_sharding in SEQUENCE_SHARDINGS:
        assert share_of_ideal(pairs(sequence_sharding, 64, 4, causal=False)) == 1


def test_the_arithmetic_explains_the_measured_contiguous_share_and_bounds_the_others():
    """8 GPUs. They measure speed against one GPU's kernel: more than the count of pairs is in them."""
    reachable = {
        sequence_sharding: share_of_ideal(pairs(sequence_sharding, 65_536, 8))
        for sequence_sharding in SEQUENCE_SHARDINGS
    }
    for measured in PUBLISHED_RING_SHARE.values():
        assert abs(measured["contiguous"] - reachable["contiguous"]) < 0.02  # 8 / 15 = 53.3 %
        assert 0.8 < measured["striped"] < measured["zigzag"] < 0.91 < reachable["striped"] < reachable["zigzag"]


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="seq_len"):
        pairs("zigzag", 12, 4)


def test_work_that_is_even_in_all_and_uneven_at_each_step_is_slower():
    assert share_of_ideal([[3, 1], [1, 3]]) == pytest.approx(4 / 6)
