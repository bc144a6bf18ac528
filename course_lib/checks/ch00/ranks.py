"""Tables of exercises 1 to 6: each answer runs on real ranks, and its values, messages and bytes are compared."""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks import Cost, Each, Exercise, Stops, agree, fresh_seed, numbers
from course_lib.checks.watch import MessageLog, collective
from course_lib.comm import all_gather, all_gather_json, all_reduce, make_groups, pass_on, recv, reduce_scatter, send
from course_lib.layout.mesh import Mesh
from course_lib.measure import ByteMeter
from course_lib.minimal.ring import ring_all_reduce, send_and_receive


def one_each(rng, world_size, length):
    """Numbers for each rank."""
    return Each(numbers(rng, length) for _ in range(world_size))


def swap(x, to, source, group):
    """Send x and receive a tensor of its length, both at once."""
    received = torch.empty_like(x)
    send_and_receive(x, to, received, source, group)
    return received


# ------------------------------------------------------------------------------------ 1. unequal shares
def _mean_of_shares(losses_b, group, total_of=torch.sum):
    """The mean over all samples of a group, from one all-reduce, also if a rank has no sample."""
    total, count = all_reduce(torch.stack([total_of(losses_b), losses_b.new_tensor(len(losses_b))]), group)
    return total / count


def _shares(rng):
    """Four ranks, one of them at times without samples; last, groups of two of them."""
    some = rng.sample([3, 5, 6, 7, 8, 9], 4)  # none is the size of a group: dividing by either would look alike
    with_none = rng.sample([0, *some[1:]], 4)
    return [(4, some, "world", fresh_seed(rng)), *((4, with_none, of, fresh_seed(rng)) for of in ("world", "dp"))]


def _watch_mean(answer, samples_of_ranks, group, seed):
    losses_b = numbers(seed + dist.get_rank(), samples_of_ranks[dist.get_rank()])
    given = losses_b.clone()
    with ByteMeter() as meter:
        result = answer(given, make_groups(Mesh(dp=2, tp=2))["dp"] if group == "dp" else dist.group.WORLD)
    return {"the mean": result, "arguments changed": not agree(given, losses_b), "calls": dict(meter.calls)}


_WRONG_MEAN = {
    "every rank counted alike, however many samples it has: this is the mean of the ranks' means": (
        lambda losses_b, group: all_reduce(losses_b.mean(), group, op="mean")
    ),
    "summed, not averaged": lambda losses_b, group: all_reduce(losses_b.sum(), group),
    "divided by the number of ranks, not by the number of samples": lambda x, group: all_reduce(x.sum(), group, "mean"),
    "divided by this rank's number of samples; the count must be summed over the ranks too": (
        lambda losses_b, group: all_reduce(losses_b.sum(), group) / len(losses_b)
    ),
    "this is the mean of the rank's own samples; nothing was exchanged": lambda losses_b, group: losses_b.mean(),
    "the ranks' means were summed": lambda losses_b, group: all_reduce(losses_b.mean(), group),
    "this is the mean over the whole world; exchange only within `group`": lambda losses_b, group: _mean_of_shares(
        losses_b, dist.group.WORLD
    ),
    "the result is nan; a rank without samples has no mean, but a sum (0) and a count (0)": {
        "total_of": lambda losses_b: losses_b.mean() * len(losses_b)  # 0 / 0 on a rank without samples
    },
    "each call costs its latency; put the sum and the count into one tensor": lambda losses_b, group: (
        all_reduce(losses_b.sum(), group) / all_reduce(losses_b.new_tensor(len(losses_b)), group)
    ),
}
_SAYS_MEAN = {
    "calls": "one all_reduce is asked for; two numbers of every rank are enough, so nothing has to be gathered"
}
check_mean_of_unequal_shares = Exercise(_mean_of_shares, _shares, _WRONG_MEAN, _watch_mean, _SAYS_MEAN, ranks=True)


