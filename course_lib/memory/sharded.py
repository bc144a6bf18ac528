"""The whole budget of one rank among many: ZeRO over dp ranks, tensor and sequence parallelism over tp, offload.

A rank of tensor parallelism runs a narrower model (`tensor.py`), whose states ZeRO then shards (`zero.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.config import ModelConfig
from course_lib.memory.formulas import ASSUMED_OVERHEADS, Budget, check_seq_len, temporary_bytes
from course_lib.memory.states import Recipe, has_step_counters, recipe_of
from course_lib.memory.tensor import narrow, tensor_parallel_activations
from course_lib.memory.zero import (
    Offload,
    bytes_by_place,
    tensor_sizes,
    zero_gathered_bytes,
    zero_reduced_bytes,
    zero_state_bytes,
    zero_units,
)


def sharded_budget(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    recipe: Recipe | str = "bf16-master",
    optimizer: str = "adamw",
    attention: str = "fused",
    recompute: str = "none",
    micro_batches: int = 1,
    device: str = "cuda",
    zero_stage: int = 0,
    dp_size: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    regather: bool = False,
    offload: Offload | None = None,
    tp_rank: int = 0,
    units: Sequence[int] | None = None,
) -> Budget:
    """Predict the memory of one GPU of dp_size * tp; with one GPU it is `formulas.budget`.

    `batch_size` is one rank's micro-batch; `units` are ZeRO's, in numbers, where they are not the usual ones.
    What offload moves away is in `elsewhere`, by place, as bytes of this rank.

    Raises   ValueError if a word is unknown, a size is below 1, heads do not divide, seq_len exceeds the model's, or
             parameters are to wait elsewhere without stage 3
    """
    check_seq_len(config, seq_len)
    offload = offload or Offload()
    if offload.parameters != "device" and zero_stage != 3:
        raise ValueError(f"offload.parameters is {offload.parameters!r}, but zero_stage is {zero_stage}; choose 3")
    recipe, local = recipe_of(recipe), narrow(config, tp, tp_rank)
    units = units if units is not None else zero_units(local, zero_stage, recipe.param_bytes)
    states = zero_state_bytes(units, zero_stage, dp_size, recipe, optimizer)
    places = bytes_by_place(states, offload)
    kept = tensor_parallel_activations(
        config, batch_size, seq_len, tp, sequence_parallel, regather, attention, recompute, recipe.name, device, tp_rank
    )
    counters = 4 * len(tensor_sizes(local)) if device == "cpu" and has_step_counters(recipe, optimizer) else 0
    full_at_start = micro_batches > 1 or recipe.grad_bytes > recipe.param_bytes
    return Budget(
        parameters=states.parameters if offload.parameters == "device" else 0,
        gradients=states.gradients,
        optimizer=(states.optimizer if offload.optimizer == "device" else 0) + (counters if zero_stage == 0 else 0),
        activations=kept.peak_bytes - kept.logits,
        logits=kept.logits,
        temporary=_work_bytes(local, batch_size, seq_len, attention, recipe, tp)
        + zero_reduced_bytes(units, zero_stage, dp_size, recipe),
        gradients_at_start=states.gradients if full_at_start else 0,
        overheads={} if device == "cpu" else dict(ASSUMED_OVERHEADS),
        gathered=zero_gathered_bytes(units, zero_stage, dp_size, recipe, tied=config.tied),
        elsewhere={place: size for place, size in places.items() if place != "device" and size},
    )


def _work_bytes(local: ModelConfig, batch_size: int, seq_len: int, attention: str, recipe: Recipe, tp: int) -> int:
    """The work space of a narrow model. What does not get narrower: in backward about five tensors of the whole width.

    These are the gradients of residual and branch and what a norm's backward makes of them; with sequence parallelism
    the gathered gradient, a column's input gradient and their copies for the wire. Toys measure 4.5 to 7.
    """
    whole_width = 5 * batch_size * seq_len * local.d_model * recipe.compute_bytes if tp > 1 else 0
    return max(temporary_bytes(local, batch_size, seq_len, attention, recipe), whole_width)
