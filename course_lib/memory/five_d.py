"""The memory of each rank of a pipeline under a whole layout: stages, cut over tp, cp and ep, sharded by ZeRO.

It is the sum of the other files of this folder:

    parameters      the layers of my stages (stages.py), narrower by tp (tensor.py), experts divided by ep (moe.py)
    ZeRO            shards them over data = dp x cp ranks, experts over data / ep (zero.py): flats of each stage, of
                    each kind by itself, each padded by ranks - 1 numbers at most
    activations     of S / cp tokens, as many micro-batches as the schedule keeps (pipeline.py)
    temporary       what a step works with: others' keys (context.py), messages, gradients on their way; or, if that
                    is more than all that backward keeps and works with, what comes after it: what the optimizer needs
                    to update its largest tensor

Gradients are summed over data in the buckets in which they lie: no copy. A bucket is there from its first gradient on.

Whole tensors stay on the ranks of a tp group (norms, routers), of a data group (parameters below ZeRO 3), and on two
ends of a pipeline (tied embeddings): these are the copies that no axis takes away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.experts import check_expert_parallel
from course_lib.layout.partition import check_layers, copies_of_kv, even_layers
from course_lib.memory.context import check_exchange, exchange_bytes, tokens_of_rank, written_out_bytes
from course_lib.memory.formulas import ASSUMED_OVERHEADS, Budget, check_seq_len
from course_lib.memory.moe import expert_work_bytes, narrow_experts
from course_lib.memory.pipeline import boundary_bytes, held_by_rank, num_neighbours, stage_activations
from course_lib.memory.sharded import dense_work_bytes
from course_lib.memory.stages import stage_config
from course_lib.memory.states import Recipe, Shapes, StateBytes, has_step_counters, parameter_shapes, recipe_of
from course_lib.memory.zero import (
    bucketed,
    padded,
    wire_grad_bytes,
    zero_gathered_bytes,
    zero_reduced_bytes,
    zero_state_bytes,
)
from course_lib.schedules import make
from course_lib.schedules.instructions import Schedule

KINDS = ("matrices", "norms", "kv", "tied", "experts")  # in a flat of ZeRO all are of one


# ------------------------------------------------------------------------------------ which stages, which layers
@lru_cache(maxsize=8)
def schedule_of(layout: Layout) -> Schedule:
    """The pipeline of a layout; without one it has one rank."""
    return make(layout.schedule, layout.pp, layout.accumulation, layout.v)


def layers_of(config: ModelConfig, layout: Layout) -> list[int]:
    """How many layers each stage has."""
    layers = list(layout.layers_of_stage or even_layers(config.num_layers, layout.num_stages))
    check_layers(config, layers)
    return layers


def unit_shapes(
    config: ModelConfig, layout: Layout, stage: int, tp_rank: int = 0, tied_copy: bool = True
) -> dict[str, Shapes]:
    """The tensors that one rank has of a stage: those before the blocks, those of each block, those behind them.

    tied_copy   whether a tied head on the last stage is a tensor of its own: not where the rank has the embedding too
    """
    layers = layers_of(config, layout)
    whole = parameter_shapes(narrow_experts(config, layout.tp, tp_rank))
    units = {}
    if stage == 0:
        units["embed"] = {name: whole[name] for name in _BEFORE_BLOCKS if name in whole}
    for layer in range(sum(layers[:stage]), sum(layers[: stage + 1])):
        alone = narrow_experts(stage_config(config, [1] * config.num_layers, layer), layout.tp, tp_rank)
        units[f"blocks.{layer}"] = {
            name: (shape, copies // (layout.ep if name.startswith("moe.experts.") else 1))
            for name, (shape, copies) in parameter_shapes(alone).items()
            if name.startswith(("attention.", "mlp.", "moe."))
        }
    if stage == len(layers) - 1:
        units["end"] = {name: whole[name] for name in _AFTER_BLOCKS if name in whole}
        if config.tied and tied_copy and stage > 0:
            units["end"]["head"] = whole["embed"]
    return units


_BEFORE_BLOCKS, _AFTER_BLOCKS = ("embed", "positions"), ("norm", "norm.bias", "head")


# ------------------------------------------------------------------------------------ ZeRO's flats
@dataclass(frozen=True)
class Flat:
    """Parameters of one stage and kind side by side, which ZeRO shards over so many ranks."""

    stage: int
    label: str
    kind: str  # one of KINDS: whose gradients are summed over the same ranks
    sizes: tuple[int, ...]  # numbers in each tensor
    ranks: int

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def padded(self) -> int:
        """With the zeros that make equal shards of it."""
        return padded(self.numel, self.ranks)


@lru_cache(maxsize=256)  # a layout asks several times for each of its ranks
def flats_of(
    config: ModelConfig, layout: Layout, pp_rank: int = 0, tp_rank: int = 0, itemsize: int = 2
) -> tuple[Flat, ...]:
    """What is summed over data, and sharded by ZeRO, on a rank, by stage and kind: buckets, and in stage 3 units.

    itemsize   bytes of a parameter: a bucket closes once it has its size
    """
    mine = schedule_of(layout).stages_of_rank(pp_rank)
    flats = []
    for stage in mine:
        units = unit_shapes(config, layout, stage, tp_rank, tied_copy=0 not in mine)
        groups = {label: [unit] for label, unit in units.items()} if layout.zero == 3 else {"all": units.values()}
        for label, group in groups.items():
            for kind in KINDS:
                ranks = layout.expert_shard_size if kind == "experts" else layout.shard_size
                sizes = [size for unit in group for size in tensor_sizes(unit, kind, config, layout)]
                buckets = bucketed(sizes, itemsize) if layout.zero < 3 else [sizes] if sizes else []
                flats += [Flat(stage, label, kind, tuple(bucket), ranks) for bucket in buckets]
    return tuple(flats)


def kind_of(name: str, config: ModelConfig, layout: Layout) -> str:
    """Of which kind a tensor of `unit_shapes` is, as parallel/sums.py has it.

    norms    whole on each rank of tp: norms, positions, biases of rows, routers, latent attention's narrow matrices
    kv       key/value heads that several ranks of tp have
    tied     embedding and head, as copies on two ranks of the pipeline
    """
    ends = {schedule_of(layout).rank_of_stage[stage] for stage in (0, -1)}
    whole = "norm" in name or name.endswith(("o.bias", "down.bias")) or name in _WHOLE
    if name.startswith("moe.experts."):
        return "experts"
    if name in ("embed", "head") and config.tied and len(ends) == 2:
        return "tied"
    if layout.tp > 1 and whole:
        return "norms"
    is_kv = name.startswith(("attention.k", "attention.v")) and config.mla is None
    return "kv" if is_kv and copies_of_kv(config, layout.tp) > 1 else "matrices"


_WHOLE = ("positions", "moe.router", "attention.q_down", "attention.kv_down")


def tensor_sizes(shapes: Shapes, kind: str, config: ModelConfig, layout: Layout) -> list[int]:
    """Numbers in each tensor of one kind, in the model's order: one expert after the other."""
    of_kind = [(prod(shape), n) for name, (shape, n) in shapes.items() if kind_of(name, config, layout) == kind]
    return [size for copy in range(max((n for _, n in of_kind), default=0)) for size, n in of_kind if copy < n]


