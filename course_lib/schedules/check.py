"""Can a pipeline schedule run, and does it compute the gradient? If not: what is wrong, where, and what would be right.

    problems(schedule)            # [] or sentences
    check(schedule)               # ValueError with all of them
    check(from_text("F0 B0\\nB0 F0"))     # somebody's own, as text or as lists
    chart_problems("F0 B0\\n. F0 B0")     # a chart, whose columns are slots of time

A schedule is right if
1. each micro-batch passes each stage exactly once forward and once backward (B, or I and W), on the rank of that stage;
2. nobody waits for ever: lists are followed in order, and no circle of ranks waits for each other;
3. what crosses from a stage to its neighbour is taken in the order in which it was sent, so that a first-in-first-out
   channel is enough.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from course_lib.schedules.instructions import OPS, Instruction, Schedule, from_lists, is_idle, words_of
from course_lib.validate import Index, checked

SHOWN = 10  # problems in one error; the rest is counted


def check(schedule: Schedule) -> None:
    """Raises ValueError, with every problem, unless the schedule is right."""
    if found := problems(schedule):
        more = f"\n- and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        mistakes = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
        listed = "".join(f"\n- {problem}" for problem in found[:SHOWN])
        raise ValueError(f"schedule {schedule.name!r} cannot be run, {mistakes} found:{listed}{more}")


@checked
def problems(schedule: Schedule, whole: bool = True) -> list[str]:
    """Everything wrong with a schedule, as sentences. Places in a rank's list are counted from 0.

    whole   False: some is not placed yet; told is what no further instruction can mend
    """
    if found := _shape_problems(schedule):
        return found
    found = [*_place_problems(schedule), *_once_problems(schedule, whole), *_order_problems(schedule)]
    return found or _deadlock(schedule) or list(_channel_problems(schedule) if whole else ())


# --- 1. everything once, at its place
def _shape_problems(schedule: Schedule) -> list[str]:
    found = []
    if len(schedule.instructions) != schedule.pp:
        found.append(f"there are {len(schedule.instructions)} lists for pp = {schedule.pp} ranks; give one a rank")
    for stage, rank in enumerate(schedule.rank_of_stage):
        if rank not in range(schedule.pp):
            found.append(f"stage {stage} is on rank {rank}, but ranks are 0 to {schedule.pp - 1}")
    for rank in range(schedule.pp):
        if rank not in schedule.rank_of_stage:
            found.append(f"rank {rank} has no stage; give every rank at least one, or use fewer ranks")
    return found


def _place_problems(schedule: Schedule) -> Iterator[str]:
    """What does not exist, or stands in another rank's list."""
    for rank, place, one in _placed(schedule):
        where = f"rank {rank}, place {place}: {one}"
        if one.op not in OPS:
            yield f"{where} is no work: {one.op!r} is not one of {', '.join(OPS)}"
        elif one.stage not in range(schedule.num_stages):
            yield f"{where} names stage {one.stage}, but stages are 0 to {schedule.num_stages - 1}"
        elif one.micro_batch not in range(schedule.num_micro_batches):
            yield f"{where} names micro-batch {one.micro_batch}, but there are 0 to {schedule.num_micro_batches - 1}"
        elif schedule.rank_of_stage[one.stage] != rank:
            owner = schedule.rank_of_stage[one.stage]
            yield f"{where} is work of stage {one.stage}, which is on rank {owner}; move it to that rank's list"


def _once_problems(schedule: Schedule, whole: bool) -> Iterator[str]:
    times = Counter(one for row in schedule.instructions for one in row)
    for one, count in times.items():
        if count > 1:
            there = [f"rank {rank}, place {place}" for rank, place, other in _placed(schedule) if other == one]
            places = " and ".join(there)
            yield f"{one} is there {count} times ({places}); it must be once: its gradient would count again"
    for stage, rank in enumerate(schedule.rank_of_stage):
        for micro_batch in range(schedule.num_micro_batches):
            yield from _repeated(times, micro_batch, stage, f"rank {rank}")
            if whole:
                yield from _missing(times, micro_batch, stage, f"rank {rank}")


def _repeated(times: Counter, micro_batch: int, stage: int, where: str) -> Iterator[str]:
    _, whole, inputs, weights = (Instruction(op, micro_batch, stage) for op in OPS)
    part = inputs if times[inputs] else weights
    if times[whole] and times[part]:
        yield f"{where}: {whole} is the whole backward, so {part} repeats a part of it; take out one of the two"


