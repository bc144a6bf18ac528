"""Wrong answers to the exercises of chapter 00, each with what its grader must say about it."""

import functools
import math
from unittest import mock

import torch
import torch.distributed as dist

from course_lib.checks.ch00 import (
    check_all_reduce_by_doubling,
    check_all_reduce_in_two_levels,
    check_crossover_bytes,
    check_faster_all_reduce,
    check_mean_of_unequal_shares,
    check_ring_all_gather,
    check_shift,
    check_tree_broadcast,
)
from course_lib.comm import all_gather, all_reduce, pass_on, recv, reduce_scatter, send
from course_lib.minimal.ring import ring_all_reduce


# ------------------------------------------------------------------------------------ 1. unequal shares
def mean_of_means(losses_b, group):
    return all_reduce(losses_b.mean(), group, op="mean")


def summed_not_averaged(losses_b, group):
    return all_reduce(losses_b.sum(), group)


def divided_by_ranks(losses_b, group):
    return all_reduce(losses_b.sum(), group, op="mean")


def divided_by_own_count(losses_b, group):
    return all_reduce(losses_b.sum(), group) / len(losses_b)


def own_mean(losses_b, group):
    return losses_b.mean()


def mean_over_the_world(losses_b, group):
    total, count = all_reduce(torch.stack([losses_b.sum(), losses_b.new_tensor(len(losses_b))]), dist.group.WORLD)
    return total / count


def weighted_by_own_mean(losses_b, group):  # 0 / 0 on a rank without samples
    sum_and_count = torch.stack([losses_b.mean() * len(losses_b), losses_b.new_tensor(len(losses_b))])
    total, count = all_reduce(sum_and_count, group)
    return total / count


def two_all_reduces(losses_b, group):
    return all_reduce(losses_b.sum(), group) / all_reduce(losses_b.new_tensor(len(losses_b)), group)


