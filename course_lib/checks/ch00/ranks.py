"""Graders of chapter 00: each runs the answer on real ranks and looks at its values, its messages and its bytes.

Numbers are whole (as float64), so that sums are exact in any order. The arithmetic of exercise 7 is in alpha_beta.py.
"""

import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_generator, grader
from course_lib.checks.observe import Call, Seen, broadcast_rounds, expect_input_kept, expect_only_messages, run_calls
from course_lib.layout.mesh import Mesh
from course_lib.traffic import all_gather_bytes, reduce_scatter_bytes, ring_all_reduce_bytes

ITEMSIZE = 8
SAME_CALLS = "Does every rank of the group make the same calls in the same order?"


def _whole_numbers(rng: random.Random, length: int) -> Tensor:
    return torch.randint(100, (length,), generator=fresh_generator(rng)).double()


def one_each(rng: random.Random, world_size: int, length: int) -> list[Tensor]:
    """Return a tensor for every rank; no element of one rank is an element of another."""
    return [1000.0 * (rank + 1) + _whole_numbers(rng, length) for rank in range(world_size)]


# ------------------------------------------------------------------------------------ 1. unequal shares
@grader
def check_mean_of_unequal_shares(answer, rng):
    """The mean over all samples of a group, from one all-reduce, also if a rank has no sample."""
    some = rng.sample([3, 5, 6, 7, 8, 9], 4)  # none is the size of a group: dividing by either would look alike
    for lengths in (some, rng.sample([0, *some[1:]], 4)):
        call = Call([rng.randrange(1, 1000) + _whole_numbers(rng, length) for length in lengths])
        [everybody] = run_calls(answer, [call], SAME_CALLS)
        for rank, seen in enumerate(everybody):
            _expect_mean(seen, rank, call.inputs, ranks=[0, 1, 2, 3])
    mesh = Mesh(dp=2, tp=2)
    [everybody] = run_calls(answer, [call], SAME_CALLS, mesh, ("dp",))
    for rank, seen in enumerate(everybody):
        _expect_mean(seen, rank, call.inputs, mesh.ranks_along("dp", rank))


def _expect_mean(seen: Seen, rank: int, inputs: list[Tensor], ranks: list[int]) -> None:
    lengths = [len(inputs[other]) for other in ranks]
    where = f"rank {rank}; the ranks {ranks} of its group have {lengths} samples"
    if isinstance(seen.result, Tensor) and seen.result.isnan().any():
        fail(f"{where}: the result is nan; a rank without samples has no mean, but it has a sum (0) and a count (0)")
    if isinstance(seen.result, Tensor) and seen.result.numel() == 1:
        seen = replace(seen, result=seen.result.reshape(()))
    everything = torch.cat([inputs[other] for other in ranks])
    expect_close(seen.result, everything.mean(), where, _wrong_means(rank, inputs, ranks))
    expect_input_kept(seen, where)
    if seen.calls != {"all_reduce": 1}:
        called = ", ".join(f"{name} ({count} times)" for name, count in seen.calls.items()) or "nothing"
        why = (
            "each call costs its latency; put the sum and the count into one tensor"
            if set(seen.calls) == {"all_reduce"}
            else "two numbers of every rank are enough, so nothing has to be gathered"
        )
        fail(f"{where}: one all_reduce is asked for, and your function called {called}: {why}")


def _wrong_means(rank: int, inputs: list[Tensor], ranks: list[int]) -> dict[str, Tensor]:
    shares, own = [inputs[other] for other in ranks], inputs[rank]
    total, means = torch.cat(shares).sum(), torch.stack([share.mean() for share in shares])
    return {
        "every rank counted alike, however many samples it has: this is the mean of the ranks' means": means.mean(),
        "summed, not averaged": total,
        "divided by the number of ranks, not by the number of samples": total / len(ranks),
        "divided by this rank's number of samples; the count must be summed over the ranks too": total / len(own),
        "this is the mean of the rank's own samples; nothing was exchanged": own.mean(),
        "the ranks' means were summed": means.sum(),
        "this is the mean over the whole world; exchange only within `group`": torch.cat(inputs).mean(),
    }


