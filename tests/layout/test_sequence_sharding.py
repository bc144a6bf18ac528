"""Sequence sharding of tokens: every token once, ranks ascending, tiles equal to the mask, bad lengths refused."""

import pytest
import torch

from course_lib.layout import SEQUENCE_SHARDINGS, check_context, tile
from course_lib.parallel.positions import order, positions

SHAPES = [(1, 8), (2, 8), (2, 16), (4, 8), (4, 48), (3, 12)]


@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_every_token_has_one_rank_and_a_ranks_tokens_ascend(sequence_sharding):
    for cp_size, seq_len in SHAPES:
        of_ranks = [positions(sequence_sharding, seq_len, cp_size, rank) for rank in range(cp_size)]
        assert all(len(mine) == seq_len // cp_size and (mine.diff() > 0).all() for mine in of_ranks)
        assert torch.equal(torch.cat(of_ranks).sort().values, torch.arange(seq_len))
        assert torch.equal(order(sequence_sharding, seq_len, cp_size), torch.cat(of_ranks))


def test_the_three_placements_of_sixteen_tokens_on_four_ranks():
    expected = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "zigzag": [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
        "striped": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    }
    for sequence_sharding, of_ranks in expected.items():
        assert [positions(sequence_sharding, 16, 4, rank).tolist() for rank in range(4)] == of_ranks


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequence_sharding", SEQUENCE_SHARDINGS)
def test_tiles_are_the_mask_to_the_pair(sequence_sharding, causal):
    for cp_size, seq_len in SHAPES:
        s = seq_len // cp_size
        for query_rank in range(cp_size):
            query_q1 = positions(sequence_sharding, seq_len, cp_size, query_rank)[:, None]
            for key_rank in range(cp_size):
                key_k = positions(sequence_sharding, seq_len, cp_size, key_rank)
                seen_qk = key_k <= query_q1 if causal else torch.ones(s, s, dtype=torch.bool)
                part = tile(sequence_sharding, s, query_rank, key_rank, causal)
                of_tile_qk = torch.zeros(s, s, dtype=torch.bool)
                if part is not None:
                    inside_qk = torch.ones_like(of_tile_qk[part.queries, part.keys])
                    of_tile_qk[part.queries, part.keys] = inside_qk.tril() if part.causal else inside_qk
                    assert part.pairs == of_tile_qk.sum()
                assert torch.equal(of_tile_qk, seen_qk), (cp_size, seq_len, query_rank, key_rank)


@pytest.mark.parametrize(
    ("seq_len", "cp_size", "sequence_sharding", "words"),
    [
        (20, 4, "zigzag", r"seq_len \(20\) must be a multiple of 2 x cp \(8\).* 16 or 24"),
        (18, 4, "contiguous", r"seq_len \(18\) must be a multiple of cp \(4\).* 16 or 20"),
        (3, 4, "striped", r"seq_len \(3\) .* nearest length is 4"),
        (0, 2, "striped", "seq_len is 0; give a whole number"),
        (16, 0, "striped", "cp_size is 0; give a whole number"),
        (16, 2, "diagonal", "sequence_sharding is 'diagonal'; choose from contiguous, zigzag, striped"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_lengths(seq_len, cp_size, sequence_sharding, words):
    with pytest.raises(ValueError, match=words):
        check_context(seq_len, cp_size, sequence_sharding)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="cp_rank is 4; a group of 4 has ranks 0 to 3"):
        positions("zigzag", 16, 4, 4)
