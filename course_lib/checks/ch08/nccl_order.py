"""Would messages that ran on gloo also run on NCCL? Record the calls of each rank, and replay them in NCCL's order.

gloo matches a receive with its send whatever was started before. NCCL runs the messages of one communicator in the
order of the calls, and a send ends when its receive runs (NVIDIA/nccl#479). Messages that one `batch_isend_irecv`
starts run together. torch has one communicator for all batches of a group, and one for each pair of its ranks for
messages that are started alone.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from course_lib import comm

_WAYS = {"send": "its send to", "recv": "its receive from"}
HANG = timedelta(seconds=10)  # other ranks compute for milliseconds between two messages
BATCH = "start a send and a receive in one dist.batch_isend_irecv"
STUCK = f"right on gloo, but NCCL runs the messages of two ranks in the order of the calls, and ranks wait: {BATCH}"


class Started(NamedTuple):
    """Messages that one call started."""

    communicator: str  # one for the batches of a group, one for the lone messages of each pair of ranks
    messages: list[list]  # each ["send" | "recv", the other rank]
    after: list[int]  # the rank's calls that it had waited for by then


@contextmanager
def recorded_calls() -> Iterator[list[Started]]:
    """Give a list that gets each call that starts messages on this rank; a wait of HANG raises."""
    calls: list[Started] = []
    call_of: dict[int, tuple[dist.Work, int]] = {}
    waited: set[int] = set()
    left_of_batch = [0]
    check, wait, group_class = c10d._check_p2p_op_list, dist.Work.wait, dist.ProcessGroup
    originals = {"send": group_class.send, "recv": group_class.recv}

    def begin_batch(messages):
        check(messages)
        calls.append(Started(f"batches of {messages[0].group.group_name}", [], sorted(waited)))
        left_of_batch[0] = len(messages)

    def starting(kind: str):
        def start(group, tensors, peer, *tag):
            other = dist.get_global_rank(group, peer)
            if left_of_batch[0]:
                left_of_batch[0] -= 1
            else:
                pair = sorted((dist.get_rank(), other))
                calls.append(Started(f"{group.group_name}, ranks {pair}", [], sorted(waited)))
            calls[-1].messages.append([kind, other])
            work = originals[kind](group, tensors, peer, *tag)
            call_of[id(work)] = work, len(calls) - 1  # the work is kept, so that no other gets its id
            return work

        return start

    def noted_wait(work, timeout=HANG):
        result = wait(work, timeout)
        if id(work) in call_of:
            waited.add(call_of[id(work)][1])
        return result

    c10d._check_p2p_op_list, dist.Work.wait = begin_batch, noted_wait
    group_class.send, group_class.recv = starting("send"), starting("recv")
    try:
        yield calls
    finally:
        c10d._check_p2p_op_list, dist.Work.wait = check, wait
        group_class.send, group_class.recv = originals["send"], originals["recv"]


def replay(rows: Sequence[Sequence[Started]]) -> tuple[int, str]:
    """Return how many rounds all messages take in NCCL's order, and where ranks wait for ever ("" if none does).

    rows   the recorded calls of each rank
    A round moves all messages whose two ends run. A call runs if it is the first of its communicator that is left, and
    the calls that the rank had waited for are done.
    """
    left = [[list(call.messages) for call in row] for row in rows]
    for rounds in itertools.count():
        running = [_running(row, of_rank) for row, of_rank in zip(rows, left, strict=True)]
        moved = _matched(rows, left, running)
        for rank, index, message in moved:
            left[rank][index].remove(message)
        if not moved:
            first = {rank: left[rank][min(running[rank])] for rank in range(len(rows)) if any(left[rank])}
            places = {rank: [f"{_WAYS[kind]} rank {other}" for kind, other in calls] for rank, calls in first.items()}
            return rounds, ", ".join(f"rank {rank} stands at " + " and ".join(at) for rank, at in places.items())


def replay_of_all(calls: list[Started]) -> tuple[int, str]:
    """Return `replay` of the recorded calls of all ranks; each rank gives its own."""
    return replay([[Started(*call) for call in row] for row in comm.all_gather_json(calls, dist.group.WORLD)])


def _running(row: Sequence[Started], left: Sequence[list]) -> list[int]:
    heads: dict[str, int] = {}
    for index, call in enumerate(row):
        if left[index]:
            heads.setdefault(call.communicator, index)
    return [index for index in heads.values() if not any(left[before] for before in row[index].after)]


def _matched(rows, left, running) -> list[tuple[int, int, list]]:
    """(rank, its call, message) of both ends of each message that runs at both."""
    waiting: dict[tuple, dict[str, list]] = {}
    for rank, indices in enumerate(running):
        for index in indices:
            for kind, other in left[rank][index]:
                pair = (rank, other) if kind == "send" else (other, rank)
                ends = waiting.setdefault((rows[rank][index].communicator, pair), {"send": [], "recv": []})
                ends[kind].append((rank, index, [kind, other]))
    return [end for ends in waiting.values() for both in zip(*ends.values(), strict=False) for end in both]