def five_d_states(
    config: ModelConfig,
    layout: Layout,
    pp_rank: int = 0,
    tp_rank: int = 0,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    step_counters: bool = False,
) -> StateBytes:
    """Parameters, gradients and optimizer states of one rank, to the byte.

    step_counters   torch's 4 bytes a tensor, where nothing is sharded
    """
    flats = flats_of(config, layout, pp_rank, tp_rank, recipe_of(recipe).param_bytes)
    each = [zero_state_bytes(_as_sharded(flat, layout), layout.zero, flat.ranks, recipe, optimizer) for flat in flats]
    states = StateBytes(*(sum(getattr(one, kind) for one in each) for kind in _STATES))
    tensors = sum(len(flat.sizes) for flat in flats)
    return replace(states, optimizer=states.optimizer + 4 * tensors * (step_counters and layout.zero == 0))


_STATES = ("parameters", "gradients", "optimizer")


def _as_sharded(flat: Flat, layout: Layout) -> list[int]:
    """ZeRO's units: the flat, or where nothing is sharded its tensors."""
    return [flat.numel] if layout.zero else list(flat.sizes)


# ------------------------------------------------------------------------------------ the whole budget
def five_d_budgets(
    config: ModelConfig,
    layout: Layout,
    seq_len: int,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    attention: str = "fused",
    device: str = "cuda",
    tp_rank: int = 0,
    load: float = 1.0,
    output_kept: bool = True,
) -> list[Budget]:
    """Predict the memory of each rank of the pipeline; ranks that differ in dp, cp and tp have as much, or a bit less.

    load          rows that reach this rank's experts over a fair share
    output_kept   as in `memory.pipeline.stage_activations`
    Raises        ValueError if a word is unknown, sizes do not divide, or seq_len exceeds the model's
    """
    check_seq_len(config, seq_len)
    if config.moe is not None or layout.ep > 1:
        check_expert_parallel(config, layout.data_size, layout.ep, layout.tp)
    check_exchange(attention, layout.cp, layout.cp_method)
    recipe, schedule, layers = recipe_of(recipe), schedule_of(layout), layers_of(config, layout)
    each = [
        stage_activations(
            config, layout.micro_batch, seq_len, layers, stage, attention, layout.recompute, recipe.name, device,
            layout.tp, layout.sequence_parallel, layout.cp, output_kept and layout.pp > 1, layout.cp_method, load,
            layout.regather,
        )
        for stage in range(len(layers))
    ]  # fmt: skip
    counters = device == "cpu" and has_step_counters(recipe, optimizer)
    share = layout.tp if layout.sequence_parallel else 1
    message = boundary_bytes(config, layout.micro_batch, seq_len, recipe.compute_bytes, layout.cp, share)
    budgets = []
    for rank, row in enumerate(schedule.instructions):
        states = five_d_states(config, layout, rank, tp_rank, recipe, optimizer, counters)
        flats = flats_of(config, layout, rank, tp_rank, recipe.param_bytes)
        activations, logits, beside = held_by_rank(row, each, states.gradients)
        units = _whole_units(flats, layout)
        has_last = schedule.num_stages - 1 in schedule.stages_of_rank(rank)
        work = _work_bytes(config, layout, seq_len, attention, recipe, tp_rank, has_last, load)
        work += zero_reduced_bytes(units, layout.zero, 1, recipe) + num_neighbours(schedule, rank) * message
        gathered = zero_gathered_bytes(units, layout.zero, 1, recipe, tied=config.tied and layout.pp == 1)
        later = (
            max(_update_bytes(flats, layout, recipe), _replicas_bytes(flats, layout, recipe))
            - activations
            - logits
            - gathered
        )
        always_there = recipe.grad_bytes > recipe.param_bytes and not _in_buckets(layout)
        budgets.append(
            Budget(
                parameters=states.parameters,
                gradients=states.gradients,
                optimizer=states.optimizer,
                activations=activations,
                logits=logits,
                temporary=max(work, later),
                gradients_at_start=states.gradients
                if always_there
                else max(beside, _bucket_bytes(flats, layout, recipe)),
                overheads={} if device == "cpu" else dict(ASSUMED_OVERHEADS),
                gathered=gathered,
            )
        )
    return budgets