# ------------------------------------------------------------------------------------ 2. a ring of unequal shards
@grader
def check_ring_all_gather(answer, rng):
    """All shards on every rank, in rank order, sent around the ring; shards differ in length."""
    for world_size in (rng.choice([2, 3]), 4):
        lengths = rng.sample(range(1, 12), world_size)
        shards = [1000.0 * rank + torch.arange(length).double() for rank, length in enumerate(lengths)]
        hang = "In the ring every rank sends and receives at the same time, and G - 1 times: use pass_on."
        [everybody] = run_calls(answer, [Call(shards, (lengths,))], hang)
        for rank, seen in enumerate(everybody):
            where = f"rank {rank} of {world_size}, shards of {lengths} numbers"
            expect_only_messages(seen, where)
            expect_close(seen.result, torch.cat(shards), f"{where}: the result", _wrong_gathers(shards, rank))
            expect_input_kept(seen, where)
            _expect_ring(seen, rank, lengths, where)


def _wrong_gathers(shards: list[Tensor], rank: int) -> dict[str, Tensor]:
    size = len(shards)
    as_they_came = torch.cat([shards[(rank - step) % size] for step in range(size)])
    from_me_on = torch.cat([shards[(rank + step) % size] for step in range(size)])
    return {
        "the shards stand in the order in which they arrived; put each at its owner's place": as_they_came,
        "the shards begin with the rank's own; on every rank they must begin with rank 0's": from_me_on,
        "the shards stand in rank order, but the last rank's first": torch.cat(shards[::-1]),
    }


def _expect_ring(seen: Seen, rank: int, lengths: list[int], where: str) -> None:
    size, right = len(lengths), (rank + 1) % len(lengths)
    strangers = sorted(set(seen.sent_to) - {right})
    if strangers:
        fail(f"{where}: it sent to {strangers}; in a ring a rank sends only to its right neighbour, {right}")
    want = ITEMSIZE * (sum(lengths) - lengths[right])
    if seen.sent_bytes > want:
        fail(
            f"{where}: it sent {seen.sent_bytes:,} bytes, and {want:,} are enough: pass on only the shard that came "
            f"last, and after {size - 1} steps stop, before a shard comes back to its owner"
        )
    expect_equal(seen.sent_bytes, want, f"{where}: the number of bytes sent")


# ------------------------------------------------------------------------------------ 3. a tree
@grader
def check_tree_broadcast(answer, rng):
    """The root's tensor on every rank, each rank receiving once, in ceil(log2 G) rounds, for any G and root."""
    for world_size in (4, 3, 5):
        hang = (
            "A rank must receive before it passes on, and each send needs one recv on the other side."
            if world_size == 4
            else f"{world_size} is not a power of two: in the last round some ranks have nobody to send to."
        )
        roots = [rng.randrange(1, world_size), 0]
        length = rng.randrange(1, 40)
        calls = [Call(one_each(rng, world_size, length), (src,)) for src in roots]
        for call, everybody in zip(calls, run_calls(answer, calls, hang), strict=True):
            where = f"{world_size} ranks, src {call.args[0]}"
            _expect_broadcast(everybody, call.inputs, call.args[0], where)
            _expect_tree(everybody, call.args[0], where)


def _expect_broadcast(everybody: list[Seen], inputs: list[Tensor], src: int, where: str) -> None:
    if src != 0 and all(isinstance(s.result, Tensor) and torch.equal(s.result, inputs[0]) for s in everybody):
        fail(f"{where}: every rank has rank 0's tensor; the root is `src`")
    for rank, seen in enumerate(everybody):
        here = f"{where}: rank {rank}"
        expect_only_messages(seen, here)
        wrong = {} if rank == src else {"it still has its own tensor; nothing was received or kept": inputs[rank]}
        expect_close(seen.result, inputs[src], here, wrong)
        expect_input_kept(seen, here)


