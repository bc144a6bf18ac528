"""Equal layers run once: what a stage of a few layers changes on the ledger, repeated for a stage of many.

The layers of a stage are alike but for the first and the last. So a stage of at most four layers of each sort runs on a
ledger that notes every change, and a stage of a hundred layers repeats what the second of four did. Notes depend on
what a layer computes, not on who takes its gradients: runs that differ in ZeRO, dp or the pipeline share them.

    Passage     consecutive changes between two calls of the keeper, summed up: net change, largest moment
    Section     the passages and calls of one layer, in forward, in backward or among its weight gradients
    notes_of    the sections of a stage, or None where its layers are not repeated
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

from course_lib.layout import Layout
from course_lib.memory.blocks import Part, StageProgram
from course_lib.memory.ledger import KINDS, LEAF, Ledger, Storage, Tensor, Weight

ALONE = 4  # so many equal layers run: the first, two that must be alike, the last
_LAYER = re.compile(r"blocks\.(\d+)")
_SAVED = ("activations", "logits")


@dataclass(frozen=True)
class Passage:
    """Changes of the ledger one after the other: what is left of them, and their largest moment above the start."""

    net: tuple[tuple[str, int], ...]
    net_total: int
    most: tuple[tuple[str, int], ...]
    most_saved: int
    rise: int
    at_peak: tuple[tuple[str, int], ...]
    moment: str

    def apply(self, L: Ledger, shift: int) -> None:
        """Change the ledger as the layer did, `shift` layers further."""
        by_kind = L.by_kind
        if L.total + self.rise > L.peak:
            L.peak, L.moment = L.total + self.rise, shifted(self.moment, shift)
            L.peak_by_kind = dict(by_kind)
            for kind, nbytes in self.at_peak:
                L.peak_by_kind[kind] += nbytes
        for kind, nbytes in self.most:
            L.largest[kind] = max(L.largest[kind], by_kind[kind] + nbytes)
        if self.most_saved:
            L.most_saved = max(L.most_saved, by_kind["activations"] + by_kind["logits"] + self.most_saved)
        for kind, nbytes in self.net:
            by_kind[kind] += nbytes
        L.total += self.net_total


@dataclass(frozen=True)
class Call:
    """A call of the keeper: "receive" a gradient, "unit" begins, "hook" of a unit, "root" of backward, "finish"."""

    what: str
    name: str
    doing: str
    gradient: tuple[int, str, int] = (0, "", 0)  # bytes, kind, itemsize
    hooked: bool = False


@dataclass(frozen=True)
class Section:
    """What happened in one layer, or outside of all (layer None)."""

    layer: int | None
    steps: tuple[Passage | Call, ...]

    def like(self, other: Section) -> bool:
        """Whether another layer did the same."""
        return self.moved(other.layer - self.layer) == other.steps

    def moved(self, shift: int) -> tuple[Passage | Call, ...]:
        found = []
        for step in self.steps:
            if isinstance(step, Passage):
                found.append(replace(step, moment=shifted(step.moment, shift)))
            else:
                found.append(replace(step, name=shifted(step.name, shift), doing=shifted(step.doing, shift)))
        return tuple(found)


Notes = dict[str, list[Section]]  # of each instruction (F, B, I, W) its sections


@lru_cache(maxsize=2**17)  # all layouts of a model have the same names
def shifted(name: str, shift: int) -> str:
    """The name with its layer so many further."""
    return _LAYER.sub(lambda found: f"blocks.{int(found[1]) + shift}", name) if shift else name


# ---- noting


class Recorder(Ledger):
    """A ledger that notes each change, and is its own keeper: of gradients it notes that they came."""

    def __init__(self):
        self.noted: list = []
        super().__init__()

    def change(self, kind: str, nbytes: int, quietly: bool = False) -> None:
        if nbytes:
            self.noted.append((self.doing, kind, nbytes, quietly))

    def receive(self, weight: Weight, came: list[Tensor]) -> None:
        storage = came.pop().storage
        gradient = (storage.nbytes, storage.kind, storage.itemsize)
        self.noted.append(Call("receive", weight.name, self.doing, gradient))
        storage.nbytes = 0  # from here on it is the keeper's

    def before_unit(self, unit: str, x: Tensor | None) -> None:
        hooked = x is not None and x.node is not None and x.node is not LEAF
        self.noted.append(Call("unit", unit, self.doing, hooked=hooked))
        if hooked:
            x.node.before = lambda: self.noted.append(Call("hook", unit, self.doing))

    def after_forward(self, root) -> None:
        self.noted.append(Call("root", "", self.doing))
        root.before = lambda: self.noted.append(Call("hook", "", self.doing))

    def finish(self) -> None:
        self.noted.append(Call("finish", "", self.doing))

    def taken(self) -> list:
        noted, self.noted = self.noted, []
        return noted


def run_stage(L: Ledger, keeper, program: StageProgram, in_two: bool) -> Iterator[str]:
    """One micro-batch, forward and backward: F and then B, or I and W; yields the name of each when it is done."""
    part, x = program.part, None
    if not part.is_first:
        x = L.make(part.own_rows * part.local.d_model, part.itemsize)
        x.node = LEAF
    queue = [] if in_two else None
    L.queue = queue
    out, root = program.forward(x)
    L.queue = None
    numel = None if out is None else out.numel
    del out
    yield "F"
    grad = L.make(numel, part.itemsize) if numel else L.make(1, 4)
    grad.storage.borrowed = True
    came = L.backward([(root, grad)])
    if not in_two:
        keeper.finish()
    program.casts.clear()
    program.targets = None
    del x, root, grad, came
    yield "I" if in_two else "B"
    if in_two:
        L.run_queue(queue)
        keeper.finish()
        yield "W"


@lru_cache(maxsize=512)
def _noted(part: Part, weights: tuple[tuple[str, int], ...], tied: bool, in_two: bool) -> tuple[Notes, Notes] | None:
    """Notes of the first micro-batch and of a later one; None where two layers that should be alike are not."""
    L = Recorder()
    made = {name: Weight(name, numel) for name, numel in weights}
    if tied:
        made["head"] = made["embed"]
    for weight in made.values():
        weight.receive = L.receive
    program = StageProgram(L, part, made.__getitem__, L)
    both = []
    for _ in range(2):
        notes = {}
        for name in run_stage(L, L, program, in_two):
            notes[name] = _sections(L.taken(), name, part)
        both.append(notes)
    for notes in both:
        for name, sections in notes.items():
            layers = [section.layer for section in sections if section.layer is not None]
            if layers != list(part.layers if name == "F" else reversed(part.layers)):
                return None
            by_layer = {section.layer: section for section in sections}
            for run in _runs(part):
                if len(run) == ALONE and not by_layer[run[1]].like(by_layer[run[2]]):
                    return None
    return tuple(both)


def _sections(noted: list, op: str, part: Part) -> list[Section]:
    """Cut what was noted where a layer begins: at units in forward, at hooks in backward, at names among W."""
    layer, last = None, part.layers[-1]
    pieces: list[tuple[int | None, list]] = [(None, [])]
    for one in noted:
        before = layer
        if isinstance(one, Call) and one.what in ("unit", "root", "finish"):
            layer = _layer_in(one.name)
        elif isinstance(one, Call) and one.what == "hook":
            behind = _layer_in(one.name)
            layer = last if behind is None else behind - 1 if behind > part.layers[0] else None
        elif op == "W":
            layer = _layer_in(one.doing if isinstance(one, Call) else one[0])
        if layer != before:
            pieces.append((layer, []))
        pieces[-1][1].append(one)
    return [Section(layer, tuple(_summed(piece))) for layer, piece in pieces if piece]


@lru_cache(maxsize=2**17)
def _layer_in(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def _summed(piece: list) -> Iterator[Passage | Call]:
    changes = []
    for one in piece:
        if isinstance(one, Call):
            if changes:
                yield _passage(changes)
            yield one
            changes = []
        else:
            changes.append(one)
    if changes:
        yield _passage(changes)


def _passage(changes: list[tuple[str, str, int, bool]]) -> Passage:
    now, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    total = rise = most_saved = 0
    at_peak, moment = {}, ""
    for doing, kind, nbytes, quietly in changes:
        now[kind] += nbytes
        total += nbytes
        most[kind] = max(most[kind], now[kind])
        if kind in _SAVED:
            most_saved = max(most_saved, sum(now[one] for one in _SAVED))
        if total > rise and not quietly:
            rise, at_peak, moment = total, dict(now), doing
    net, most, at_peak = (tuple((kind, n) for kind, n in each.items() if n) for each in (now, most, at_peak))
    return Passage(net, total, most, most_saved, rise, at_peak, moment)


# ---- repeating


def _runs(part: Part) -> list[range]:
    """Layers of one sort, one behind the other: those with an MLP, those with experts."""
    moe = part.local.moe
    first = part.layers.start if moe is None else min(max(moe.first_dense_layers, part.layers.start), part.layers.stop)
    runs = [range(part.layers.start, first), range(first, part.layers.stop)]
    return [run for run in runs if run]


def notes_of(part: Part, weights: dict[str, Weight], in_two: bool) -> tuple[tuple[Notes, Notes], list] | None:
    """Notes of a stage, first and later micro-batch, and which of its layers repeats which that ran.

    None where each layer runs: few layers, adapters, matrices that autocast casts, activations that leave the device
    """
    runs = _runs(part)
    plain = part.residual_itemsize in (None, part.itemsize) and not any(one.frozen for one in weights.values())
    if not plain or all(len(run) <= ALONE for run in runs):
        return None
    few = [min(len(run), ALONE) for run in runs]
    first = 0
    if part.local.moe is not None:  # where experts begin is where they begin
        begin = part.local.moe.first_dense_layers
        first = begin - few[0] if runs[0].stop <= begin else begin
    ran, start = [], first
    for count in few:
        ran.append(range(start, start + count))
        start += count
    which: list[tuple[int, int]] = []
    for run, short in zip(runs, ran, strict=True):
        for place, layer in enumerate(run):
            from_end = len(run) - place
            like = place if place < 2 or len(run) <= ALONE else max(1, len(short) - from_end)
            which.append((layer, short[like]))
    wanted = {like: layer for layer, like in which}
    like_of = {layer: like for like, layer in wanted.items()}
    names = {}
    for name, weight in weights.items():
        layer = _layer_in(name)
        if layer is None:
            names[name] = weight.numel
        elif layer in like_of:
            names[shifted(name, like_of[layer] - layer)] = weight.numel
    tied = weights.get("head") is not None and weights["head"] is weights.get("embed")
    short_part = replace(part, layers=range(first, start), layout=layout_of_layers(part.layout))
    both = _noted(short_part, tuple(names.items()), tied, in_two)
    return None if both is None else (both, which)


@lru_cache(maxsize=4096)
def layout_of_layers(layout: Layout) -> Layout:
    """What layers depend on: one of many layouts that differ in ZeRO, dp, pipeline and micro-batches."""
    return Layout(
        dp=layout.ep,
        ep=layout.ep,
        cp=layout.cp,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        regather=layout.regather,
        micro_batch=layout.micro_batch,
        recompute=layout.recompute,
        cp_method=layout.cp_method,
        cp_sharding=layout.cp_sharding,
        expert_method=layout.expert_method,
    )


def repeat(L: Ledger, keeper, weights: dict[str, Weight], notes: Notes, which: list[tuple[int, int]]) -> Iterator[str]:
    """What `run_stage` does, from notes: yields the name of each instruction when it is done."""
    hooks: dict[str, SimpleNamespace] = {}
    for name, sections in notes.items():
        by_layer = {section.layer: section for section in sections}
        order = which if name == "F" else which[::-1]
        begun = False
        for section in sections:
            if section.layer is None:
                _play(L, keeper, weights, section, 0, hooks)
            elif not begun:
                begun = True
                for layer, like in order:
                    _play(L, keeper, weights, by_layer[like], layer - like, hooks)
        yield name


def _play(L: Ledger, keeper, weights: dict[str, Weight], section: Section, shift: int, hooks: dict) -> None:
    for step in section.steps:
        if isinstance(step, Passage):
            step.apply(L, shift)
            continue
        L.doing = shifted(step.doing, shift)
        name = shifted(step.name, shift)
        if step.what == "receive":
            weight = weights[name]
            weight.receive(weight, [_arrived(L, *step.gradient)])
        elif step.what == "unit":
            hooks[name] = SimpleNamespace(before=None)
            keeper.before_unit(name, SimpleNamespace(node=hooks[name]) if step.hooked else None)
        elif step.what == "root":
            hooks[""] = SimpleNamespace(before=None)
            keeper.after_forward(hooks[""])
        elif step.what == "hook":
            if hooks[name].before is not None:
                hooks[name].before()
        else:
            keeper.finish()


def _arrived(L: Ledger, nbytes: int, kind: str, itemsize: int) -> Tensor:
    """A gradient whose bytes are on the ledger already."""
    storage = Storage.__new__(Storage)
    storage.ledger, storage.nbytes, storage.kind, storage.itemsize = L, nbytes, kind, itemsize
    storage.moved = storage.borrowed = False
    return Tensor(storage, nbytes // itemsize)
