"""What the instructions of a pipeline need from each other, and when a rank posts, has and may forget each message.

`plan` says it for one rank, as data: parallel/executor.py does it, and the memory formula counts it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.schedules.instructions import Instruction, Schedule

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


def steps_of_rank(schedule: Schedule, rank: int, ahead: int = 1) -> list[Step]:
    """The rank's list with all that it sends and receives; receives are posted `ahead` instructions early."""
    row = schedule.instructions[rank]
    sources = [_source(instruction, schedule) for instruction in row]
    to_come = {src: _sent(schedule, src, rank) for src in set(sources) - {None}}
    turn = {message: index for sent in to_come.values() for index, message in enumerate(sent)}
    needed = {src: _places(schedule, src, needed_by) for src in to_come}
    given = {src: _places(schedule, src, given_by) for src in to_come}
    on_the_way: dict[Message, int] = {}  # what this rank has sent, and to whom
    posted: dict[int, int] = dict.fromkeys(to_come, 0)
    steps = []
    for place, instruction in enumerate(row):
        post = []
        for later, src in zip(row[place : place + 1 + ahead], sources[place : place + 1 + ahead], strict=True):
            if src is not None:
                end = max(posted[src], turn[needed_by(later, schedule)] + 1)
                post += [(message, src) for message in to_come[src][posted[src] : end]]
                posted[src] = end
        needs, gives = needed_by(instruction, schedule), given_by(instruction, schedule)
        arrived = ()
        if (src := sources[place]) is not None:  # what went to src and was needed there before it made `needs`
            sent = (message for message, dst in on_the_way.items() if dst == src)
            arrived = tuple(message for message in sent if needed[src][message] <= given[src][needs])
        for message in arrived:
            del on_the_way[message]
        dst = None if gives is None else schedule.rank_of_stage[gives[2]]
        dst = None if dst == rank else dst
        if dst is not None:
            on_the_way[gives] = dst
        steps.append(Step(instruction, needs, gives, dst, tuple(post), arrived))
    return steps


def _source(instruction: Instruction, schedule: Schedule) -> int | None:
    if needed_by(instruction, schedule) is None:
        return None
    src = schedule.rank_of_stage[instruction.stage + (-1 if instruction.op == "F" else 1)]
    return None if src == schedule.rank_of_stage[instruction.stage] else src


def _sent(schedule: Schedule, src: int, dst: int) -> list[Message]:
    given = [given_by(instruction, schedule) for instruction in schedule.instructions[src]]
    return [message for message in given if message is not None and schedule.rank_of_stage[message[2]] == dst]


def _places(schedule: Schedule, rank: int, message_of: Callable) -> dict[Message | None, int]:
    return {message_of(one, schedule): place for place, one in enumerate(schedule.instructions[rank])}
