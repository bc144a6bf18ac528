"""Grader of chapter 04, exercise 5: units that are gathered, used and freed, in forward and in backward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.checks.core import CheckFailed, expect_close, fail, fresh_seed, grader, numbers, run_ranks

WIDTH = 4


@dataclass
class Log:
    """What happened, in order: (event, unit); and the most units whole at once."""

    events: list[tuple[str, int]] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    most_whole: int = 0


class Unit:
    """One layer, tanh(x w), of which this rank keeps a shard. What exercise 5 is handed.

    start_gather()   begins to make the weight whole        forward(x)      needs it whole; returns the output
    wait()           until it is                            backward(grad)  needs it whole; returns the input's gradient
    free()           drops the whole weight                 reduce()        scatters the weight's gradient to its owners
    """

    def __init__(self, index: int, whole_DD: Tensor, group: dist.ProcessGroup, log: Log) -> None:
        self._index, self._group, self._log = index, group, log
        self.shard_p = whole_DD.flatten().chunk(group.size())[group.rank()].clone()
        self.grad_p: Tensor | None = None
        self._whole_DD = self._work = self._grad_DD = self._x = self._y = None
        self._is_whole = False

    def start_gather(self) -> None:
        self._note("gather")
        if self._whole_DD is not None:
            raise CheckFailed(f"unit {self._index} is gathered although it is whole already: that sends it once more")
        self._whole_DD = torch.empty(WIDTH, WIDTH, dtype=self.shard_p.dtype)
        self._work = comm.all_gather_into(self._whole_DD.view(-1), self.shard_p, self._group, async_op=True)
        self._log.whole.add(self._index)
        self._log.most_whole = max(self._log.most_whole, len(self._log.whole))

    def wait(self) -> None:
        if self._whole_DD is None:
            raise CheckFailed(f"unit {self._index} is waited for, but its gather was not started")
        self._work.wait()
        self._is_whole = True

    def free(self) -> None:
        self._note("free")
        if self._work is not None:
            self._work.wait()
        self._whole_DD, self._work, self._is_whole = None, None, False
        self._log.whole.discard(self._index)

    def forward(self, x: Tensor) -> Tensor:
        self._need_whole("forward")
        self._x, self._y = x, torch.tanh(x @ self._whole_DD)
        return self._y

    def backward(self, grad: Tensor) -> Tensor:
        self._need_whole("backward")
        if self._x is None:
            raise CheckFailed(f"unit {self._index} runs backward before it ran forward")
        inner = grad * (1 - self._y**2)
        self._grad_DD = self._x.mT @ inner
        return inner @ self._whole_DD.mT

    def reduce(self) -> None:
        self._note("reduce")
        if self._grad_DD is None:
            raise CheckFailed(f"unit {self._index} is reduced before its backward has made a gradient")
        self.grad_p = comm.reduce_scatter(self._grad_DD.flatten(), self._group, op="mean")
        self._grad_DD = None

    def _need_whole(self, event: str) -> None:
        self._note(event)
        if self._whole_DD is None:
            again = "; after forward it was freed, so gather it again" if event == "backward" else ""
            raise CheckFailed(f"unit {self._index} runs {event} with freed parameters{again}")
        if not self._is_whole:
            raise CheckFailed(f"unit {self._index} runs {event} while its gather is under way; wait() for it first")

    def _note(self, event: str) -> None:
        self._log.events.append((event, self._index))


@grader
def check_gather_use_free(answer, rng):
    """Forward and backward over units: each gathered twice, the next one ahead, freed after use, gradients reduced."""
    for world_size, num_units in ((2, rng.choice([4, 5])), (4, 3)):
        seed = fresh_seed(rng)
        ranks = run_ranks(_on_rank, world_size, answer, num_units, seed)
        for rank, (refused, log, output, grads) in enumerate(ranks):
            where = f"rank {rank} of {world_size}, {num_units} units"
            if refused:
                fail(f"{where}: {refused}")
            _expect_schedule(log, num_units, where)
            _expect_numbers(output, grads, world_size, num_units, seed, rank, where)


def _weights(num_units: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [numbers(generator, WIDTH, WIDTH) for _ in range(num_units)]


def _input(seed: int, rank: int) -> Tensor:
    return numbers(seed + 1 + rank, 3, WIDTH)


def _on_rank(answer: Callable, num_units: int, seed: int) -> tuple:
    group, log = dist.group.WORLD, Log()
    units = [Unit(index, weight, group, log) for index, weight in enumerate(_weights(num_units, seed))]
    try:
        output = answer(units, _input(seed, dist.get_rank()))
    except CheckFailed as refused:  # every rank runs the same schedule, so all stop here
        return str(refused), None, None, None
    return None, log, output, [unit.grad_p for unit in units]


def _expect_schedule(log: Log, num_units: int, where: str) -> None:
    events = log.events
    for index in range(num_units):
        for event in ("forward", "backward"):
            if events.count((event, index)) != 1:
                fail(f"{where}: unit {index} ran {event} {events.count((event, index))} times, and once is right")
        if ("reduce", index) not in events:
            fail(f"{where}: the gradient of unit {index} was never reduced")
    if log.most_whole > 2:
        fail(f"{where}: {log.most_whole} units were whole at once, and 2 are enough: free a unit after its turn")
    if log.whole:
        fail(f"{where}: at the end units {sorted(log.whole)} are still whole; free them after their backward")
    turns = [(event, index) for event, index in events if event in ("forward", "backward")]
    in_order = [("forward", index) for index in range(num_units)]
    if turns != in_order + [("backward", index) for index in reversed(range(num_units))]:
        fail(f"{where}: forward runs from the first unit to the last, and backward from the last to the first")
    for turn, (_, following) in pairwise(turns):
        if turn[1] != following and ("gather", following) not in _since_freed(events, following, events.index(turn)):
            fail(
                f"{where}: while unit {turn[1]} runs {turn[0]} nothing is gathered ahead; start to gather unit "
                f"{following} before"
            )
    gathers = sum(event == "gather" for event, _ in events)
    if gathers > 2 * num_units:
        fail(f"{where}: {gathers} gathers, and {2 * num_units} are enough: once for forward, once for backward")


def _since_freed(events: list[tuple[str, int]], index: int, stop: int) -> list[tuple[str, int]]:
    """The events up to `stop` after the last one that freed this unit."""
    until = events[:stop]
    freed = [place for place, event in enumerate(until) if event == ("free", index)]
    return until[freed[-1] + 1 :] if freed else until


def _expect_numbers(output, grads, world_size: int, num_units: int, seed: int, rank: int, where: str) -> None:
    weights = [weight.requires_grad_() for weight in _weights(num_units, seed)]
    outputs = []
    for other in range(world_size):
        x = _input(seed, other)
        for weight in weights:
            x = torch.tanh(x @ weight)
        outputs.append(x)
    expect_close(output, outputs[rank].detach(), f"{where}: the output")
    (sum(x.sum() for x in outputs) / world_size).backward()
    for index, (got, weight) in enumerate(zip(grads, weights, strict=True)):
        want = weight.grad.flatten().chunk(world_size)[rank]
        expect_close(got, want, f"{where}: the gradient's shard of unit {index}")
