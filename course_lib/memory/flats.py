"""Which parameter tensors a rank holds: stage by stage, unit by unit, and laid end to end in flats.

stage     consecutive layers; the first stage has the embedding as well, the last the final norm and the head
unit      what comes before the blocks, each block, what comes after them: what ZeRO-3 gathers at once
kind      whose gradients are summed over the same ranks
flat      tensors of one stage and kind side by side: a bucket, or with ZeRO-3 a unit's; padded for equal shards
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from course_lib.config import ModelConfig, require_dense
from course_lib.layout import Layout
from course_lib.layout.partition import check_layers, even_layers, kv_replication
from course_lib.memory.states import padded
from course_lib.schedules.instructions import Instruction, Schedule
from course_lib.tensors import LoRA, Shapes, adapter_shapes, block_shapes, end_shapes, is_replicated, narrow
from course_lib.validate import Bytes, Size, checked

BUCKET_BYTES = 25 * 2**20


@lru_cache(maxsize=1024)
def layers_of(config: ModelConfig, layout: Layout) -> tuple[int, ...]:
    """How many layers each stage has."""
    layers = layout.layers_of_stage or tuple(even_layers(config.num_layers, layout.num_stages))
    check_layers(config, layers)
    return layers


@checked
def stage_parameters(config: ModelConfig, layers: Sequence[int]) -> list[int]:
    """Count the parameters of each stage, a tied head's copy too; ValueError unless `layers` are those of the model."""
    check_layers(config, layers)
    layout = Layout(pp=len(layers), layers_of_stage=tuple(layers))
    return [sum(one.count * one.numel for one in tensors_of(config, layout, stage)) for stage in range(len(layers))]


def live_layers(schedule: Schedule, layers: Sequence[int]) -> list[int]:
    """For each rank the layers whose activations it keeps at once, one micro-batch each: compare with num_layers."""
    return [most_in_flight(row, layers) for row in schedule.instructions]


def most_in_flight(order: Iterable[Instruction], sizes: Sequence[int] | Mapping[int, int]) -> int:
    """The most that one rank keeps at once of what its forwards save, so much for each micro-batch on a stage."""
    change = {"F": 1, "B": -1, "I": -1, "W": 0}  # F saves, B or I frees, W has nothing of these
    return max(accumulate(change[op] * sizes[stage] for op, _, stage in order))


class Named(NamedTuple):
    """A parameter tensor of a rank; or so many equal ones side by side, the matrices of a layer's experts.

    name    in its unit
    numel   elements of each
    place   how many tensors of the rank come before it
    """

    name: str
    numel: int
    kind: str  # "matrices", "norms", "head_norms", "kv", "tied", "experts"
    unit: str
    stage: int
    place: int
    count: int = 1


def tensors_of(
    config: ModelConfig, layout: Layout, pp_rank: int = 0, tp_rank: int = 0, lora: LoRA | None = None
) -> tuple[Named, ...]:
    """List all parameter tensors of a rank in the model's order, or its adapters: all that is trained beside them."""
    return _tensors_of(config, _cut_of(layout), pp_rank, tp_rank, lora)


@lru_cache(maxsize=4096)
def with_any_batch(layout: Layout) -> Layout:
    """One of many layouts with the same parameters, gradients and states, whatever batch, recomputation, cp_method."""
    few = {"micro_batch": 1, "micro_batches": 2 * layout.pp}
    return replace(layout, recompute="none", regather=False, cp_method="ring", cp_sharding="zigzag", **few)


@lru_cache(maxsize=4096)
def _cut_of(layout: Layout) -> Layout:
    """What tensors depend on: one of many layouts that differ in ZeRO, dp, cp, micro-batches and recomputation."""
    of_tp = {"expert_tp": 1} if layout.folded else {"sequence_parallel": False, "regather": False}
    return replace(with_any_batch(layout), zero_stage=0, dp_replicate=1, dp=layout.ep, cp=1, **of_tp)


