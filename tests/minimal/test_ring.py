"""The smallest all-reduces equal one process and PyTorch's: values, gradients, bytes sent; planted bugs do not."""

import pytest
import torch
import torch.distributed as dist
from harness import worlds

from course_lib import comm
from course_lib.launch import RankError, launch
from course_lib.layout import Mesh
from course_lib.measure import ByteMeter
from course_lib.minimal import compare_with_one_process, compare_with_sum, ring, sent_by_each_rank, sent_bytes
from course_lib.minimal.ring import all_reduce_through_rank_0, ring_all_reduce
from course_lib.minimal.zero import DataParallel

pytestmark = pytest.mark.launches
BOTH = (all_reduce_through_rank_0, ring_all_reduce)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_elements", [12, 7, 2])
@pytest.mark.parametrize("all_reduce", BOTH)
def test_every_rank_has_the_sum(all_reduce, num_elements, world_size):
    assert compare_with_sum(all_reduce, world_size, num_elements) == 0


def test_a_ring_rank_sends_all_pieces_but_one_in_each_phase():
    assert sent_by_each_rank(ring_all_reduce, 4, 12) == [2 * 3 * 3 * 4] * 4
    assert sent_by_each_rank(ring_all_reduce, 3, 7) == [36, 40, 36]  # the first piece has one element more
    assert sum(sent_by_each_rank(ring_all_reduce, 4, 7)) == 2 * 3 * 7 * 4


def test_rank_0_sends_to_everybody_and_the_others_to_rank_0():
    assert sent_by_each_rank(all_reduce_through_rank_0, 4, 10) == [120, 40, 40, 40]


@pytest.mark.parametrize("num_elements", [12, 7])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_sends_what_is_counted_for_pytorchs_all_reduce(num_elements, world_size):
    counted = sent_by_each_rank(comm.all_reduce, world_size, num_elements)
    assert sent_by_each_rank(ring_all_reduce, world_size, num_elements) == counted


class RingDataParallel(DataParallel):
    """Data parallelism whose gradients are averaged by the ring of the lesson."""

    def update(self):
        for param in self.model.parameters():
            param.grad = ring_all_reduce(param.grad, self.group) / self.group.size()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("world_size", "num_micro_batches"), worlds((2, 3)))
def test_gradients_averaged_by_the_ring_train_as_one_process(world_size, num_micro_batches):
    assert compare_with_one_process(RingDataParallel, world_size, num_micro_batches) < 1e-10
    assert sent_bytes(RingDataParallel, world_size, num_micro_batches) == sent_bytes(DataParallel, world_size)


def in_a_part_of_the_world():
    group = comm.make_groups(Mesh(dp=2, tp=2))["dp"]
    total_P = ring_all_reduce(torch.full((5,), 10.0 ** dist.get_rank()), group)
    return total_P.tolist()


def test_a_ring_works_in_a_group_of_some_ranks():
    assert list(launch(in_a_part_of_the_world, 4)) == [[101] * 5, [1010] * 5] * 2


# ------------------------------------------------------------------------------------ planted bugs
def never_adds(pieces, step, group):
    ring.all_gather_step(pieces, step + 1, group)


def ring_that_copies(x_P, group):
    total_P = x_P.clone()
    pieces = total_P.tensor_split(group.size())
    for phase in (never_adds, ring.all_gather_step):
        for step in range(group.size() - 1):
            phase(pieces, step, group)
    return total_P


def one_phase(x_P, group):
    total_P = x_P.clone()
    pieces = total_P.tensor_split(group.size())
    for step in range(group.size() - 1):
        ring.reduce_scatter_step(pieces, step, group)
    return total_P


def one_step_too_few(x_P, group):
    total_P = x_P.clone()
    pieces = total_P.tensor_split(group.size())
    for step in range(group.size() - 2):
        ring.reduce_scatter_step(pieces, step, group)
    for step in range(group.size() - 1):
        ring.all_gather_step(pieces, step, group)
    return total_P


@pytest.mark.parametrize("wrong", [ring_that_copies, one_phase, one_step_too_few])
def test_a_planted_bug_differs_from_the_sum(wrong):
    assert compare_with_sum(wrong, 4) > 1


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
        (in_place, "rank 0 has another input than before the call; add to a copy"),
        (first_piece, r"rank 0 returned \(1,\); return a tensor of shape \(10,\)"),
        (lambda x_P, group: None, "rank 0 returned NoneType; return a tensor"),
    ],
)
def test_what_is_no_all_reduce_is_told_in_a_sentence(wrong, told):
    with pytest.raises(ValueError, match=told):
        compare_with_sum(wrong, 2)


def first_send_then_receive(outgoing, dst, incoming, src, group):
    dist.send(outgoing, group_dst=dst, group=group)
    dist.recv(incoming, group_src=src, group=group)


def swap_with(exchange):
    other, theirs = 1 - dist.get_rank(), torch.empty(100_000)
    exchange(torch.full((100_000,), float(dist.get_rank())), other, theirs, other, dist.group.WORLD)
    return theirs[-1].item()


@pytest.mark.exhaustive
def test_two_ranks_swap_and_do_so_only_if_both_messages_are_in_flight():
    assert list(launch(swap_with, 2, ring.send_and_receive)) == [1.0, 0.0]
    with pytest.raises(RankError, match="time limit"):
        launch(swap_with, 2, first_send_then_receive, timeout=3, backend="gloo")


def counted_and_sent():
    x_P = torch.ones(12)
    with ByteMeter() as meter:
        ring_all_reduce(x_P, dist.group.WORLD)
    return meter.calls


def test_a_ring_of_four_has_six_messages_out_and_six_in():
    assert list(launch(counted_and_sent, 4)) == [{"send": 6, "recv": 6}] * 4