def _expect_tree(everybody: list[Seen], src: int, where: str) -> None:
    for rank, seen in enumerate(everybody):
        received, enough = len(seen.received_from), int(rank != src)
        if received > enough:
            fail(
                f"{where}: rank {rank} received {received} times, and {enough} is enough; send only to who has nothing"
            )
    used, enough = broadcast_rounds([seen.messages for seen in everybody], src), math.ceil(math.log2(len(everybody)))
    if used > enough:
        by_root = len(everybody[src].sent_to)
        why = (
            f"the root alone sends {by_root} times; ranks that have the tensor can send it too"
            if by_root > enough
            else "some ranks that have the tensor wait while others send; in each round all of them should send"
        )
        fail(f"{where}: {used} rounds, and {enough} are enough: {why}")


# ------------------------------------------------------------------------------------ 4. a shift without deadlock
@grader
def check_shift(answer, rng):
    """Everyone's tensor `distance` ranks further on, for any distance and any length, without a deadlock."""
    small, large = rng.randrange(1, 9), rng.randrange(50_000, 60_000)
    all_send = "If all ranks begin with send, nobody receives: messages must be under way in both directions at once."
    _expect_shifts(answer, rng, 3, [(1, small)], all_send)
    even = "Over a distance of 2, even ranks talk to even ranks: if these begin with send, each waits for the other."
    _expect_shifts(answer, rng, 4, [(2, small), (2, large)], even)
    others = [(0, small), (-1, small), (3, small), (rng.randrange(4, 9), large), (-rng.randrange(4, 9), small)]
    distances = ", ".join(str(distance) for distance, _ in others)
    _expect_shifts(answer, rng, 3, others, f"It happened among 3 ranks at one of the distances {distances}.")


def _expect_shifts(answer, rng, world_size: int, distances_lengths: list[tuple[int, int]], hang: str) -> None:
    calls = [Call(one_each(rng, world_size, n), (d,)) for d, n in distances_lengths]
    for call, everybody in zip(calls, run_calls(answer, calls, hang), strict=True):
        distance, inputs = call.args[0], call.inputs
        for rank, seen in enumerate(everybody):
            where = f"rank {rank} of {world_size}, distance {distance}"
            _expect_shift(seen, rank, distance, inputs, where)


def _expect_shift(seen: Seen, rank: int, distance: int, inputs: list[Tensor], where: str) -> None:
    size, n_bytes = len(inputs), inputs[rank].nbytes
    expect_only_messages(seen, where)
    expect_close(
        seen.result,
        inputs[(rank - distance) % size],
        where,
        {
            "it has the tensor of rank + distance: the shift goes the wrong way": inputs[(rank + distance) % size],
            "it has zeros: was the message waited for?": torch.zeros_like(inputs[rank]),
            "it has its own tensor": inputs[rank],
            "it has its left neighbour's tensor: the distance was not used": inputs[(rank - 1) % size],
        },
    )
    expect_input_kept(seen, where)
    hops = distance % size
    too_many = {"send once over the whole distance, not over a distance of 1 again and again": n_bytes * hops}
    expect_equal(seen.sent_bytes, n_bytes if hops else 0, f"{where}: the number of bytes sent", too_many)


# ------------------------------------------------------------------------------------ 5. doubling
@grader
def check_all_reduce_by_doubling(answer, rng):
    """The sum on every rank in log2 G exchanges of the whole tensor."""
    length = rng.randrange(5, 30)
    for world_size in (2, 4):
        inputs = one_each(rng, world_size, length)
        hang = "Two partners swap: one of them must begin with recv, or both messages must be under way at once."
        [everybody] = run_calls(answer, [Call(inputs)], hang)
        for rank, seen in enumerate(everybody):
            where = f"rank {rank} of {world_size}"
            expect_only_messages(seen, where)
            _expect_doubled_sum(seen, rank, inputs, where)
            _expect_doubling(seen, world_size, inputs[rank].nbytes, where)


