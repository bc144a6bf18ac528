"""What the first rank of a pipeline holds at least: sums that are soon worked out, never above the ledger's peak.

    states, overheads   each kind in one flat
    gathered            with ZeRO-3 two neighbouring units, and the gradients of one of them
    in flight           what layers save of each micro-batch, in the schedule's order; without a pipeline the logits
    gradients           of stages through which a backward has gone

A planner rejects by it most of what does not fit; what it leaves is walked moment by moment (budget.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.blocks import Part, StageProgram
from course_lib.memory.budget import overheads_of, part_of, steady
from course_lib.memory.flats import cut_of, in_model_order, layers_of, placed_by, unit_shapes
from course_lib.memory.ledger import LEAF, Ledger, Weight
from course_lib.memory.moments import Plain
from course_lib.memory.replay import layout_of_layers
from course_lib.memory.run import Run
from course_lib.memory.states import Shapes, recipe_of
from course_lib.memory.zero import Offload, wire_grad_bytes, zero_state_bytes
from course_lib.schedules import make
from course_lib.validate import Amount, checked

Sizes = tuple[int, int]  # elements of a unit: experts, all others


@checked
def least_bytes(run: Run, usable_bytes: Amount | None = None) -> int:
    """Bytes below which the fullest rank of a run is not, what is no tensor included.

    usable_bytes   where states alone are more, activations are left out
    Raises         ValueError for adapters, offload and Adafactor
    """
    units, always, whole = _at_rest(run)
    if usable_bytes is not None and always + max(whole.values()) > usable_bytes:
        return always + max(whole.values())
    saved = {stage: _saved(run, stage) for stage in units}
    gradients = {stage: _gradients(run, of_stage) for stage, of_stage in units.items()}
    again, most = _made_again(run), sum(gradients.values())
    few = steady(run).layout
    for one in _moments(few.schedule, few.pp, few.micro_batches, few.v):
        there = sum(count * saved[stage] for stage, count in one.in_flight)
        there += sum(gradients[stage] for stage in one.summed)
        if one.forward:
            most = max(most, there + _logits(run, one.stage))
        else:
            most = max(most, there + again, there - saved[one.stage] + whole[one.stage])
    return always + most


class Moment(NamedTuple):
    """The end of a forward, or the beginning of a backward, of a stage of the first rank.

    in_flight   (stage, micro-batches) that wait for their backward, this one included
    summed      stages through which a backward has gone
    """

    stage: int
    forward: bool
    in_flight: tuple[tuple[int, int], ...]
    summed: frozenset[int]


@lru_cache(maxsize=256)
def _moments(name: str, pp: int, micro_batches: int, v: int) -> tuple[Moment, ...]:
    """The moments of a step, each once, of those that differ in micro-batches in flight alone the fullest."""
    schedule = make(name, pp, micro_batches, v)
    live, summed, found = dict.fromkeys(schedule.stages_of_rank(0), 0), set(), {}
    for one in schedule.instructions[0]:
        live[one.stage] += one.op == "F"
        if one.op != "W":
            found.setdefault((one.stage, one.op == "F", frozenset(summed)), set()).add(tuple(live.items()))
        live[one.stage] -= one.op in "BI"
        if one.op in "BW":
            summed.add(one.stage)
    return tuple(
        Moment(stage, forward, each, done)
        for (stage, forward, done), all_of in found.items()
        for each in _fullest(all_of)
    )


def _fullest(rows: set[tuple[tuple[int, int], ...]]) -> list[tuple[tuple[int, int], ...]]:
    """Those that no other exceeds in every stage."""

    def below(one, other) -> bool:
        return one != other and all(mine <= more for (_, mine), (_, more) in zip(one, other, strict=True))

    return [one for one in rows if not any(below(one, other) for other in rows)]


# ---- states


@checked
def least_states(run: Run) -> int:
    """Bytes of states, of what ZeRO-3 gathers and of what is no tensor: recomputation takes none of them away.

    Raises   ValueError for adapters, offload and Adafactor
    """
    _, always, whole = _at_rest(run)
    return always + max(whole.values())


def _at_rest(run: Run) -> tuple[dict[int, tuple[Sizes, ...]], int, dict[int, int]]:
    """Units of each stage; bytes that are always there; and of each stage what is whole during its backward."""
    if run.lora is not None or run.offload != Offload() or run.optimizer == "adafactor":
        raise ValueError("the least sums are without adapters, offload and Adafactor; ask budgets(run)")
    units = _units(run.config, cut_of(run.layout))
    always = sum(overheads_of(run).values())
    for place, ranks in enumerate(_shares(run)):
        numel = sum(sizes[place] for of_stage in units.values() for sizes in of_stage)
        states = zero_state_bytes((numel,), run.layout.zero_stage, ranks, run.recipe, run.optimizer)
        always += states.parameters + states.optimizer
    return units, always, {stage: _whole(run, of_stage) for stage, of_stage in units.items()}


@lru_cache(maxsize=1024)
def _units(config: ModelConfig, layout: Layout) -> dict[int, tuple[Sizes, ...]]:
    """Elements of each unit of the first rank's stages."""
    found = {}
    for stage in placed_by(layout).stages_of_rank(0):
        of_units = unit_shapes(config, layout, stage, tied_copy=False)
        known = {id(shapes): _sizes(shapes) for shapes in of_units.values()}
        found[stage] = tuple(known[id(shapes)] for shapes in of_units.values())
    return found


