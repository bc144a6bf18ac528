"""Graders of chapter 04, exercises 4 and 6: trainers, judged by what the lesson measures."""

from functools import cache

import torch
import torch.distributed as dist

from course_lib.checks.core import CheckFailed, fail, grader, launched, rank_errors_as_failures, run_ranks
from course_lib.checks.trainers import expect_right, expect_sent
from course_lib.measure import ByteMeter
from course_lib.memory.states import count_parameters
from course_lib.memory.zero import layer_units
from course_lib.minimal import compare, held_bytes, memory_of_a_step
from course_lib.minimal.zero import Zero3
from course_lib.model import build

NUM_PARAMS = count_parameters(compare.CONFIG)
MOST_MESSAGES = -(-NUM_PARAMS // 60_000)  # buckets of single parameters; of whole units there is one fewer
ITEMSIZE = 2  # bfloat16, in which sent_bytes and memory_of_a_step compute
SIGNS_OF_FREED_MEMORY = {
    "killed by SIGSEGV": "your code read or wrote memory that it had given back; is your shard a view of the buffer "
    "that you empty? Clone it",
    "out of bounds for storage of size 0": "a unit was used after it was freed: gather it before its forward, and "
    "again before its backward",
}


@grader
def check_zero2_buckets(answer, rng):
    """ZeRO-2 whose reduce-scatters carry buckets: right, few messages, and sent while backward runs."""
    world_size = rng.choice([2, 4])
    expect_right(answer, world_size)
    calls, gradients = run_ranks(_messages, world_size, answer)[0]
    scatters = calls.get("reduce_scatter", 0)
    if scatters > MOST_MESSAGES:
        fail(
            f"backward sent {scatters} reduce-scatters, and {MOST_MESSAGES} are enough: put parameters together until "
            "a bucket has 60,000 elements"
        )
    if scatters == 1:
        fail(
            "backward sent one reduce-scatter, so all full gradients were alive at its end; close a bucket once it has "
            "60,000 parameters"
        )
    if gradients > 0.05 * NUM_PARAMS * ITEMSIZE:
        fail(
            f"when backward was over, {gradients:,} bytes of full gradients were still there; reduce-scatter a bucket "
            "as soon as its gradients are complete, and drop them"
        )
    expect_sent(answer, world_size, 3, 4, _phase_bytes(world_size))


def _messages(trainer: type) -> tuple[dict[str, int], int]:
    """The collectives of one backward, and the bytes of full gradients after it."""
    made = trainer(build(compare.CONFIG, dtype=torch.bfloat16), compare.master_adamw, dist.group.WORLD)
    parts = compare.micro_batches_of_rank(0, 1)
    with ByteMeter() as meter:
        made.backward(parts)
    return meter.calls, sum(param.grad.nbytes for param in made.model.parameters() if param.grad is not None)


@grader
def check_zero3(answer, rng):
    """ZeRO-3 from an empty cell: right, at most 3 phases, states in shards, one or two units full at a time."""
    world_size = rng.choice([2, 4])
    try:
        expect_right(answer, world_size)
    except CheckFailed as failure:
        why = next((why for sign, why in SIGNS_OF_FREED_MEMORY.items() if sign in str(failure)), None)
        if why is None:
            raise
        fail(f"{why}\n{failure}")
    with rank_errors_as_failures(world_size):
        held = launched(held_bytes, answer, world_size)
        peak = launched(_peak_bytes, answer, world_size)
    enough, left_by_ours = _bytes_of_ours(world_size)
    for kind, per_parameter in (("optimizer", 12), ("gradients", 2), ("parameters", 2)):
        shard = per_parameter * NUM_PARAMS / world_size
        if held[kind] > 1.1 * shard:
            fail(
                f"at the end of backward a rank holds {held[kind]:,} bytes of {kind}, and its shard is "
                f"{shard:,.0f} bytes"
            )
    if peak > enough + 2 * ITEMSIZE * max(layer_units(compare.CONFIG)):
        fail(
            f"at its peak a rank holds {peak:,} bytes, and {enough:,} are enough: free a unit after its forward, "
            "and after its backward"
        )
    with rank_errors_as_failures(world_size):
        left = launched(compare.bytes_after_backward, answer, world_size) - left_by_ours
    if left > ITEMSIZE * max(layer_units(compare.CONFIG)):
        fail(
            f"when backward is over, {left:,} bytes more than the shards are alive: free a unit after its backward "
            "too, once its gradients are reduced"
        )
    expect_sent(answer, world_size, 1, 3, _phase_bytes(world_size))
    expect_sent(answer, world_size, 3, 9, _phase_bytes(world_size))


@cache
def _bytes_of_ours(world_size: int) -> tuple[int, int]:
    """What the lesson's trainer holds at its peak and after backward: the same at every check."""
    return _peak_bytes(Zero3, world_size), compare.bytes_after_backward(Zero3, world_size)


def _peak_bytes(trainer: type, world_size: int) -> int:
    return memory_of_a_step(trainer, world_size).peak_bytes


def _phase_bytes(world_size: int) -> int:
    return ITEMSIZE * NUM_PARAMS * (world_size - 1) // world_size
