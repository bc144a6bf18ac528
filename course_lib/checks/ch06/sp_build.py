"""Grader of chapter 06, exercise 7: tensor and sequence parallelism of a Llama, judged by what the lesson measures."""

import torch
import torch.distributed as dist

from course_lib.checks.core import fail, grader, launched, rank_errors_as_failures, run_ranks
from course_lib.minimal import compare, compare_with_one_process, sent_bytes
from course_lib.minimal.compare_cut_model import different_copies, gradient_errors, kept_by_a_block, train_on_ranks
from course_lib.model import build

L, D, N = compare.CONFIG.num_layers, compare.CONFIG.d_model, compare.CONFIG.num_heads
RIGHT = 1e-9
ITEMSIZE = 2  # bfloat16, in which sent_bytes and kept_by_a_block compute


@grader
def check_sequence_parallel(answer, rng):
    """TP + SP from an empty cell: right gradients and parameters, norms of my tokens, no more bytes than needed."""
    world_size = rng.choice([2, 4])
    shapes = run_ranks(_norm_inputs, world_size, answer)
    _expect_my_tokens(shapes[0], world_size)
    with rank_errors_as_failures(world_size):
        errors = launched(gradient_errors, answer, world_size, 1)
    _expect_right_gradients(errors, world_size)
    with rank_errors_as_failures(world_size):
        difference = launched(compare_with_one_process, answer, world_size, 3)
    if not difference < RIGHT:
        fail(
            f"with 3 micro-batches on {world_size} ranks a parameter differs from one process by {difference:.1e}; sum "
            "once per step, after the last micro-batch: a second sum counts the first micro-batches again"
        )
    _expect_memory_and_bytes(answer, world_size)
    with rank_errors_as_failures(world_size):
        _, models = launched(train_on_ranks, answer, 2, world_size)
    if different_copies(models) > 1:
        fail(f"after two steps the ranks would save {different_copies(models)} different models, and one is right")


def _norm_inputs(answer: type) -> list[tuple[int, ...]]:
    """What the first norm of the first block is given, for 2 sequences of 8 tokens per rank."""
    made, seen = answer(build(compare.CONFIG), compare.adamw, dist.group.WORLD), []
    made.model.blocks[0].attention_norm.register_forward_pre_hook(lambda norm, args: seen.append(tuple(args[0].shape)))
    size = 8 * dist.get_world_size()
    made.loss(*torch.zeros(2, size, size, dtype=torch.long))
    return seen


def _expect_my_tokens(shapes: list[tuple[int, ...]], world_size: int) -> None:
    S = 8 * world_size
    B, s = S, S // world_size
    if not shapes:
        fail("the norm of the first block was not called; does self.model run, and is loss() what backward uses?")
    got = shapes[0]
    if got == (B, S, D):
        fail(f"the first norm was given all {S} tokens; after leave() a rank has its own {s}")
    if got == (B // world_size, S, D):
        fail("the first norm was given some of the sequences; cut the tokens, dimension 1, not the batch")
    if got != (B, s, D):
        fail(f"the first norm was given shape {got}; with {world_size} ranks {(B, s, D)} is right")


def _expect_right_gradients(errors: dict[str, float], world_size: int) -> None:
    wrong = {name for name, error in errors.items() if not error < RIGHT}
    if "loss" in wrong:
        fail("the loss differs from that of one process; leave() must sum the ranks' partial sums")
    norms = {name for name in errors if "norm" in name}
    mean_error = 1 - 1 / world_size
    if wrong and all(abs(errors[name] - mean_error) < RIGHT for name in wrong):
        fail(f"the gradients of {len(wrong)} norms are {world_size} times too small: averaged; add the ranks' parts")
    if wrong == norms:
        fail(
            "the loss is right, and the gradient of every norm is not: a rank has its own tokens' part of it, so add "
            "the parts of all ranks, once per step; all_reduce does not change its argument: use the value it returns"
        )
    if wrong and wrong < norms:
        fail(f"the gradients of {len(wrong)} of {len(norms)} norms are not summed: {sorted(wrong)[0]} is one of them")
    if "head.weight" in wrong:
        fail(
            f"the loss is right, and {len(wrong)} gradients are not, head.weight among them: a part of a matrix has "
            "its full gradient already; only what is replicated is to be summed"
        )
    if wrong:
        fail(
            f"the loss is right, and {len(wrong)} gradients are not, {sorted(wrong)[0]} among them: the backward of a "
            "gather sums over the ranks, and the backward of a reduce-scatter gathers"
        )


def _expect_memory_and_bytes(answer: type, t: int) -> None:
    with rank_errors_as_failures(t):
        kept, sent = launched(kept_by_a_block, answer, t), launched(sent_bytes, answer, t)
    enough = 4 + (34 + 8 / D + 4 * N / D) / t
    if kept > 1.01 * enough:
        fail(
            f"a block saves {kept:.2f} bytes per token and feature for backward, and {enough:.2f} are enough; norms "
            "and residual sums should have this rank's tokens only"
        )
    tokens = compare.SEQUENCES * compare.SEQ_LEN
    phases = 2 * (4 * L + 2)
    if kept <= 1.01 * (enough - 4 + 4 / t):  # gathers the inputs of columns again: one more for each
        phases += 2 * L + 1
    needed = (phases * ITEMSIZE * tokens * D + 3 * 2 * 4 * tokens + 2 * ITEMSIZE * (2 * L + 1) * D) * (t - 1) // t
    if sent > 1.01 * needed:
        fail(
            f"a rank sends {sent:,} bytes in a step, and {needed:,} are enough: an all-reduce followed by a slice "
            "sends twice what a reduce-scatter sends, and of the gradients only those of norms are sent"
        )
