"""The graders of chapter 00 accept right answers that are arranged otherwise, three of each."""

import itertools
import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import ch00
from course_lib.comm import all_gather, all_reduce, all_reduce_, recv, reduce_scatter, send

pytestmark = pytest.mark.launches
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ a ring from an empty cell


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


# ------------------------------------------------------------------------------------ a ring of unequal shards
def shards_into_one_buffer(x_shard, lengths, group):
    """Views of the result, filled in place; both messages of a step are started as one operation."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = x_shard.new_empty(sum(lengths))
    places = whole.split(lengths)
    places[rank].copy_(x_shard)
    for step in range(size - 1):
        pair = [dist.P2POp(dist.isend, places[(rank - step) % size], group=group, group_peer=(rank + 1) % size)]
        came = places[(rank - step - 1) % size]
        pair.append(dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % size))
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    return whole


def shards_by_owner(x_shard, lengths, group):
    """Blocking messages; rank 0 receives before it sends."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    held, of_owner = x_shard, {rank: x_shard}
    for owner in ((rank - step) % size for step in range(1, size)):
        like = x_shard.new_empty(lengths[owner])
        if rank == 0:
            arrived = recv(like, size - 1, group)
        send(held, (rank + 1) % size, group)
        if rank != 0:
            arrived = recv(like, rank - 1, group)
        of_owner[owner] = held = arrived
    return torch.cat([of_owner[owner] for owner in range(size)])


def shards_turned_at_the_end(x_shard, lengths, group):
    """A list in the order of arrival, put into rank order by a rotation."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    came = [x_shard]
    for step in range(1, size):
        like = x_shard.new_empty(lengths[(rank - step) % size])
        sending = dist.isend(came[-1], group=group, group_dst=(rank + 1) % size)
        dist.recv(like, group=group, group_src=(rank - 1) % size)
        sending.wait()
        came.append(like)
    from_next = came[::-1]  # of ranks r + 1, ..., r
    return torch.cat(from_next[size - 1 - rank :] + from_next[: size - 1 - rank])


# ------------------------------------------------------------------------------------ a tree
def tree_from_the_farthest(x, src, group):
    """As MPI libraries do: the lowest bit of a position names its parent, the root serves the farthest first."""
    size = dist.get_world_size(group)
    position, bit = (dist.get_rank(group) - src) % size, 1
    while bit < size and not position & bit:
        bit *= 2
    if position:
        x = recv(x, (position - bit + src) % size, group)
    while bit > 1:
        bit //= 2
        if position + bit < size:
            send(x, (position + bit + src) % size, group)
    return x


def tree_of_halves(x, src, group):
    """The first of a range of positions has x, and gives it to the first of the range's second half."""
    size = dist.get_world_size(group)
    position, first, end = (dist.get_rank(group) - src) % size, 0, dist.get_world_size(group)
    while end - first > 1:
        middle = (first + end + 1) // 2
        if position == first:
            send(x, (middle + src) % size, group)
        elif position == middle:
            x = recv(x, (first + src) % size, group)
        first, end = (first, middle) if position < middle else (middle, end)
    return x


def tree_with_handles(x, src, group):
    """Doubling; sends are started, and waited for at the end."""
    size = dist.get_world_size(group)
    position, mine, works = (dist.get_rank(group) - src) % size, x.clone(), []
    for have_it in (2**k for k in range(math.ceil(math.log2(size)))):
        if have_it <= position < 2 * have_it:
            dist.irecv(mine, group=group, group_src=(position - have_it + src) % size).wait()
        elif position < have_it and position + have_it < size:
            works.append(dist.isend(mine, group=group, group_dst=(position + have_it + src) % size))
    for work in works:
        work.wait()
    return mine


# ------------------------------------------------------------------------------------ a shift
def shift_as_one_operation(x, distance, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not distance % size:
        return x
    came = torch.zeros_like(x)
    pair = [dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - distance) % size)]
    pair.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + distance) % size))
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return came


