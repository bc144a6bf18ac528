"""Which parameter tensors a rank holds: stage by stage, unit by unit, and laid end to end in flats.

stage     consecutive layers; the first stage has the embedding as well, the last the final norm and the head
unit      what comes before the blocks, each block, what comes after them: what ZeRO-3 gathers at once
kind      whose gradients are summed over the same ranks
flat      tensors of one stage and kind side by side: a bucket, or with ZeRO-3 a unit's; padded for equal shards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.partition import check_layers, even_layers, kv_replication
from course_lib.memory.ranks import is_replicated, narrow
from course_lib.memory.states import LoRA, Shapes, adapter_shapes, block_shapes, end_shapes
from course_lib.schedules import make
from course_lib.schedules.instructions import Schedule

BUCKET_BYTES = 25 * 2**20
schedule_of = lru_cache(maxsize=256)(make)


def placed_by(layout: Layout) -> Schedule:
    """The layout's pipeline with few micro-batches: for what asks where a stage is; without one it has one rank."""
    return schedule_of(layout.schedule, layout.pp, 2 * layout.pp, layout.v)


def layers_of(config: ModelConfig, layout: Layout) -> list[int]:
    """How many layers each stage has."""
    layers = list(layout.layers_of_stage or even_layers(config.num_layers, layout.num_stages))
    check_layers(config, layers)
    return layers


# ---- tensors


class Named(NamedTuple):
    """One parameter tensor of a rank."""

    name: str
    numel: int
    kind: str  # "matrices", "norms", "head_norms", "kv", "tied", "experts"
    unit: str
    stage: int


def tensors_of(config: ModelConfig, layout: Layout, pp_rank: int = 0, tp_rank: int = 0) -> tuple[Named, ...]:
    """List all parameter tensors of a rank, in the model's order."""
    return _tensors_of(config, _cut_of(layout), pp_rank, tp_rank)


def adapters_of(config: ModelConfig, layout: Layout, lora: LoRA) -> tuple[Named, ...]:
    """List all adapters of an undivided model, in its order; beside frozen weights they alone are trained."""
    return _tensors_of(config, _cut_of(layout), 0, 0, lora)


@lru_cache(maxsize=4096)
def _cut_of(layout: Layout) -> Layout:
    """What tensors depend on: one of many layouts that differ in ZeRO, dp, cp, micro-batches and recomputation."""
    of_tp = {"expert_tp": 1} if layout.folded else {"sequence_parallel": False, "regather": False}
    return replace(with_any_batch(layout), zero_stage=0, dp_replicate=1, dp=layout.ep, cp=1, **of_tp)


@lru_cache(maxsize=1024)
def _tensors_of(
    config: ModelConfig, layout: Layout, pp_rank: int, tp_rank: int, lora: LoRA | None = None
) -> tuple[Named, ...]:
    mine, found, named = placed_by(layout).stages_of_rank(pp_rank), [], {}
    for stage in mine:
        for unit, shapes in _unit_shapes(config, layout, stage, tp_rank, tied_copy=0 not in mine).items():
            if id(shapes) not in named:  # names, elements and kinds, the same for equal layers
                trained = adapter_shapes(shapes, lora) if lora else shapes
                named[id(shapes)] = shapes, _in_model_order(trained, config, layout)
            prefix = f"{unit}." * unit.startswith("blocks")
            found += [Named(f"{prefix}{name}", numel, kind, unit, stage) for name, numel, kind in named[id(shapes)][1]]
    return tuple(found)


def _unit_shapes(config: ModelConfig, layout: Layout, stage: int, tp_rank: int, tied_copy: bool) -> dict[str, Shapes]:
    """The tensors that one rank has of a stage: those before the blocks, those of each block, those behind them.

    tied_copy   whether a tied head on the last stage is a tensor of its own: not where the rank has the embedding too
    """
    layers, local = layers_of(config, layout), narrow(config, layout.tp, tp_rank)
    before, behind = end_shapes(local)
    of_sort = {has_experts: block_shapes(local, has_experts) for has_experts in {False, config.moe is not None}}
    for name, (shape, copies) in of_sort[config.moe is not None].items():
        if name.startswith("moe.experts."):  # folded they are whole
            shape = block_shapes(config, True)[name][0] if layout.folded else shape
            of_sort[True][name] = shape, copies // layout.ep
    units = {"embed": before} if stage == 0 else {}
    for layer in range(sum(layers[:stage]), sum(layers[: stage + 1])):
        units[f"blocks.{layer}"] = of_sort[config.has_experts(layer)]
    if stage == len(layers) - 1:
        units["end"] = behind | ({"head": before["embed"]} if config.tied and tied_copy and stage > 0 else {})
    return units


def _in_model_order(shapes: Shapes, config: ModelConfig, layout: Layout) -> list[tuple[str, int, str]]:
    """(name, elements, kind) of each tensor, one expert after the other: gate.3, of adapters gate.3.lora_a."""
    experts, found = [name for name in shapes if name.startswith("moe.experts.")], []
    for name, (shape, copies) in shapes.items():
        if name not in experts:
            found.append((name, prod(shape), kind_of(name, config, layout)))
        for i in range(copies if name in experts[:1] else 0):
            for each in experts:
                matrix, dot, adapter = each.removeprefix("moe.experts.").partition(".")
                found.append((f"moe.experts.{matrix}.{i}{dot}{adapter}", prod(shapes[each][0]), "experts"))
    return found


