"""ZeRO's arithmetic: what each of dp data-parallel ranks holds of parameters, gradients and optimizer states.

With P parameters, 2 bytes each for parameter and gradient, 12 for an FP32 master copy and Adam's two moments:

    stage   a rank holds             limit    sends a step (one micro-batch)
    0       2P + 2P + 12P            16 P     2 P    all-reduce of gradients
    1       2P + 2P + 12P/dp          4 P     2 P    reduce-scatter, all-gather of parameters
    2       2P + (2P + 12P)/dp        2 P     2 P    the same, each bucket during backward
    3       (2P + 2P + 12P)/dp          0     3 P    all-gather twice, reduce-scatter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from course_lib.memory.flats import padded
from course_lib.memory.states import Recipe, StateBytes, moments_bytes, recipe_of
from course_lib.validate import Amount, Size, checked, one_of, whole

Ranks = Annotated[int, partial(whole, least=1)]  # one only divides by them: 10**9 shows the limit
_ZeroStage = Literal[0, 1, 2, 3]  # 0: plain data parallelism
_SHARDED_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1}


@checked
def zero_state_bytes(
    units: Sequence[int],
    stage: _ZeroStage,
    dp_size: Size,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
) -> StateBytes:
    """Predict what each rank holds between two steps, by kind, of units of so many elements, padding included.

    Raises   ValueError if stage, recipe or optimizer is unknown, or the optimizer cannot work on flat shards
    """
    recipe = recipe_of(recipe)
    if optimizer == "adafactor" and stage:
        raise ValueError(
            "optimizer 'adafactor' keeps sums of a matrix's rows and columns, which flat shards cut apart; "
            "choose adamw, adamw-8bit, sgd-momentum, sgd"
        )
    whole = [padded(unit, dp_size) for unit in units] if stage else list(units)
    shards = [padded(unit, dp_size) // dp_size for unit in units]
    parameters, gradients, states = (shards if stage >= first else whole for first in _SHARDED_FROM_STAGE.values())
    optimizer_bytes = sum(recipe.master_bytes * n + moments_bytes((n,), recipe, optimizer) for n in states)
    return StateBytes(recipe.param_bytes * sum(parameters), recipe.grad_bytes * sum(gradients), optimizer_bytes)


def wire_grad_bytes(recipe: Recipe) -> int:
    """Bytes of a gradient's number on the wire: FP32 where gradients are kept in FP32, one of the two if both are."""
    return min(recipe.grad_bytes, max(recipe.param_bytes, 4))


# ---- the papers' continuous form


@checked
def zero_bytes_per_parameter(
    stage: _ZeroStage, dp_size: Ranks, recipe: Recipe | str = "bf16-master", optimizer_bytes: Amount | None = None
) -> float:
    """Bytes of state a parameter and rank, as the papers draw them: no units, no padding.

    optimizer_bytes   master and moments together, the paper's K; the recipe's by default
    Source   Rajbhandari et al. 2020 (arXiv:1910.02054), section 5 and figure 1
    """
    recipe = recipe_of(recipe)
    optimizer = recipe.master_bytes + recipe.moment_bytes if optimizer_bytes is None else optimizer_bytes
    kinds = zip((recipe.param_bytes, recipe.grad_bytes, optimizer), _SHARDED_FROM_STAGE.values(), strict=True)
    return sum(size / dp_size if stage >= first else size for size, first in kinds)


@checked
def zero_saving(stage: _ZeroStage, dp_size: Ranks, recipe: Recipe | str = "bf16-master") -> float:
    """How many times fewer bytes of state a rank holds than without ZeRO; at most 4, 8 and dp with 16 bytes."""
    return zero_bytes_per_parameter(0, dp_size, recipe) / zero_bytes_per_parameter(stage, dp_size, recipe)


# ---- offload


@dataclass(frozen=True)
class Offload:
    """Where a rank's shards wait: "device", "host" or "disk". Parameters elsewhere need stage 3.

    activations   where they wait between the forward and the backward pass of their micro-batch
    Source        Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv:2104.07857)
    """

    optimizer: str = "device"
    parameters: str = "device"
    activations: str = "device"

    def __post_init__(self) -> None:
        for field, place in vars(self).items():
            one_of(field, place, ("device", "host", "disk"))


@checked
def offload_link_bytes(states: StateBytes, offload: Offload, micro_batches: Size = 1) -> dict[str, int]:
    """Count the bytes that cross each link, one way, in one step of one rank whose shards are `states`.

    The optimizer runs where its states are loaded: on the host. Its gradients go down; its new parameters come up,
    unless they wait on the host or the disk as well. States on disk are read and written back. Parameters off the
    device come up for the forward pass and again for the backward pass of each micro-batch.
    """
    states_off, parameters_off = offload.optimizer != "device", offload.parameters != "device"
    used = 2 * micro_batches * states.parameters * parameters_off
    on_disk, optimizer = offload.parameters == "disk", states.optimizer * (offload.optimizer == "disk")
    return {
        "device to host": states.gradients * states_off + states.parameters * (parameters_off and not states_off),
        "host to device": states.parameters * (states_off and not parameters_off) + used,
        "disk to host": optimizer + used * on_disk,
        "host to disk": optimizer + states.parameters * on_disk,
    }
