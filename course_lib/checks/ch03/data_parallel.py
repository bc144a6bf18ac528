"""Tables of chapter 03, exercises 1 to 4: the size of a batch, averages weighted and clipped, buckets."""

import math
import random
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from course_lib.checks.core import numbers
from course_lib.checks.table import Exercise
from course_lib.checks.watch import Each, on_ranks
from course_lib.comm import all_gather, all_reduce


# ------------------------------------------------------------------------------------ 1. the batch in tokens
def accumulation(batch_tokens, seq_len, micro_batch_size, dp_size):
    """Micro-batches of each rank for a batch in tokens, and a ValueError where they do not come out whole."""
    return _whole(batch_tokens, seq_len * micro_batch_size * dp_size)


def _whole(numerator, denominator, text="does not come out whole; choose another batch"):
    if numerator % denominator:
        raise ValueError(text)
    return numerator // denominator


def _batches(rng: random.Random) -> list[tuple]:
    cases = []
    for _ in range(50):
        seq_len, micro, dp = rng.choice([512, 2048, 4096]), rng.randrange(2, 9), rng.randrange(2, 200)
        tokens = rng.randrange(1, 40) * dp * micro * seq_len
        cases += [(more, seq_len, micro, dp) for more in (tokens, tokens + micro * seq_len, tokens + seq_len // 2)]
    return cases


def _watch_accumulation(answer, *case):
    try:
        number = answer(*case)
    except ValueError as refusal:
        return {"refused": True, "the ValueError has a text": bool(str(refusal).strip())}
    is_whole = isinstance(number, int)
    return {"refused": False, "the ValueError has a text": True, "the number": number, "it is an int": is_whole}


_WRONG_BATCH = {
    "the batch is counted in tokens; a sequence has seq_len of them": lambda tokens, seq_len, micro, dp: _whole(
        tokens, micro * dp
    ),
    "all dp ranks work at the same time, each on its own micro-batch": lambda tokens, seq_len, micro, dp: _whole(
        tokens, seq_len * micro
    ),
    "each micro-batch has micro_batch_size sequences": lambda tokens, seq_len, micro, dp: _whole(tokens, seq_len * dp),
    "this does not come out whole; raise ValueError": lambda tokens, seq_len, micro, dp: (
        tokens // (seq_len * micro * dp)
    ),
    "the ValueError has no text; say in it what to change": lambda tokens, seq_len, micro, dp: _whole(
        tokens, seq_len * micro * dp, text=""
    ),
    "return a whole number (int), as `//` gives": lambda *case: float(accumulation(*case)),
}
_SAYS_BATCH = {
    "refused": "raise ValueError where it does not come out whole, and only there",
    "it is an int": "return a whole number (int), as `//` gives",
}
check_accumulation = Exercise(accumulation, _batches, _WRONG_BATCH, _watch_accumulation, _SAYS_BATCH)


# ------------------------------------------------------------------------------------ 2. unequal numbers of tokens
def _average_by_tokens(grad_P, num_tokens, group):
    """The gradient of the mean over all tokens, from ranks with unequal numbers of tokens, one of them with none."""
    return all_reduce(grad_P * num_tokens, group) / all_reduce(grad_P.new_tensor(float(num_tokens)), group)


def _gathers_all(grad_P, num_tokens, group):
    everything = all_gather(torch.cat([grad_P * num_tokens, grad_P.new_tensor([float(num_tokens)])]), group)
    total = all_gather(everything, group).view(-1, len(grad_P) + 1)[: group.size()].sum(0)
    return total[:-1] / total[-1]


def _gradients(rng: random.Random) -> list[tuple]:
    cases = []
    for size in (2, 4):
        grads, counts = [numbers(rng, 40) for _ in range(size)], rng.sample([7, 11, 13, 19, 23], size)
        if size == 4:
            lost = rng.randrange(4)
            counts[lost], grads[lost] = 0, torch.zeros(40, dtype=torch.float64)
        cases.append((size, Each(grads), Each(counts)))
    return cases


_WRONG_TOKENS = {
    "every rank counted alike: this is the mean of the ranks' gradients": lambda grad_P, num_tokens, group: all_reduce(
        grad_P, group, op="mean"
    ),
    "the ranks' gradients were summed": lambda grad_P, num_tokens, group: all_reduce(grad_P, group),
    "weighted by tokens, but never divided": lambda grad_P, num_tokens, group: all_reduce(grad_P * num_tokens, group),
    "divided by the number of ranks; divide by the number of tokens": lambda grad_P, num_tokens, group: all_reduce(
        grad_P * num_tokens, group, op="mean"
    ),
    "this is the rank's own gradient; nothing was exchanged": lambda grad_P, num_tokens, group: grad_P.clone(),
    "the result is not finite; divide by the tokens of all ranks, a rank's own may be 0": [
        lambda grad_P, num_tokens, group: all_reduce(grad_P * num_tokens, group) / num_tokens,
        lambda grad_P, num_tokens, group: all_reduce(grad_P * num_tokens, group) / grad_P.new_tensor(num_tokens),
    ],
    "one all-reduce of the weighted gradient, and one number for the tokens": _gathers_all,
}
_SAYS_TOKENS = {"bytes sent": "one all-reduce of the weighted gradient, and one number for the tokens"}
check_average_by_tokens = Exercise(
    _average_by_tokens, _gradients, _WRONG_TOKENS, partial(on_ranks, slack=64), _SAYS_TOKENS, ranks=True
)


# ------------------------------------------------------------------------------------ 3. clipping
def _averaged(grads, group, op="mean"):
    return [all_reduce(grad, group, op=op) for grad in grads]


def _clipped(grads, max_norm, norm_of=lambda norm: norm, most=1.0):
    norm = norm_of(torch.cat([grad.flatten() for grad in grads]).norm())
    return [grad * min(most, max_norm / float(norm)) for grad in grads]


def _average_and_clip(grads, max_norm, group, op="mean", **mistake):
    """Averaged gradients of several tensors, scaled together so that their norm is at most max_norm."""
    return _clipped(_averaged(grads, group, op), max_norm, **mistake)


def _in_place(grads, max_norm, group):
    for grad in grads:
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    return grads if norm <= max_norm else [max_norm * grad / norm for grad in grads]


def _limits(rng: random.Random) -> list[tuple]:
    cases, sizes = [], [rng.randrange(2, 9) for _ in range(3)]
    for size in (2, 4):
        shares = [numbers(rng, sum(sizes)) for _ in range(size)]
        mean_norm = torch.stack(shares).mean(0).norm().item()
        grads = Each(list(share.split(sizes)) for share in shares)
        cases += [(size, grads, times * mean_norm) for times in (0.4, 10)]
    return cases


def _watch_clipped(answer, grads, max_norm):
    mine = [grad.clone() for grad in grads[dist.get_rank()]]  # may be written
    return {"the gradients": answer(mine, max_norm, dist.group.WORLD)}


WRONG_CLIP = {
    "clipped before averaging: a rank's own gradient is noisier and longer than the mean": (
        lambda grads, max_norm, group: _averaged(_clipped(grads, max_norm), group)
    ),
    "the squares were summed over the ranks, but after averaging every rank has the whole gradient": (
        lambda grads, max_norm, group: _average_and_clip(
            grads, max_norm, group, norm_of=lambda norm: all_reduce(norm**2, group).sqrt()
        )
    ),
    "each tensor was clipped on its own; the norm is that of all tensors together": lambda grads, max_norm, group: [
        _clipped([grad], max_norm)[0] for grad in _averaged(grads, group)
    ],
    "a gradient below the limit was made longer; the factor is at most 1": {"most": math.inf},
    "it was averaged, but not clipped": lambda grads, max_norm, group: _averaged(grads, group),
    "the gradients were summed, not averaged": {"op": "sum"},
}
check_average_and_clip = Exercise(_average_and_clip, _limits, WRONG_CLIP, _watch_clipped, right=_in_place, ranks=True)


# ------------------------------------------------------------------------------------ 4. buckets
def buckets(sizes_bytes, bucket_bytes, first_bucket_bytes, order=reversed, strictly=False, rest=True):
    """Which parameters share a bucket: last first, closed once it has its size, the first one small."""
    plan, filling = [], []
    for index in order(range(len(sizes_bytes))):
        filling.append(index)
        limit, held = (bucket_bytes if plan else first_bucket_bytes), sum(sizes_bytes[member] for member in filling)
        if held > limit or (held == limit and not strictly):
            plan.append(filling)
            filling = []
    return plan + [filling] if filling and rest else plan


def _never_over(sizes_bytes, bucket_bytes, first_bucket_bytes):
    plan: list[list[int]] = [[]]
    for index in reversed(range(len(sizes_bytes))):
        limit = bucket_bytes if len(plan) > 1 else first_bucket_bytes
        if plan[-1] and sum(sizes_bytes[member] for member in plan[-1]) + sizes_bytes[index] > limit:
            plan.append([])
        plan[-1].append(index)
    return plan


def _sizes(rng: random.Random) -> list[tuple]:
    cases = []
    for _ in range(60):
        cap = rng.randrange(40, 200)
        sizes = [rng.randrange(1, 90) for _ in range(rng.randrange(8, 20))]
        cases.append((sizes, cap, rng.randrange(5, cap // 2)))
    return cases


def _wrong(limits: Callable = lambda cap, first: (cap, first), **how) -> Callable:
    return lambda sizes, cap, first: buckets(sizes, *limits(cap, first), **how)


WRONG_BUCKETS = {
    "the buckets begin with the first parameter; backward completes the last one first": _wrong(order=iter),
    "the first bucket is as large as others; it closes at first_bucket_bytes": _wrong(lambda cap, first: (cap, cap)),
    "every bucket closes at first_bucket_bytes; that is for the first alone": _wrong(lambda cap, first: (first, first)),
    "a bucket closes before it would pass its size; it closes once it has it": _never_over,
    "the last bucket, which never got full, is missing: its gradients would not be averaged": _wrong(rest=False),
    "a bucket that has exactly its size stays open; it is full": _wrong(strictly=True),
}
check_buckets = Exercise(buckets, _sizes, WRONG_BUCKETS)
