"""How graders count the rounds of a broadcast."""

import pytest

from course_lib.checks.ch00.ranks import broadcast_rounds


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
