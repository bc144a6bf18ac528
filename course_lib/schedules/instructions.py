"""What a pipeline schedule is made of: instructions, one list of them for each rank.

    F3@1   forward of micro-batch 3 by stage 1
    B3@1   its whole backward: the gradient of its input, and those of its weights
    I3@1   only the gradient of its input, which stage 0 waits for
    W3@1   the gradients of its weights, at any time after I3@1

A stage is a run of consecutive layers; stages are numbered along the model. A rank has v of them. Communication is not
in the lists, since it follows from them: F of stage s needs the activations of F of stage s - 1, the backward of stage
s the gradient from that of stage s + 1.

    from_text("F0 F1 B0 B1\nF0 B0 F1 B1")      # two ranks, one stage each
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from course_lib.validate import Checked, Index, Size, checked

OPS = ("F", "B", "I", "W")


class Instruction(NamedTuple):
    """One piece of work: `op` (F, B, I or W) of one micro-batch by one stage."""

    op: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.op}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True)
class Schedule(Checked):
    """What each of pp ranks computes, in order, and which rank has which stage.

    `pairs` are forwards that a GPU may run at once with the backward behind them in the list (DualPipeV alone).
    """

    name: str
    pp: Size
    num_micro_batches: Size
    rank_of_stage: tuple[int, ...]
    instructions: tuple[tuple[Instruction, ...], ...] = field(repr=False)
    pairs: frozenset[Instruction] = field(default=frozenset(), repr=False)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def v(self) -> int:
        """Stages of a rank."""
        return self.num_stages // self.pp

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The rank's stages, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    @cached_property
    def all(self) -> frozenset[Instruction]:
        return frozenset(instruction for row in self.instructions for instruction in row)

    @cached_property
    def needed(self) -> dict[Instruction, list[Instruction]]:
        """For every instruction what must be done before it: what `needs` returns, kept for walks over all of them."""
        return {one: needs(one, self) for one in self.all}

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is done in two parts, I and W."""
        return any(instruction.op in "IW" for instruction in self.all)

    def __str__(self) -> str:
        """One line a rank; `from_text` reads it."""
        return "\n".join(" ".join(map(str, row)) for row in self.instructions)


# --- what follows from what
def needs(instruction: Instruction, schedule: Schedule) -> list[Instruction]:
    """What must be done before: the stage before in F, the stage after in the backward, I before W."""
    op, micro_batch, stage = instruction.op, instruction.micro_batch, instruction.stage
    if op == "F":
        return [Instruction("F", micro_batch, stage - 1)] if stage > 0 else []
    if op == "W":
        return [Instruction("I", micro_batch, stage)]
    own_forward = Instruction("F", micro_batch, stage)
    if stage == schedule.num_stages - 1:
        return [own_forward]
    in_parts = Instruction("I", micro_batch, stage + 1)
    return [own_forward, in_parts if in_parts in schedule.all else Instruction("B", micro_batch, stage + 1)]


# --- placements: which rank has which stage
@checked
def loop_placement(pp: Size, v: Size) -> tuple[int, ...]:
    """Stage s on rank s % pp: after the last rank the model goes on at the first."""
    return tuple(range(pp)) * v


def v_placement(pp: Size) -> tuple[int, ...]:
    """Two stages a rank, down and up again: rank 0 has the first stage and the last, and so the loss."""
    return (*range(pp), *reversed(range(pp)))


# --- schedules that somebody wrote


WORD = re.compile(r"([FBIW])(\d+)(?:@(\d+))?")
LABEL = re.compile(r"^\s*(?:rank|gpu|stage)\s*\d+\s*:?", re.IGNORECASE)


@checked
def from_lists(
    rows: Sequence[Iterable],
    rank_of_stage: Sequence[int] | None = None,
    num_micro_batches: Size | None = None,
    name: str = "handmade",
) -> Schedule:
    """A schedule from one list a rank: words as "F0" or "F0@1", tuples ("F", 0, 1), or Instructions.

    Without a stage, that of the same number as the rank is meant (one stage a rank). Idle slots (".", "", None) are
    left out. Whether it can run is for check.py to say.
    Raises   ValueError for what cannot be read
    """
    instructions = []
    for rank, row in enumerate(rows):
        placed = [(f"rank {rank}, place {place}", word) for place, word in enumerate(row) if not is_idle(word)]
        instructions.append(tuple(read_instruction(word, rank, where) for where, word in placed))
    flat = [instruction for row in instructions for instruction in row]
    if not flat:
        raise ValueError("the schedule is empty; give one list of instructions a rank, such as [['F0', 'B0']]")
    if rank_of_stage is None:
        num_stages = 1 + max(instruction.stage for instruction in flat)
        rank_of_stage = loop_placement(len(rows), max(1, -(-num_stages // len(rows))))
    if num_micro_batches is None:
        num_micro_batches = 1 + max(instruction.micro_batch for instruction in flat)
    return Schedule(name, len(rows), num_micro_batches, tuple(rank_of_stage), tuple(instructions))


@checked
def from_text(text: str, rank_of_stage: Sequence[int] | None = None, name: str = "handmade") -> Schedule:
    """A schedule from text: one line a rank, words separated by spaces, "." for an idle slot.

    A line may begin with its name, as in "rank 0 F0 B0"; "-" goes on with what stands left of it.
    """
    return from_lists(words_of(text), rank_of_stage, name=name)


def words_of(text: str) -> list[list[str]]:
    """Each line's words, without its name."""
    return [LABEL.sub("", line).split() for line in text.strip().splitlines()]


def is_idle(word) -> bool:
    """Whether a word is no instruction: an empty slot, or the rest of what stands left."""
    return word is None or word in ("", ".", "-")


def read_instruction(word, rank: Index, where: str) -> Instruction:
    """ "F0", "F0@1", ("F", 0) or ("F", 0, 1) -> Instruction."""
    if isinstance(word, Instruction):
        return word
    if isinstance(word, str):
        match = WORD.fullmatch(word.strip())
        parts = match.groups() if match else None
    else:
        parts = tuple(word) if isinstance(word, Sequence) and len(word) in (2, 3) and word[0] in OPS else None
    if parts is None:
        raise ValueError(
            f"{where}: cannot read {word!r}; write F, B, I or W, the micro-batch, and @ with the stage where a rank "
            "has more than one, such as F0 or F0@1"
        )
    stage = rank if len(parts) == 2 or parts[2] is None else int(parts[2])
    return Instruction(parts[0], int(parts[1]), stage)
