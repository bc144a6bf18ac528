"""Pictures of experts as concepts: what they draw adds up, and is what the lessons compute."""

import matplotlib.pyplot as plt
import pytest

from course_lib.hardware import gpu
from course_lib.layout.experts import ExpertLayout
from course_lib.plots import expert_concepts, expert_ranks
from course_lib.plots.expert_concepts import ExpertKind, finer, grouped_share_of_peak, sorted_rows
from course_lib.plots.expert_ranks import owners, stages_of_rows, travelling_rows

CHOSEN = [[[0, 2], [1, 3]], [[0, 1], [2, 0]]]


@pytest.mark.parametrize(("parts", "num_shared"), [(1, 0), (4, 0), (4, 1), (2, 4)])
def test_finer_and_shared_experts_store_and_use_the_same_width(parts, num_shared):
    coarse = ExpertKind(16, 2, 0, 1.0)
    kind = finer(coarse, parts, num_shared)
    assert (kind.stored, kind.used) == (coarse.stored, coarse.used)
    with pytest.raises(ValueError, match="choose 0 to 8"):
        finer(coarse, 4, 9)


def test_rows_are_sorted_by_expert_in_the_order_of_tokens():
    picture = sorted_rows([[0, 1], [1, 3], [0, 2]], 4)
    assert picture.rows == [2, 2, 1, 1] and picture.order == [0, 4, 1, 2, 5, 3]
    with pytest.raises(ValueError, match="each to an expert 0 to 2"):
        sorted_rows([[0, 3]], 3)


def test_the_share_of_peak_is_that_of_memory_until_the_ridge():
    h100 = gpu("h100")
    few, many = (grouped_share_of_peak(rows, 7168, 2048, h100) for rows in (1, 4096))
    assert few == pytest.approx(h100.memory_bytes_per_s / h100.bf16_flops, rel=0.01) and many == 1


def test_rows_go_to_their_experts_and_return_to_their_tokens():
    layout = ExpertLayout(4, 2)
    tokens, rows, arrived, by_expert, returned, summed = stages_of_rows(CHOSEN, layout)
    assert tokens == summed == [[("a", 0), ("b", 0)], [("c", 1), ("d", 1)]] and rows == returned
    assert [text for text, _ in arrived[0]] == ["a0", "b1", "c0", "d0", "c1"]
    assert [text for text, _ in by_expert[0]] == ["a0", "c0", "d0", "b1", "c1"]
    assert sum(row.home != row.away for row in travelling_rows(CHOSEN, layout)) == 5
    with pytest.raises(ValueError, match="each of 4 ranks"):
        travelling_rows(CHOSEN, ExpertLayout(4, 4))


def test_experts_are_on_one_rank_and_the_rest_on_all():
    parts = dict(owners(8, 4))
    assert parts["router"] == [0, 1, 2, 3] and parts["expert\n5"] == [2]


def test_every_picture_is_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf().axes[0].get_title(loc="left")))
    expert_concepts.show_dense_and_experts()
    expert_concepts.show_expert_kinds({"coarse": ExpertKind(16, 2, 0, 1.0)})
    expert_concepts.show_sorted_rows([[0, 1], [1, 3], [0, 2]], 4)
    expert_concepts.show_rows_per_expert({"one": 128, "EP": 8192}, 7168, 2048, gpu("h100"))
    expert_ranks.show_travelling_rows(CHOSEN, ExpertLayout(4, 2))
    expert_ranks.show_gradient_path(False)
    expert_ranks.show_owners()
    expert_ranks.show_two_cuts()
    assert len(drawn) == 8 and drawn[2] == "3 tokens, 6 rows, 4 calls of an expert: one for each"
    assert drawn[4] == "5 of 8 rows leave their rank, and come back"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: expert_concepts.show_dense_and_experts(8, 9), "choose at most all"),
        (lambda: expert_concepts.show_expert_kinds({}), "give at least one"),
        (lambda: expert_concepts.show_sorted_rows([[0]] * 9, 1), "the picture has room for 8 and 32"),
        (lambda: expert_concepts.show_rows_per_expert({}, 8, 8, gpu("h100")), "at least 1 row"),
        (lambda: expert_ranks.show_travelling_rows([[[0]] * 13], ExpertLayout(1, 1)), "the picture has room for 12"),
        (lambda: expert_ranks.show_two_cuts(32, 4), "room for 16 and 8"),
        (lambda: expert_ranks.show_owners(32, 4), "room for 16 experts"),
    ],
)
def test_what_has_no_room_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
