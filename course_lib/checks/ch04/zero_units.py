"""Grader of chapter 04, exercise 5: units that are gathered, used and freed, in forward and in backward."""

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.checks import CheckFailed, Cost, Exercise, Stops, fresh_seed, numbers

WIDTH = 4


class Unit:
    """One layer, tanh(x w), of which this rank keeps a shard. What exercise 5 is handed.

    start_gather()   begins to make the weight whole        forward(x)      needs it whole; returns the output
    wait()           until it is                            backward(grad)  needs it whole; returns the input's gradient
    free()           drops the whole weight                 reduce()        scatters the weight's gradient to its owners
    """

    def __init__(self, index: int, whole_DD: Tensor, group: dist.ProcessGroup, log: list[tuple[str, int]]) -> None:
        self._index, self._group, self._log = index, group, log
        self.shard_p = whole_DD.flatten().chunk(group.size())[group.rank()].clone()
        self.grad_p: Tensor | None = None
        self._whole_DD = self._work = self._grad_DD = self._x = self._y = None  # _work: a gather under way

    def start_gather(self) -> None:
        self._note("gather")
        if self._whole_DD is not None:
            raise CheckFailed(f"unit {self._index} is gathered although it is whole already: that sends it once more")
        self._whole_DD = torch.empty(WIDTH, WIDTH, dtype=self.shard_p.dtype)
        self._work = comm.all_gather_into(self._whole_DD.view(-1), self.shard_p, self._group, async_op=True)

    def wait(self) -> None:
        if self._whole_DD is None:
            raise CheckFailed(f"unit {self._index} is waited for, but its gather was not started")
        if self._work is not None:
            self._work.wait()
            self._work = None

    def free(self) -> None:
        self._note("free")
        if self._whole_DD is not None:
            self.wait()
        self._whole_DD = None

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
        if self._work is not None:
            raise CheckFailed(f"unit {self._index} runs {event} while its gather is under way; wait() for it first")

    def _note(self, event: str) -> None:
        self._log.append((event, self._index))


def _stage_3(units, x, frees=lambda unit: True, again=True, ahead=True, reduce=True, reverse=True, wait=True):
    """Gather, use and free each unit, the next one gathered ahead; frees: which units are freed after their forward."""
    turns = [(unit, unit.forward) for unit in units]
    turns += [(unit, unit.backward) for unit in (units[::-1] if reverse else units)]
    value, whole = x, set()

    def gather(unit):
        if unit not in whole:
            unit.start_gather()
            whole.add(unit)

    for at, (unit, compute) in enumerate(turns):
        is_forward = at < len(units)
        if at == len(units):
            x, value = value, torch.ones_like(value)
        if is_forward or again:
            gather(unit)
        if wait and unit in whole:
            unit.wait()
        if ahead and at + 1 < len(turns) and turns[at + 1][0] is not unit:
            gather(turns[at + 1][0])
        value = compute(value)
        if not is_forward or frees(unit):
            unit.free()
            whole.discard(unit)
        if reduce and not is_forward:
            unit.reduce()
    return x


def _events(answer, num_units, seed):
    """Watch the order of the calls, what is whole, the output and the shards of the gradients."""
    rank, group, log = dist.get_rank(), dist.group.WORLD, []
    units = [Unit(index, numbers(seed + index, WIDTH, WIDTH), group, log) for index in range(num_units)]
    try:
        output = answer(units, numbers(seed + 100 + rank, 3, WIDTH))
    except CheckFailed as refused:  # every rank runs the same schedule, so all stop here
        return {"error": f"refused\n{refused}"}
    turns = [event for event in log if event[0] in ("forward", "backward")]
    most_whole, whole, late = _replayed(log, turns)
    return {
        "units that ran forward": sorted(index for event, index in turns if event == "forward"),
        "units that ran backward": sorted(index for event, index in turns if event == "backward"),
        "units whose gradient was reduced": sorted({index for event, index in log if event == "reduce"}),
        "units whole at once": Cost(most_whole),
        "units still whole at the end": sorted(whole),
        "the order": turns,
        "turns without a gather": late,
        "gathers": Cost(sum(event == "gather" for event, _ in log)),
        "the output": output,
        "the shards of the gradients": [unit.grad_p for unit in units],
    }


def _replayed(events: list[tuple[str, int]], turns: list[tuple[str, int]]) -> tuple[int, set[int], list[str]]:
    """The most units whole at once, those whole at the end, and turns in which the next unit is not gathered yet."""
    whole, most_whole, late, following = set(), 0, [], iter([*turns[1:], None])
    for event, index in events:
        if event == "gather":
            whole.add(index)
            most_whole = max(most_whole, len(whole))
        elif event == "free":
            whole.discard(index)
        elif (event, index) in turns and (after := next(following)) and after[1] not in whole:
            late.append(f"unit {index} runs {event}")
    return most_whole, whole, late


WRONG = {
    "a gradient was never reduced": {"reduce": False},
    "too many units were whole at once: free a unit after its turn": {"frees": lambda unit: False},
    "units are still whole; free them after their backward": (
        lambda units, x: (_stage_3(units, x), units[0].start_gather())[0]
    ),
    "forward runs from the first unit to the last, and backward from the last to the first": {"reverse": False},
    "while a unit runs nothing is gathered ahead; start to gather the next one before": {"ahead": False},
    "runs forward with freed parameters": Stops(lambda units, x: units[0].forward(x)),
    "so gather it again": Stops({"again": False}),
    "wait() for it first": Stops({"wait": False}),
}
SAYS = {
    "units that ran forward": "once is right for each",
    "units that ran backward": "once is right for each",
    "turns without a gather": "start to gather the next unit before",
    "gathers": "once for forward, once for backward",
}
check_gather_use_free = Exercise(
    _stage_3,
    lambda rng: [(size, num_units, fresh_seed(rng)) for size, num_units in ((2, rng.choice([4, 5])), (4, 3))],
    WRONG,
    _events,
    SAYS,
    right=lambda units, x: _stage_3(units, x, frees=lambda unit: unit is not units[-1]),
    ranks=True,
)
