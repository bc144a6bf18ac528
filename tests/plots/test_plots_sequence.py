"""The records behind the pictures of sequence parallelism: who holds which tile, what a rank holds of each tensor."""

import pytest
from pictures import drawn

from course_lib.plots import sequence as plots


def test_by_tokens_a_token_is_on_one_rank_and_by_features_on_all():
    for by_tokens, ranks_of_a_token in ((True, 1), (False, 2)):
        tiles = plots.cut_tiles(by_tokens)
        assert len(tiles) == plots.NUM_TOKENS * plots.NUM_FEATURES
        for token in range(plots.NUM_TOKENS):
            assert len({tile.rank for tile in tiles if tile.token == token}) == ranks_of_a_token


def test_ranks_that_do_not_divide_the_tiles_are_refused():
    with pytest.raises(ValueError, match="num_ranks is 4; 4 tokens and 6 features need 1 or 2"):
        plots.cut_tiles(True, 4)


def test_sequence_parallelism_changes_what_is_held_outside_the_borders_alone():
    tp, sp = plots.half_block(False), plots.half_block(True)
    inside = range(plots.ENTER_AT, plots.LEAVE_AT + 1)
    for index, (before, after) in enumerate(zip(tp, sp, strict=True)):
        assert before.name == after.name
        assert (before.holding == after.holding) == (index in inside)
        if index not in inside:
            assert (before.holding, after.holding) == (plots.FULL, plots.TOKENS)


def test_what_is_sent_forward_comes_back_as_its_counterpart():
    for sequence_parallel in (False, True):
        enter, leave = plots.operators(sequence_parallel)
        assert (enter.forward, enter.backward) == (leave.backward, leave.forward)


@pytest.mark.parametrize("holding", [plots.TOKENS, plots.FEATURES])
def test_the_parts_of_all_ranks_make_the_tensor(holding):
    parts = [plots.part_of(holding, rank, 4) for rank in range(4)]
    assert sum(width * height for _, _, width, height in parts) == 1
    assert len({(left, top) for left, top, _, _ in parts}) == 4


def test_an_unknown_holding_is_refused():
    with pytest.raises(ValueError, match="choose from full, tokens, features, partial sum"):
        plots.part_of("half", 0, 2)


def test_the_pictures_name_functions_and_collectives(monkeypatch):
    texts = drawn(monkeypatch, plots.show_half_block)
    assert {"copy_in", "sum_out", "gather_in", "scatter_sum"} <= set(texts)
    assert "→ all-gather\n← reduce-scatter" in texts and "→ reduce-scatter\n← all-gather" in texts
    cuts = drawn(monkeypatch, plots.show_cuts)
    assert cuts.count("0") == cuts.count("1") == plots.NUM_TOKENS * plots.NUM_FEATURES