def _missing(times: Counter, micro_batch: int, stage: int, where: str) -> Iterator[str]:
    forward, whole, inputs, weights = (Instruction(op, micro_batch, stage) for op in OPS)
    if not times[forward]:
        yield f"{where}: {forward} is missing, the forward of micro-batch {micro_batch} by stage {stage}; add it"
    if times[whole]:
        return
    if not times[inputs] and not times[weights]:
        yield f"{where}: {whole} is missing, the backward of micro-batch {micro_batch} by stage {stage}; add it"
    elif not times[weights]:
        yield f"{where}: {inputs} has no {weights}: the gradients of the weights are missing; add {weights} behind it"
    elif not times[inputs]:
        yield f"{where}: {weights} has no {inputs}: the gradient of the input is missing; add {inputs} before it"


# --- 2. nobody waits for ever
def runnable_order(
    schedule: Schedule, joint: bool = False
) -> tuple[list[tuple[int, tuple[Instruction, ...]]], list[int]]:
    """Runs the lists without a clock: ([(rank, instructions), ...] in an order that can be, how far each rank came).

    One instruction at a time; with joint, the schedule's pairs (a forward with the backward behind it) as one.
    """
    rows = [_groups(row, schedule.pairs if joint else frozenset()) for row in schedule.instructions]
    done: set[Instruction] = set()
    order, reached, moved = [], [0] * len(rows), True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while reached[rank] < len(row) and all(
                need in done or need in row[reached[rank]]
                for one in row[reached[rank]]
                for need in schedule.needed[one]
            ):
                order.append((rank, row[reached[rank]]))
                done.update(row[reached[rank]])
                reached[rank] += 1
                moved = True
    return order, reached


def _groups(row: tuple[Instruction, ...], pairs: frozenset[Instruction]) -> list[tuple[Instruction, ...]]:
    groups, place = [], 0
    while place < len(row):
        size = 2 if row[place] in pairs else 1
        groups.append(tuple(row[place : place + size]))
        place += size
    return groups


def _order_problems(schedule: Schedule) -> Iterator[str]:
    """What stands in a rank's own list before something that it needs."""
    for rank, row in enumerate(schedule.instructions):
        place_of = {one: place for place, one in reversed(list(enumerate(row)))}
        for place, one in enumerate(row):
            for need in schedule.needed[one] if one.op in OPS else ():
                if place_of.get(need, -1) > place:
                    yield (
                        f"rank {rank}, place {place}: {one} stands before {need} (place {place_of[need]}), "
                        f"which it needs; move {one} behind it"
                    )


def _deadlock(schedule: Schedule) -> list[str]:
    """A circle of ranks that wait for each other, named, and how to break it."""
    _, reached = runnable_order(schedule)
    waits = _circle(schedule, reached)
    if not waits:
        return []
    place_of = {one: place for _, place, one in _placed(schedule)}
    chain = "; ".join(
        f"rank {rank} stands at {one} (place {reached[rank]}) and waits for {need}, which is at place "
        f"{place_of[need]} of rank {schedule.rank_of_stage[need.stage]}"
        for rank, (one, need) in waits.items()
    )
    circle = list(waits)
    ways = [  # at least one: what follows from dependencies alone makes no circle
        f"rank {rank} do {waits[before][1]} before {waits[rank][0]}"
        for rank, before in zip(circle, circle[-1:] + circle[:-1], strict=True)
        if not _rests_on(waits[before][1], waits[rank][0], schedule)
    ]
    return [f"deadlock, nobody in this circle can go on: {chain}. Break it: let {', or '.join(ways)}"]


def _rests_on(one: Instruction, other: Instruction, schedule: Schedule) -> bool:
    """Whether one is the other, or needs it, or needs something that does: then it cannot come before."""
    return one == other or any(_rests_on(need, other, schedule) for need in schedule.needed.get(one, ()))


