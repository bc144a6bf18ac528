"""The memory of each rank of a pipeline under a whole layout: stages, cut over tp, cp and ep, sharded by ZeRO.

    parameters      the layers of my stages, narrower by tp (tensor.py), experts divided by ep (moe.py)
    ZeRO            shards them over data = dp x cp ranks, experts over data / ep (zero.py): the flats of each stage
                    and kind (flats.py), each padded by ranks - 1 elements at most

Whole tensors stay on the ranks of a tp group (norms, routers), of a data group (parameters below ZeRO 3), and on two
ends of a pipeline (tied embeddings): these are the copies that no axis takes away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from course_lib.config import ModelConfig
from course_lib.layout import Layout
from course_lib.memory.flats import Flat, flats_of
from course_lib.memory.states import Recipe, StateBytes, recipe_of
from course_lib.memory.zero import zero_state_bytes


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
    return states_of_flats(flats, layout.zero_stage, recipe, optimizer, step_counters)


def states_of_flats(
    flats: Sequence[Flat], zero_stage: int, recipe: Recipe | str, optimizer: str, step_counters: bool
) -> StateBytes:
    """The states of a rank that has these flats."""
    equal = Counter(((flat.numel,) if zero_stage else flat.sizes, flat.ranks) for flat in flats)
    each = [
        (zero_state_bytes(sizes, zero_stage, ranks, recipe, optimizer), count)
        for (sizes, ranks), count in equal.items()
    ]
    states = StateBytes(*(sum(count * getattr(one, kind) for one, count in each) for kind in _STATES))
    tensors = sum(len(flat.sizes) for flat in flats)
    return replace(states, optimizer=states.optimizer + 4 * tensors * (step_counters and zero_stage == 0))


_STATES = ("parameters", "gradients", "optimizer")
