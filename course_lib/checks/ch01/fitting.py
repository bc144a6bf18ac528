"""Graders of chapter 01: what fits into a memory, by its budget and by its fragmentation."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from course_lib.checks.ch01.single_gpu_memory import random_llama
from course_lib.checks.core import fail_by_belief, grader
from course_lib.config import ModelConfig
from course_lib.memory.budget import budget

# ------------------------------------------------------------------------------------ 5. the largest micro-batch
FitCase = tuple[ModelConfig, int, str, int]  # config, seq_len, recipe, memory_bytes


@grader
def check_largest_micro_batch(answer, rng):
    """The largest micro-batch whose whole budget fits, 0 where not even one sequence does."""
    sizes = rng.sample([6, 7, 11, 13, 14, 19, 21, 23, 26, 29, 35], 3)  # no powers of two, nor one more than one
    cases = [_fit_case(rng, size) for size in (*sizes, 0)]
    got = [answer(*case) for case in cases]
    fail_by_belief(got, [_largest(*case) for case in cases], cases, FIT_BELIEFS, _told_fit_case)


def _fit_case(rng: random.Random, largest: int) -> FitCase:
    """A GPU in which `largest` sequences fit, with or without room left over."""
    config = replace(random_llama(rng, False), num_layers=rng.randrange(20, 40), d_model=1024, d_ff=4096)
    seq_len, recipe = rng.choice([64, 96, 128]), rng.choice(["bf16-master", "bf16-master-fp32-grads", "fp32"])
    if largest == 0:
        return config, seq_len, recipe, budget(config, 1, seq_len, recipe).states_bytes // 2
    low = budget(config, largest, seq_len, recipe).total_bytes
    high = budget(config, largest + 1, seq_len, recipe).total_bytes
    return config, seq_len, recipe, rng.choice([low, (low + high) // 2])


def _told_fit_case(config: ModelConfig, seq_len: int, recipe: str, memory_bytes: int) -> str:
    return f"{config.num_layers} layers of {config.d_model}, sequences of {seq_len}, {recipe}, {memory_bytes:,} bytes"


def _largest(config: ModelConfig, seq_len: int, recipe: str, memory_bytes: int, needed="total_bytes") -> int:
    batch = 0
    while getattr(budget(config, batch + 1, seq_len, recipe), needed) <= memory_bytes and batch < 10_000:
        batch += 1
    return batch


def _all_grows(config: ModelConfig, seq_len: int, recipe: str, memory_bytes: int) -> int:
    return memory_bytes // budget(config, 1, seq_len, recipe).total_bytes


def _without_states(config: ModelConfig, seq_len: int, recipe: str, memory_bytes: int) -> int:
    one = budget(config, 1, seq_len, recipe)
    return memory_bytes // (one.peak_bytes - one.between_steps_bytes)


def _without_logits(config: ModelConfig, seq_len: int, recipe: str, memory_bytes: int) -> int:
    one = budget(config, 1, seq_len, recipe)
    return max(0, (memory_bytes - one.states_bytes - sum(one.overheads.values())) // one.activations)


FIT_BELIEFS: dict[str, Callable[..., int]] = {
    "as if everything grew with the batch: parameters, gradients and optimizer states are there once": _all_grows,
    "one too many: it is the first that does not fit": lambda *case: _largest(*case) + 1,
    "one sequence too few: what fits exactly does fit": lambda *case: max(0, _largest(*case) - 1),
    "at least 1 is returned, also where the states alone do not fit; return 0 there": lambda *case: max(
        1, _largest(*case)
    ),
    "context and work space of the libraries are left out (`budget(...).overheads`)": lambda *case: _largest(
        *case, needed="peak_bytes"
    ),
    "the whole memory is given to activations: the states lie there too": _without_states,
    "logits and temporary bytes grow with the batch as well": _without_logits,
    "only powers of two are tried": lambda *case: 2 ** int(math.log2(_largest(*case))) if _largest(*case) else 0,
}


# ------------------------------------------------------------------------------------ 6. first fit
Event = tuple  # ("alloc", name, nbytes) or ("free", name)


@grader
def check_first_failure(answer, rng):
    """When a first-fit allocator runs out of memory, and how much was free in all."""
    cases = [_random_events(rng) for _ in range(120)]
    want = [_first_fit(*case) for case in cases]
    got = [answer(list(events), capacity) for events, capacity in cases]
    got = [tuple(value) if isinstance(value, list) else value for value in got]
    fail_by_belief(got, want, cases, FIT_FAILURES, lambda events, capacity: f"{events} in {capacity} bytes")


def _random_events(rng: random.Random) -> tuple[list[Event], int]:
    capacity, alive, events = 512 * rng.randrange(10**6, 10**8), [], []
    for number in range(40):
        if alive and rng.random() < 0.45:
            events.append(("free", alive.pop(rng.randrange(len(alive)))))
        else:
            alive.append(f"t{number}")
            events.append(("alloc", alive[-1], capacity * rng.randrange(4, 24) // 100 // 512 * 512))
    return events, capacity


def _first_fit(events: list[Event], capacity: int, choose=min, merge: bool = True) -> tuple[int, int] | None:
    """choose   of the free blocks (start, size) that are large enough, which one; the lowest is the first fit"""
    free_blocks, placed = [(0, capacity)], {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            free_blocks = _with_free_block(free_blocks, placed.pop(name), merge)
            continue
        fitting = [free_block for free_block in free_blocks if free_block[1] >= size[0]]
        if not fitting:
            return index, sum(free_block[1] for free_block in free_blocks)
        start, length = chosen = choose(fitting)
        free_blocks.remove(chosen)
        placed[name] = (start, size[0])
        if length > size[0]:
            free_blocks.append((start + size[0], length - size[0]))
    return None


def _with_free_block(free_blocks: list[tuple[int, int]], freed: tuple[int, int], merge: bool) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in sorted([*free_blocks, freed]):
        if merge and joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _only_the_sum(events: list[Event], capacity: int) -> tuple[int, int] | None:
    free, sizes = capacity, {}
    for index, (kind, name, *size) in enumerate(events):
        if kind == "free":
            free += sizes.pop(name)
        elif size[0] > free:
            return index, free
        else:
            sizes[name], free = size[0], free - size[0]
    return None


def _best_fit(events: list[Event], capacity: int) -> tuple[int, int] | None:
    return _first_fit(
        events,
        capacity,
        choose=lambda free_blocks: min(free_blocks, key=lambda free_block: (free_block[1], free_block[0])),
    )


def _index_alone(events: list[Event], capacity: int) -> int | None:
    failure = _first_fit(events, capacity)
    return failure and failure[0]


FIT_FAILURES: dict[str, Callable[..., object]] = {
    "free bytes were added up, but a tensor needs them side by side: no fragmentation is seen this way": _only_the_sum,
    "neighbouring free blocks do not join: a freed tensor between two free blocks makes one large free block": (
        lambda events, capacity: _first_fit(events, capacity, merge=False)
    ),
    "this is best fit (the smallest free block that is large enough); first fit takes the lowest address": _best_fit,
    "this takes the highest address; first fit takes the lowest": (
        lambda events, capacity: _first_fit(events, capacity, choose=max)
    ),
    "return the number of the event and the free bytes in all": _index_alone,
}
