"""Graders of chapter 04, exercises 1 to 3: bytes held, bytes sent, clipping on shards."""

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_generator, grader, numbers
from course_lib.checks.observe import Call, Seen, expect_input_kept, run_calls

SAME_CALLS = "Does every rank of the group make the same calls in the same order?"


# ------------------------------------------------------------------------------------ 1. bytes held
@grader
def check_held_bytes(answer, rng):
    """Bytes of parameters, gradients and optimizer states that a rank holds at each stage, padding included."""
    for _ in range(8):
        dp_size = rng.choice([3, 4, 7, 8, 64])
        num_params = rng.randrange(10**6, 10**9) * dp_size + rng.randrange(1, dp_size)
        for stage in range(4):
            got = answer(num_params, stage, dp_size)
            if not (isinstance(got, tuple) and len(got) == 3 and all(isinstance(size, int) for size in got)):
                fail(f"it returned {got!r}; return three whole numbers: parameters, gradients, optimizer")
            _expect_held(got, num_params, stage, dp_size)


def _expect_held(got: tuple, num_params: int, stage: int, dp_size: int) -> None:
    def held(cut: tuple[str, ...], optimizer_bytes: int = 12, shard: int = -(-num_params // dp_size)) -> tuple:
        whole = num_params if stage == 0 else dp_size * -(-num_params // dp_size)
        sizes = {"parameters": 2, "gradients": 2, "optimizer": optimizer_bytes}
        return tuple(size * (shard if kind in cut else whole) for kind, size in sizes.items())

    order = ("optimizer", "gradients", "parameters")
    cut, floor = order[:stage], num_params // dp_size
    wrong = {
        "parameters are cut last, after gradients and optimizer states": held(("parameters", *order)[:stage]),
        "the optimizer's states are cut first; gradients follow in stage 2": held(
            ("gradients", "optimizer", "parameters")[:stage]
        ),
        "the FP32 master copy belongs to the optimizer: 4 + 4 + 4 bytes, not 8": held(cut, optimizer_bytes=8),
        "round the shard up: ranks pad to equal pieces": held(cut, shard=floor),
        "every kind was divided; a stage cuts only what the stages up to it cut": held(order),
    }
    where = f"{num_params:,} parameters, stage {stage}, {dp_size} ranks: (parameters, gradients, optimizer)"
    unpadded = tuple(size * num_params for size in (2, 2, 12))
    nothing_cut = "nothing was sharded; stage 1 shards the optimizer states, stage 2 the gradients too, stage 3 all"
    if stage and got == unpadded:
        fail(f"{where} is {got}, and {held(cut)} is right: {nothing_cut}")
    if stage:
        wrong[nothing_cut] = held(())
    whole = tuple(
        got_kind == plain for got_kind, plain in zip(got, unpadded, strict=False)
    )  # an answer of another length is told below
    if stage and any(whole):
        fail(f"{where} is {got}: from stage 1 on what stays whole is padded too, {held(cut)} is right")
    expect_equal(got, held(cut), where, wrong)


# ------------------------------------------------------------------------------------ 3. clipping on shards
@grader
def check_clip_shards(answer, rng):
    """Shards scaled by one factor, so that the whole gradient has a norm of at most max_norm."""
    for world_size in (2, rng.choice([3, 4])):
        generator = fresh_generator(rng)
        shards = [numbers(generator, 50) * (1 + rank) for rank in range(world_size)]
        norm = torch.cat(shards).norm().item()
        limits = [0.2 * min(shard.norm().item() for shard in shards), 10 * norm]
        seen = run_calls(answer, [Call(shards, (limit,)) for limit in limits], SAME_CALLS)
        for limit, everybody in zip(limits, seen, strict=True):
            for rank, one in enumerate(everybody):
                _expect_clipped_shard(one, rank, shards, limit)


def _expect_clipped_shard(seen: Seen, rank: int, shards: list[Tensor], limit: float) -> None:
    mine_p, squares = shards[rank], torch.stack([shard.square().sum() for shard in shards])
    norm = squares.sum().sqrt().item()
    where = f"rank {rank} of {len(shards)}, norm of the whole gradient {norm:.3f}, max_norm {limit:.3f}"

    def scaled(by: float) -> Tensor:
        return mine_p * min(1.0, limit / by)

    wrong = {
        "scaled by the norm of its own shard; ranks then scale differently": scaled(mine_p.norm().item()),
        "the shards' norms were added; add their squares, then take the root": scaled(squares.sqrt().sum().item()),
        "the mean of the squares was taken; the whole gradient has the sum of them": scaled(norm / len(shards) ** 0.5),
        "a gradient below the limit was made longer; the factor is at most 1": mine_p * (limit / norm),
        "it was not clipped": mine_p,
        "the root is missing: this is the sum of squares": scaled(norm**2),
    }
    if norm <= limit:
        wrong.pop("it was not clipped")
    expect_close(seen.result, scaled(norm), where, wrong, rtol=1e-5)
    expect_input_kept(seen, where)
    if seen.sent_bytes > 64:
        fail(f"{where}: it sent {seen.sent_bytes:,} bytes; an all-reduce of a single number is enough")


# ------------------------------------------------------------------------------------ 2. bytes sent
@grader
def check_sent_bytes(answer, rng):
    """Bytes that a rank sends in a step with m micro-batches: parameters in 2 bytes, gradients in 4."""
    for _ in range(6):
        dp_size, micro_batches = rng.choice([2, 4, 8, 64]), rng.randrange(3, 9)
        num_params = rng.randrange(10**6, 10**9) * dp_size
        for m in (1, micro_batches):
            for stage in range(4):
                _expect_sent(answer(num_params, stage, dp_size, m), num_params, stage, dp_size, m)


def _expect_sent(got, num_params: int, stage: int, dp_size: int, m: int) -> None:
    def sent(gathers: int, scatters: int, grad_bytes: int = 4, share: float = (dp_size - 1) / dp_size) -> int:
        return round((2 * gathers + grad_bytes * scatters) * num_params * share)

    gathers, scatters = {0: (0, 2), 1: (1, 1), 2: (1, m), 3: (2 * m, m)}[stage]
    wrong = {}  # what a stage is believed to do first: a wrong size of a number has shown in stage 0
    if stage == 1:
        wrong["this is the all-reduce form; only a reduce-scatter is needed"] = sent(1, 2)
        wrong["stage 1 reduces once a step, after the last micro-batch"] = sent(1, m)
    if stage == 2:
        wrong["each micro-batch reduces: nobody keeps whole gradients to add to"] = sent(1, 1)
    if stage == 3:
        wrong["parameters are gathered twice: for forward, and again for backward"] = sent(m, m)
        wrong["every micro-batch gathers and reduces"] = sent(2, 1)
    wrong |= {
        "gradients travel in 4 bytes": sent(gathers, scatters, grad_bytes=2),
        "a ring sends (dp - 1) / dp of it: a rank keeps its own piece": sent(gathers, scatters, share=1.0),
    }
    where = f"{num_params:,} parameters, stage {stage}, {dp_size} ranks, {m} micro-batches: bytes sent by a rank"
    expect_equal(got, sent(gathers, scatters), where, wrong)