@lru_cache(maxsize=128)
def _tensors_of(
    config: ModelConfig, layout: Layout, pp_rank: int, tp_rank: int, lora: LoRA | None
) -> tuple[Named, ...]:
    layers, stages = layers_of(config, layout), layout.stages_of_rank(pp_rank)
    local = narrow(config, layout.tp, tp_rank)
    before, behind = end_shapes(local)
    if config.tied and 0 not in stages:  # where the rank has no embedding, the head is a copy
        behind["head"] = before["embed"]
    of_block = {sort: block_shapes(local, sort) for sort in {False, config.moe is not None}}
    if layout.folded:  # experts are whole
        of_block[True] |= {
            name: of for name, of in block_shapes(config, True).items() if name.startswith("moe.experts.")
        }
    ends, found, place = {"before": before, "behind": behind}, [], 0
    in_order = {sort: _in_model_order(shapes, config, layout, lora) for sort, shapes in (of_block | ends).items()}
    for stage in stages:
        units = {"embed": "before"} if stage == 0 else {}
        own = range(sum(layers[:stage]), sum(layers[: stage + 1]))
        units |= {f"blocks.{layer}": config.has_experts(layer) for layer in own}
        units |= {"end": "behind"} if stage == len(layers) - 1 else {}
        for unit, sort in units.items():
            for name, numel, kind, count in in_order[sort]:
                found.append(Named(name, numel, kind, unit, stage, place, count))
                place += count
    return tuple(found)


def _in_model_order(
    shapes: Shapes, config: ModelConfig, layout: Layout, lora: LoRA | None
) -> list[tuple[str, int, str, int]]:
    """(name, elements, kind, count) of what is trained; one expert comes after the other."""
    shapes, found = adapter_shapes(shapes, lora) if lora else shapes, []
    of_expert = {name: prod(shape) for name, (shape, _) in shapes.items() if name.startswith("moe.experts.")}
    for name, (shape, copies) in shapes.items():
        if name not in of_expert:
            found.append((name, prod(shape), kind_of(name, config, layout), 1))
        elif name == next(iter(of_expert)):
            sizes, experts = [*of_expert.values()], copies // layout.ep
            if len({*sizes}) == 1:  # gate, up and down
                found.append(("moe.experts", sizes[0], "experts", experts * len(sizes)))
            else:  # adapters
                found += [(one, numel, "experts", 1) for one, numel in of_expert.items()] * experts
    return found


def kind_of(name: str, config: ModelConfig, layout: Layout) -> str:
    """Of which kind a tensor of a rank is, as parallel/sums.py has it.

    norms        whole on each rank of tp: norms, positions, biases of rows, routers, latent attention's narrow matrices
    head_norms   whole as well, but used for the rank's own heads: QK-norm
    kv           key/value heads that several ranks of tp have
    tied         embedding and head, as copies on two ranks of the pipeline
    """
    if name.startswith("moe.experts."):
        return "experts"
    ends = {layout.rank_of_stage[stage] for stage in (0, -1)}
    if name in ("embed", "head") and config.tied and len(ends) == 2:
        return "tied"
    if layout.tp > 1 and config.qk_norm and name in ("attention.q_norm", "attention.k_norm"):
        return "head_norms"
    if layout.tp > 1 and is_replicated(name):
        return "norms"
    is_kv = name.startswith(("attention.k", "attention.v")) and config.mla is None
    return "kv" if is_kv and kv_replication(config, layout.tp) > 1 else "matrices"


def different_terms_over_tp(layout: Layout) -> tuple[str, ...]:
    """Kinds that all ranks of tp have whole, with different terms of a gradient on each: these are summed."""
    return ("norms", "head_norms") if layout.sequence_parallel else ("head_norms",)


class Flat(NamedTuple):
    """Parameters of one stage and kind side by side, whose gradients are summed over so many ranks.

    tensors         the last first, as their gradients come
    unit            of its first tensor; with ZeRO-3 of all
    numel, padded   elements, without and with the zeros that make equal shards of it
    count           so many equal buckets of an expert's tensors, all counted in tensors, numel and padded
    """

    tensors: tuple[Named, ...]
    ranks: int
    stage: int
    kind: str
    unit: str
    numel: int
    padded: int
    count: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(one.numel for one in self.tensors for _ in range(one.count))