# ------------------------------------------------------------------------------------ 2. a ring of unequal shards
def _ring_all_gather(x_shard, lengths, group, order=lambda shards, rank: shards, more=0):
    """All shards on every rank, in rank order, sent around the ring; shards differ in length."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards = [x_shard.new_empty(length) for length in lengths]
    shards[rank] = x_shard
    for step in range(size - 1 + more):
        held, arriving = (rank - step) % size, (rank - step - 1) % size
        shards[arriving] = pass_on(shards[held], shards[arriving], group)
    return torch.cat(order(shards, rank))


def _unequal_shards(rng):
    lengths = [rng.sample(range(1, 12), size) for size in (rng.choice([2, 3]), 4)]
    return [(len(of_ranks), Each(numbers(rng, length) for length in of_ranks), of_ranks) for of_ranks in lengths]


def _watch_ring(answer, shards, lengths):
    seen = collective(answer, shards, lengths, leave_out=["messages sent and received"])
    right = (dist.get_rank() + 1) % len(lengths)
    return {"sent to others than its right neighbour": sorted(set(seen.pop("sent to")) - {right})} | seen


_WRONG_RING = {
    "the shards stand in the order in which they arrived; put each at its owner's place": (
        {"order": lambda shards, rank: [shards[rank - step] for step in range(len(shards))]}
    ),
    "the shards begin with the rank's own; on every rank they must begin with rank 0's": (
        {"order": lambda shards, rank: shards[rank:] + shards[:rank]}
    ),
    "the shards stand in rank order, but the last rank's first": {"order": lambda shards, rank: shards[::-1]},
    "pass on only the shard that came last, and after G - 1 steps stop, before a shard comes back to its owner": (
        {"more": 1}
    ),
    "its two ends disagree on its length": Stops(
        lambda x_shard, lengths, group: _ring_all_gather(x_shard, [len(x_shard)] * len(lengths), group)
    ),
    "only send and recv are allowed here": Stops(lambda x, lengths, group: all_gather(x[:1], group)),
    "only to its right neighbour": Stops(
        lambda x_shard, lengths, group: torch.cat(
            [
                _tree_broadcast(x_shard.new_empty(n) if r != group.rank() else x_shard, r, group)
                for r, n in enumerate(lengths)
            ]
        )
    ),
}
_SAYS_RING = {
    "sent to others than its right neighbour": "in a ring a rank sends only to its right neighbour",
    "bytes sent": "pass on only the shard that came last",
}
_HANG_RING = "In the ring every rank sends and receives at the same time, and G - 1 times: use pass_on."
check_ring_all_gather = Exercise(
    _ring_all_gather, _unequal_shards, _WRONG_RING, _watch_ring, _SAYS_RING, ranks=_HANG_RING
)


# ------------------------------------------------------------------------------------ 3. a tree
def _doubling_tree(position, size):
    """Positions to which a position sends: in each round all that have the tensor send it on."""
    return [position + 2**k for k in range(size.bit_length()) if position < 2**k < size - position]


def _farthest_first(position, size):
    """As MPI libraries do: the lowest bit of a position names its parent, the root serves the farthest first."""
    bits = [2**k for k in reversed(range(size.bit_length()))]
    return [position + bit for bit in bits if position % (2 * bit) == 0 and position + bit < size]


def _tree_broadcast(x, src, group, children=_doubling_tree, root=None):
    """The root's tensor on every rank, each rank receiving once, in ceil(log2 G) rounds, for any G and root."""
    size, src = dist.get_world_size(group), src if root is None else root
    position = (dist.get_rank(group) - src) % size
    for parent in range(size):
        if position in children(parent, size):
            x = recv(x, (parent + src) % size, group)
    for child in children(position, size):
        send(x, (child + src) % size, group)
    return x


def _watch_tree(answer, inputs, src):
    x = inputs[dist.get_rank()].clone()
    with MessageLog() as log, ByteMeter() as meter:
        result = answer(x, src, dist.group.WORLD)
    of_ranks = all_gather_json(log.messages, dist.group.WORLD)
    times = [sum(kind == "recv" for kind, _ in of_rank) for of_rank in of_ranks]
    is_tree = all(count == (rank != src) for rank, count in enumerate(times))
    return {
        "other calls than send and recv": sorted(set(meter.calls) - {"send", "recv"}),
        "the tensor": result.clone() if isinstance(result, Tensor) else result,
        "arguments changed": not agree(x, inputs[dist.get_rank()]),
        "times that it received": Cost(times[dist.get_rank()]),
        "messages sent by the root": Cost(sum(kind == "send" for kind, _ in of_ranks[src])),
        "rounds": Cost(broadcast_rounds(of_ranks, src) if is_tree else 0),
    }


