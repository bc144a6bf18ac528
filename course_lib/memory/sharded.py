"""The whole budget of one rank among many: ZeRO over dp ranks, tensor and sequence parallelism over tp, context
parallelism over cp, offload.

A rank of tensor parallelism runs a narrower model (`tensor.py`), whose states ZeRO then shards (`zero.py`). A rank of
context parallelism runs it on fewer tokens of each sequence (`context.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from course_lib.config import ModelConfig
from course_lib.hardware import GPU
from course_lib.memory.context import check_exchange, exchange_bytes, output_twice_bytes, tokens_of_rank
from course_lib.memory.formulas import ASSUMED_OVERHEADS, Budget, check_seq_len, fits, temporary_bytes
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
    cp: int = 1,
    method: str = "ring",
) -> Budget:
    """Predict the memory of one GPU of dp_size * cp * tp; with one GPU it is `formulas.budget`.

    `batch_size` is one rank's micro-batch, `seq_len` the whole sequence, of which a rank has seq_len / cp tokens.
    Context parallelism shards no state; to let ZeRO do so over cp ranks as well, as many do, count them in dp_size.
    `units` are ZeRO's, in numbers, where they are not the usual ones.
    What offload moves away is in `elsewhere`, by place, as bytes of this rank.

    Raises   ValueError if a word is unknown, a size is below 1, heads or tokens do not divide, seq_len exceeds the
             model's, parameters are to wait elsewhere without stage 3, or attention is explicit over cp ranks
    """
    check_seq_len(config, seq_len)
    exchanged = _exchanged_bytes(config, batch_size, seq_len, cp, method, attention, recipe_of(recipe), tp)
    seq_len = tokens_of_rank(seq_len, cp)
    both_outputs = output_twice_bytes(config, batch_size, seq_len, recipe_of(recipe), recompute, method, tp) * (cp > 1)
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
        activations=kept.peak_bytes - kept.logits + both_outputs,
        logits=kept.logits,
        temporary=max(dense_work_bytes(local, batch_size, seq_len, attention, recipe, tp), exchanged)
        + zero_reduced_bytes(units, zero_stage, dp_size, recipe),
        gradients_at_start=states.gradients if full_at_start else 0,
        overheads={} if device == "cpu" else dict(ASSUMED_OVERHEADS),
        gathered=zero_gathered_bytes(units, zero_stage, dp_size, recipe, tied=config.tied),
        elsewhere={place: size for place, size in places.items() if place != "device" and size},
    )


def dense_work_bytes(local: ModelConfig, batch_size: int, seq_len: int, attention: str, recipe: Recipe, tp: int) -> int:
    """The work space of a narrow model. What does not get narrower: in backward about five tensors of the whole width.

    These are the gradients of residual and branch and what a norm's backward makes of them; with sequence parallelism
    the gathered gradient, a column's input gradient and their copies for the wire. Toys measure 4.5 to 7.
    """
    whole_width = 5 * batch_size * seq_len * local.d_model * recipe.compute_bytes if tp > 1 else 0
    return max(temporary_bytes(local, batch_size, seq_len, attention, recipe), whole_width)


def _exchanged_bytes(config, batch_size, seq_len, cp, method, attention, recipe, tp) -> int:
    """What attention has of other ranks' keys and values in backward, its larger moment."""
    check_exchange(attention, cp, method)
    return exchange_bytes(config, batch_size, seq_len, cp, method, True, recipe.compute_bytes, tp=tp)


def longest_sequence(budget_of: Callable[[int], Budget], gpu: GPU | str, multiple: int = 1024) -> int:
    """The longest sequence, a multiple of so many tokens, whose budget fits the GPU; 0 if none does.

    budget_of   from seq_len to the budget of one GPU, longer ones larger
    """

    def fit(count: int) -> bool:
        return fits(budget_of(count * multiple), gpu)

    if not fit(1):
        return 0
    low, high = 1, 2
    while fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * multiple