def shift_with_one_handle(x, distance, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if distance % size == 0:
        return x.clone()
    sending = dist.isend(x, group=group, group_dst=(rank + distance) % size)
    came = recv(x, (rank - distance) % size, group)
    sending.wait()
    return came


def shift_cut_open_once(x, distance, group):
    """Blocking messages; in each cycle of ranks the smallest receives first."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if distance % size == 0:
        return x.clone()
    if rank < math.gcd(distance, size):
        came = recv(x, (rank - distance) % size, group)
    send(x, (rank + distance) % size, group)
    return came if rank < math.gcd(distance, size) else recv(x, (rank - distance) % size, group)


# ------------------------------------------------------------------------------------ two levels
def levels_by_torch(x_P, node_group, cross_group):
    piece_p = x_P.new_empty(len(x_P) // dist.get_world_size(node_group))
    dist.reduce_scatter_tensor(piece_p, x_P, group=node_group)
    dist.all_reduce(piece_p, group=cross_group)
    total_P = torch.empty_like(x_P)
    dist.all_gather_into_tensor(total_P, piece_p, group=node_group)
    return total_P


def levels_with_lists(x_P, node_group, cross_group):
    pieces = list(x_P.chunk(dist.get_world_size(node_group)))
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=node_group)
    dist.all_reduce(mine, group=cross_group)
    gathered = [torch.empty_like(mine) for _ in pieces]
    dist.all_gather(gathered, mine, group=node_group)
    return torch.cat(gathered)


def levels_with_a_handle(x_P, node_group, cross_group):
    piece_p = reduce_scatter(x_P, node_group)
    all_reduce_(piece_p, cross_group, async_op=True).wait()
    return all_gather(piece_p, node_group)


# ------------------------------------------------------------------------------------ latency or bandwidth
def ring_parts(n_bytes, world_size, link):
    steps = 2 * (world_size - 1)
    return steps * link.latency_s, steps * n_bytes / world_size / link.bytes_per_s


def crossover_from_one_byte(world_size, link):
    latency_s, byte_s = ring_parts(1, world_size, link)
    return latency_s / byte_s


def crossover_by_halving(world_size, link):
    low, high = 1.0, 1e15
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        latency_s, bytes_s = ring_parts(middle, world_size, link)
        low, high = (middle, high) if bytes_s < latency_s else (low, middle)
    return low


def crossover_of_a_piece(world_size, link):
    piece_bytes = link.latency_s * link.both_directions_bytes_per_s / 2
    return sum(itertools.repeat(piece_bytes, world_size))


def faster_by_difference(payload_bytes, world_size, link):
    steps = world_size.bit_length() - 1
    more_latency_s = (2 * (world_size - 1) - steps) * link.latency_s
    fewer_bytes = (steps - 2 * (world_size - 1) / world_size) * payload_bytes
    return "ring" if fewer_bytes / link.bytes_per_s > more_latency_s else "doubling"


def faster_by_a_table(payload_bytes, world_size, link):
    steps = math.log2(world_size)
    seconds = {"doubling": steps * link.latency_s + steps * payload_bytes / link.bytes_per_s}
    seconds["ring"] = sum(ring_parts(payload_bytes, world_size, link))
    return min(seconds, key=seconds.get)


def faster_step_by_step(payload_bytes, world_size, link):
    ring_s = sum(link.latency_s + payload_bytes / world_size / link.bytes_per_s for _ in range(2 * (world_size - 1)))
    doubling_s, reached = 0.0, 1
    while reached < world_size:
        doubling_s, reached = doubling_s + link.latency_s + payload_bytes / link.bytes_per_s, 2 * reached
    return ("doubling", "ring")[ring_s < doubling_s]


RIGHT = {
    "check_mean_of_unequal_shares": (mean_with_cat, mean_of_ones, mean_by_torch),
    "check_ring_all_gather": (shards_into_one_buffer, shards_by_owner, shards_turned_at_the_end),
    "check_tree_broadcast": (tree_from_the_farthest, tree_of_halves, tree_with_handles),
    "check_shift": (shift_as_one_operation, shift_with_one_handle, shift_cut_open_once),
    "check_all_reduce_by_doubling": (doubling_from_the_top, doubling_by_bits, doubling_larger_sends_first),
    "check_all_reduce_in_two_levels": (levels_by_torch, levels_with_lists, levels_with_a_handle),
    "check_crossover_bytes": (crossover_from_one_byte, crossover_by_halving, crossover_of_a_piece),
    "check_faster_all_reduce": (faster_by_difference, faster_by_a_table, faster_step_by_step),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "answer"), [(check, answer) for check, answers in RIGHT.items() for answer in answers]
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    for seed in (1, 2, 3):
        getattr(ch00, check)(answer, seed=seed)
    assert capsys.readouterr().out == f"{check}: passed\n" * 3