def kind_of(name: str, config: ModelConfig, layout: Layout) -> str:
    """Of which kind a tensor of a rank is, as parallel/sums.py has it.

    norms        whole on each rank of tp: norms, positions, biases of rows, routers, latent attention's narrow matrices
    head_norms   whole as well, but used for the rank's own heads: QK-norm
    kv           key/value heads that several ranks of tp have
    tied         embedding and head, as copies on two ranks of the pipeline
    """
    ends = {placed_by(layout).rank_of_stage[stage] for stage in (0, -1)}
    if name.startswith("moe.experts."):
        return "experts"
    if name in ("embed", "head") and config.tied and len(ends) == 2:
        return "tied"
    if layout.tp > 1 and config.qk_norm and name in ("attention.q_norm", "attention.k_norm"):
        return "head_norms"
    if layout.tp > 1 and is_replicated(name):
        return "norms"
    is_kv = name.startswith(("attention.k", "attention.v")) and config.mla is None
    return "kv" if is_kv and kv_replication(config, layout.tp) > 1 else "matrices"


def different_terms_over_tp(layout: Layout) -> tuple[str, ...]:
    """Kinds that all ranks of tp have whole and of whose gradient each has a different term: these are summed.

    Of other whole parameters each rank has the same gradient, except under sequence parallelism: there it is of the
    rank's own tokens.
    """
    return ("norms", "head_norms") if layout.sequence_parallel else ("head_norms",)


# ---- flats


class Flat(NamedTuple):
    """Parameters of one stage and kind side by side, whose gradients are summed over so many ranks.

    unit            of its first tensor; with ZeRO-3 of all
    numel, padded   elements, without and with the zeros that make equal shards of it
    """

    tensors: tuple[Named, ...]
    ranks: int
    stage: int
    kind: str
    unit: str
    sizes: tuple[int, ...]
    numel: int
    padded: int


def padded(numel: int, ranks: int) -> int:
    """The next multiple of `ranks`: what a flat of so many elements occupies, all ranks together."""
    return -(-numel // ranks) * ranks


@lru_cache(maxsize=4096)
def with_any_batch(layout: Layout) -> Layout:
    """One of many layouts with the same parameters, gradients and states, whatever batch, recomputation, cp_method."""
    few = {"micro_batch": 1, "micro_batches": 2 * layout.pp}
    return replace(layout, recompute="none", regather=False, cp_method="ring", cp_sharding="zigzag", **few)


def flats_of(
    config: ModelConfig, layout: Layout, pp_rank: int = 0, tp_rank: int = 0, itemsize: int = 2, lora: LoRA | None = None
) -> tuple[Flat, ...]:
    """What is summed over data, and sharded by ZeRO, on a rank, stage by stage: buckets, and with ZeRO-3 units.

    itemsize   bytes of a parameter: a bucket closes once it has its size
    lora       adapters, which then are all that is summed
    """
    return _flats_of(config, with_any_batch(layout), pp_rank, tp_rank, itemsize, lora)


@lru_cache(maxsize=1024)
def _flats_of(
    config: ModelConfig, layout: Layout, pp_rank: int, tp_rank: int, itemsize: int, lora: LoRA | None
) -> tuple[Flat, ...]:
    groups = _groups_of(config, _cut_of(layout), pp_rank, tp_rank, itemsize, lora, layout.zero_stage == 3)
    of_experts, of_others, flats = layout.expert_shard_size, layout.shard_size, []
    for group, sizes, numel in groups:
        first, ranks = group[0], of_experts if group[0].kind == "experts" else of_others
        flats.append(Flat(group, ranks, first.stage, first.kind, first.unit, sizes, numel, padded(numel, ranks)))
    return tuple(flats)


@lru_cache(maxsize=1024)
def _groups_of(
    config: ModelConfig, layout: Layout, pp_rank: int, tp_rank: int, itemsize: int, lora: LoRA | None, in_units: bool
) -> list[tuple[tuple[Named, ...], tuple[int, ...], int]]:
    """Of each flat of a rank its tensors, the elements of each, and of all."""
    trained, groups = _tensors_of(config, layout, pp_rank, tp_rank, lora), []
    for stage in placed_by(layout).stages_of_rank(pp_rank):
        mine = [one for one in trained if one.stage == stage]
        groups += units_of(mine) if in_units else buckets_of(mine, itemsize)
    sizes = [tuple(one.numel for one in group) for group in groups]
    return [(tuple(group), own, sum(own)) for group, own in zip(groups, sizes, strict=True)]


def units_of(tensors: Sequence[Named]) -> list[list[Named]]:
    """Tensors of one unit and kind together."""
    found: dict[tuple[str, str], list[Named]] = {}
    for one in tensors:
        found.setdefault((one.unit, one.kind), []).append(one)
    return list(found.values())


def buckets_of(tensors: Sequence[Named], itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> list[list[Named]]:
    """Tensors of one kind in a bucket, the last first; a bucket closes once it has its size (parallel/data.py)."""
    closed, filling, reached = [], {}, {}
    for one in reversed(tensors):
        filling.setdefault(one.kind, []).append(one)
        reached[one.kind] = reached.get(one.kind, 0) + itemsize * one.numel
        if reached[one.kind] >= bucket_bytes:
            closed.append(filling.pop(one.kind))
            del reached[one.kind]
    return closed + list(filling.values())
