"""Expected values against all outcomes of small cases, and against draws; draws against what was asked of them."""

import itertools

import pytest
import torch

from course_lib.layout.experts import ExpertLayout
from course_lib.panels.synthetic_routing import popularity, synthetic_routing
from course_lib.traffic.experts import expected_places
from course_lib.traffic.routing import once_per_node_rows, plain_rows, sent


def imbalance(load):
    return max(load) * len(load) / sum(load)


def all_outcomes(first_choice, places, top_k):
    """Places reached, averaged over every sequence of draws without putting back."""
    width, mean = len(first_choice) // places, 0.0
    for order in itertools.permutations(range(len(first_choice)), top_k):
        chance, left = 1.0, 1.0
        for expert in order:
            chance *= first_choice[expert] / left
            left -= first_choice[expert]
        mean += chance * len({expert // width for expert in order})
    return mean


def test_expected_places_equal_the_mean_of_all_outcomes():
    for num_experts, places, top_k in ((6, 3, 2), (6, 2, 3), (8, 4, 3)):
        uniform, skewed = popularity(num_experts), sorted(popularity(num_experts, 1.3))  # popular ones together
        assert expected_places(num_experts, places, top_k) == pytest.approx(all_outcomes(uniform, places, top_k))
        assert all_outcomes(skewed, places, top_k) < expected_places(num_experts, places, top_k)


def test_deepseek_v3_reaches_5_3_of_8_nodes_without_its_limit():
    assert expected_places(256, 8, 8) == pytest.approx(5.29, abs=0.01)


def rows_between(rows, layout):
    return sum(each.between_bytes for each in sent(rows, layout, 1))


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_draws_have_the_expected_averages(skew):
    layout, tokens = ExpertLayout(16, 8, 2), 2000
    experts = synthetic_routing(layout, tokens, 3, skew)
    across, _ = once_per_node_rows(experts, layout)
    reached = sum(map(sum, across)) / (tokens * 8)
    assert reached == pytest.approx(all_outcomes(popularity(16, skew), 4, 3), rel=0.01)
    if skew == 0.0:
        plain = rows_between(plain_rows(experts, layout), layout) / (tokens * 8)
        assert plain == pytest.approx(3 * 3 / 4, rel=0.01)  # of 3 assignments those that leave their node, one of 4
        once = rows_between(across, layout) / (tokens * 8)
        assert once == pytest.approx(expected_places(16, 4, 3) * 3 / 4, rel=0.01)
    first = torch.tensor(experts)[:, :, 0].flatten().bincount(minlength=16) / (tokens * 8)
    assert (first - torch.tensor(popularity(16, skew))).abs().max() < 0.01


def test_draws_keep_the_limit_choose_no_expert_twice_and_follow_the_seed():
    layout = ExpertLayout(32, 8, 2)
    for max_nodes in (1, 2):
        for expert_Tk in synthetic_routing(layout, 50, 6, 0.5, max_nodes):
            assert all(len(set(row)) == 6 and len({e // 8 for e in row}) <= max_nodes for row in expert_Tk)
    one, same, other = (synthetic_routing(layout, 9, 2, seed=seed)[0] for seed in (1, 1, 2))
    assert one == same != other


def test_skew_loads_a_few_experts_and_with_them_their_ranks():
    layout = ExpertLayout(32, 8)
    loads = {}
    for skew in (0.0, 1.0):
        routing = synthetic_routing(layout, 500, 2, skew)
        of_experts, of_ranks = (plain_rows(routing, cut) for cut in (ExpertLayout(32, 32), layout))
        loads[skew] = [
            imbalance([sum(column) for column in zip(*rows, strict=True)]) for rows in (of_experts, of_ranks)
        ]
    assert loads[0.0][0] < 1.3 < 3 < loads[1.0][0]
    assert loads[0.0][1] < 1.1 < 1.2 < loads[1.0][1]
