"""Pictures of experts: the numbers that they draw, and that no text lies on another."""

import matplotlib
import pytest
import torch
from harness import sampled

matplotlib.use("Agg")

from pictures import look

from course_lib.layout.experts import ExpertLayout
from course_lib.model.synthetic_routing import synthetic_routing
from course_lib.plots import experts, routing
from course_lib.traffic.routing import counts_of, moe_traffic, plain_rows

LAYOUT = ExpertLayout(8, 4, 2)
ROUTING = synthetic_routing(LAYOUT, 64, 2, skew=0.5)


# ---------------------------------------------------------------- load


def test_a_load_is_what_is_computed_and_what_is_dropped():
    picture = experts.load_picture([10, 30, 20, 0], capacity=20)
    assert picture.kept == [10, 20, 20, 0] and picture.dropped == [0, 10, 0, 0]
    assert (picture.mean, picture.drop_rate) == (15, 10 / 60) and picture.largest == pytest.approx(20 / 15)
    assert experts.load_title(picture).endswith("1.33 times the mean load; 16.7 % of all assignments are dropped")
    free = experts.load_picture([10, 30, 20, 0])
    assert free.largest == 2 and free.drop_rate == 0 and "dropped" not in experts.load_title(free)
    own = experts.load_picture([10, 30], capacity=30, dropped=[4, 1])  # ranks have capacities of their own
    assert own.kept == [6, 29]


def test_an_impossible_load_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        experts.load_picture([0, 0])
    with pytest.raises(ValueError, match="none above its load"):
        experts.load_picture([1, 5], dropped=[2, 0])


# ---------------------------------------------------------------- load while training


def test_balance_is_load_over_mean_and_judged_at_the_end():
    picture = experts.balance_picture([[3, 1], [2, 2], [1, 3], [4, 0]])
    assert picture.relative == [[1.5, 1.0, 0.5, 2.0], [0.5, 1.0, 1.5, 0.0]]
    assert (picture.largest_at_end, picture.last_steps) == (2.0, 1)  # the last quarter
    with pytest.raises(ValueError, match="some load in each"):
        experts.balance_picture([[1, 2], [0, 0]])


def test_the_share_of_active_parameters_is_the_title():
    said = experts.parameters_title({"dense": (8e9, 8e9), "Mixtral 8x7B": (46.7e9, 12.9e9), "V3": (671e9, 37.6e9)})
    assert said == "A token passes through 27.6 % of Mixtral 8x7B and 5.6 % of V3"
    assert experts.parameters_title({"dense": (8e9, 8e9)}).endswith("every parameter")


# ---------------------------------------------------------------- who sends what to whom


def test_the_matrix_has_the_bytes_that_the_traffic_counts():
    rows = plain_rows(counts_of(ROUTING, 8), LAYOUT)
    picture = routing.traffic_picture(rows, 2 * 256, 2)
    dispatch = moe_traffic(ROUTING, LAYOUT, 256).dispatch
    assert picture.within_bytes == [sent.within_bytes for sent in dispatch]
    assert picture.between_bytes == [sent.between_bytes for sent in dispatch]
    assert all(picture.bytes_sent[rank][rank] == 0 for rank in range(4))
    assert [picture.link(0, dst) for dst in range(4)] == ["home", "within", "between", "between"]
    alone = routing.traffic_picture([[5]], 2)
    assert routing.traffic_title(alone) == "Nothing is sent: every row stays on its rank"
    assert routing.traffic_title(routing.traffic_picture([[0, 3], [1, 0]], 2, 1)) == (
        "8.00 B sent by all ranks, 100 % of it between nodes"
    )
    assert routing.traffic_title(routing.traffic_picture([[0, 3], [1, 0]], 2)) == "8.00 B sent by all ranks"
    with pytest.raises(ValueError, match="square table"):
        routing.traffic_picture([[1, 2]], 2)


# ---------------------------------------------------------------- every picture can be drawn, and read

LOAD = torch.tensor(counts_of(ROUTING, 8)).sum(0).tolist()
MANY = ExpertLayout(128, 32, 8)
MANY_ROUTING = synthetic_routing(MANY, 64, 4, skew=0.5)
UNEVEN = [[100 + step * (expert - 3.5) for expert in range(8)] for step in range(24)]
PICTURES = {
    "load": lambda: experts.show_load(LOAD, experts_per_rank=2),
    "load, capacity at the mean": lambda: experts.show_load(LOAD, 64),
    "load of 128": lambda: experts.show_load(torch.tensor(counts_of(MANY_ROUTING, 128)).sum(0).tolist(), 80),
    "balance": lambda: experts.show_balance({"no balancing": UNEVEN, "auxiliary loss": [[1] * 8] * 9, "bias": UNEVEN}),
    "parameters": lambda: experts.show_parameters({"dense": (8e9, 8e9), "DeepSeek-V3": (671e9, 37.6e9)}),
    "traffic": lambda: routing.show_traffic(plain_rows(counts_of(ROUTING, 8), LAYOUT), 8192, 2),
    "traffic of 32": lambda: routing.show_traffic(plain_rows(counts_of(MANY_ROUTING, 128), MANY), 8192, 8),
    "traffic of one node": lambda: routing.show_traffic(plain_rows(counts_of(ROUTING, 8), LAYOUT), 8192),
    "routes": lambda: routing.show_routes([[[0, 1], [1, 3]]], ExpertLayout(4), [[[0.6, 0.4], [0.9, 0.1]]], "t"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*PICTURES], 4))
def test_a_picture_is_shown_once_with_no_text_on_another(name, monkeypatch):
    look(PICTURES[name], monkeypatch, 100_000)
