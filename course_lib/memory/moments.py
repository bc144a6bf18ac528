"""The moments of a rank's step: its instructions one after the other, and what follows them, on the ledger.

    F, B, I, W            of each stage and micro-batch, in the schedule's order (blocks.py has what happens inside)
    messages              what has come and is not used yet, what was sent and has not certainly come
    sums of gradients     what ZeRO has not summed: over tp, between two ends that are tied
    clipping, update      a tensor, or a shard, at a time; AdamW over lists has one more copy of all at once

The first backward of a stage differs from the others, because it makes the gradients. So each stage runs twice on the
ledger, and all other micro-batches repeat what the second run did.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.memory.blocks import Part, StageProgram
from course_lib.memory.ledger import LEAF, Ledger, Tensor, Weight
from course_lib.memory.replay import notes_of, repeat, run_stage


@dataclass(frozen=True)
class Change:
    """What one instruction does: `rise` up to its largest moment, `net` in the end, by kind; the moment's name.

    most    up to each kind's own largest; "saved": activations and what the loss saves, together
    """

    rise: dict[str, int]
    net: dict[str, int]
    moment: str
    most: dict[str, int]


class Shard:
    """A flat of ZeRO on a rank: its gradients while they gather and travel, its parameters while they are whole."""

    def __init__(self, L: Ledger, numel: int, ranks: int, names: tuple[str, ...], sizes: tuple[int, int], stage: int):
        self.L, self.numel, self.ranks, self.names, self.stage = L, numel, ranks, set(names), stage
        self.param_bytes, self.grad_bytes = sizes
        self.waiting_for = set(names)
        self.full: Tensor | None = None  # all gradients of this rank's micro-batches
        self.piece: Tensor | None = None  # of their sum, on its way
        self.gradient: Tensor | None = None  # the shard's
        self.whole: Tensor | None = None  # parameters, while they are gathered (stage 3)

    def collect(self, name: str) -> None:
        if self.full is None:
            kind = "gradients" if self.stage == 1 else "temporary"
            self.full = self.L.make(self.numel, self.grad_bytes, kind)
        self.waiting_for.discard(name)

    def start_reduce(self) -> None:
        if self.stage > 1 and self.piece is None:
            self.full = self.full or self.L.make(self.numel, self.grad_bytes)
            self.piece = self.L.make(self.numel // self.ranks, self.grad_bytes)

    def finish_reduce(self) -> None:
        if self.piece is None:
            return
        if self.gradient is None:
            self.gradient = self.piece
            self.gradient.storage.become("gradients")
        self.piece = self.full = None
        self.waiting_for = set(self.names)

    def gather(self) -> None:
        self.whole = self.whole or self.L.make(self.numel, self.param_bytes, "gathered")


class Plain:
    """Gradients without ZeRO: each parameter's own, unless FP32 buffers take them."""

    def __init__(self, keeps: bool):
        self.keeps, self.gradients = keeps, {}

    def receive(self, weight: Weight, came: list[Tensor]) -> None:
        grad = came.pop()
        if self.keeps and weight.name not in self.gradients:
            grad.storage.become("gradients")
            self.gradients[weight.name] = grad

    def before_unit(self, unit: str, x: Tensor | None) -> None:
        """Nothing is gathered."""

    def after_forward(self, root) -> None:
        """Nothing is freed."""

    def finish(self) -> None:
        """Nothing is under way."""


class Buckets:
    """Stages 1 and 2: gradients in flats, which are reduced in one order once they are full (parallel/zero.py).

    Without ZeRO the buckets of data parallelism behave as stage 1's: there from the first gradient to the end.
    """

    def __init__(self, shards: list[Shard], stage: int, others: Plain):
        self.shards, self.stage, self.others, self.started = shards, stage, others, 0
        self.shard_of = {name: shard for shard in shards for name in shard.names}

    def receive(self, weight: Weight, came: list[Tensor]) -> None:
        if weight.name not in self.shard_of:
            self.others.receive(weight, came)
            return
        self.shard_of[weight.name].collect(weight.name)
        came.clear()
        if self.stage == 2:
            self.start_full()

    def start_full(self) -> None:
        while self.started < len(self.shards) and not self.shards[self.started].waiting_for:
            if self.started:
                self.shards[self.started - 1].finish_reduce()
            self.shards[self.started].start_reduce()
            self.started += 1

    def before_unit(self, unit: str, x: Tensor | None) -> None:
        """Parameters are whole."""

    def after_forward(self, root) -> None:
        """Parameters stay whole."""

    def finish(self) -> None:
        for shard in self.shards[self.started :] if self.stage == 2 else ():
            shard.waiting_for = set()
        if self.stage == 2:
            self.start_full()
            for shard in self.shards:
                shard.finish_reduce()
        self.started = 0