def flats_of(
    config: ModelConfig, layout: Layout, pp_rank: int = 0, tp_rank: int = 0, itemsize: int = 2, lora: LoRA | None = None
) -> tuple[Flat, ...]:
    """What is summed over data, and sharded by ZeRO, on a rank, stage by stage: buckets, and with ZeRO-3 units.

    itemsize   bytes of a parameter: a bucket closes once it has its size
    """
    return _flats_of(config, with_any_batch(layout), pp_rank, tp_rank, itemsize, lora)


@lru_cache(maxsize=128)
def _flats_of(
    config: ModelConfig, layout: Layout, pp_rank: int, tp_rank: int, itemsize: int, lora: LoRA | None
) -> tuple[Flat, ...]:
    trained, flats = tensors_of(config, layout, pp_rank, tp_rank, lora), []
    of_experts, of_others = layout.expert_shard_size, layout.shard_size
    for stage in layout.stages_of_rank(pp_rank):
        of_stage = [one for one in trained if one.stage == stage]
        units = [(unit[::-1], 1) for unit in units_of(of_stage)] if layout.zero_stage == 3 else []
        for group, count in units or buckets_of(of_stage, itemsize):
            numel, first = sum(one.count * one.numel for one in group), group[0]
            ranks = of_experts if first.kind == "experts" else of_others
            whole = count * padded(numel // count, ranks)
            flats.append(Flat(tuple(group), ranks, stage, first.kind, first.unit, numel, whole, count))
    return tuple(flats)


def units_of(tensors: Sequence[Named]) -> list[list[Named]]:
    """Tensors of one unit and kind together."""
    found: dict[tuple[str, str], list[Named]] = {}
    for one in tensors:
        found.setdefault((one.unit, one.kind), []).append(one)
    return list(found.values())


def buckets_of(tensors: Sequence[Named], itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> list[tuple[list, int]]:
    """Tensors of one kind in a bucket, the last first; a bucket closes once it has its size (parallel/data.py).

    Returns (tensors of so many equal buckets, how many).
    """
    closed, filling, reached = [], {}, {}
    for one in reversed(tensors):
        size, kind, count = itemsize * one.numel, one.kind, one.count
        missing = -(-(bucket_bytes - reached.get(kind, 0)) // size)  # tensors that close the open bucket
        if count < missing:
            filling.setdefault(kind, []).append(one)
            reached[kind] = reached.get(kind, 0) + size * count
            continue
        end = one if count == missing else one._replace(place=one.place + count - missing, count=missing)
        closed.append(([*filling.pop(kind, []), end], 1))
        of_each = -(-bucket_bytes // size)
        buckets, left = divmod(count - missing, of_each)
        if buckets:
            closed.append(([one._replace(place=one.place + left, count=buckets * of_each)], buckets))
        if left:
            filling[kind] = [one._replace(count=left)]
        reached[kind] = left * size
    return closed + [(bucket, 1) for bucket in filling.values()]


@checked
def layer_units(config: ModelConfig) -> list[int]:
    """Stage 3's units, in elements: embedding, each block, final norm with head (a tied head is the embedding's)."""
    require_dense(config, "layer_units")
    return [sum(one.numel for one in unit) for unit in units_of(tensors_of(config, Layout()))]


@checked
def bucket_units(config: ModelConfig, itemsize: Size = 2, bucket_bytes: Bytes = BUCKET_BYTES) -> list[int]:
    """The units of stages 1 and 2, in elements: tensors, last layer first; a bucket closes once it has its size."""
    require_dense(config, "bucket_units")
    buckets = buckets_of(tensors_of(config, Layout()), itemsize, bucket_bytes)
    return [sum(one.numel for one in bucket) for bucket, _ in buckets]
