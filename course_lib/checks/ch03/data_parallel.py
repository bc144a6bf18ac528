"""Graders of chapter 03, exercises 1 to 4: the size of a batch, averages weighted and clipped, buckets."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.core import expect_close, fail, fail_by_belief, grader, numbers
from course_lib.checks.observe import Call, Seen, expect_input_kept, run_calls
from course_lib.traffic import ring_all_reduce_bytes

SAME_CALLS = "Does every rank of the group make the same calls in the same order?"


# ------------------------------------------------------------------------------------ 1. the batch in tokens
@grader
def check_accumulation(answer, rng):
    """Micro-batches of each rank for a batch in tokens, and a ValueError where they do not come out whole."""
    for _ in range(50):
        seq_len, micro, dp, want = (
            rng.choice([512, 2048, 4096]),
            rng.randrange(2, 9),
            rng.randrange(2, 200),
            rng.randrange(1, 40),
        )
        case = (want * dp * micro * seq_len, seq_len, micro, dp)
        _expect_accumulation(answer(*case), want, case)
        for wrong_tokens in (case[0] + micro * seq_len, case[0] + seq_len // 2):
            _expect_refused(answer, (wrong_tokens, *case[1:]))


def _in_words(case: tuple[int, int, int, int]) -> str:
    return f"{case[0]:,} tokens, sequences of {case[1]}, micro-batch {case[2]}, dp {case[3]}"


def _expect_accumulation(got, want: int, case: tuple[int, int, int, int]) -> None:
    _, seq_len, micro, dp = case
    if got == want and not isinstance(got, int):
        fail(f"{_in_words(case)}: it returned {got!r}; return a whole number (int), as `//` gives")
    believed = {
        want * seq_len: "the batch is counted in tokens; a sequence has seq_len of them",
        want * dp: "all dp ranks work at the same time, each on its own micro-batch",
        want * micro: "each micro-batch has micro_batch_size sequences",
    }
    if got != want:
        fail(
            f"{_in_words(case)}: it returned {got}, and {want} is right"
            + (f": {believed[got]}" if got in believed else "")
        )


def _expect_refused(answer: Callable, case: tuple[int, int, int, int]) -> None:
    try:
        got = answer(*case)
    except ValueError as refusal:
        if not str(refusal).strip():
            fail(f"{_in_words(case)}: the ValueError has no text; say in it what to change")
        return
    fail(f"{_in_words(case)}: it returned {got}, but this does not come out whole; raise ValueError")


# ------------------------------------------------------------------------------------ 2. unequal numbers of tokens
@grader
def check_average_by_tokens(answer, rng):
    """The gradient of the mean over all tokens, from ranks with unequal numbers of tokens, one of them with none."""
    for world_size in (2, 4):
        grads = [numbers(rng, 40) for _ in range(world_size)]
        counts = rng.sample([7, 11, 13, 19, 23], world_size)
        if world_size == 4:
            lost = rng.randrange(4)
            counts[lost], grads[lost] = 0, torch.zeros(40, dtype=torch.float64)
        call = Call(grads, (counts,))
        [everybody] = run_calls(functools.partial(_with_own_count, answer), [call], SAME_CALLS)
        for rank, seen in enumerate(everybody):
            _expect_token_mean(seen, rank, grads, counts)


def _with_own_count(answer: Callable, grad_P: Tensor, counts: list[int], group) -> object:
    return answer(grad_P, counts[dist.get_rank(group)], group)


def _expect_token_mean(seen: Seen, rank: int, grads: list[Tensor], counts: list[int]) -> None:
    where = f"rank {rank}; the ranks have {counts} tokens"
    stacked, weights = torch.stack(grads), torch.tensor(counts, dtype=torch.float64)
    total = weights @ stacked
    if isinstance(seen.result, Tensor) and not seen.result.isfinite().all():
        fail(f"{where}: the result is not finite; divide by the tokens of all ranks, a rank's own may be 0")
    wrong = {
        "every rank counted alike: this is the mean of the ranks' gradients": stacked.mean(0),
        "the ranks' gradients were summed": stacked.sum(0),
        "weighted by tokens, but never divided": total,
        "divided by the number of ranks; divide by the number of tokens": total / len(grads),
        "this is the rank's own gradient; nothing was exchanged": grads[rank],
    }
    expect_close(seen.result, total / weights.sum(), where, wrong)
    expect_input_kept(seen, where)
    enough = ring_all_reduce_bytes(grads[rank].nbytes, len(grads), rank, itemsize=8) + 64
    if seen.sent_bytes > enough:
        fail(
            f"{where}: it sent {seen.sent_bytes:,} bytes, and {enough - 64:,} and a few are enough: one all-reduce of "
            "the weighted gradient, and one number for the tokens"
        )


# ------------------------------------------------------------------------------------ 3. clipping
@grader
def check_average_and_clip(answer, rng):
    """Averaged gradients of several tensors, scaled together so that their norm is at most max_norm."""
    sizes = [rng.randrange(2, 9) for _ in range(3)]
    for world_size in (2, 4):
        shares = [numbers(rng, sum(sizes)) for _ in range(world_size)]
        mean_norm = torch.stack(shares).mean(0).norm().item()
        limits = [0.4 * mean_norm, 10 * mean_norm]  # one that clips; one above every norm in play
        calls = [Call(shares, (sizes, limit)) for limit in limits]
        seen = run_calls(functools.partial(_on_a_list, answer), calls, SAME_CALLS)
        for limit, everybody in zip(limits, seen, strict=True):
            for rank, one in enumerate(everybody):
                _expect_clipped(one, rank, shares, sizes, limit)


def _on_a_list(answer: Callable, grad_P: Tensor, sizes: list[int], max_norm: float, group) -> Tensor | None:
    """The answer gets a list of tensors, as a model's gradients are; what it returns is compared as one flat tensor."""
    result = answer([piece.clone() for piece in grad_P.split(sizes)], max_norm, group)
    return None if result is None else torch.cat([piece.flatten() for piece in result])