class Units:
    """Stage 3: a unit's parameters are gathered while it computes, with the next one's; then its gradients leave."""

    def __init__(self, shards: list[Shard], units: list[str], uses: dict[int, tuple[int, int]]):
        self.shards = shards
        self.place = {unit: index for index, unit in enumerate(units)}
        self.needed: list[list[Shard]] = [[] for _ in units]  # by each unit
        self.first: list[list[Shard]] = [[] for _ in units]  # those of which it is the first
        for place, shard in enumerate(shards):
            first, last = uses[place]
            self.first[first].append(shard)
            for index in range(first, last + 1):
                self.needed[index].append(shard)
        self.held: list[Shard] = []  # whole now
        self.leaving: list[Shard] = []  # being reduced
        self.shard_of = {name: shard for shard in shards for name in shard.names}
        self.lowest, self.in_backward = len(units) - 1, False

    def receive(self, weight: Weight, came: list[Tensor]) -> None:
        self.shard_of[weight.name].collect(weight.name)
        came.clear()

    def hold(self, *indices: int) -> None:
        wanted = [shard for index in indices if 0 <= index < len(self.needed) for shard in self.needed[index]]
        for shard in self.held:
            if shard not in wanted:
                shard.whole = None
        for shard in wanted:
            shard.gather()
        self.held = wanted

    def before_unit(self, unit: str, x: Tensor | None) -> None:
        if self.in_backward:
            return
        index = self.place[unit]
        if x is not None and x.node is not None and x.node is not LEAF:
            x.node.before = lambda: self.before_backward(index - 1)
            self.lowest = min(self.lowest, index - 1)
        self.hold(index, index + 1)

    def after_forward(self, root) -> None:
        last = len(self.place) - 1
        root.before = lambda: self.before_backward(last)
        self.hold()

    def before_backward(self, index: int) -> None:
        self.in_backward = True
        self.reduce(self.first[index + 1] if index + 1 < len(self.first) else [])
        self.hold(*([index, index - 1] if index > self.lowest else [index]))

    def reduce(self, left: list[Shard]) -> None:
        for shard in self.leaving:
            shard.finish_reduce()
        for shard in left:
            shard.start_reduce()
        self.leaving = left

    def finish(self) -> None:
        self.reduce([shard for shards in self.first[: self.lowest + 1] for shard in shards])
        self.reduce([])
        self.hold()
        self.lowest, self.in_backward = len(self.place) - 1, False


class StageOnLedger:
    """One stage of one rank: what its instructions change, the first time and later."""

    def __init__(self, L: Ledger, part: Part, weights: dict[str, Weight], keeper: Plain | Buckets | Units):
        self.L, self.part, self.weights, self.keeper, self.runs = L, part, weights, keeper, 0
        self.program = StageProgram(L, part, weights.__getitem__, keeper)
        for weight in weights.values():
            weight.receive = keeper.receive

    def run(self, in_two: bool) -> dict[tuple[str, bool], Change]:
        """One micro-batch, forward and backward: of each instruction, in one part or in two, what it changes."""
        noted = None if self.L.offloads else notes_of(self.part, self.weights, in_two)
        if noted is None:
            instructions = run_stage(self.L, self.keeper, self.program, in_two)
        else:
            both, which = noted
            instructions = repeat(self.L, self.keeper, self.weights, both[min(self.runs, 1)], which)
        self.runs += 1
        changes, start = {}, self._start()
        for name in instructions:
            changes[name, in_two] = self._change(start)
            start = self._start()
        return changes

    def _start(self) -> dict[str, int]:
        self.L.reset()
        return dict(self.L.by_kind)

    def _change(self, start: dict[str, int]) -> Change:
        peak, now = self.L.peak_by_kind, self.L.by_kind
        return Change(
            {kind: peak[kind] - start[kind] for kind in start},
            {kind: now[kind] - start[kind] for kind in start},
            self.L.moment,
            {kind: self.L.largest[kind] - start[kind] for kind in start}
            | {"saved": self.L.most_saved - start["activations"] - start["logits"]},
        )
