"""Graders of chapter 09, exercises 4 and 5: bytes of a layer, whose gradients are summed over whom."""

import torch.distributed as dist

from course_lib.checks import Exercise, fresh_seed, numbers
from course_lib.comm import all_reduce_
from course_lib.parallel.expert import expert_groups

DP, EP = 4, 2


# ------------------------------------------------------------------------------------ 4. bytes of a layer
def sent_bytes(rows, rank, d_model, narrow_bytes, wide_bytes, total=None, home=False):
    """Dispatch and combine twice, and the gradients of both once. A mistake makes another total of out and back."""
    out = sum(n for dst, n in enumerate(rows[rank]) if home or dst != rank)
    back = sum(row[rank] for src, row in enumerate(rows) if home or src != rank)
    forward, gradients = out * narrow_bytes + back * wide_bytes, (out + back) * wide_bytes
    if total:
        return d_model * total(out, back, narrow_bytes, wide_bytes)
    return d_model * (2 * forward + gradients)


def _tables_of_rows(rng):
    """More goes out than comes back."""
    cases = []
    for _ in range(3):
        ranks = rng.randrange(3, 7)
        rows = [[rng.randrange(1, 60) for _ in range(ranks)] for _ in range(ranks)]
        rank = rng.randrange(ranks)
        rows[rank][rank - 1] += 60 * ranks
        cases.append((rows, rank, rng.randrange(16, 100), 1, rng.choice([2, 4])))
    return cases


WRONG_SENT = {
    "what stays on the rank is not sent": {"home": True},
    "combine returns the rows that came from others, not those that I sent": {
        "total": lambda out, back, narrow, wide: 2 * out * (narrow + 2 * wide)
    },
    "forward runs twice: before its backward the block dispatches and combines once more": {
        "total": lambda out, back, narrow, wide: out * narrow + back * wide + (out + back) * wide
    },
    "this is forward, twice; gradients travel too": {
        "total": lambda out, back, narrow, wide: 2 * (out * narrow + back * wide)
    },
    "only rows in dispatch are narrow; results and gradients have wide_bytes": {
        "total": lambda out, back, narrow, wide: 3 * (out + back) * narrow
    },
    "in dispatch an element has narrow_bytes": {"total": lambda out, back, narrow, wide: 3 * (out + back) * wide},
    "the gradients of dispatched rows are wide": {
        "total": lambda out, back, narrow, wide: 2 * out * narrow + 2 * back * wide + out * wide + back * narrow
    },
    "received rows are counted as well; return what this rank sends": {
        "total": lambda out, back, narrow, wide: 2 * (out + back) * (narrow + 2 * wide)
    },
}
check_sent_bytes = Exercise(sent_bytes, _tables_of_rows, WRONG_SENT)


# ------------------------------------------------------------------------------------ 5. whose gradients
def sum_gradients(expert_grads, other_grads, ep_group, expert_dp_group, dp_group, experts=None, rest=None):
    """Experts' over expert_dp, the rest over dp, all divided by dp. A mistake: (the group's name or none, divisor)."""
    groups = {"ep": ep_group, "expert_dp": expert_dp_group, "dp": dp_group}
    for grads, (name, divisor) in ((expert_grads, experts or ("expert_dp", DP)), (other_grads, rest or ("dp", DP))):
        for grad in grads:
            if name:
                all_reduce_(grad, groups[name])
            grad /= divisor


def _watch_gradients(answer, seed, size):
    one, two = numbers(seed + dist.get_rank(), 2, size, 2)
    groups = expert_groups(dist.group.WORLD, EP)
    answer([one], [two], groups.ep, groups.expert_dp, groups.dp)
    return {"an expert's gradient": one, "the gradient of the rest": two}


WRONG_SUMS = {
    "a mean over the ranks that have this expert: ep times too large; divide by all ranks of dp": {
        "experts": ("expert_dp", DP // EP)
    },
    "summed over all ranks, those with other experts too": {"experts": ("dp", DP)},
    "summed over the ranks that exchange tokens; those have other experts": {"experts": ("ep", DP)},
    "not summed: the same expert on another rank saw other tokens": {"experts": ("", DP)},
    "not divided: each rank's loss is a mean over its own tokens, and there are dp": {"experts": ("expert_dp", 1)},
    "not divided by the number of ranks": {"rest": ("dp", 1)},
    "the rest is on all ranks, not only on those with the same experts": {"rest": ("expert_dp", DP)},
    "a mean over the ranks with the same experts; the rest is on all ranks": {"rest": ("expert_dp", DP // EP)},
}
check_sum_gradients = Exercise(
    sum_gradients, lambda rng: [(DP, fresh_seed(rng), rng.randrange(3, 9))], WRONG_SUMS, _watch_gradients, ranks=True
)
