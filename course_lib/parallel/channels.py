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
each needing the one before or standing behind it in a list: just what `schedule_check.check` excludes.

Receives are posted one instruction ahead: while a rank computes, what it needs next is on its way. That costs the
memory of one message. A sent tensor stays alive until a message from its receiver proves that it has come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.comm.conjugate import Group
from course_lib.schedules.instructions import Instruction, Schedule

Pair = tuple[int, int]  # (sender, receiver), counted inside the group
Message = tuple[str, int, int]  # ("activation" | "gradient", micro-batch, the stage that needs it)


def needed_by(instruction: Instruction, schedule: Schedule) -> Message | None:
    """What the instruction must have from another stage."""
    if instruction.op == "F" and instruction.stage > 0:
        return ("activation", instruction.micro_batch, instruction.stage)
    if instruction.op in "BI" and instruction.stage < schedule.num_stages - 1:
        return ("gradient", instruction.micro_batch, instruction.stage)
    return None


def given_by(instruction: Instruction, schedule: Schedule) -> Message | None:
    """What the instruction makes for another stage."""
    if instruction.op == "F" and instruction.stage < schedule.num_stages - 1:
        return ("activation", instruction.micro_batch, instruction.stage + 1)
    if instruction.op in "BI" and instruction.stage > 0:
        return ("gradient", instruction.micro_batch, instruction.stage - 1)
    return None


@dataclass(frozen=True)
class Step:
    """One instruction of one rank, and what it has to do with others.

    needs, gives   messages, also those that stay on the rank
    dst            to which rank `gives` goes; None: it stays here
    post           (message, sender): receives to post before the instruction, in this order
    arrived        sent messages that have certainly come by the time that `needs` has
    """

    instruction: Instruction
    needs: Message | None
    gives: Message | None
    dst: int | None
    post: tuple[tuple[Message, int], ...]
    arrived: tuple[Message, ...]


def plan(schedule: Schedule, rank: int, ahead: int = 1) -> list[Step]:
    """The rank's list with all that it sends and receives; receives are posted `ahead` instructions early."""
    row = schedule.instructions[rank]
    sources = [_source(instruction, schedule) for instruction in row]
    to_come = {src: _sent(schedule, src, rank) for src in set(sources) - {None}}
    on_the_way: dict[Message, int] = {}  # what this rank has sent, and to whom
    posted: dict[int, int] = dict.fromkeys(to_come, 0)
    steps = []
    for place, instruction in enumerate(row):
        post = []
        for later, src in zip(row[place : place + 1 + ahead], sources[place : place + 1 + ahead]):
            if src is not None:
                end = max(posted[src], to_come[src].index(needed_by(later, schedule)) + 1)
                post += [(message, src) for message in to_come[src][posted[src] : end]]
                posted[src] = end
        needs, gives = needed_by(instruction, schedule), given_by(instruction, schedule)
        arrived = () if sources[place] is None else _proved_by(needs, sources[place], on_the_way, schedule)
        for message in arrived:
            del on_the_way[message]
        dst = None if gives is None else schedule.rank_of_stage[gives[2]]
        dst = None if dst == rank else dst
        if dst is not None:
            on_the_way[gives] = dst
        steps.append(Step(instruction, needs, gives, dst, tuple(post), arrived))
    return steps


def _source(instruction: Instruction, schedule: Schedule) -> int | None:
    """Which other rank sends what the instruction needs."""
    if needed_by(instruction, schedule) is None:
        return None
    src = schedule.rank_of_stage[instruction.stage + (-1 if instruction.op == "F" else 1)]
    return None if src == schedule.rank_of_stage[instruction.stage] else src


def _sent(schedule: Schedule, src: int, dst: int) -> list[Message]:
    """What one rank sends another, in its order."""
    given = [given_by(instruction, schedule) for instruction in schedule.instructions[src]]
    return [message for message in given if message is not None and schedule.rank_of_stage[message[2]] == dst]


def _proved_by(came: Message, src: int, on_the_way: dict[Message, int], schedule: Schedule) -> tuple[Message, ...]:
    """What went to `src` and was needed there no later than where it made the message that came."""
    used = set()
    for instruction in schedule.instructions[src]:
        used.add(needed_by(instruction, schedule))
        if given_by(instruction, schedule) == came:
            break
    return tuple(message for message, dst in on_the_way.items() if dst == src and message in used)


# --- the channels


def pairs_of(schedule: Schedule) -> list[Pair]:
    """Who sends to whom."""
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
            _first_message(channels[pair], me == pair[0])
    return channels


def _first_message(channel: Group, is_sender: bool) -> None:
    device = torch.device("cuda") if "nccl" in dist.get_backend(channel) else torch.device("cpu")
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    (send if is_sender else receive)(byte, channel).wait()


def send(x: Tensor, channel: Group) -> dist.Work:
    """Starts to send to the other end; x must not change before wait()."""
    return dist.isend(x, group_dst=1 - channel.rank(), group=channel)


def receive(x: Tensor, channel: Group) -> dist.Work:
    """Starts to receive into x, which holds the message after wait()."""
    return dist.irecv(x, group_src=1 - channel.rank(), group=channel)
