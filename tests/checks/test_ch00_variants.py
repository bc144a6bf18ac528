"""The graders of chapter 00 accept right answers that are arranged otherwise, three of each."""

import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import ch00
from course_lib.comm import all_reduce, recv, send

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ a ring from an empty cell
def to_the_left_and_padded(x, group):
    """Pieces go to the left, as rows of a padded matrix; rank r ends with the sum of row r + 1."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = torch.nn.functional.pad(x, (0, -len(x) % size)).view(size, -1).clone()
    for step in range(2 * (size - 1)):
        if step < size - 1:
            out, into = (rank + 2 + step) % size, (rank + 3 + step) % size
        else:
            out, into = (rank + 1 + step - size + 1) % size, (rank + 2 + step - size + 1) % size
        arrived = torch.empty_like(rows[into])
        works = [dist.isend(rows[out], group=group, group_dst=(rank - 1) % size)]
        works.append(dist.irecv(arrived, group=group, group_src=(rank + 1) % size))
        for work in works:
            work.wait()
        rows[into] = rows[into] + arrived if step < size - 1 else arrived
    return rows.flatten()[: len(x)]


def one_rank_receives_first(x, group):
    """Blocking messages; the last rank receives before it sends."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pieces = list(x.tensor_split(size))
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        out = (rank - step - (1 if adds else -(size - 1))) % size
        into = (out - 1) % size
        if rank == size - 1:
            arrived = recv(pieces[into], (rank - 1) % size, group)
            send(pieces[out], (rank + 1) % size, group)
        else:
            send(pieces[out].contiguous(), (rank + 1) % size, group)
            arrived = recv(pieces[into], (rank - 1) % size, group)
        pieces[into] = pieces[into] + arrived if adds else arrived
    return torch.cat(pieces)


def both_directions_at_once(x, group):
    """Half of the tensor goes around to the right, the other half to the left."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone()
    half = math.ceil(len(x) / size / 2) * size
    rings = [(1, total[:half].tensor_split(size)), (-1, total[half:].tensor_split(size))]
    for step in range(2 * (size - 1)):
        messages, arrivals = [], []
        for way, pieces in rings:
            adds, place = step < size - 1, way * rank
            out = (place - 1 - step if adds else place - (step - size + 1)) % size
            into = (out - 1) % size
            arrived = torch.empty_like(pieces[into])
            messages.append(dist.P2POp(dist.isend, pieces[out], group=group, group_peer=(rank + way) % size))
            messages.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - way) % size))
            arrivals.append((pieces[into], arrived, adds))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for mine, arrived, adds in arrivals:
            mine.copy_(mine + arrived if adds else arrived)
    return total


# ------------------------------------------------------------------------------------ a mean of unequal shares
def mean_with_cat(losses_b, group):
    both = torch.cat([losses_b.sum().view(1), torch.full((1,), len(losses_b), dtype=losses_b.dtype)])
    both = all_reduce(both, group)
    return both[0] / both[1]


def mean_of_ones(losses_b, group):
    rows = torch.stack([losses_b, torch.ones_like(losses_b)])
    total, count = all_reduce(rows.sum(1), group).unbind()
    return total / count


def mean_by_torch(losses_b, group):
    both = torch.tensor([losses_b.sum().item(), losses_b.numel()], dtype=losses_b.dtype)
    dist.all_reduce(both, group=group)
    return both[0].div(both[1])


# ------------------------------------------------------------------------------------ doubling
def doubling_from_the_top(x, group):
    rank, distance = dist.get_rank(group), dist.get_world_size(group) // 2
    while distance:
        theirs = torch.empty_like(x)
        works = [
            dist.isend(x, group=group, group_dst=rank ^ distance),
            dist.irecv(theirs, group=group, group_src=rank ^ distance),
        ]
        for work in works:
            work.wait()
        x, distance = x + theirs, distance // 2
    return x


def doubling_by_bits(x, group):
    rank = dist.get_rank(group)
    total = x.clone()
    for bit in range(dist.get_world_size(group).bit_length() - 1):
        partner, theirs = rank ^ (1 << bit), torch.empty_like(x)
        pair = [dist.P2POp(dist.isend, total.clone(), group=group, group_peer=partner)]
        pair.append(dist.P2POp(dist.irecv, theirs, group=group, group_peer=partner))
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        total += theirs
    return total


def doubling_larger_sends_first(x, group):
    rank, distance, total = dist.get_rank(group), 1, x
    while distance < dist.get_world_size(group):
        partner = rank ^ distance
        if rank > partner:
            send(total, partner, group)
        theirs = recv(total, partner, group)
        if rank < partner:
            send(total, partner, group)
        total, distance = theirs + total, 2 * distance
    return total


VARIANTS = [
    (ch00.check_ring_all_reduce, (to_the_left_and_padded, one_rank_receives_first, both_directions_at_once)),
    (ch00.check_mean_of_unequal_shares, (mean_with_cat, mean_of_ones, mean_by_torch)),
    (ch00.check_all_reduce_by_doubling, (doubling_from_the_top, doubling_by_bits, doubling_larger_sends_first)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"),
    [(check, answer) for check, answers in VARIANTS for answer in answers],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    for seed in (1, 2, 3):
        check(answer, seed=seed)
    assert capsys.readouterr().out == f"{check.__name__}: passed\n" * 3