def _expect_clipped(seen: Seen, rank: int, shares: list[Tensor], sizes: list[int], limit: float) -> None:
    stacked = torch.stack(shares)
    mean, root = stacked.mean(0), len(shares) ** 0.5
    above = mean.norm().item() > limit
    where = f"rank {rank} of {len(shares)}, norm of the mean {mean.norm():.3f}, max_norm {limit:.3f}"
    each = torch.cat([_clipped(piece, limit) for piece in mean.split(sizes)])
    wrong = {
        "clipped before averaging: a rank's own gradient is noisier and longer than the mean": torch.stack(
            [_clipped(share, limit) for share in shares]
        ).mean(0),
        "the squares were summed over the ranks, but after averaging every rank has the whole gradient": mean
        * min(1.0, limit / (root * mean.norm().item())),
        "each tensor was clipped on its own; the norm is that of all tensors together": each,
        "a gradient below the limit was made longer; the factor is at most 1": mean * (limit / mean.norm()),
        "it was averaged, but not clipped": mean,
        "the gradients were summed, not averaged": _clipped(stacked.sum(0), limit),
    }
    if not above:
        wrong.pop("it was averaged, but not clipped")
    expect_close(seen.result, _clipped(mean, limit), where, _different(wrong, _clipped(mean, limit)), rtol=1e-4)


def _clipped(grad_P: Tensor, limit: float) -> Tensor:
    return grad_P * min(1.0, limit / grad_P.norm().item())


def _different(wrong: dict[str, Tensor], right: Tensor) -> dict[str, Tensor]:
    """Misconceptions that show in this case."""
    return {message: value for message, value in wrong.items() if not torch.allclose(value, right, rtol=1e-3)}


# ------------------------------------------------------------------------------------ 4. buckets
Plan = list[list[int]]


@grader
def check_buckets(answer, rng):
    """Which parameters share a bucket: last first, closed once it has its size, the first one small."""
    cases = []
    for _ in range(60):
        cap = rng.randrange(40, 200)
        sizes = [rng.randrange(1, 90) for _ in range(rng.randrange(8, 20))]
        cases.append((sizes, cap, rng.randrange(5, cap // 2)))
    got = [answer(list(case[0]), *case[1:]) for case in cases]
    tell = "sizes {}, bucket_bytes {}, first_bucket_bytes {}".format
    fail_by_belief(got, [_buckets(*case) for case in cases], cases, BELIEFS, tell)


def _buckets(sizes: list[int], cap: int, first: int) -> Plan:
    return _fill(reversed(range(len(sizes))), sizes, cap, first)


def _fill(order, sizes: list[int], cap: int, first: int, strictly: bool = False) -> Plan:
    plan: Plan = []
    filling: list[int] = []
    for index in order:
        filling.append(index)
        limit = cap if plan else first
        held = sum(sizes[member] for member in filling)
        if held > limit or (held == limit and not strictly):
            plan.append(filling)
            filling = []
    return plan + [filling] if filling else plan


def _never_over(sizes: list[int], cap: int, first: int) -> Plan:
    plan: Plan = [[]]
    for index in reversed(range(len(sizes))):
        limit = cap if len(plan) > 1 else first
        if plan[-1] and sum(sizes[member] for member in plan[-1]) + sizes[index] > limit:
            plan.append([])
        plan[-1].append(index)
    return plan


def _without_the_rest(sizes: list[int], cap: int, first: int) -> Plan:
    plan = _buckets(sizes, cap, first)
    full = sum(sizes[member] for member in plan[-1]) >= (cap if len(plan) > 1 else first)
    return plan if full else plan[:-1]


BELIEFS: dict[str, Callable[[list[int], int, int], Plan]] = {
    "the buckets begin with the first parameter; backward completes the last one first": lambda sizes, cap, first: (
        _fill(range(len(sizes)), sizes, cap, first)
    ),
    "the first bucket is as large as the others; it closes at first_bucket_bytes": lambda sizes, cap, first: _fill(
        reversed(range(len(sizes))), sizes, cap, cap
    ),
    "every bucket closes at first_bucket_bytes; that is for the first alone": lambda sizes, cap, first: _fill(
        reversed(range(len(sizes))), sizes, first, first
    ),
    "a bucket closes before it would pass its size; it closes once it has it": _never_over,
    "the last bucket, which never got full, is missing: its gradients would not be averaged": _without_the_rest,
    "a bucket that has exactly its size stays open; it is full": lambda sizes, cap, first: _fill(
        reversed(range(len(sizes))), sizes, cap, first, strictly=True
    ),
}