# ------------------------------------------------------------------------------------ 2. a ring of unequal shards
def in_order_of_arrival(x_shard, lengths, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards = [x_shard]
    for step in range(size - 1):
        like = x_shard.new_empty(lengths[(rank - step - 1) % size])
        shards.append(pass_on(shards[-1], like, group))
    return torch.cat(shards)


def buffer_as_long_as_mine(x_shard, lengths, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards = [x_shard] * size
    for step in range(size - 1):
        shards[(rank - step - 1) % size] = pass_on(shards[(rank - step) % size], x_shard, group)
    return torch.cat(shards)


def one_step_too_many(x_shard, lengths, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards = [x_shard.new_empty(length) for length in lengths]
    shards[rank] = x_shard
    for step in range(size):
        held, arriving = (rank - step) % size, (rank - step - 1) % size
        shards[arriving] = pass_on(shards[held], shards[arriving], group)
    return torch.cat(shards)


def padded_collective(x_shard, lengths, group):
    padded = torch.cat([x_shard, x_shard.new_zeros(max(lengths) - len(x_shard))])
    rows = all_gather(padded, group).view(len(lengths), -1)
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


def straight_to_everybody(x_shard, lengths, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards = [x_shard.new_empty(length) for length in lengths]
    shards[rank] = x_shard.clone()
    others = [peer for peer in range(size) if peer != rank]
    handles = [dist.isend(x_shard, group=group, group_dst=peer) for peer in others]
    handles += [dist.irecv(shards[peer], group=group, group_src=peer) for peer in others]
    for handle in handles:
        handle.wait()
    return torch.cat(shards)


# ------------------------------------------------------------------------------------ 3. a tree
def star(x, src, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank != src:
        return recv(x, src, group)
    for peer in range(size):
        if peer != src:
            send(x, peer, group)
    return x


def chain(x, src, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    position = (rank - src) % size
    if position > 0:
        x = recv(x, (rank - 1) % size, group)
    if position < size - 1:
        send(x, (rank + 1) % size, group)
    return x


def root_is_zero(x, src, group):
    rank, size, have_it = dist.get_rank(group), dist.get_world_size(group), 1
    while have_it < size:
        if rank < have_it and rank + have_it < size:
            send(x, rank + have_it, group)
        elif have_it <= rank < 2 * have_it:
            x = recv(x, rank - have_it, group)
        have_it *= 2
    return x


def one_rank_is_told_twice(x, src, group):  # one rank is told twice
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = star(x, src, group)
    position = (rank - src) % size
    if position == 1:
        send(x, (src + 2) % size, group)
    elif position == 2:
        x = recv(x, (src + 1) % size, group)
    return x


def broadcast_by_all_reduce(x, src, group):
    return all_reduce(x if dist.get_rank(group) == src else torch.zeros_like(x), group)


# ------------------------------------------------------------------------------------ 4. a shift without deadlock
def even_ranks_first(x, distance, group):  # hangs over a distance of 2
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if distance % size == 0:
        return x.clone()
    to, source = (rank + distance) % size, (rank - distance) % size
    if rank % 2 == 0:
        send(x, to, group)
        return recv(x, source, group)
    received = recv(x, source, group)
    send(x, to, group)
    return received


def _shift(x, distance, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if distance % size == 0:
        return x.clone()
    received = torch.empty_like(x)
    handles = [
        dist.isend(x, group=group, group_dst=(rank + distance) % size),
        dist.irecv(received, group=group, group_src=(rank - distance) % size),
    ]
    for handle in handles:
        handle.wait()
    return received


def wrong_way(x, distance, group):
    return _shift(x, -distance, group)


def distance_ignored(x, distance, group):
    return _shift(x, 1, group)


def one_rank_at_a_time(x, distance, group):
    for _ in range(distance % dist.get_world_size(group)):
        x = _shift(x, 1, group)
    return x.clone()


def sends_to_itself(x, distance, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (rank + distance) % size, (rank - distance) % size
    return recv(x, source, group) if to == rank else _shift(x, distance, group)


# ------------------------------------------------------------------------------------ 5. doubling
def _swap(x, partner, group):
    if dist.get_rank(group) < partner:
        send(x, partner, group)
        return recv(x, partner, group)
    theirs = recv(x, partner, group)
    send(x, partner, group)
    return theirs


def first_pair_only(x, group):
    return x + _swap(x, dist.get_rank(group) ^ 1, group)


def sends_the_original(x, group):
    total = x.clone()
    for step in range(int(math.log2(dist.get_world_size(group)))):
        total += _swap(x, dist.get_rank(group) ^ 2**step, group)
    return total


def everybody_with_everybody(x, group):
    total = x.clone()
    for difference in range(1, dist.get_world_size(group)):
        total += _swap(x, dist.get_rank(group) ^ difference, group)
    return total


def the_ring(x, group):
    return ring_all_reduce(x, group)


def doubling_in_place(x, group):
    for step in range(int(math.log2(dist.get_world_size(group)))):
        x += _swap(x, dist.get_rank(group) ^ 2**step, group)
    return x


# ------------------------------------------------------------------------------------ 6. two levels
def whole_tensor_crosses(x_P, node_group, cross_group):
    return all_reduce(all_reduce(x_P, node_group), cross_group)


def over_the_whole_world(x_P, node_group, cross_group):
    return all_reduce(x_P, dist.group.WORLD)


def piece_not_gathered(x_P, node_group, cross_group):
    return all_reduce(reduce_scatter(x_P, node_group), cross_group)


def nothing_crosses(x_P, node_group, cross_group):
    return all_gather(reduce_scatter(x_P, node_group), node_group)


def mean_of_the_world(x_P, node_group, cross_group):
    return all_gather(all_reduce(reduce_scatter(x_P, node_group, op="mean"), cross_group, op="mean"), node_group)


def summed_again_in_the_node(x_P, node_group, cross_group):
    whole_P = all_gather(all_reduce(reduce_scatter(x_P, node_group), cross_group), node_group)
    return all_reduce(whole_P, node_group)


# ------------------------------------------------------------------------------------ 7. latency or bandwidth
def message_in_one_piece(world_size, link):
    return link.latency_s * link.bytes_per_s


def both_directions(world_size, link):
    return world_size * link.latency_s * link.both_directions_bytes_per_s


def steps_not_cancelled(world_size, link):
    return 2 * (world_size - 1) * link.latency_s * link.bytes_per_s


def divided_by_bandwidth(world_size, link):
    return world_size * link.latency_s / link.bytes_per_s


def always_the_ring(payload_bytes, world_size, link):
    return "ring"


def _model(payload_bytes, world_size, latency_s, bytes_per_s, pieces):
    ring_s = 2 * (world_size - 1) * (latency_s + payload_bytes / pieces / bytes_per_s)
    doubling_s = math.log2(world_size) * (latency_s + payload_bytes / bytes_per_s)
    return ring_s, doubling_s


def slower_one(payload_bytes, world_size, link):
    ring_s, doubling_s = _model(payload_bytes, world_size, link.latency_s, link.bytes_per_s, world_size)
    return "ring" if ring_s > doubling_s else "doubling"


def ring_step_carries_all(payload_bytes, world_size, link):
    ring_s, doubling_s = _model(payload_bytes, world_size, link.latency_s, link.bytes_per_s, 1)
    return "ring" if ring_s < doubling_s else "doubling"


def faster_with_both_directions(payload_bytes, world_size, link):
    both = link.both_directions_bytes_per_s
    ring_s, doubling_s = _model(payload_bytes, world_size, link.latency_s, both, world_size)
    return "ring" if ring_s < doubling_s else "doubling"


def decided_by_the_crossover(payload_bytes, world_size, link):
    return "ring" if payload_bytes > world_size * link.latency_s * link.bytes_per_s else "doubling"


# ------------------------------------------------------------------------------------ 8. a ring from an empty cell


@functools.wraps(check_shift)
def check_shift_soon(answer, seed=None):
    """The same check with a shorter wait for a hang."""
    with mock.patch("course_lib.checks.observe.HANG_S", 2.0):
        check_shift(answer, seed)


WRONG = {
    "my_mean": {
        "check": check_mean_of_unequal_shares,
        "answers": [
            (mean_of_means, "this is the mean of the ranks' means"),
            (summed_not_averaged, "summed, not averaged"),
            (divided_by_ranks, "divided by the number of ranks"),
            (divided_by_own_count, "divided by this rank's number of samples"),
            (own_mean, "nothing was exchanged"),
            (mean_over_the_world, "exchange only within `group`"),
            (weighted_by_own_mean, "the result is nan"),
            (two_all_reduces, "put the sum and the count into one tensor"),
        ],
    },
    "my_ring_all_gather": {
        "check": check_ring_all_gather,
        "answers": [
            (in_order_of_arrival, "in the order in which they arrived"),
            (buffer_as_long_as_mine, "its two ends disagree on its length"),
            (one_step_too_many, "before a shard comes back to its owner"),
            (padded_collective, "your function called all_gather"),
            (straight_to_everybody, "only to its right neighbour"),
        ],
    },
    "my_tree_broadcast": {
        "check": check_tree_broadcast,
        "answers": [
            (star, "the root alone sends 3 times"),
            (chain, "some ranks that have the tensor wait"),
            (root_is_zero, "the root is `src`"),
            (one_rank_is_told_twice, "received 2 times"),
            (broadcast_by_all_reduce, "your function called all_reduce"),
        ],
    },
    "my_shift": {
        "check": check_shift_soon,
        "answers": [
            (even_ranks_first, "even ranks talk to even ranks"),
            (wrong_way, "the shift goes the wrong way"),
            (distance_ignored, "the distance was not used"),
            (one_rank_at_a_time, "not over a distance of 1 again and again"),
            (sends_to_itself, "would send to itself or receive from itself"),
        ],
    },
    "my_all_reduce_by_doubling": {
        "check": check_all_reduce_by_doubling,
        "answers": [
            (first_pair_only, "the sum of the first pair alone"),
            (sends_the_original, "must send the running sum"),
            (everybody_with_everybody, "running sum already has others in it"),
            (the_ring, "few bytes but many steps are the ring"),
            (doubling_in_place, "your function changed its input"),
        ],
    },
    "my_all_reduce_in_two_levels": {
        "check": check_all_reduce_in_two_levels,
        "answers": [
            (whole_tensor_crosses, "all of the tensor crossed"),
            (over_the_whole_world, "over the whole world"),
            (piece_not_gathered, "put its pieces together"),
            (nothing_crosses, "nothing crossed between the nodes"),
            (mean_of_the_world, "averaged, not summed"),
            (summed_again_in_the_node, "summed once more over the node"),
        ],
    },
    "my_crossover_bytes": {
        "check": check_crossover_bytes,
        "answers": [
            (message_in_one_piece, "sends the message in G pieces"),
            (both_directions, "takes both directions"),
            (steps_not_cancelled, "the number of steps, 2 (G - 1)"),
            (divided_by_bandwidth, "here the seconds were divided"),
        ],
    },
    "my_faster_all_reduce": {
        "check": check_faster_all_reduce,
        "answers": [
            (always_the_ring, "always the ring"),
            (slower_one, "the wrong way round"),
            (ring_step_carries_all, "if a ring step carried the whole message"),
            (faster_with_both_directions, "takes both directions"),
            (decided_by_the_crossover, "decided by crossover_bytes"),
        ],
    },
}