_WRONG_TREE = {
    "every rank has rank 0's tensor; the root is `src`": {"root": 0},
    "it still has its own tensor; nothing was received or kept": lambda x, src, group: x.clone(),
    "it received more often than needed; send only to who has nothing": {
        "children": lambda position, size: list(range(1, size)) if position == 0 else [2] if position == 1 else []
    },
    "the root alone sends; ranks that have the tensor can send it too": {
        "children": lambda position, size: list(range(1, size)) if position == 0 else []
    },
    "some ranks that have the tensor wait while others send; in each round all of them should send": {
        "children": lambda position, size: [position + 1] if position + 1 < size else []
    },
    "only send and recv are allowed here": Stops(lambda x, src, group: all_reduce(x, group)),
}
_SAYS_TREE = {
    "times that it received": "send only to who has nothing",
    "rounds": "some ranks that have the tensor wait while others send; in each round all of them should send",
}
_HANG_TREE = (
    "A rank must receive before it passes on, and each send needs one recv on the other side. 3 and 5 are not powers "
    "of two: in the last round some ranks have nobody to send to."
)
check_tree_broadcast = Exercise(
    _tree_broadcast,
    lambda rng: [(n, one_each(rng, n, 20), src) for n in (3, 4, 5) for src in (rng.randrange(1, n), 0)],
    _WRONG_TREE,
    _watch_tree,
    _SAYS_TREE,
    right=partial(_tree_broadcast, children=_farthest_first),
    ranks=_HANG_TREE,
)


# ------------------------------------------------------------------------------------ 4. a shift without deadlock
def shift(x, distance, group):
    """Everyone's tensor `distance` ranks further on, for any distance and any length, without a deadlock."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return swap(x, (rank + distance) % size, (rank - distance) % size, group) if distance % size else x.clone()


def _blocking(x, distance, group, begins_with_recv=lambda rank, size, distance: rank < math.gcd(distance, size)):
    """Blocking messages; in each cycle of ranks the smallest receives first, or as it is said."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (rank + distance) % size, (rank - distance) % size
    if to == rank:
        return x.clone()
    if begins_with_recv(rank, size, distance):
        received = recv(x, source, group)
        send(x, to, group)
        return received
    send(x, to, group)
    return recv(x, source, group)


def _one_rank_at_a_time(x, distance, group):
    for _ in range(distance % dist.get_world_size(group)):
        x = shift(x, 1, group)
    return x.clone()


def _distances(rng):
    among_3, small, large = rng.randrange(4, 9), rng.randrange(1, 9), rng.randrange(50_000, 60_000)
    cases = [(3, distance, small) for distance in (1, 0, -1, 3, -among_3)]
    cases += [(3, among_3, large), (4, 2, small), (4, 2, large)]
    return [(size, one_each(rng, size, length), distance) for size, distance, length in cases]


_WRONG_SHIFT = {
    "it has the tensor of rank + distance: the shift goes the wrong way": lambda x, far, group: shift(x, -far, group),
    "it has zeros: was the message waited for?": lambda x, far, group: 0 * x if far % group.size() else x.clone(),
    "it has its own tensor": lambda x, distance, group: x.clone(),
    "it has its left neighbour's tensor: the distance was not used": {"distance": 1},
    "send once over the whole distance, not over a distance of 1 again and again": _one_rank_at_a_time,
    "even ranks talk to even ranks": Stops(partial(_blocking, begins_with_recv=lambda rank, *_: rank % 2 == 1)),
    "would send to itself or receive from itself": Stops(lambda x, distance, group: recv(x, group.rank(), group)),
}
_SAYS_SHIFT = {"bytes sent": "one message over the whole distance, and none where that is a whole turn"}
_HANG_SHIFT = (
    "If all ranks begin with send, nobody receives: messages must be under way in both directions at once. Over a "
    "distance of 2, even ranks talk to even ranks: if these begin with send, each waits for the other."
)
check_shift = Exercise(
    shift,
    _distances,
    _WRONG_SHIFT,
    partial(collective, leave_out=["sent to", "messages sent and received"]),
    _SAYS_SHIFT,
    right=_blocking,
    ranks=_HANG_SHIFT,
    seconds=4.0,
)


# ------------------------------------------------------------------------------------ 5. doubling
def doubling(x, group, distances=lambda size: [2**step for step in range(int(math.log2(size)))], running=True):
    """The sum on every rank in log2 G exchanges of the whole tensor."""
    total = x.clone()
    for distance in distances(dist.get_world_size(group)):
        partner = dist.get_rank(group) ^ distance
        total += swap(total.clone() if running else x, partner, partner, group)
    return total


