"""The explorer of experts: load, drops and bytes are those of the routing, and its wiring."""

import matplotlib.pyplot as plt
import pytest
from widget_tree import control, shown, texts

from course_lib.layout.experts import ExpertLayout
from course_lib.model.moe import capacity_of
from course_lib.model.synthetic_routing import synthetic_routing
from course_lib.traffic.routing import counts_of, moe_traffic
from course_lib.widgets import expert_explorer
from course_lib.widgets.experts import DROPLESS, ExpertChoice, experts_png, explore_experts

SMALL = {"num_experts": 8, "top_k": 2, "ep_size": 4, "num_nodes": 2, "tokens_per_rank": 64, "d_model": 512}


def test_without_a_capacity_every_choice_is_computed_and_sent():
    view = explore_experts(ExpertChoice(**SMALL))
    layout = ExpertLayout(8, 4, 2)
    routing = synthetic_routing(layout, 64, 2, 0.5)
    assert sum(view.load.kept) == 4 * 64 * 2 and view.load.drop_rate == 0 and view.load.capacity is None
    assert view.load.kept == [sum(column) for column in zip(*counts_of(routing, 8), strict=True)]
    assert view.traffic == moe_traffic(routing, layout, 512) and "dropped" not in view.text


def test_a_capacity_drops_what_the_arithmetic_says_and_less_is_sent():
    view = explore_experts(ExpertChoice(**SMALL, capacity_factor=1.0, skew=1.0))
    routing = synthetic_routing(ExpertLayout(8, 4, 2), 64, 2, 1.0)
    room = capacity_of(64, 2, 8, 1.0)
    assert sum(view.load.dropped) == sum(max(0, count - room) for row in counts_of(routing, 8) for count in row) > 0
    assert view.load.capacity == 4 * room and max(view.load.kept) <= 4 * room
    assert f"{100 * view.load.drop_rate:.1f} % of the assignments are dropped" in view.text
    whole = explore_experts(ExpertChoice(**SMALL, skew=1.0))
    assert sum(view.dispatch.between_bytes) < sum(whole.dispatch.between_bytes)
    assert sum(view.traffic.sent_bytes(rank) for rank in range(4)) < sum(whole.traffic.sent_bytes(r) for r in range(4))


@pytest.mark.parametrize("method", ["plain", "once_per_rank", "once_per_node", "padded"])
def test_the_matrix_adds_up_to_what_is_dispatched(method):
    capacity = 1.0 if method == "padded" else DROPLESS
    view = explore_experts(ExpertChoice(**SMALL, method=method, capacity_factor=capacity))
    assert view.dispatch.within_bytes == [sent.within_bytes for sent in view.traffic.dispatch]
    assert view.dispatch.between_bytes == [sent.between_bytes for sent in view.traffic.dispatch]


def test_a_limit_of_nodes_and_sending_once_a_node_save_bytes_between_nodes():
    wide = {"num_experts": 64, "top_k": 8, "ep_size": 8, "num_nodes": 4, "tokens_per_rank": 32}
    free, once = (explore_experts(ExpertChoice(**wide, method=m)) for m in ("plain", "once_per_node"))
    limited = explore_experts(ExpertChoice(**wide, method="once_per_node", max_nodes=2))
    between = [sum(view.dispatch.between_bytes) for view in (free, once, limited)]
    assert between[0] > between[1] > between[2] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nodes": 8}, "choose nodes from 1, 2, 4"),
        ({"ep_size": 16, "num_nodes": 2}, "choose ep from 1, 2, 4, 8"),
        ({"top_k": 9}, "choose 1 to 8"),
        ({"top_k": 6, "max_nodes": 1}, "choose 1 to 4"),
        ({"method": "padded"}, "needs a capacity"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"tokens_per_rank": 2**20}, "choose at most 65536 tokens"),
    ],
)
def test_what_cannot_be_is_explained(changes, said):
    with pytest.raises(ValueError, match=said):
        explore_experts(ExpertChoice(**(SMALL | changes)))


@pytest.mark.slow
def test_one_rank_alone_sends_nothing_and_has_no_matrix():
    alone, four = explore_experts(ExpertChoice(**(SMALL | {"ep_size": 1, "num_nodes": 1}))), ExpertChoice(**SMALL)
    assert "One rank alone sends nothing." in alone.text and alone.traffic.sent_bytes(0) == 0
    height = lambda png: int.from_bytes(png[20:24], "big")  # noqa: E731
    assert height(experts_png(alone)) < height(experts_png(explore_experts(four)))


@pytest.mark.slow
def test_a_slider_replaces_the_picture_and_an_impossible_choice_is_told():
    box = expert_explorer(ExpertChoice(**SMALL))
    before, said = shown(box), texts(box)
    control(box, "capacity").value = 0.5
    assert len(before) == len(shown(box)) == 1 and shown(box) != before and texts(box) != said
    control(box, "ranks (ep)").value = 16
    assert "Not possible" in texts(box) and "choose ep from" in texts(box) and shown(box) == []
    control(box, "experts").value = 16
    assert "Not possible" not in texts(box) and len(shown(box)) == 1 and plt.get_fignums() == []
