"""Watch an answer at work: call it on real ranks and write down what it returned, sent and received.

A grader describes its calls (`Call`), `run_calls` makes them on every rank, and what comes back (`Seen`) is plain data
that the grader compares with what the exercise asks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.checks.core import CheckFailed, fail, hang_in_words, run_ranks
from course_lib.comm.groups import make_groups
from course_lib.launch.limits import slowness
from course_lib.layout.mesh import Mesh
from course_lib.measure.meter import ByteMeter

HANG_S = 5.0  # on an idle machine: the answers take milliseconds; a rank that waits longer waits for ever


@dataclass(frozen=True)
class Call:
    """One call of the answer, made by every rank: `answer(inputs[rank], *args, *groups)`."""

    inputs: list[Tensor]
    args: tuple = ()


@dataclass(frozen=True)
class Seen:
    """What one rank's call returned and did.

    messages   ("send", to) and ("recv", from), in order
    sent       what each send carried, in order
    """

    result: object
    kept_input: bool
    sent_bytes: int
    sent_by_axis: dict[str, int]
    calls: dict[str, int]
    messages: list[tuple[str, int]]
    sent: list[Tensor]

    @property
    def sent_to(self) -> list[int]:
        """The ranks to which this one sent, in order."""
        return [peer for kind, peer in self.messages if kind == "send"]

    @property
    def received_from(self) -> list[int]:
        """The ranks from which this one received, in order."""
        return [peer for kind, peer in self.messages if kind == "recv"]


class _MessageLog(TorchDispatchMode):
    """Writes down to whom this rank sends, and what, and from whom it receives; the meter keeps neither."""

    def __init__(self):
        super().__init__()
        self.messages: list[tuple[str, int]] = []
        self.sent: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("c10d::send", "c10d::recv_"):
            self.messages.append(("send" if name == "c10d::send" else "recv", args[2]))
        if name == "c10d::send":
            self.sent += [x.clone() for x in args[0]]
        return func(*args, **(kwargs or {}))


def run_calls(
    answer: Callable, calls: list[Call], hang: str, mesh: Mesh | None = None, axes: tuple[str, ...] = ()
) -> list[list[Seen]]:
    """seen[call][rank]. The answer gets the groups of those axes of the mesh, or without a mesh the whole world.

    hang     what to say if the ranks wait for each other: the likely reason
    Raises   CheckFailed if a rank fails or waits for ever
    """
    limit_s = HANG_S * slowness()
    try:
        results = run_ranks(_on_this_rank, len(calls[0].inputs), answer, calls, mesh, axes, timeout=limit_s)
    except CheckFailed as failure:
        raise CheckFailed(hang_in_words(str(failure), hang)) from None
    return [[seen[index] for seen in results] for index in range(len(calls))]


def _on_this_rank(answer: Callable, calls: list[Call], mesh: Mesh | None, axes: tuple[str, ...]) -> list[Seen]:
    groups_by_axis = make_groups(mesh) if mesh else {}
    groups = [groups_by_axis[axis] for axis in axes] if mesh else [dist.group.WORLD]
    return [_observe(answer, call, groups, groups_by_axis) for call in calls]


def _observe(answer: Callable, call: Call, groups: list, groups_by_axis: dict) -> Seen:
    x = call.inputs[dist.get_rank()]
    before = x.clone()
    with _MessageLog() as log, ByteMeter(axes=groups_by_axis) as meter:
        result = answer(x, *call.args, *groups)
    if isinstance(result, Tensor):
        result = result.clone()
    return Seen(result, torch.equal(x, before), meter.sent_bytes, meter.by_axis, meter.calls, log.messages, log.sent)


# What several graders ask -------------------------------------------------------------------------------------------


def expect_input_kept(seen: Seen, where: str) -> None:
    """The answer left its input as it was."""
    if not seen.kept_input:
        fail(f"{where}: your function changed its input; work on a copy (`x.clone()`): the caller still needs it")


def expect_only_messages(seen: Seen, where: str) -> None:
    """The answer called nothing but send and recv."""
    others = sorted(set(seen.calls) - {"send", "recv"})
    if others:
        fail(f"{where}: only send and recv are allowed here, and your function called {', '.join(others)}")


def broadcast_rounds(messages: list[list[tuple[str, int]]], src: int) -> int:
    """Rounds that a broadcast took, if in one round a rank can send to one other. messages[rank] as in `Seen`.

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
