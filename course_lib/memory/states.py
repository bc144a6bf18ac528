"""Bytes of the states: parameters, gradients, optimizer, whole, under ZeRO, off the device. No batch changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Annotated, Literal

from course_lib.config import ModelConfig
from course_lib.run import OPTIMIZERS, Offload, Recipe, recipe_of
from course_lib.tensors import LoRA, count, lora_shapes, parameter_shapes, quantized_shapes
from course_lib.validate import Amount, Bytes, Checked, Size, checked, one_of, whole


@dataclass(frozen=True)
class StateBytes(Checked):
    """Bytes of the states by kind. FP32 master parameters count as optimizer."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes

    @property
    def total(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


@checked
def state_bytes(
    config: ModelConfig,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    lora: LoRA | None = None,
    step_counters: bool = False,
) -> StateBytes:
    """Predict the bytes of parameters, gradients and optimizer states; with `lora` the adapters alone have all three.

    Bytes    N * (param + grad + master + moments); `step_counters` adds those of torch's optimizers, in host memory
    Raises   ValueError if recipe or optimizer is unknown
    """
    recipe, base = recipe_of(recipe), parameter_shapes(config)
    trained = lora_shapes(config, lora) if lora else base
    parameters = recipe.param_bytes * count(base | trained)
    if lora is not None and lora.four_bits:
        for shape, copies in quantized_shapes(config).values():  # NF4: 64 numbers have an 8-bit scale, 256 scales one
            numel, blocks = prod(shape), -(-prod(shape) // 64)
            in_four_bits = -(-numel // 2) + blocks + 4 * -(-blocks // 256)
            parameters -= copies * (recipe.param_bytes * numel - in_four_bits)
    of_optimizer = sum(n * optimizer_bytes(shape, recipe, optimizer, step_counters) for shape, n in trained.values())
    return StateBytes(parameters, recipe.grad_bytes * count(trained), of_optimizer)


def optimizer_bytes(shape: tuple[int, ...], recipe: Recipe, optimizer: str, step_counters: bool = False) -> int:
    """Bytes that an optimizer keeps of one tensor: master copy and moments; ValueError if it is unknown.

    8-bit Adam keeps an FP32 scale for each 256 numbers of each moment; tensors below 4096 numbers stay in FP32.
    Adafactor keeps no first moment, and of the second one number a row and one a column.

    step_counters   torch's 4 bytes as well, which the course's MasterAdamW has not
    Source   Dettmers et al. 2021 (arXiv:2110.02861), bitsandbytes' defaults; Shazeer and Stern 2018 (arXiv:1804.04235)
    """
    one_of("optimizer", optimizer, OPTIMIZERS)
    numel, of_one = prod(shape), recipe.moment_bytes // 2
    moments = {
        "adamw": recipe.moment_bytes * numel,
        "adamw-8bit": 2 * (numel + 4 * -(-numel // 256)) if numel >= 4096 else 8 * numel,
        "adafactor": of_one * (sum(shape) if len(shape) == 2 else numel),
        "sgd-momentum": of_one * numel,
        "sgd": 0,
    }[optimizer]
    counter = 4 * (step_counters and recipe.master_bytes == 0 and optimizer in ("adamw", "adafactor"))
    return recipe.master_bytes * numel + moments + counter


# ---- ZeRO: what each of dp data-parallel ranks holds
#
# With P parameters, 2 bytes each for parameter and gradient, 12 for an FP32 master copy and Adam's two moments:
#
#     stage   a rank holds             limit    sends a step (one micro-batch)
#     0       2P + 2P + 12P            16 P     2 P    all-reduce of gradients
#     1       2P + 2P + 12P/dp          4 P     2 P    reduce-scatter, all-gather of parameters
#     2       2P + (2P + 12P)/dp        2 P     2 P    the same, each bucket during backward
#     3       (2P + 2P + 12P)/dp          0     3 P    all-gather twice, reduce-scatter

Ranks = Annotated[int, partial(whole, least=1)]  # one only divides by them: 10**9 shows the limit
_ZeroStage = Literal[0, 1, 2, 3]  # 0: plain data parallelism
_SHARDED_FROM_STAGE = (3, 2, 1)  # parameters, gradients, optimizer


@checked
def zero_state_bytes(
    units: Sequence[int],
    stage: _ZeroStage,
    dp_size: Size,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    step_counters: bool = False,
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
    parameters, gradients, states = (shards if stage >= first else whole for first in _SHARDED_FROM_STAGE)
    of_optimizer = sum(optimizer_bytes((n,), recipe, optimizer, step_counters and not stage) for n in states)
    return StateBytes(recipe.param_bytes * sum(parameters), recipe.grad_bytes * sum(gradients), of_optimizer)


def padded(numel: int, ranks: int) -> int:
    """The next multiple of `ranks`: what a flat of so many elements occupies, all ranks together."""
    return -(-numel // ranks) * ranks


def wire_grad_bytes(recipe: Recipe) -> int:
    """Bytes of a gradient's number on the wire: FP32 where gradients are kept in FP32, one of the two if both are."""
    return min(recipe.grad_bytes, max(recipe.param_bytes, 4))


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
    kinds = zip((recipe.param_bytes, recipe.grad_bytes, optimizer), _SHARDED_FROM_STAGE, strict=True)
    return sum(size / dp_size if stage >= first else size for size, first in kinds)


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
