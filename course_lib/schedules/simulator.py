"""A clock for pipeline schedules: when each instruction starts and stops, who waits, and what is kept meanwhile.

    simulation = simulate(one_f_one_b(4, 8), Costs(forward_s=1, input_backward_s=1, weight_backward_s=1))
    simulation.bubble_of_ideal      # 0.375 = (p - 1) / m
    print(text_chart(simulation))   # a line a rank, a column a slot

The model: a rank computes one instruction at a time, in its list's order, each as soon as what it needs has arrived. A
transfer between ranks takes transfer_s, during which both compute on; transfers do not slow each other down.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from course_lib.schedules.check import check, runnable_order
from course_lib.schedules.instructions import OPS, Instruction, Schedule
from course_lib.span import Span
from course_lib.validate import Amount, Checked, Positive, checked

_PerStage = Amount | Sequence[Amount]
_Timed = list[tuple[Instruction, Span]]  # of a rank


@dataclass(frozen=True)
class Costs(Checked):
    """Seconds of each kind of work, each a number or one a stage; transfer_s is from a stage to the next, or back.

    The whole backward B takes input_backward_s + weight_backward_s. With v stages a rank, a stage is 1 / v of a rank's
    layers: give what one stage takes. pair_s is what a forward and a backward take that run at once (the pairs of
    DualPipeV), of which nothing is sent before both are done; None means one after the other, each sent at once.
    """

    forward_s: _PerStage = 1.0
    input_backward_s: _PerStage = 1.0
    weight_backward_s: _PerStage = 1.0
    transfer_s: _PerStage = 0.0
    pair_s: Amount | None = None

    def seconds(self, instruction: Instruction) -> float:
        parts = {"F": [self.forward_s], "I": [self.input_backward_s], "W": [self.weight_backward_s]}
        parts["B"] = parts["I"] + parts["W"]
        return sum(_of_stage(part, instruction.stage) for part in parts[instruction.op])

    def check(self, num_stages: int) -> None:
        """Raises ValueError for no work at all, or a list of the wrong length."""
        for name in ("forward_s", "input_backward_s", "weight_backward_s", "transfer_s"):
            value, length = getattr(self, name), num_stages - (name == "transfer_s")
            if isinstance(value, Sequence) and len(value) != length:
                raise ValueError(f"{name} has {len(value)} values, but {length} are needed; give those, or one number")
        if not any(self.seconds(Instruction(op, 0, stage)) > 0 for op in "FB" for stage in range(num_stages)):
            raise ValueError("forward_s, input_backward_s and weight_backward_s are all 0; give one more than 0")


def _of_stage(value: _PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


@dataclass(frozen=True)
class Simulation:
    """A schedule on the clock. `times[rank][i]` is when `schedule.instructions[rank][i]` began and ended, in seconds.

    Idle time is counted in two ways, and its share in two as well:
    - until all ranks are done (`makespan_s`): so it is if a step ends with a barrier, as with a global gradient norm;
    - from one step to the next without a barrier (`back_to_back_s`): the longest that any one rank is at work or
      waits between its own first and last instruction. The next step can follow at that distance.
    """

    schedule: Schedule
    costs: Costs
    times: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank; a span's name is the instruction as text."""
        return tuple(
            tuple(Span(rank, "compute", str(one), *time) for one, time in zip(row, times, strict=False))  # what ran
            for rank, (row, times) in enumerate(zip(self.schedule.instructions, self.times, strict=True))
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for row in self.rows for span in row)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(row[-1][1] for row in self.times if row)

    @cached_property
    def back_to_back_s(self) -> float:
        """Seconds from one step to the next, if ranks need not wait for each other between steps."""
        return max(row[-1][1] - row[0][0] for row in self.times)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of work of each rank; the longest is the ideal time of a step."""
        return tuple(sum(stop_s - start_s for start_s, stop_s in row) for row in self.times)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds that each rank waits, until all are done."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle over busy time, all ranks together: (p - 1) / m for 1F1B with equal stages."""
        return sum(self.idle_s) / sum(self.busy_s)

    @property
    def bubble_of_total(self) -> float:
        """Idle time over all time, all ranks together: (p - 1) / (m + p - 1) for 1F1B with equal stages."""
        return sum(self.idle_s) / (len(self.times) * self.makespan_s)

    @property
    def bubble_of_ideal_back_to_back(self) -> float:
        """As bubble_of_ideal, without a barrier between steps."""
        return len(self.times) * self.back_to_back_s / sum(self.busy_s) - 1

    @property
    def bubble_of_total_back_to_back(self) -> float:
        """As bubble_of_total, without a barrier between steps."""
        return 1 - sum(self.busy_s) / (len(self.times) * self.back_to_back_s)

    @cached_property
    def live(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each rank (second, count) at each change: micro-batches whose activations it keeps, once a stage.

        From the start of F to the stop of B, or of I.
        """
        return tuple(_counts(row, {"F": 1, "B": -1, "I": -1}) for row in self.timed)

    @cached_property
    def waiting(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each rank (second, count) at each change: micro-batches between I and W, once a stage."""
        return tuple(_counts(row, {"I": 1, "W": -1}) for row in self.timed)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Most micro-batches alive at once, a rank, once a stage: divide by v to count whole ranks' layers."""
        return tuple(max((count for _, count in row), default=0) for row in self.live)

    @property
    def peak_waiting(self) -> tuple[int, ...]:
        """Most micro-batches that wait for W at once, a rank, once a stage."""
        return tuple(max((count for _, count in row), default=0) for row in self.waiting)

    @property
    def timed(self) -> list[_Timed]:
        """For each rank, each instruction beside its span."""
        return [list(zip(*row, strict=True)) for row in zip(self.schedule.instructions, self.rows, strict=True)]

    def memory(self, live_bytes: _PerStage, waiting_bytes: _PerStage = 0.0) -> list[list[tuple[float, float]]]:
        """For each rank (second, bytes) at each change, given what one micro-batch keeps in one stage.

        live_bytes from the start of F to the stop of I or B, then waiting_bytes, what W needs, to the stop of W.
        """
        return [_held_bytes(row, live_bytes, waiting_bytes) for row in self.timed]

    def peak_bytes(self, live_bytes: _PerStage, waiting_bytes: _PerStage = 0.0) -> list[float]:
        """Most bytes of activations on each rank at once."""
        return [max((held for _, held in row), default=0.0) for row in self.memory(live_bytes, waiting_bytes)]


def _counts(row: _Timed, change_of_op: dict[str, int]) -> tuple[tuple[float, int], ...]:
    count, counts = 0, []
    for instruction, span in row:
        if change := change_of_op.get(instruction.op, 0):
            count += change
            counts.append((span.start_s if instruction.op == "F" else span.stop_s, count))
    return tuple(counts)


def _held_bytes(row: _Timed, live_bytes: _PerStage, waiting_bytes: _PerStage) -> list[tuple[float, float]]:
    held, changes = 0.0, []
    for instruction, span in row:
        live, waiting = _of_stage(live_bytes, instruction.stage), _of_stage(waiting_bytes, instruction.stage)
        held += {"F": live, "B": -live, "I": waiting - live, "W": -waiting}[instruction.op]
        changes.append((span.start_s if instruction.op == "F" else span.stop_s, held))
    return changes


@checked
def simulate(schedule: Schedule, costs: Costs = Costs()) -> Simulation:
    """Clocks a schedule.

    Raises   ValueError if it cannot run (check.py says why), its pairs not as one, or costs do not fit its stages
    """
    _check_once(schedule)
    return clock(schedule, costs)


def clock(schedule: Schedule, costs: Costs) -> Simulation:
    """Clocks a schedule, of an unfinished or a wrong one what can run: `simulate` checks first."""
    num_stages = schedule.num_stages
    costs.check(num_stages)
    seconds = {(op, stage): costs.seconds(Instruction(op, 0, stage)) for op in OPS for stage in range(num_stages)}
    crossing_s = [_of_stage(costs.transfer_s, stage) for stage in range(num_stages - 1)] + [0.0]
    times: list[list[tuple[float, float]]] = [[] for _ in range(schedule.pp)]
    free_s, done_s = [0.0] * schedule.pp, []  # by rank; by place in the order
    for rank, group, awaited in _order(schedule, costs.pair_s is not None):
        start_s = free_s[rank]
        for place, boundary in awaited:
            arrived_s = done_s[place] + crossing_s[boundary]
            if arrived_s > start_s:
                start_s = arrived_s
        durations = [seconds[work] for work in group]
        if len(group) == 2:
            durations = [costs.pair_s * duration / (sum(durations) or 1.0) for duration in durations]
        for duration in durations:
            stop_s = start_s + duration
            times[rank].append((start_s, stop_s))
            start_s = stop_s
        free_s[rank] = start_s
        done_s.append(start_s)
    return Simulation(schedule, costs, tuple(map(tuple, times)))


@lru_cache(maxsize=16)
def _check_once(schedule: Schedule) -> None:
    check(schedule)


@lru_cache(maxsize=16)
def _order(schedule: Schedule, joint: bool) -> list[tuple[int, tuple, tuple]]:
    """An order that can be: (rank, (op, stage) of what runs as one, what that awaits). The same whatever it costs.

    What is awaited is a place in this order, and the boundary between stages that it crosses: -1 on the same rank.
    """
    order, _ = runnable_order(schedule, joint)
    place_of = {one: place for place in reversed(range(len(order))) for one in order[place][1]}  # its first, if twice
    _check_all_ran(schedule, place_of)
    rank_of_stage, steps = schedule.rank_of_stage, []
    for rank, group in order:
        awaited = []
        for one in group:
            for need in (need for need in schedule.needed[one] if need not in group):
                same_rank = rank_of_stage[need.stage] == rank_of_stage[one.stage]
                awaited.append((place_of[need], -1 if same_rank else min(need.stage, one.stage)))
        steps.append((rank, tuple((one.op, one.stage) for one in group), tuple(awaited)))
    return steps


def _check_all_ran(schedule: Schedule, ran: Container[Instruction]) -> None:
    """Raises ValueError for pairs of which one half waits, through other ranks, for the other: apart they would run."""
    left = [[one for one in row if one not in ran] for row in schedule.instructions]
    stuck = [f"rank {r}: {row[0]} with {row[1]}" for r, row in enumerate(left) if row and row[0] in schedule.pairs]
    if stuck:
        raise ValueError(
            f"with pair_s the pairs run as one, but these wait for themselves or for each other: {', '.join(stuck)}; "
            "take one out of the schedule's pairs, or leave pair_s out"
        )


# --- text
@checked
def text_chart(simulation: Simulation, slot_s: Positive | None = None) -> str:
    """A line a rank, a column a slot of time: F0 where it starts, "-" where it goes on, "." where the rank waits.

    slot_s, the width of a column, is the shortest instruction unless given; times are rounded to it. A stage is named
    (F0@4) where ranks have more than one. check.chart_problems reads such a chart.
    Raises   ValueError if that makes more than 200 columns
    """
    slot_s = slot_s or min((span.seconds for span in simulation.spans if span.seconds > 0), default=1.0)
    num_slots = _slot(simulation.makespan_s, slot_s)
    if num_slots > 200:
        longer_s = simulation.makespan_s / 200
        raise ValueError(
            f"{num_slots} slots of {slot_s:g} s are more than 200; choose slot_s of at least {longer_s:.3g}"
        )
    several = simulation.schedule.num_stages > simulation.schedule.pp
    chart = [["."] * num_slots for _ in simulation.rows]
    for row, line in zip(simulation.timed, chart, strict=True):
        for instruction, span in row:
            first, last = _slot(span.start_s, slot_s), _slot(span.stop_s, slot_s)
            name = str(instruction) if several else str(instruction).split("@")[0]
            line[first:last] = [name, *["-"] * (last - first - 1)][: last - first]
    width = max(len(cell) for line in chart for cell in line)
    digits = len(str(len(chart) - 1))
    lines = [" ".join(cell.ljust(width) for cell in line).rstrip() for line in chart]
    return "\n".join(f"rank {rank:>{digits}}  {line}" for rank, line in enumerate(lines))


def _slot(seconds: float, slot_s: float) -> int:
    return math.floor(seconds / slot_s + 0.5)
