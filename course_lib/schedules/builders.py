"""Pipeline schedules as data: for each rank the list of what it computes, in order.

    schedule = one_f_one_b(pp=4, num_micro_batches=8)
    schedule.instructions[3]      # rank 3: F0@3 B0@3 F1@3 B1@3 ...
    make("zbv", 4, 8)             # by name

    bubble (p ranks, m micro-batches; F, I, W a stage's times)      in flight on rank i (stages)    stages
    naive         m (p - 1) (F + I + W)                             1                              p
    afab          (p - 1) (F + I + W)                               m                              p
    1f1b          (p - 1) (F + I + W)                               p - i                          p
    interleaved   (p - 1) (F + I + W), stages are 1 / v as long     (v - 1) p + 2 (p - i) - 1      v p
    zb_h1         (p - 1) (F + I - W)                               p - i                          p
    zb_h2         (p - 1) (F + I - 2 W)                             2 (p - i) - 1                  p
    zbv           0                                                 2 p                            2 p
    dualpipe_v    (p - 1) (F&B + I - 2 W)                           2 p + 1                        2 p

The words are those of instructions.py; bubbles.py says when these hold. check.py proves that a schedule can
run, simulator.py clocks it, and parallel/pipeline.py runs it on real ranks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from course_lib.schedules.instructions import Instruction, Schedule, loop_placement, v_placement
from course_lib.schedules.instructions import from_lists as from_lists  # so that one import serves
from course_lib.schedules.instructions import from_text as from_text
from course_lib.validate import Size, checked


# --- one stage a rank
def naive(pp: Size, num_micro_batches: Size) -> Schedule:
    """One micro-batch after the other through all stages and back: one rank works, the others wait."""
    return _same_stage("naive", pp, [[op + str(i) for i in range(num_micro_batches) for op in "FB"]] * pp)


def all_forward_all_backward(pp: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards, in the same order of micro-batches: each rank has m of them in flight.

    Source   Huang et al. 2019, GPipe (arXiv:1811.06965)
    """
    check_sizes(pp, num_micro_batches)
    row = [op + str(i) for op in "FB" for i in range(num_micro_batches)]
    return _same_stage("all-forward-all-backward", pp, [row] * pp)


@checked
def one_f_one_b(pp: int, num_micro_batches: int) -> Schedule:
    """Rank i runs pp - i - 1 forwards ahead, then a forward and a backward in turn, then what backwards remain.

    The lead is the least that lets every backward come as soon as it can, so rank i has min(m, pp - i) in flight.
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, "PipeDream-Flush"
    """
    check_sizes(pp, num_micro_batches)
    return _same_stage("1F1B", pp, [_one_f_one_b_row(pp, num_micro_batches, rank) for rank in range(pp)])


def _one_f_one_b_row(pp: int, num_micro_batches: int, rank: int) -> list[str]:
    """What one rank does: rank pp - 1 turns at once, each one before it runs one forward further ahead."""
    forwards, backwards = ([op + str(i) for i in range(num_micro_batches)] for op in "FB")
    return _one_and_one(forwards, backwards, ahead=pp - rank - 1)