def _circle(schedule: Schedule, reached: list[int]) -> dict[int, tuple[Instruction, Instruction]]:
    """Ranks that wait for each other, each with what it stands at and what it waits for; empty if all are done."""
    rows = schedule.instructions
    placed = {one for row in rows for one in row}
    done = {one for row, place in zip(rows, reached, strict=True) for one in row[:place]}
    for rank in range(schedule.pp):
        waits = {}
        while rank not in waits and reached[rank] < len(rows[rank]):
            one = rows[rank][reached[rank]]
            need = next(need for need in schedule.needed[one] if need not in done)
            if need not in placed:  # it may come yet
                break
            waits[rank] = (one, need)
            rank = schedule.rank_of_stage[need.stage]
        if rank in waits:
            return dict(list(waits.items())[list(waits).index(rank) :])
    return {}


# --- 3. channels
def _channel_problems(schedule: Schedule) -> Iterator[str]:
    """Channels whose two ends differ in the order of micro-batches."""
    for stage in range(schedule.num_stages - 1):
        if schedule.rank_of_stage[stage] == schedule.rank_of_stage[stage + 1]:
            continue
        for what, ops, source, target in (
            ("activations", "F", stage, stage + 1),
            ("gradients", "BI", stage + 1, stage),
        ):
            sent, taken = _micro_batches(schedule, ops, source), _micro_batches(schedule, ops, target)
            if sent != taken:  # one may have more
                index = next(at for at, (left, right) in enumerate(zip(sent, taken, strict=False)) if left != right)
                yield (
                    f"{what} from stage {source} (rank {schedule.rank_of_stage[source]}) to stage {target} (rank "
                    f"{schedule.rank_of_stage[target]}) are sent in the order {_listed(sent)} but taken in the order "
                    f"{_listed(taken)}: number {index} to arrive is micro-batch {sent[index]}, where "
                    f"{taken[index]} is expected; use the same order at both ends"
                )


def _micro_batches(schedule: Schedule, ops: str, stage: int) -> list[int]:
    row = schedule.instructions[schedule.rank_of_stage[stage]]
    return [one.micro_batch for one in row if one.op in ops and one.stage == stage]


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers[:12])) + (" ..." if len(numbers) > 12 else "")


def _placed(schedule: Schedule) -> Iterator[tuple[int, int, Instruction]]:
    for rank, row in enumerate(schedule.instructions):
        for place, one in enumerate(row):
            yield rank, place, one


# --- charts
def chart_times(rows: Sequence[Sequence[str]], schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(start, stop) of each instruction of a chart's rows, in columns: "-" goes on with what stands left of it."""
    times = []
    for row, instructions in zip(rows, schedule.instructions, strict=True):
        starts = [column for column, cell in enumerate(row) if not is_idle(cell)]
        stops = [next((c for c in range(at + 1, len(row)) if row[c] != "-"), len(row)) for at in starts]
        times.append(tuple(zip(starts, stops, strict=True)))
        assert len(times[-1]) == len(instructions)
    return tuple(times)


@checked
def chart_problems(
    chart: str, rank_of_stage: tuple[int, ...] | None = None, whole: bool = True, message_slots: Index = 0
) -> list[str]:
    """Whether a chart can happen: a line a rank, a column a slot of time, "." idle, "-" goes on with what stands left.

    Charts in slides and blogs often keep the right order but show times that cannot be. With whole=False the chart may
    be cut off, or lack instructions: only its times are checked. Columns are counted from 0, and what starts first is
    told first. A message between ranks takes message_slots columns.
    """
    rows = words_of(chart)
    schedule = from_lists(rows, rank_of_stage, name="chart")
    times = chart_times(rows, schedule)
    slots = {one: times[rank][place] for rank, place, one in _placed(schedule)}
    found = []
    for rank, _, one in sorted(_placed(schedule), key=lambda placed: slots[placed[2]][0]):
        for need in schedule.needed[one]:
            start, (_, done) = slots[one][0], slots.get(need, (0, None))
            owner = schedule.rank_of_stage[need.stage]
            if done is None:
                found.append(f"column {start}: rank {rank} runs {one}, but {need} of rank {owner} is nowhere before it")
            elif (ready := done + (message_slots if owner != rank else 0)) > start:
                message = f", and its message takes {message_slots:g}" * (ready > done)
                found.append(
                    f"column {start}: rank {rank} runs {one}, which needs {need} of rank {owner}; that is done only "
                    f"after column {done - 1}{message}, so {one} can be in column {ready:g} at the earliest"
                )
    return found + (problems(schedule) if whole else [])
