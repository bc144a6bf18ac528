"""A lesson's program on real ranks, beside one process: what differs, what is sent, what is held.

    run = on_ranks(ring_all_reduce, as_sum)            # 4 ranks
    run.difference                                     # the largest of any number on any rank
    run.sent_bytes                                     # of each rank
    run = on_ranks(Zero1, as_trainer, 2, num_micro_batches=3)
    run.errors["embed.weight"]
    run = on_ranks(Zero1, as_counted_trainer)
    run[0].held["gradients"], run[0].timeline.peak_bytes

`as_sum` and the others (trials.py) say what kind of program it is: what it is given, and what one process does.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from course_lib.launch import launch
from course_lib.measure import ByteMeter, Timeline
from course_lib.span import Span
from course_lib.validate import Size, checked

_TIME_LIMIT_S = 60.0  # a trial takes seconds


@dataclass(frozen=True)
class Match:
    """A tensor beside the right one: the largest difference, norms, and the product of both."""

    largest: float
    norm_of_difference: float
    norm: float
    right_norm: float
    product: float

    @property
    def error(self) -> float:
        """The norm of the difference over that of the right one; infinite where something is no number."""
        return self.norm_of_difference / self.right_norm if self.right_norm else self.norm_of_difference


@dataclass
class Record:
    """What a program did on one rank; what its trial does not look at stays empty.

    matches    by name: an output, a loss, a gradient, beside one process
    sent       bytes (attention: blocks) that this rank sent, by what sent them;  calls: collectives called
    held       bytes by kind at the end of backward;  timeline: over a step
    kept       for backward: bytes, or micro-batches, as the trial says
    spans      when it computed and sent
    result     whatever else the program left
    """

    matches: dict[str, Match] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    timeline: Timeline | None = None
    kept: float = 0.0
    spans: list[Span] = field(default_factory=list)
    result: object = None

    def match_gradient(self, name: str, got: Tensor | None, right: Tensor) -> None:
        """Keep a gradient's distance from the right one; None, where none came, counts as zeros."""
        self.match(name, torch.zeros_like(right) if got is None else got, right)

    def match(self, name: str, got: Tensor, right: Tensor) -> None:
        """Keep a tensor's distance from the right one.

        Raises   ValueError if it is no tensor of the right shape
        """
        if not isinstance(got, Tensor) or got.shape != right.shape:
            found = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"{name} is {found}; return a tensor of shape {tuple(right.shape)}")
        got, right = got.detach().double(), right.detach().double()
        apart = (got - right).nan_to_num(nan=math.inf)
        numbers = apart.abs().max(), apart.norm(), got.norm(), right.norm(), (got * right).sum()
        self.matches[name] = Match(*(x.item() for x in numbers))

    @contextmanager
    def metered(self, name: str, unit_bytes: int = 1) -> Iterator[None]:
        """Count what is sent inside, in units of so many bytes, and the collectives that are called."""
        with ByteMeter() as meter:
            yield
        self.sent[name] = meter.sent_bytes / unit_bytes if unit_bytes > 1 else meter.sent_bytes
        for collective, count in meter.calls.items():
            self.calls[collective] = self.calls.get(collective, 0) + count


class Records(list[Record]):
    """The records of all ranks: run[0] is that of rank 0."""

    @property
    def difference(self) -> float:
        """The largest difference of any number from one process, on any rank."""
        return max(match.largest for record in self for match in record.matches.values())

    @property
    def errors(self) -> dict[str, float]:
        """By name: the largest relative error on any rank."""
        names = {name: None for record in self for name in record.matches}
        return {name: max(one.matches[name].error for one in self if name in one.matches) for name in names}

    @property
    def sent_bytes(self) -> list[int]:
        return [sum(record.sent.values()) for record in self]

    @property
    def num_calls(self) -> int:
        """Collectives that rank 0 called."""
        return sum(self[0].calls.values())


@checked
def on_ranks(
    program: Callable, trial: Callable, world_size: Size = 4, *, backend: str = "auto", **options: object
) -> Records:
    """Run a lesson's program on real ranks as its kind of program, and return what each rank's record says.

    trial     one of trials.py: trial(record, program, **options) is called in each rank
    backend   "gloo" keeps the ranks on the CPU
    """

    def of_rank() -> Record:
        record = Record()
        trial(record, program, **options)
        return record

    return Records(launch(of_rank, world_size, backend=backend, timeout=_TIME_LIMIT_S, quiet=backend == "gloo"))
