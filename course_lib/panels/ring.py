"""A ring all-reduce under a slider (lesson 0): what every rank holds after each step, also of two wrong programs."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.panels.controls import named
from course_lib.panels.record import Control, Panel, Shown
from course_lib.panels.svg import Box, Chart

RANKS = 4
STEPS = 2 * (RANKS - 1)
DATA = [[(piece + 1) * 10**rank for piece in range(RANKS)] for rank in range(RANKS)]
PROGRAMS = (
    ("the ring of the lesson", "right"),
    ("stores in place of adding", "stores"),
    ("sends to the left, indices as before", "left"),
)


@dataclass(frozen=True)
class RingState:
    """What ranks hold after a step, sums of how many, by [rank][piece]; `received[rank]`: what has come, or None."""

    label: str
    values: list[list[float]]
    summed: list[list[int]]
    received: list[int | None]


def ring_states(values: Sequence[Sequence[float]], program: str = "right") -> list[RingState]:
    """Return the start, and the state after each of 2 (G - 1) steps of G ranks with G pieces each.

    Rank r sends piece r - 1 - step first, to r + 1, so that it ends up responsible for piece r.

    Raises   ValueError if the values are not G rows of G numbers
    """
    n, sizes = len(values), [len(row) for row in values]
    if any(size != n for size in sizes):
        raise ValueError(f"{n} ranks need {n} pieces each, got rows of {sizes}; cut each row into {n}")
    held, summed = [list(row) for row in values], [[1] * n for _ in range(n)]
    states = [RingState("start", [list(row) for row in held], [[1] * n for _ in range(n)], [None] * n)]
    for step in range(2 * (n - 1)):
        reducing, turn = step < n - 1, step % (n - 1)
        behind = 1 if reducing else 0
        received = [(rank - behind - 1 - turn) % n for rank in range(n)]
        sources = [(rank + 1 if program == "left" else rank - 1) % n for rank in range(n)]
        pieces = [(source - behind - turn) % n for source in sources]
        sent = [(held[source][piece], summed[source][piece]) for source, piece in zip(sources, pieces, strict=True)]
        adds = reducing and program != "stores"
        for rank, piece in enumerate(received):
            value, count = sent[rank]
            held[rank][piece] = held[rank][piece] * adds + value
            summed[rank][piece] = summed[rank][piece] * adds + count
        label = f"{'reduce-scatter' if reducing else 'all-gather'}, s = {turn}"
        states.append(RingState(label, [list(row) for row in held], [list(row) for row in summed], received))
    return states


def _draw_ring(step: int, program: str) -> Shown:
    state, right = ring_states(DATA, program)[step], ring_states(DATA)[step]
    rows, wrong = {}, []
    for rank, values in enumerate(state.values):
        parts = []
        for piece, value in enumerate(values):
            part = "sum of all" if state.summed[rank][piece] == RANKS else "partial sum"
            if state.received[rank] == piece:
                part = "received now"
            if value != right.values[rank][piece]:
                part = "wrong"
                wrong.append(f"rank {rank} has {value} as piece {piece}, not {right.values[rank][piece]}")
            parts.append(Box(piece, piece + 1, part, f"{value:g}"))
        rows[f"rank {rank}"] = parts
    said = f"Step {step} of {STEPS}, {state.label}. "
    if step:
        pieces = ", ".join(f"rank {rank} piece {piece}" for rank, piece in enumerate(state.received))
        said += f"Received: {pieces}. "
    if wrong:
        more = f"; and {len(wrong) - 4} more" * (len(wrong) > 4)
        said += f"Wrong: {'; '.join(wrong[:4])}{more}."
    else:
        done = sum(count == RANKS for row in state.summed for count in row)
        said += f"{done} of {RANKS**2} pieces are the sum of all ranks."
    return [Chart(f"What each rank holds, {state.label}: pieces 0 to {RANKS - 1}", rows, RANKS, unit="place")], said


RING = Panel(
    "A ring all-reduce, step by step",
    {
        "step": Control("steps done", named(range(STEPS + 1)), 2, "slider"),
        "program": Control("program", PROGRAMS, "right"),
    },
    _draw_ring,
)
