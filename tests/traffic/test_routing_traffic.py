"""Routing traffic against a count by hand, token by token; real ranks and the meter are in test_dispatch.py."""

import pytest
import torch

from course_lib.config import MoeConfig
from course_lib.layout.experts import ExpertLayout
from course_lib.model.moe import capacity, capacity_of
from course_lib.panels.synthetic_routing import synthetic_routing
from course_lib.traffic.collectives import collective_bytes
from course_lib.traffic.routing import (
    Sent,
    moe_traffic,
    once_per_node_rows,
    once_per_rank_rows,
    plain_rows,
    sent,
    way_back,
)

# 8 experts on 4 ranks, 2 nodes: rank 0 has 0 1, rank 1 has 2 3 | rank 2 has 4 5, rank 3 has 6 7
LAYOUT = ExpertLayout(8, 4, ranks_per_node=2)
BY_HAND = [
    torch.tensor([[0, 1], [2, 4], [6, 7], [4, -1]]),  # rank 0
    torch.tensor([[5, 6]]),
    torch.zeros(0, 2, dtype=torch.long),
    torch.tensor([[3, 1], [-1, -1]]),
]


def test_rows_of_a_small_routing_are_those_counted_by_hand():
    assert plain_rows(BY_HAND, ExpertLayout(8, 8)) == [
        [1, 1, 1, 0, 2, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0] * 8,
        [0, 1, 0, 1, 0, 0, 0, 0],
    ]
    assert plain_rows(BY_HAND, LAYOUT) == [[2, 1, 2, 2], [0, 0, 1, 1], [0] * 4, [1, 1, 0, 0]]
    assert once_per_rank_rows(BY_HAND, LAYOUT) == [[1, 1, 2, 1], [0, 0, 1, 1], [0] * 4, [1, 1, 0, 0]]
    across, inside = once_per_node_rows(BY_HAND, LAYOUT)
    assert across == [[2, 0, 3, 0], [0, 0, 0, 1], [0] * 4, [0, 1, 0, 0]]  # to the same place in the other node
    assert inside == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 2, 1], [0, 0, 1, 1]]


def test_bytes_are_split_by_node_and_what_stays_costs_nothing():
    rows = plain_rows(BY_HAND, LAYOUT)
    assert sent(rows, LAYOUT, 10) == [Sent(10, 40), Sent(0, 20), Sent(0, 0), Sent(0, 20)]
    assert sent(way_back(rows), LAYOUT, 10) == [Sent(0, 10), Sent(10, 10), Sent(0, 30), Sent(0, 30)]
    assert sum(each.total_bytes for each in sent(rows, ExpertLayout(8, 4), 10)) == 90
    traffic = moe_traffic(BY_HAND, LAYOUT, d_model=5, itemsize=2)
    assert traffic.dispatch == sent(rows, LAYOUT, 10) and traffic.combine == sent(way_back(rows), LAYOUT, 10)
    assert traffic.counts == [Sent(16, 32)] * 4  # two experts' counts to each of three ranks, 8 bytes each
    assert traffic.forward(0) == Sent(16 + 10 + 0, 32 + 40 + 10) and traffic.backward(0) == Sent(10, 50)


def test_beside_a_row_that_goes_once_travel_ids_and_weights_and_their_gradients_return():
    traffic = moe_traffic(BY_HAND, LAYOUT, d_model=5, method="once_per_node", itemsize=1)
    beside = 2 * 4 + 2 * 4  # two assignments: an id in 4 bytes, a weight in FP32
    assert traffic.dispatch[0] == Sent(1 * (5 + beside), 3 * (5 + beside))
    assert traffic.combine[0] == Sent(1 * 5, 0) and traffic.combine[2] == Sent(1 * 5, 3 * 5)
    assert traffic.dispatch_backward[2] == Sent(1 * (5 + 8), 3 * (5 + 8))
    assert traffic.combine_backward[0] == Sent(5, 15)
    assert traffic.counts[0] == Sent(8, 8)  # one number to the other node, one to the other rank of mine