def _one_and_one(forwards: Sequence, backwards: Sequence, ahead: int) -> list:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that remain."""
    ahead = min(ahead, len(forwards))
    turns = [
        one for pair in zip(forwards[ahead:], backwards, strict=False) for one in pair
    ]  # the backwards of the warm-up have no partner
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def _same_stage(name: str, pp: int, rows: Sequence[Sequence[str]]) -> Schedule:
    """A schedule with one stage a rank, from rows such as ["F0", "B0"]."""
    instructions = tuple(
        tuple(Instruction(word[0], int(word[1:]), rank) for word in row) for rank, row in enumerate(rows)
    )
    num_micro_batches = 1 + max(instruction.micro_batch for instruction in instructions[0])
    return Schedule(name, pp, num_micro_batches, loop_placement(pp, 1), instructions)


# --- several stages a rank
def interleaved_1f1b(pp: int, num_micro_batches: int, v: int = 2) -> Schedule:
    """1F1B with v stages a rank, in loops: pp micro-batches through one stage, then the same through the next.

    The forwards ahead are (v - 1) pp + 2 (pp - i - 1): all stages but the last for pp micro-batches, and twice the
    distance to the last rank. With v = 1 it is 1F1B.
    Raises   ValueError if v > 1 and the micro-batches are no multiple of pp
    Source   Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2; the order is Megatron-LM's
    """
    check_sizes(pp, num_micro_batches, v)
    if v == 1:
        return one_f_one_b(pp, num_micro_batches)
    check_interleaved(pp, num_micro_batches, v)
    rows = tuple(_interleaved_row(pp, num_micro_batches, rank, v) for rank in range(pp))
    return Schedule(f"interleaved 1F1B, v={v}", pp, num_micro_batches, loop_placement(pp, v), rows)


def _interleaved_row(pp: int, num_micro_batches: int, rank: int, v: int) -> tuple[Instruction, ...]:
    """What one rank does: pp micro-batches through each of its stages in turn, backward from the last one on."""
    turns = [
        (micro_batch, loop)
        for first in range(0, num_micro_batches, pp)
        for loop in range(v)
        for micro_batch in range(first, first + pp)
    ]
    forwards = [Instruction("F", micro_batch, loop * pp + rank) for micro_batch, loop in turns]
    backwards = [Instruction("B", micro_batch, (v - 1 - loop) * pp + rank) for micro_batch, loop in turns]
    return tuple(_one_and_one(forwards, backwards, ahead=(v - 1) * pp + 2 * (pp - rank - 1)))


# --- backward in two parts: I at once, since the stage before waits for it; W where the rank would otherwise wait
def zb_h1(pp: int, num_micro_batches: int) -> Schedule:
    """1F1B with W delayed by as many micro-batches as the rank's number: no more memory than 1F1B.

    Ranks far from the first have fewer micro-batches in flight, so they can afford to let more wait for W.
    Source   Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.3
    """
    check_sizes(pp, num_micro_batches)
    return _same_stage("ZB-H1", pp, [_zb_h1_row(pp, num_micro_batches, rank) for rank in range(pp)])


def _zb_h1_row(pp: int, num_micro_batches: int, rank: int) -> list[str]:
    """What one rank does: as far ahead as in 1F1B, with W as far behind as its number."""
    return _split_row(num_micro_batches, ahead=pp - rank - 1, behind=rank)


def zb_h2(pp: int, num_micro_batches: int) -> Schedule:
    """Twice ZB-H1's lead of forwards and twice its delay of W: rank 0 need not wait for the first gradient.

    Rank i has 2 (pp - i) - 1 micro-batches in flight and lets 2 i wait for W: about twice the memory.
    Source   Qi et al. 2024 (arXiv:2401.10241), section 2.3
    """
    check_sizes(pp, num_micro_batches)
    return _same_stage("ZB-H2", pp, [_zb_h2_row(pp, num_micro_batches, rank) for rank in range(pp)])


def _zb_h2_row(pp: int, num_micro_batches: int, rank: int) -> list[str]:
    """What one rank does: twice as far ahead and behind as in ZB-H1."""
    return _split_row(num_micro_batches, ahead=2 * (pp - rank - 1), behind=2 * rank)


def _split_row(num_micro_batches: int, ahead: int, behind: int) -> list[str]:
    """F and I as in 1F1B; after each I the W of the micro-batch `behind` it; then the Ws that remain."""
    forwards, inputs, weights = ([op + str(i) for i in range(num_micro_batches)] for op in "FIW")
    row = []
    for word in _one_and_one(forwards, inputs, ahead):
        row.append(word)
        if word[0] == "I" and int(word[1:]) >= behind:
            row.append(weights.pop(0))
    return row + weights


def zbv(pp: Size, num_micro_batches: Size) -> Schedule:
    """Two stages a rank on a V, split backward: nobody waits if F, I and W take the same time.

    In the memory of 1F1B's first rank, and on all ranks alike: a rank's second stage is the nearer to the loss, the
    further its first is from it. Below 2 pp - 1 micro-batches the last of the pattern are left out.
    Source   Qi et al. 2024 (arXiv:2401.10241), section 6; 2024, Pipeline Parallelism with Controllable Memory
             (arXiv:2405.15362)
    """
    return _on_a_v("ZBV", pp, num_micro_batches, [_zbv_words(pp, num_micro_batches, rank) for rank in range(pp)])


def _zbv_words(pp: int, num_micro_batches: int, rank: int) -> list[str]:
    m = max(num_micro_batches, 2 * pp - 1)
    return [
        *["Fd"] * (2 * (pp - rank) - 1),  # fill: forwards on the way down,
        *["Fu", "Fd"] * rank,  # then both ways,
        *["Fu", "Iu", "Wu"] * (pp - rank),  # until the first gradients have come down
        *["Fd", "Id", "Wd", "Fu", "Iu", "Wu"] * (m - (2 * pp - 1) + rank),  # steady: each kind once a stage
        *["Id", "Wd", "Fu", "Iu", "Wu"] * (pp - rank - 1),
        *["Id", "Iu"] * rank,  # drain: what other ranks wait for,
        *["Id", "Wd"] * (pp - rank),
        *["Wu"] * rank + ["Wd"] * rank,  # then what nobody waits for
    ]


def dualpipe_v(pp: Size, num_micro_batches: Size) -> Schedule:
    """DeepSeek's DualPipe on a V: in its steady part a forward of one stage pairs with a backward of the other.

    On a GPU the two of a pair run at once, each computing while the other communicates. The backward is split only
    while filling and draining.
    Raises   ValueError below 2 pp micro-batches
    Source   DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), section 3.2.1; github.com/deepseek-ai/DualPipe
    """
    _check_dualpipe_v(pp, num_micro_batches)
    rows = [_dualpipe_v_words(pp, num_micro_batches, rank) for rank in range(pp)]
    return _on_a_v("DualPipeV", pp, num_micro_batches, rows)


def _dualpipe_v_words(pp: int, num_micro_batches: int, rank: int) -> list[str]:
    late = ["u", "d"] * (rank + 1)  # the last backwards: the first half whole, the second without W
    waiting = late[rank + 1 :] + ["d"] * (pp - rank - 1)  # the Ws left over, oldest first
    return [
        *["Fd"] * (2 * (pp - rank - 1)),  # fill: forwards on the way down,
        *["Fd", "Fu"] * (rank + 1),  # then both ways,
        *["Iu", "Wu", "Fu"] * (pp - rank - 1),  # until the first gradients have come down
        *["FdBu", "FuBd"] * (num_micro_batches - 2 * pp + rank + 1),  # steady: pairs
        *["Bu", "FuBd"] * (pp - rank - 1),
        *["B" + way for way in late[: rank + 1]],  # drain: what other ranks wait for,
        *["I" + way for way in late[rank + 1 :]],
        *[word for way in waiting[: pp - rank - 1] for word in ("W" + way, "Id")],
        *["W" + way for way in waiting[pp - rank - 1 :]],  # then what nobody waits for
    ]


def _on_a_v(name: str, pp: int, num_micro_batches: int, rows: Sequence[Sequence[str]]) -> Schedule:
    """From words as "Fd": d is the rank's stage on the way down, u that on the way up; "FdBu" is a pair.

    Each kind of work on a stage takes the micro-batches in order, so they are counted; those beyond are left out.
    """
    placed = [_row_on_a_v(words, pp, num_micro_batches, rank) for rank, words in enumerate(rows)]
    pairs = frozenset(one for _, of_rank in placed for one in of_rank)
    return Schedule(name, pp, num_micro_batches, v_placement(pp), tuple(row for row, _ in placed), pairs)


def _row_on_a_v(
    words: Sequence[str], pp: int, num_micro_batches: int, rank: int
) -> tuple[tuple[Instruction, ...], list[Instruction]]:
    """The instructions of a rank's words, and those that are the first of a pair."""
    counted: Counter[str] = Counter()
    row, pairs = [], []
    for word in words:
        for op, way in (word[:2], word[2:]) if word[2:] else (word,):
            row.append(Instruction(op, counted[op + way], rank if way == "d" else 2 * pp - 1 - rank))
            for counted_too in {"B": "BIW", "I": "IB"}.get(op, op):  # B is I and W in one
                counted[counted_too + way] += 1
        if word[2:]:
            pairs.append(row[-2])
    return tuple(one for one in row if one.micro_batch < num_micro_batches), pairs