_WRONG_DOUBLING = {
    "the sum of the first pair; log2 G exchanges are needed": {"distances": lambda size: [1]},
    "each exchange must send the running sum, not the tensor that the rank began with": {"running": False},
    "averaged, not summed": lambda x, group: doubling(x, group) / group.size(),
    "it has its own tensor": lambda x, group: x.clone(),
    "log2 G exchanges are enough: a partner's running sum already has others in it": lambda x, group: doubling(
        x, group, lambda size: range(1, size), running=False
    ),
    "few bytes but many steps are the ring; here each exchange carries the whole tensor": ring_all_reduce,
}
_SAYS_DOUBLING = {"messages sent and received": "in log2 G exchanges each rank sends and receives once"}
_HANG_DOUBLING = "Two partners swap: one of them must begin with recv, or both messages must be under way at once."
check_all_reduce_by_doubling = Exercise(
    doubling,
    lambda rng: [(size, one_each(rng, size, rng.randrange(5, 30))) for size in (2, 4)],
    _WRONG_DOUBLING,
    partial(collective, leave_out=["sent to"]),
    _SAYS_DOUBLING,
    ranks=_HANG_DOUBLING,
)


# ------------------------------------------------------------------------------------ 6. two levels
def _two_levels(x_P, node_group, cross_group):
    """The sum over all ranks, with 1 / (ranks of a node) of the tensor crossing between nodes."""
    return all_gather(all_reduce(reduce_scatter(x_P, node_group), cross_group), node_group)


def _watch_levels(answer, num_nodes, ranks_per_node, length, seed):
    groups, x_P = make_groups(Mesh(dp=num_nodes, tp=ranks_per_node)), numbers(seed + dist.get_rank(), length)
    given = x_P.clone()
    with ByteMeter(axes=groups) as meter:
        result = answer(given, groups["tp"], groups["dp"])
    axes = {
        "bytes sent over the whole world": "other",
        "bytes sent between nodes": "dp",
        "bytes sent inside the node": "tp",
    }
    sent = {what: Cost(meter.by_axis.get(axis, 0)) for what, axis in axes.items()}
    return {"the sum": result, "arguments changed": not agree(given, x_P)} | sent


_WRONG_LEVELS = {
    "it called a collective over the whole world; use only node_group and cross_group": lambda x, node, cross: (
        all_reduce(x, dist.group.WORLD)
    ),
    "summed inside the node alone; nothing crossed between the nodes": lambda x, node, cross: all_gather(
        reduce_scatter(x, node), node
    ),
    "summed across the nodes alone; other ranks of the node are missing": lambda x, node, cross: all_reduce(x, cross),
    "one piece of the sum; at the end the node has to put its pieces together": lambda x, node, cross: all_reduce(
        reduce_scatter(x, node), cross
    ),
    "averaged, not summed": lambda x, node, cross: _two_levels(x, node, cross) / dist.get_world_size(),
    "each number was summed once more over the node: finished sums need only be copied": (
        lambda x, node, cross: all_reduce(_two_levels(x, node, cross), node)
    ),
    "all of the tensor crossed; reduce-scatter in the node first, then one piece is enough": (
        lambda x, node, cross: all_reduce(all_reduce(x, node), cross)
    ),
}
_SAYS_LEVELS = {
    "bytes sent over the whole world": "use only node_group and cross_group",
    "bytes sent between nodes": "reduce-scatter in the node first, then one piece is enough",
    "bytes sent inside the node": "half an all-reduce before the nodes talk, and half after it, are enough",
}
check_all_reduce_in_two_levels = Exercise(
    _two_levels,
    lambda rng: [(g * n, n, g, 12 * rng.randrange(1, 9), fresh_seed(rng)) for n, g in ((1, 3), (3, 1), (2, 2))],
    _WRONG_LEVELS,
    _watch_levels,
    _SAYS_LEVELS,
    ranks=True,
)


def broadcast_rounds(messages: list[list[tuple[str, int]]], src: int) -> int:
    """Rounds that a broadcast took, if in one round a rank can send to one other. messages[rank] of a `MessageLog`.

    Each rank but src must have received once.
    """
    arrived_in_round = {src: 0}
    waiting = [src]
    while waiting:
        rank = waiting.pop()
        receivers = [peer for kind, peer in messages[rank] if kind == "send"]
        for number, peer in enumerate(receivers, start=1):
            arrived_in_round[peer] = arrived_in_round[rank] + number
            waiting.append(peer)
    return max(arrived_in_round.values())
