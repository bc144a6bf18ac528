"""The smallest all-reduces: planted bugs differ from the sum; what is none is told in a sentence."""

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.compare.record import on_ranks
from course_lib.compare.trials import as_sum
from course_lib.launch import RankError, launch
from course_lib.layout import Mesh
from course_lib.minimal import ring
from course_lib.minimal.ring import ring_all_reduce

pytestmark = pytest.mark.launches


def in_a_part_of_the_world():
    group = comm.make_groups(Mesh(dp=2, tp=2))["dp"]
    total_P = ring_all_reduce(torch.full((5,), 10.0 ** dist.get_rank()), group)
    return total_P.tolist()


def test_a_ring_works_in_a_group_of_some_ranks():
    assert list(launch(in_a_part_of_the_world, 4)) == [[101] * 5, [1010] * 5] * 2


def in_place(x_P, group):
    pieces = x_P.tensor_split(group.size())
    for step in range(group.size() - 1):
        ring.reduce_scatter_step(pieces, step, group)
    for step in range(group.size() - 1):
        ring.all_gather_step(pieces, step, group)
    return x_P


def first_piece(x_P, group):
    return ring_all_reduce(x_P, group)[:1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (in_place, "the input is another one than before the call; add to a copy"),
        (first_piece, r"the sum is \(1,\); return a tensor of shape \(10,\)"),
        (lambda x_P, group: None, "the sum is NoneType; return a tensor"),
    ],
)
def test_what_is_no_all_reduce_is_told_in_a_sentence(wrong, told):
    with pytest.raises(RankError, match=told):
        on_ranks(wrong, as_sum, 2)