def _sizes(shapes: Shapes) -> Sizes:
    experts = {name: entry for name, entry in shapes.items() if name.startswith("moe.experts.")}
    others = sum(prod(shape) for name, (shape, _) in shapes.items() if name not in experts)
    return sum(prod(shape) * copies for shape, copies in experts.values()), others


def _shares(run: Run) -> tuple[int, int]:
    return run.layout.expert_shard_size, run.layout.shard_size


def _gradients(run: Run, of_stage: tuple[Sizes, ...]) -> int:
    """Of a stage, once a backward has gone through it."""
    recipe, held = recipe_of(run.recipe), 0
    for place, ranks in enumerate(_shares(run)):
        whole = sum(sizes[place] for sizes in of_stage)
        itemsize = wire_grad_bytes(recipe) if ranks > 1 else min(recipe.param_bytes, recipe.grad_bytes)
        held += itemsize * (whole // ranks if run.layout.zero_stage > 1 else whole)
    return held


def _whole(run: Run, of_stage: tuple[Sizes, ...]) -> int:
    """With ZeRO-3, what is whole while a backward goes through a stage: two neighbouring units, gradients of one."""
    if run.layout.zero_stage < 3:
        return 0
    recipe, units = recipe_of(run.recipe), [sum(sizes) for sizes in of_stage]
    held = [recipe.param_bytes * (before + unit) + wire_grad_bytes(recipe) * unit for before, unit in pairwise(units)]
    return max(held, default=recipe.param_bytes * units[0])


# ---- activations


def _saved(run: Run, stage: int) -> int:
    """What one micro-batch leaves on a stage for its backward."""
    layers = layers_of(run.config, run.layout)
    first, end = sum(layers[:stage]), sum(layers[: stage + 1])
    moe = run.config.moe
    dense = layers[stage] if moe is None else max(0, min(end, moe.first_dense_layers) - first)
    saved = dense * _layer_saves(run, 0) if dense else 0
    with_experts = layers[stage] - dense
    return saved + (with_experts * _layer_saves(run, moe.first_dense_layers) if with_experts else 0)


def _made_again(run: Run) -> int:
    """What full recomputation makes of one layer before its backward, beside the layer's input."""
    if run.layout.recompute != "full":
        return 0
    layer = 0 if run.config.moe is None or run.config.moe.first_dense_layers else run.config.moe.first_dense_layers
    whole = replace(run, layout=replace(run.layout, recompute="none"))
    return max(0, _layer_saves(whole, layer) - _layer_saves(run, layer))


def _logits(run: Run, stage: int) -> int:
    layout = run.layout
    if stage < layout.num_stages - 1 or run.config.family == "xlmr":
        return 0
    rows = layout.micro_batch * (run.seq_len // layout.cp)
    return rows * (run.config.vocab_size // layout.tp) * recipe_of(run.recipe).compute_bytes


def _layer_saves(run: Run, layer: int) -> int:
    part = replace(part_of(run, range(layer, layer + 1)), layout=layout_of_layers(run.layout))
    if part.local.moe is not None and layer < part.local.moe.first_dense_layers:
        part = replace(part, local=replace(part.local, moe=None))
    return _second_saves(run.config, part)


@lru_cache(maxsize=4096)
def _second_saves(config: ModelConfig, part: Part) -> int:
    """What a second layer like this one adds to what the first has saved."""
    layer = part.layers.start
    tensors = in_model_order(unit_shapes(config, part.layout, 0)[f"blocks.{layer}"])
    weights = {f"blocks.{i}.{name}": Weight(name, numel) for i in (layer, layer + 1) for name, numel in tensors}
    both = replace(part, layers=range(layer, layer + 2))
    return _after_forward(both, weights) - _after_forward(part, weights)


def _after_forward(part: Part, weights: dict[str, Weight]) -> int:
    L = Ledger()
    x = L.make(part.own_rows * part.local.d_model, part.itemsize)
    x.node = LEAF
    _held = StageProgram(L, part, weights.__getitem__, Plain(keeps=False)).forward(x)
    return L.total
