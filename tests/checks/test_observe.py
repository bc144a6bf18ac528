"""How graders watch an answer: rounds of a broadcast, what was sent to whom, and a hang told in words."""

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import observe
from course_lib.checks.core import CheckFailed
from course_lib.checks.observe import Call, broadcast_rounds, run_calls
from course_lib.comm import all_reduce, recv, send
from course_lib.layout import Mesh

pytestmark = pytest.mark.launches

cloudpickle.register_pickle_by_value(__import__(__name__))  # ranks do not have tests/ on their path


def messages(sends: dict[int, list[int]], size: int) -> list[list[tuple[str, int]]]:
    """What each rank of a broadcast did, from its root's and its helpers' sends."""
    return [[("send", peer) for peer in sends.get(rank, [])] for rank in range(size)]


@pytest.mark.parametrize(
    ("sends", "src", "size", "rounds"),
    [
        ({}, 0, 1, 0),
        ({0: [1, 2, 3, 4]}, 0, 5, 4),  # a star
        ({2: [3], 3: [0], 0: [1]}, 2, 4, 3),  # a chain
        ({0: [1, 2], 1: [3]}, 0, 4, 2),  # a tree
        ({0: [2, 1, 4], 2: [3]}, 0, 5, 3),
        ({0: [1, 2, 4], 1: [3, 5], 2: [6], 3: [7]}, 0, 8, 3),
    ],
)
def test_rounds_of_a_broadcast_are_those_in_which_each_rank_sends_once(sends, src, size, rounds):
    assert broadcast_rounds(messages(sends, size), src) == rounds


def busy(x, times, tp_group, dp_group):
    if dist.get_rank(tp_group) == 0:
        send(x, 1, tp_group)
    else:
        recv(x, 0, tp_group)
    x *= times
    return all_reduce(x, dp_group)


def test_what_an_answer_did_comes_back_by_call_and_rank():
    calls = [Call([torch.full((6,), float(rank)) for rank in range(4)], (times,)) for times in (1, 2)]
    once, twice = run_calls(busy, calls, "", Mesh(dp=2, tp=2), ("tp", "dp"))
    assert [seen.result[0].item() for seen in once] == [2, 4, 2, 4]
    assert [seen.kept_input for seen in once] == [True] * 4
    assert [seen.kept_input for seen in twice] == [True, False, False, False]  # twice zero is zero
    assert [seen.messages for seen in once] == [[("send", 1)], [("recv", 0)]] * 2
    assert [seen.sent_to for seen in once] == [[1], []] * 2
    assert [seen.received_from for seen in once] == [[], [0]] * 2
    assert once[0].sent_by_axis == {"tp": 24, "dp": 24}
    assert once[0].sent_bytes == 48
    assert once[1].calls == {"recv": 1, "all_reduce": 1}


def waits(x, group):
    return recv(x, 1 - dist.get_rank(group), group)


def test_a_hang_is_told_in_seconds_with_its_reason_and_where_each_rank_stands(monkeypatch):
    monkeypatch.setattr(observe, "slowness", lambda: 1.0)
    for limit_s in (1.0, 8.0, 60.0):  # on a busy machine ranks come late to where they wait
        monkeypatch.setattr(observe, "HANG_S", limit_s)
        with pytest.raises(CheckFailed) as failure:
            run_calls(waits, [Call([torch.zeros(1)] * 2)], "Nobody sends.")
        lines = str(failure.value).splitlines()
        assert lines[0] == f"your ranks wait for each other for ever (stopped after {limit_s:.0f} s). Nobody sends."
        if all("in waits: return recv" in line for line in lines[1:]):
            break
    assert [line[:14] for line in lines[1:]] == ["rank 0 stood a", "rank 1 stood a"]
    assert all("in waits: return recv" in line for line in lines[1:])


def test_an_answer_has_more_time_on_a_busy_machine(monkeypatch):
    limits = []
    monkeypatch.setattr(observe, "slowness", lambda: 3.0)
    monkeypatch.setattr(observe, "run_ranks", lambda *args, timeout: limits.append(timeout) or [[None], [None]])
    run_calls(waits, [Call([torch.zeros(1)] * 2)], "")
    assert limits == [3.0 * observe.HANG_S]


def breaks(x, group):
    raise KeyError("my key")


def test_an_error_of_the_answer_is_shown_without_the_graders_own_lines():
    with pytest.raises(CheckFailed) as failure:
        run_calls(breaks, [Call([torch.zeros(1)] * 2)], "")
    assert "in breaks" in str(failure.value) and "KeyError: 'my key'" in str(failure.value)
    assert "course_lib/checks/" not in str(failure.value)
