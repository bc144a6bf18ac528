"""What graders ask of a trainer, whatever it shards: the result of one process, and no more bytes than needed."""

from course_lib.checks.core import fail, rank_errors_as_failures
from course_lib.minimal import compare_with_one_process, sent_bytes


def expect_right(trainer: type, world_size: int) -> None:
    """The trainer's parameters are those of one process, with 1 and with 3 micro-batches."""
    for num_micro_batches in (1, 3):
        with rank_errors_as_failures(world_size):
            difference = compare_with_one_process(trainer, world_size, num_micro_batches)
        if not difference < 1e-9:
            hint = (
                "are the gradients the mean over micro-batches"
                if num_micro_batches > 1
                else "are the gradients the mean over ranks, and is every parameter up to date after update"
            )
            fail(
                f"with {micro_batches(num_micro_batches)} on {world_size} ranks a "
                f"parameter differs from one process by {difference:.1e}; {hint}?"
            )


def expect_sent(trainer: type, world_size: int, num_micro_batches: int, phases: int, phase_bytes: int) -> None:
    """The trainer sends at most so many phases in a step."""
    with rank_errors_as_failures(world_size):
        sent = sent_bytes(trainer, world_size, num_micro_batches)
    enough = phases * phase_bytes
    if sent > 1.01 * enough:
        fail(
            f"with {micro_batches(num_micro_batches)} a rank sent {sent:,} bytes, and {phases} phases are "
            f"{enough:,} bytes"
        )


def micro_batches(count: int) -> str:
    """A number of micro-batches in words."""
    return f"{count} micro-batch{'es' * (count > 1)}"