# --- by name


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "afab": all_forward_all_backward,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}


@checked
@lru_cache(maxsize=8, typed=True)  # typed: True is not 1
def make(name: str, pp: Size, num_micro_batches: Size, v: Size = 1) -> Schedule:
    """The schedule of that name. v, the stages of a rank, is a choice of "interleaved" alone.

    Raises   ValueError for an unknown name, or sizes that the schedule cannot have
    """
    check_request(name, pp, num_micro_batches, v)
    sizes = (pp, num_micro_batches, v) if name == "interleaved" else (pp, num_micro_batches)
    return SCHEDULES[name](*sizes)


_ROWS: dict[str, Callable[..., Sequence[str]]] = {
    "1f1b": _one_f_one_b_row,
    "zb_h1": _zb_h1_row,
    "zb_h2": _zb_h2_row,
    "zbv": _zbv_words,
    "dualpipe_v": _dualpipe_v_words,
}


@lru_cache(maxsize=4096)
def row_of_rank(name: str, pp: int, num_micro_batches: int, v: int, rank: int) -> tuple[Instruction, ...]:
    """What one rank computes, in order: its row of `make(name, pp, num_micro_batches, v)`, made without other rows."""
    if name == "interleaved" and v > 1:
        return _interleaved_row(pp, num_micro_batches, rank, v)
    if name in ("naive", "afab"):  # all ranks have the same
        return tuple(one._replace(stage=rank) for one in make(name, 1, num_micro_batches).instructions[0])
    words = _ROWS["1f1b" if name == "interleaved" else name](pp, num_micro_batches, rank)
    if stages_per_rank(name) == 2:
        return _row_on_a_v(words, pp, num_micro_batches, rank)[0]
    return tuple(Instruction(word[0], int(word[1:]), rank) for word in words)


