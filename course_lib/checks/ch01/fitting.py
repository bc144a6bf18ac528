"""Tables of chapter 01: what fits into a memory, by its budget and by its fragmentation."""

import math
from dataclasses import replace

from course_lib.checks import Exercise
from course_lib.checks.ch01.single_gpu_memory import random_llama
from course_lib.memory.budget import budget


# ------------------------------------------------------------------------------------ 5. the largest micro-batch
def _largest_micro_batch(config, seq_len, recipe, memory_bytes, needed="total_bytes"):
    """The largest micro-batch whose whole budget fits, 0 where not even one sequence does."""
    batch = 0
    while getattr(budget(config, batch + 1, seq_len, recipe), needed) <= memory_bytes and batch < 10_000:
        batch += 1
    return batch


def _memories(rng):
    """GPUs in which so many sequences fit, with or without room left over, and one in which none does."""
    cases = []
    for largest in (*rng.sample([6, 7, 11, 13, 14, 19, 21, 23, 26, 29, 35], 3), 0):  # no powers of two, nor one more
        config = replace(random_llama(rng, False), num_layers=rng.randrange(20, 40), d_model=1024, d_ff=4096)
        seq_len, recipe = rng.choice([64, 96, 128]), rng.choice(["bf16-master", "bf16-master-fp32-grads", "fp32"])
        low, high = (budget(config, max(1, size), seq_len, recipe) for size in (largest, largest + 1))
        enough = rng.choice([low.total_bytes, (low.total_bytes + high.total_bytes) // 2])
        cases.append((config, seq_len, recipe, enough if largest else low.states_bytes // 2))
    return cases


def _without_states(config, seq_len, recipe, memory_bytes):
    one = budget(config, 1, seq_len, recipe)
    return memory_bytes // (one.peak_bytes - one.parameters - one.optimizer)


def _without_logits(config, seq_len, recipe, memory_bytes):
    one = budget(config, 1, seq_len, recipe)
    return max(0, (memory_bytes - one.states_bytes - sum(one.overheads.values())) // one.activations)


_WRONG_LARGEST = {
    "as if everything grew with the batch: parameters, gradients and optimizer states are there once": (
        lambda *case: case[-1] // budget(case[0], 1, *case[1:3]).total_bytes
    ),
    "one too many: it is the first that does not fit": lambda *case: _largest_micro_batch(*case) + 1,
    "one sequence too few: what fits exactly does fit": lambda *case: max(0, _largest_micro_batch(*case) - 1),
    "at least 1 is returned, also where the states alone do not fit; return 0 there": lambda *case: max(
        1, _largest_micro_batch(*case)
    ),
    "context and work space of the libraries are left out (`budget(...).overheads`)": {"needed": "peak_bytes"},
    "the whole memory is given to activations: the states lie there too": _without_states,
    "logits and temporary bytes grow with the batch as well": _without_logits,
    "only powers of two are tried": lambda *case: (
        2 ** int(math.log2(_largest_micro_batch(*case))) if _largest_micro_batch(*case) else 0
    ),
}
check_largest_micro_batch = Exercise(_largest_micro_batch, _memories, _WRONG_LARGEST)


# ------------------------------------------------------------------------------------ 6. first fit
def first_failure(events, capacity, choose=min, merge=True):
    """When a first-fit allocator runs out of memory, and how much was free in all.

    choose   of the free blocks (start, size) that are large enough, which one; the lowest is the first fit
    merge    whether neighbours join; "all": blocks at any place do, which is wrong
    """
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
        free_blocks.append((start + size[0], length - size[0]))
    return None


def _with_free_block(free_blocks, freed, merge):
    if merge == "all":
        return [(0, sum(size for _, size in [*free_blocks, freed]))]
    joined: list[tuple[int, int]] = []
    for start, size in sorted([*free_blocks, freed]):
        if merge and joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def _events(rng):
    cases = []
    for _ in range(60):
        capacity, alive, events = 512 * rng.randrange(10**6, 10**8), [], []
        for number in range(40):
            if alive and rng.random() < 0.45:
                events.append(("free", alive.pop(rng.randrange(len(alive)))))
            else:
                alive.append(f"t{number}")
                events.append(("alloc", alive[-1], capacity * rng.randrange(4, 24) // 100 // 512 * 512))
        cases.append((events, capacity))
    return cases


_WRONG_FAILURE = {
    "free bytes were added up, but a tensor needs them side by side: no fragmentation is seen this way": (
        {"merge": "all"}
    ),
    "neighbouring free blocks do not join: a freed tensor between two free blocks makes one large free block": (
        {"merge": False}
    ),
    "this is best fit (the smallest free block that is large enough); first fit takes the lowest address": (
        {"choose": lambda free_blocks: min(free_blocks, key=lambda free_block: (free_block[1], free_block[0]))}
    ),
    "this takes the highest address; first fit takes the lowest": {"choose": max},
    "return the number of the event and the free bytes in all": lambda *case: (first_failure(*case) or [None])[0],
}
_SAYS_FAILURE = {"the result": lambda events, capacity: f"{events} in {capacity} bytes"}
check_first_failure = Exercise(first_failure, _events, _WRONG_FAILURE, says=_SAYS_FAILURE)
