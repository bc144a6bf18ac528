"""Tables of chapter 03, exercises 1 to 4: the size of a batch, averages weighted and clipped, buckets."""

import math
import operator
from functools import partial

import torch
import torch.distributed as dist

from course_lib.checks import Each, Exercise, numbers, on_ranks
from course_lib.comm import all_reduce


# ------------------------------------------------------------------------------------ 1. the batch in tokens
def accumulation(batch_tokens, seq_len, micro_batch_size, dp_size, text="uneven", refuses=True):
    """Micro-batches of each rank for a batch in tokens, and a ValueError where they do not come out whole."""
    number, rest = divmod(batch_tokens, seq_len * micro_batch_size * dp_size)
    if rest and refuses:
        raise ValueError(text)
    return number


def _batches(rng):
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
    "the batch is counted in tokens; a sequence has seq_len of them": {"seq_len": 1},
    "all dp ranks work at the same time, each on its own micro-batch": {"dp_size": 1},
    "each micro-batch has micro_batch_size sequences": {"micro_batch_size": 1},
    "this does not come out whole; raise ValueError": {"refuses": False},
    "the ValueError has no text; say in it what to change": {"text": ""},
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


def _gradients(rng):
    """Two ranks, and four, of which one has no token."""
    counts_of_ranks = rng.sample([7, 11, 13, 19, 23], 2), rng.sample([0, *rng.sample([7, 11, 13, 19, 23], 3)], 4)
    return [
        (len(counts), Each(numbers(rng, 40) * (count > 0) for count in counts), Each(counts))
        for counts in counts_of_ranks
    ]


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
    "one all-reduce of the weighted gradient, and one number for the tokens": (
        lambda grad_P, num_tokens, group: all_reduce(_average_by_tokens(grad_P, num_tokens, group), group, op="mean")
    ),
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


def _limits(rng):
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
check_average_and_clip = Exercise(
    _average_and_clip,
    _limits,
    WRONG_CLIP,
    _watch_clipped,
    right=lambda grads, *case: list(map(torch.Tensor.copy_, grads, _average_and_clip(grads, *case))),
    ranks=True,
)


# ------------------------------------------------------------------------------------ 4. buckets
def buckets(sizes_bytes, bucket_bytes, first_bucket_bytes, order=reversed, is_full=operator.ge, rest=True):
    """Which parameters share a bucket: last first, closed once it has its size, the first one small."""
    plan, filling = [], []
    for index in order(range(len(sizes_bytes))):
        filling.append(index)
        if is_full(sum(sizes_bytes[member] for member in filling), bucket_bytes if plan else first_bucket_bytes):
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


def _sizes(rng):
    draws = [(rng.randrange(40, 200), rng.randrange(8, 20)) for _ in range(60)]
    return [([rng.randrange(1, 90) for _ in range(count)], cap, rng.randrange(5, cap // 2)) for cap, count in draws]


WRONG_BUCKETS = {
    "the buckets begin with the first parameter; backward completes the last one first": {"order": iter},
    "the first bucket is as large as others; it closes at first_bucket_bytes": (
        lambda sizes, cap, first: buckets(sizes, cap, cap)
    ),
    "every bucket closes at first_bucket_bytes; that is for the first alone": (
        lambda sizes, cap, first: buckets(sizes, first, first)
    ),
    "a bucket closes before it would pass its size; it closes once it has it": _never_over,
    "the last bucket, which never got full, is missing: its gradients would not be averaged": {"rest": False},
    "a bucket that has exactly its size stays open; it is full": {"is_full": operator.gt},
}
check_buckets = Exercise(buckets, _sizes, WRONG_BUCKETS)