@checked
def stages_per_rank(name: Literal[tuple(SCHEDULES)], v: Size = 1) -> int:
    """How many stages a rank has: v of "interleaved", two on the V of "zbv" and "dualpipe_v", else one."""
    if name == "interleaved":
        return v
    return 2 if name in ("zbv", "dualpipe_v") else 1


def placement(name: str, pp: int, v: int = 1) -> tuple[int, ...]:
    """Which rank has each stage of the schedule of that name, whatever its micro-batches."""
    return v_placement(pp) if name in ("zbv", "dualpipe_v") else tuple(range(pp)) * stages_per_rank(name, v)


# --- checks: before any process starts
@checked
def check_request(name: str, pp: Size, num_micro_batches: Size, v: Size = 1) -> None:
    """Raises ValueError, saying what to choose, if `make` cannot give this schedule."""
    fixed = stages_per_rank(name, v)
    if v not in (1, fixed):
        raise ValueError(
            f"schedule {name!r} has {fixed} stage{'s' * (fixed > 1)} a rank, got v={v}; "
            "leave v out, or choose interleaved"
        )
    if name == "interleaved" and v > 1:
        check_interleaved(pp, num_micro_batches, v)
    if name == "dualpipe_v":
        _check_dualpipe_v(pp, num_micro_batches)


@checked
def check_sizes(pp: Size, num_micro_batches: Size, v: Size = 1) -> None:
    """Refuse sizes that no schedule has."""


@checked
def check_interleaved(pp: Size, num_micro_batches: Size, v: Size) -> None:
    """Raises ValueError unless the micro-batches fill whole loops."""
    if num_micro_batches % pp:
        below, above = num_micro_batches // pp * pp, -(-num_micro_batches // pp) * pp
        near = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"interleaved 1F1B with v={v} needs micro-batches in whole loops: num_micro_batches ({num_micro_batches}) "
            f"must be a multiple of pp ({pp}); choose {near}, or 1f1b, which takes any number"
        )


def _check_dualpipe_v(pp: Size, num_micro_batches: Size) -> None:
    """Raises ValueError below two micro-batches a rank, which the V's two directions need."""
    if num_micro_batches < 2 * pp:
        raise ValueError(
            f"DualPipeV needs num_micro_batches ({num_micro_batches}) of at least 2 * pp = {2 * pp}; "
            f"choose {2 * pp} or more, or zbv, which takes any number"
        )
