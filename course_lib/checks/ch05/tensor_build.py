"""Graders of chapter 05, exercise 7: a tensor-parallel Llama from an empty cell, judged by what the lesson measures."""

from functools import cache

from course_lib.checks.core import fail, grader, launched, rank_errors_as_failures
from course_lib.checks.trainers import micro_batches
from course_lib.memory.ranks import narrow
from course_lib.memory.states import count_parameters
from course_lib.minimal import compare_with_one_process, held_bytes, sent_bytes
from course_lib.minimal.compare import CONFIG, differences_after_a_step
from course_lib.minimal.tensor import TensorParallel

LARGEST_DIFFERENCE = 1e-9  # in float64


@grader
def check_tensor_parallel(answer, rng):
    """A tensor-parallel Llama: the parameters of one process, states in parts, and no more bytes than the lesson's."""
    if not getattr(answer, "same_tokens", False):
        fail("the class needs `same_tokens = True`: without it the check gives every rank other sequences")
    world_size = rng.choice([2, 4])
    for num_micro_batches in (1, 3):
        _expect_right(answer, world_size, num_micro_batches)
    _expect_parts(answer, world_size)
    for num_micro_batches in (1, 3):
        with rank_errors_as_failures(world_size):
            sent = launched(sent_bytes, answer, world_size, num_micro_batches)
        enough = _enough_bytes(world_size)
        if sent > 1.01 * enough:
            fail(
                f"with {micro_batches(num_micro_batches)} a rank sent {sent:,} bytes, and {enough:,} are enough: one f "
                "for all layers that share an input, no all-reduce in update, and logits that stay in parts"
            )


def _expect_right(answer: type, world_size: int, num_micro_batches: int) -> None:
    with rank_errors_as_failures(world_size):
        difference = launched(compare_with_one_process, answer, world_size, num_micro_batches)
    if not difference < LARGEST_DIFFERENCE:
        fail(
            f"with {micro_batches(num_micro_batches)} on {world_size} ranks a parameter differs from one process by "
            f"{difference:.1e}; {_wrong_after_a_step(answer, world_size, num_micro_batches)}?"
        )


def _wrong_after_a_step(answer: type, world_size: int, num_micro_batches: int) -> str:
    """Name the parameters with a wrong gradient, of which backward reaches the last first, and ask where to look."""
    differences = launched(differences_after_a_step, answer, world_size, num_micro_batches)
    wrong = [name for name, difference in differences.items() if not difference < LARGEST_DIFFERENCE]
    hint = "is there an f in front of all columns, a g behind all rows, and nothing summed that is full already"
    if num_micro_batches > 1:
        hint = "is each loss divided by the number of micro-batches"
    elif "head.weight" in wrong:  # its gradient comes from the loss alone, before any f
        hint = (
            "so the loss itself is wrong, or the forward pass before it: does a rank count a target's logit only where "
            "the target is its own, and is there a g behind all rows"
        )
    if not wrong:
        return hint
    return (
        f"after one step of SGD {len(wrong)} of {len(differences)} parameters are wrong, the first is {wrong[0]}, and "
        f"the last, which backward reaches first, is {wrong[-1]}; {hint}"
    )


def _expect_parts(answer: type, world_size: int) -> None:
    with rank_errors_as_failures(world_size):
        held = launched(held_bytes, answer, world_size)
    for kind, per_parameter in (("parameters", 2), ("gradients", 2), ("optimizer", 12)):
        part = per_parameter * count_parameters(narrow(CONFIG, world_size))
        if held[kind] > 1.02 * part:
            fail(
                f"at the end of backward a rank holds {held[kind]:,} bytes of {kind}, and its part is {part:,} bytes; "
                "cut every matrix, the embedding and the head as well, and let the full ones go"
            )


@cache
def _enough_bytes(world_size: int) -> int:
    """What the lesson's trainer sends in a step: the same at every check, and for any number of micro-batches."""
    return sent_bytes(TensorParallel, world_size)
