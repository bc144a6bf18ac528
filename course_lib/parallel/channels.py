"""How a pipeline's ranks send to each other, and why they never wait for each other in a circle.

What travels follows from the schedule: F of stage s gives its activations to F of stage s + 1, the backward of stage s
gives the gradient of its input to that of stage s - 1. If both stages are on one rank, nothing travels.

Nobody deadlocks, on gloo or on NCCL, because:

1. Each ordered pair of ranks has a channel, a process group of these two: at one end only sends, at the other only
   receives, first in, first out. (In one group for both directions NCCL would put a send behind a receive that waits.)
2. The receiver posts its receives in the order in which the other rank sends, known from the schedule, in whatever
   order it needs them itself. So what is received is always what was meant.
3. Nobody waits for a send until its arrival is certain (`Step.arrived`). A rank waits for one thing only: the message
   that its next instruction needs; the receive of it, and all that come before it in its channel, are posted by then.

So a rank that waits, waits for an instruction that has not run yet. A circle of such ranks is a circle of instructions,
each needing the one before or standing behind it in a list: just what `schedules.check.check` excludes.

Receives are posted one instruction ahead: while a rank computes, what it needs next is on its way. That costs the
memory of one message. A sent tensor stays alive until a message from its receiver proves that it has come.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.conjugate import Group
from course_lib.schedules.instructions import Schedule

Pair = tuple[int, int]  # (sender, receiver), counted inside the group


def pairs_of(schedule: Schedule) -> list[Pair]:
    owners = schedule.rank_of_stage
    neighbours = {pair for pair in pairwise(owners) if pair[0] != pair[1]}
    return sorted(neighbours | {(b, a) for a, b in neighbours})


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs in rounds, in each of which a rank is in one pair at most."""
    made: list[list[Pair]] = []
    for pair in sorted(set(pairs)):
        for members in made:
            if not any(set(pair) & set(other) for other in members):
                members.append(pair)
                break
        else:
            made.append([pair])
    return made


def connect(group: Group, pairs: Sequence[Pair]) -> dict[Pair, Group]:
    """A channel for each of this rank's pairs. All ranks of the group must call it, with the same pairs.

    In each round each rank makes one group, alone if it is in no pair: torch names groups by how many a rank has.
    Bytes    sent per rank: one byte a channel, so that no connection is made in the midst of a step (NCCL makes it at
             the first message, and both ends wait for each other; here all do so in one order)
    """
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    together = "nccl" in dist.get_backend(group) and len(ranks) == dist.get_world_size()  # NCCL splits the world's
    channels: dict[Pair, Group] = {}
    for members in rounds(pairs):
        mine = [pair for pair in members if me in pair]
        for pair in members if together else mine or [(me,)]:
            made = dist.new_group([ranks[r] for r in pair], use_local_synchronization=not together)
            if pair in mine:
                channels[pair] = made
        for pair in mine:
            device = "cuda" if "nccl" in dist.get_backend(channels[pair]) else "cpu"
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            (send if me == pair[0] else receive)(byte, channels[pair]).wait()
    return channels


def send(x: Tensor, channel: Group) -> dist.Work:
    """Starts to send to the other end; x must not change before wait()."""
    return dist.isend(x, group_dst=1 - channel.rank(), group=channel)


def receive(x: Tensor, channel: Group) -> dist.Work:
    """Starts to receive into x, which holds the message after wait()."""
    return dist.irecv(x, group_src=1 - channel.rank(), group=channel)