def by_token(experts, layout, copies):
    """Rows between different ranks, counted one token after the other: copies(ranks that it goes to) from src."""
    rows = [[0] * layout.ep_size for _ in range(layout.ep_size)]
    for src, expert_Tk in enumerate(experts):
        for choices in torch.as_tensor(expert_Tk).tolist():
            for dst in copies([layout.rank_of_expert(e) for e in choices]):
                rows[src][dst] += 1
    return rows


@pytest.mark.parametrize("skew", [0.0, 1.5])
@pytest.mark.parametrize("layout", [ExpertLayout(16, 8, 2), ExpertLayout(16, 4, 4), ExpertLayout(12, 6, 1)])
def test_rows_equal_a_count_token_by_token(layout, skew):
    experts = synthetic_routing(layout, 20, 4, skew)
    assert plain_rows(experts, layout) == by_token(experts, layout, list)
    per_rank = once_per_rank_rows(experts, layout)
    assert per_rank == by_token(experts, layout, set)
    across, inside = once_per_node_rows(experts, layout)
    for src, expert_Tk in enumerate(experts):
        for node in range(layout.num_nodes):
            reached = sum(any(layout.node_of_rank(layout.rank_of_expert(e)) == node for e in row) for row in expert_Tk)
            assert across[src][layout.relay(src, node)] == reached
        assert sum(across[src]) <= sum(per_rank[src])
    assert [sum(column) for column in zip(*inside, strict=True)] == [
        sum(column) for column in zip(*per_rank, strict=True)
    ]
    assert all(
        layout.node_of_rank(s) == layout.node_of_rank(d)
        for s in range(len(inside))
        for d in range(len(inside))
        if inside[s][d]
    )


def test_padding_sends_the_capacity_whatever_the_routing():
    layout = ExpertLayout(8, 4)
    even = moe_traffic(BY_HAND, layout, 16, "padded", itemsize=4, capacity=3)
    expected = collective_bytes("all_to_all", 3 * 8 * 16 * 4, 4)
    assert [each.total_bytes for each in even.dispatch] == [expected] * 4
    assert even.counts == [Sent()] * 4 and even.sent_bytes(1) == 4 * expected


def test_capacity_is_that_of_the_model():
    for tokens, k, factor in ((10, 2, 1.0), (10, 2, 1.25), (7, 1, 0.5), (1, 8, 1.1)):
        config = MoeConfig(8, k, d_expert=1, capacity_factor=factor, normalise_weights=False)
        assert capacity_of(tokens, k, 8, factor) == capacity(tokens, config)
    assert [capacity_of(100, k, 10, 1.1) for k in (1, 2, 4)] == [11, 22, 44]  # 1.1 is a little more in floating point


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda: ExpertLayout(6, 4), "num_experts (6) must be divisible by ep (4); choose ep from 1, 2, 3, 6"),
        (lambda: ExpertLayout(8, 4, 3), "ep (4) must be divisible by ranks_per_node (3)"),
        (lambda: moe_traffic(BY_HAND, LAYOUT, 4, "twice"), "method is 'twice'; choose from plain"),
        (lambda: moe_traffic(BY_HAND[:2], LAYOUT, 4), "the routing has 2 ranks, ep is 4"),
        (lambda: moe_traffic(BY_HAND, LAYOUT, 4, "padded"), 'method "padded" needs a capacity'),
        (lambda: moe_traffic(BY_HAND, LAYOUT, 4, "padded", capacity=0), "capacity is 0"),
        (lambda: synthetic_routing(LAYOUT, 4, 9), "top_k (9) exceeds the 8 experts that a token can choose from"),
        (lambda: synthetic_routing(LAYOUT, 4, 5, max_nodes=1), "exceeds the 4 experts that a token can choose from (1"),
        (lambda: synthetic_routing(LAYOUT, 4, 2, max_nodes=3), "max_groups is 3; required: 1 to num_groups (2)"),
    ],
)
def test_what_cannot_be_is_refused(attempt, text):
    with pytest.raises(ValueError) as error:
        attempt()
    assert text in str(error.value)