def _expect_doubled_sum(seen: Seen, rank: int, inputs: list[Tensor], where: str) -> None:
    total = torch.stack(inputs).sum(0)
    partners = [rank ^ 2**step for step in range(int(math.log2(len(inputs))))]
    direct = inputs[rank] + torch.stack([inputs[partner] for partner in partners]).sum(0)
    wrong = {
        "the sum of the first pair alone; log2 G exchanges are needed": inputs[rank] + inputs[rank ^ 1],
        "each exchange must send the running sum, not the tensor that the rank began with": direct,
        "averaged, not summed": total / len(inputs),
        "it has its own tensor": inputs[rank],
    }
    if len(inputs) == 2:  # the first pair is everybody
        wrong = {message: value for message, value in wrong.items() if not torch.equal(value, total)}
    expect_close(seen.result, total, where, wrong)
    expect_input_kept(seen, where)


def _expect_doubling(seen: Seen, size: int, n_bytes: int, where: str) -> None:
    steps, sends = int(math.log2(size)), len(seen.sent_to)
    if sends > steps and seen.sent_bytes > steps * n_bytes:
        fail(f"{where}: {sends} messages, and {steps} are enough: a partner's running sum already has others in it")
    ring = {"few bytes but many steps are the ring; here each exchange carries the whole tensor": 2 * (size - 1)}
    expect_equal(sends, steps, f"{where}: the number of messages sent", ring)
    expect_equal(seen.sent_bytes, steps * n_bytes, f"{where}: the number of bytes sent")


# ------------------------------------------------------------------------------------ 6. two levels
@grader
def check_all_reduce_in_two_levels(answer, rng):
    """The sum over all ranks, with 1 / (ranks of a node) of the tensor crossing between nodes."""
    for num_nodes, ranks_per_node in ((2, 2), rng.choice([(1, 3), (3, 1)])):
        mesh = Mesh(dp=num_nodes, tp=ranks_per_node)
        length = 12 * rng.randrange(1, 9)
        inputs = one_each(rng, mesh.world_size, length)
        [everybody] = run_calls(answer, [Call(inputs)], SAME_CALLS, mesh, ("tp", "dp"))
        for rank, seen in enumerate(everybody):
            where = f"rank {rank}, {num_nodes} nodes of {ranks_per_node}"
            _expect_sum_of_all(seen, rank, inputs, mesh, where)
            _expect_bytes_of_two_levels(seen, inputs[rank].nbytes, mesh, where)


def _expect_sum_of_all(seen: Seen, rank: int, inputs: list[Tensor], mesh: Mesh, where: str) -> None:
    total = torch.stack(inputs).sum(0)
    in_node, across = (
        torch.stack([inputs[other] for other in mesh.ranks_along(axis, rank)]).sum(0) for axis in ("tp", "dp")
    )
    wrong = {
        "summed inside the node alone; nothing crossed between the nodes": in_node,
        "summed across the nodes alone; the other ranks of the node are missing": across,
        "one piece of the sum; at the end the node has to put its pieces together": total.chunk(mesh.tp)[
            rank % mesh.tp
        ],
        "averaged, not summed": total / mesh.world_size,
        "each number was summed once more over the node: finished sums need only be copied": total * mesh.tp,
    }
    wrong = {message: value for message, value in wrong.items() if not torch.equal(value, total)}
    expect_close(seen.result, total, where, wrong)
    expect_input_kept(seen, where)


def _expect_bytes_of_two_levels(seen: Seen, n_bytes: int, mesh: Mesh, where: str) -> None:
    if seen.sent_by_axis.get("other"):
        fail(f"{where}: it called a collective over the whole world; use only node_group and cross_group")
    want = ring_all_reduce_bytes(n_bytes // mesh.tp, mesh.dp, itemsize=ITEMSIZE)
    whole = {"all of the tensor crossed; reduce-scatter in the node first, then one piece is enough": want * mesh.tp}
    between = seen.sent_by_axis.get("dp", 0)
    expect_equal(between, want, f"{where}: the number of bytes sent between nodes", whole)
    halves = (
        reduce_scatter_bytes(n_bytes, mesh.tp, itemsize=ITEMSIZE),
        all_gather_bytes(n_bytes, mesh.tp, itemsize=ITEMSIZE),
    )
    inside = seen.sent_by_axis.get("tp", 0)
    expect_equal(inside, sum(halves), f"{where}: the number of bytes sent inside the node")