def _replicas_bytes(flats: Sequence[Flat], layout: Layout, recipe: Recipe) -> int:
    """The message in which gradients of shards are summed over replicas: of experts, or of all others, the larger."""
    held = [0, 0]
    for flat in flats:
        held[flat.kind == "experts"] += flat.padded // flat.ranks
    return wire_grad_bytes(recipe) * max(held) if layout.dp_replicate > 1 else 0


def _in_buckets(layout: Layout) -> bool:
    """Whether gradients lie in buckets that are made anew in each step: without ZeRO, on several ranks of data."""
    return layout.zero == 0 and layout.data_size > 1


def _bucket_bytes(flats: Sequence[Flat], layout: Layout, recipe: Recipe) -> int:
    """The bucket of the last stage's last layers: there when backward begins, before activations are freed."""
    last = [flat for flat in flats if flat.stage == flats[-1].stage and flat.ranks > 1]
    return recipe.grad_bytes * last[0].numel if _in_buckets(layout) and last else 0


def _update_bytes(flats: Sequence[Flat], layout: Layout, recipe: Recipe) -> int:
    """What AdamW makes of its largest tensor, or shard: an FP32 root, and a gradient of 16 bits in FP32.

    torch's own AdamW, which FP32 has without ZeRO, makes two roots.
    """
    pieces = [flat.padded // flat.ranks if layout.zero else max(flat.sizes) for flat in flats]
    copies = 1 if recipe.grad_bytes >= 4 and (layout.zero or recipe.master_bytes) else 2
    return 4 * copies * max(pieces, default=0)


def _whole_units(flats: Sequence[Flat], layout: Layout) -> list[int]:
    """A rank's units of ZeRO, each kind padded for its own ranks; what is gathered at once counts together."""
    if layout.zero < 3:
        return [flat.padded for flat in flats]
    units: dict[tuple[int, str], int] = {}
    for flat in flats:
        units[flat.stage, flat.label] = units.get((flat.stage, flat.label), 0) + flat.padded
    return list(units.values())


def _work_bytes(config, layout, seq_len, attention, recipe, tp_rank, has_last, load) -> int:
    """What a step works with beside what it keeps: the larger of a matrix's gradients and attention's other keys."""
    if not has_last:  # no logits: a vocabulary of one row each
        config = replace(config, vocab_size=layout.tp)
    local, tokens = narrow_experts(config, layout.tp, tp_rank), tokens_of_rank(seq_len, layout.cp)
    dense = replace(config, moe=None)
    args = (layout.micro_batch, tokens, attention, recipe)
    work = dense_work_bytes(replace(local, moe=None, mla=None), *args, layout.tp)
    if config.moe is not None:
        work = max(work, expert_work_bytes(local, *args, load * config.moe.top_k))
    exchanged = exchange_bytes(
        dense, layout.micro_batch, seq_len, layout.cp, layout.cp_method, True, recipe.compute_bytes, tp=layout.tp
    )
    if layout.cp > 1 and layout.cp_method != "ulysses":
        exchanged += written_out_bytes(dense, layout.micro_batch, tokens, recipe.compute_bytes, layout.tp)
    return max(work, exchanged)
