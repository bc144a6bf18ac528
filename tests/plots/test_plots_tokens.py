"""Pictures of tokens on ranks: the numbers that they draw, and that no text lies on another."""

import matplotlib
import pytest

matplotlib.use("Agg")

from pictures import look

from course_lib.layout.block_pairs import pairs, pairs_of_ranks
from course_lib.plots import tokens

DOCUMENTS = [8, 12, 4]
WHOLE = [[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23], [*range(6, 18)]]


def test_a_merged_output_has_the_area_of_its_parts():
    assert tokens.merged_part([12, 30], [2, 6]) == tokens.Part(25.5, 8)
    with pytest.raises(ValueError, match="got 2 outputs and 1 weights"):
        tokens.merged_part([1, 2], [1])


def test_a_share_is_added_at_every_rank_but_the_owner():
    table = tokens.shares_on_the_way(4)
    assert [table[rank][rank] for rank in range(4)] == [0, 1, 2, 3]
    assert sum(shares is not None for row in table for shares in row) == 4


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_bars_of_a_rank_are_the_pairs_that_are_counted_elsewhere(sharding):
    of_tokens = tokens.owners(sharding, 16, 4)
    sums = [sum(place + 1 for place, rank in enumerate(of_tokens) if rank == mine) for mine in range(4)]
    assert sums == pairs_of_ranks(pairs(sharding, 16, 4))


def test_before_a_rank_has_columns_and_after_it_has_rows():
    before, after = tokens.head_token_owners(2, 4, 6)
    assert before == [[0, 0, 0, 1, 1, 1]] * 4
    assert after == [[0] * 6] * 2 + [[1] * 6] * 2
    with pytest.raises(ValueError, match="both must be multiples of cp_size"):
        tokens.head_token_owners(4, 6, 16)


def test_documents_do_not_see_each_other():
    cells = tokens.document_cells(DOCUMENTS, WHOLE)
    assert sum(of is not None for row in cells for of in row) == 36 + 78 + 10
    assert cells[8][7] is None and cells[8][8] == 1
    assert tokens.document_pairs(DOCUMENTS, WHOLE) == [54, 70]
    with pytest.raises(ValueError, match="where has 12 tokens; give a rank to each of the 24"):
        tokens.document_cells(DOCUMENTS, WHOLE[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "show",
    [
        lambda: tokens.show_cut(4),
        lambda: tokens.show_merge([12, 30], [2, 6]),
        lambda: tokens.show_gradient_ring(4),
        lambda: tokens.show_chunks(4, 16),
        lambda: tokens.show_heads_for_tokens(4, 8, 16),
        lambda: tokens.show_documents(DOCUMENTS, {"whole": WHOLE, "the same": WHOLE}),
    ],
)
def test_a_picture_is_shown_once_without_text_on_text_and_closed(show, monkeypatch):
    look(show, monkeypatch, max_bytes=90_000)


@pytest.mark.parametrize(
    ("show", "told"),
    [
        (lambda: tokens.show_cut(9), "the picture has room for 8 ranks"),
        (lambda: tokens.show_chunks(4, 64), "32 tokens"),
        (lambda: tokens.show_documents([], {}), "0 documents"),
    ],
)
def test_what_has_no_room_is_told_in_a_sentence(show, told):
    with pytest.raises(ValueError, match=told):
        show()
