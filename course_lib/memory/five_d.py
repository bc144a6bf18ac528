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

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.layout.partition import check_layers, even_layers, kv_replication, stage_config
from course_lib.memory.moe import narrow_experts
from course_lib.memory.states import Recipe, Shapes, StateBytes, parameter_shapes, recipe_of
from course_lib.memory.zero import (
    bucketed,
    padded,
    zero_state_bytes,
)
from course_lib.schedules import make
from course_lib.schedules.instructions import Schedule

KINDS = ("matrices", "norms", "kv", "tied", "experts")  # in a flat of ZeRO all are of one


# ------------------------------------------------------------------------------------ which stages, which layers
@lru_cache(maxsize=8)
def schedule_of(layout: Layout) -> Schedule:
    """The pipeline of a layout; without one it has one rank."""
    return make(layout.schedule, layout.pp, layout.micro_batches, layout.v)


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
        groups = {label: [unit] for label, unit in units.items()} if layout.zero_stage == 3 else {"all": units.values()}
        for label, group in groups.items():
            for kind in KINDS:
                ranks = layout.expert_shard_size if kind == "experts" else layout.shard_size
                sizes = [size for unit in group for size in tensor_sizes(unit, kind, config, layout)]
                buckets = bucketed(sizes, itemsize) if layout.zero_stage < 3 else [sizes] if sizes else []
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
    return "kv" if is_kv and kv_replication(config, layout.tp) > 1 else "matrices"


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
    each = [
        zero_state_bytes(_as_sharded(flat, layout), layout.zero_stage, flat.ranks, recipe, optimizer) for flat in flats
    ]
    states = StateBytes(*(sum(getattr(one, kind) for one in each) for kind in _STATES))
    tensors = sum(len(flat.sizes) for flat in flats)
    return replace(states, optimizer=states.optimizer + 4 * tensors * (step_counters and layout.zero_stage == 0))


_STATES = ("parameters", "gradients", "optimizer")


def _as_sharded(flat: Flat, layout: Layout) -> list[int]:
    """ZeRO's units: the flat, or where nothing is sharded its tensors."""
    return [flat.numel] if layout.zero_stage else list(flat.sizes)
