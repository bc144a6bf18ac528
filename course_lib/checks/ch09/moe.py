"""Graders of chapter 09, exercises 1 to 5: a router, a balancing step, a capacity, bytes, sums of gradients."""

import math
from itertools import combinations

import torch
import torch.distributed as dist

from course_lib.checks import Exercise, agree, fresh_generator, fresh_seed, numbers, pairs, result, several
from course_lib.comm import all_reduce_
from course_lib.model import moe
from course_lib.parallel.expert import expert_groups

DP, EP = 4, 2


# ------------------------------------------------------------------------------------ 1. the router
def _normalised(score_Tk):
    return score_Tk / score_Tk.sum(-1, keepdim=True)


def route(logits_TE, top_k, score, bias_E, choose=None, weigh=None):
    """expert_Tk, weight_Tk. A mistake chooses by other numbers, or weighs otherwise: by logits, scores and biases."""
    score_TE = moe.scores(logits_TE, score)
    choice_TE = choose(logits_TE, score, bias_E) if choose else score_TE + bias_E
    expert_Tk = choice_TE.topk(top_k).indices
    chosen = [x_TE.gather(1, expert_Tk) for x_TE in (logits_TE, score_TE, bias_E.expand_as(score_TE))]
    return expert_Tk, weigh(*chosen) if weigh else _normalised(chosen[1])


def logits(rng):
    return [
        (numbers(rng, 60, experts), rng.choice([2, 3]), score, 0.3 * numbers(rng, experts))
        for score, experts in zip(("softmax", "sigmoid"), rng.choices(range(5, 10), k=2), strict=True)
    ]


_WRONG_ROUTE = {
    "the bias is missing: it is added to the scores for the choice": {
        "choose": lambda logits_TE, score, bias_E: moe.scores(logits_TE, score)
    },
    "the bias is added to the scores, not to the logits": {
        "choose": lambda logits_TE, score, bias_E: moe.scores(logits_TE + bias_E, score)
    },
    "scores are a sigmoid of each logit by itself here": {"score": "softmax"},
    "scores are one softmax over the experts here": {"score": "sigmoid"},
    "the bias chooses, it does not weigh": {"weigh": lambda _, score_Tk, bias_Tk: _normalised(score_Tk + bias_Tk)},
    "these do not add up to 1: divide by the sum of the chosen scores": {
        "weigh": lambda _, score_Tk, bias_Tk: score_Tk
    },
    "a softmax of scores; the scores themselves are divided by their sum": {
        "weigh": lambda logits_Tk, score_Tk, bias_Tk: score_Tk.softmax(-1)
    },
    "a softmax of the chosen logits; with sigmoids that is not scores divided by their sum": {
        "weigh": lambda logits_Tk, score_Tk, bias_Tk: logits_Tk.softmax(-1)
    },
}
check_route = Exercise(
    route, logits, _WRONG_ROUTE, several("return expert_Tk, weight_Tk", "expert_Tk, best first", "weight_Tk")
)


# ------------------------------------------------------------------------------------ 2. a balancing step
def _bias_step(bias_E, load_E, speed, step=lambda below_E, mean: below_E.sign()):
    """The biases after one step, given how far each load is below the mean."""
    mean = load_E.double().mean()
    return bias_E + speed * step(mean - load_E, mean)


def _bias_in_place(bias_E, load_E, speed):
    """Steps are added to the tensor that was given."""
    off_E = load_E * len(load_E) - load_E.sum()
    bias_E[off_E > 0] -= speed
    bias_E[off_E < 0] += speed
    return bias_E


def loads(rng):
    """Two loads are the mean, 50; of the others most are below, so that the median is."""
    for _ in range(2):
        generator, experts, speed = fresh_generator(rng), rng.choice([6, 8]), rng.choice([0.001, 0.01, 0.05])
        off_E = torch.randint(2, 40, (experts - 2,), generator=generator)
        above = off_E.sum() // 2
        off_E = torch.cat([-off_E, torch.stack([above, off_E.sum() - above])])
        load_E = 50 + torch.cat([off_E[torch.randperm(experts, generator=generator)], torch.tensor([0, 0])])
        yield 0.1 * numbers(generator, experts + 2), load_E, speed


WRONG_STEP = {
    "the wrong way: an overloaded expert must be chosen less": {"step": lambda below_E, _: -below_E.sign()},
    "every step has the same size, however far the load is from the mean": {"step": lambda below_E, _: below_E},
    "in proportion to the relative load; only its direction counts": {"step": lambda below_E, mean: below_E / mean},
    "an expert at the mean stays where it is": {"step": lambda below_E, _: (below_E >= 0).double() * 2 - 1},
    "an expert at the mean stays; it went down": {"step": lambda below_E, _: (below_E > 0).double() * 2 - 1},
    "the new bias starts from the old one": {"bias_E": 0},
    "away from the median; a fair share is the mean": lambda bias_E, load_E, speed: (
        bias_E + speed * (load_E.median() - load_E).sign()
    ),
}
check_bias_step = Exercise(_bias_step, loads, WRONG_STEP, result, right=_bias_in_place)


# ------------------------------------------------------------------------------------ 3. capacity
def keep(expert_Tk, num_experts, factor, room=math.ceil, k=None, by_token=False):
    """kept_Tk. A mistake makes another capacity of `factor k T / E`, or fills the experts token by token."""
    tokens, top_k = expert_Tk.shape
    capacity = room(factor * (k or top_k) * tokens / num_experts)
    if not by_token:
        return moe.keep(expert_Tk, num_experts, capacity)
    taken, kept = [0] * num_experts, []
    for expert in expert_Tk.flatten().tolist():
        taken[expert] += 1
        kept.append(taken[expert] <= capacity)
    return torch.tensor(kept).view_as(expert_Tk)


def choices(rng):
    """A capacity that is rounded up from less than a half, one that is whole, and any other; no two answers agree."""
    while True:
        cases = [_drawn_choice(rng, *ends) for ends in ((0.01, 0.49), (0.0, 0.0), (0.01, 0.99))]
        given = [[answer(*case) for case in cases] for answer in (keep, *dict(pairs(check_keep.wrong)).values())]
        if not any(agree(*pair) for pair in combinations(given, 2)):
            return cases


def _drawn_choice(rng, least, most):
    """k different experts a token, the first ones preferred; the part of the capacity behind the point is within."""
    while True:
        experts, k, tokens = rng.choice([4, 6, 8]), rng.choice([2, 3]), rng.randrange(20, 50)
        factor = rng.choice([0.75, 1.0, 1.25])
        if least <= factor * k * tokens / experts % 1 <= most and (most or experts != 6):  # sixths are not exact
            lean_E = torch.linspace(1.5, 0, experts, dtype=torch.float64)
            return (numbers(rng, tokens, experts) + lean_E).topk(k).indices, experts, factor


K, ORDER = "k is missing in the capacity", "first choices go before second ones"
UP = "its rounding goes up"
FORMULA = "; assignments count, k for each token: factor * k * T / E"
_WRONG_KEEP = {
    f"only {K}{FORMULA}": {"k": 1},
    f"{K}, and {UP}{FORMULA}": {"k": 1, "room": math.floor},
    f"{K}, and {ORDER}{FORMULA}": {"k": 1, "by_token": True},
    f"{K}, {UP}, and {ORDER}{FORMULA}": {"k": 1, "room": math.floor, "by_token": True},
    "each expert takes one too many": {"room": lambda share: math.ceil(share) + 1},
    "the capacity is a whole number here, and stays what it is when rounded up": {
        "room": lambda share: math.floor(share) + 1
    },
    "token by token; all first assignments come before any second one": {"by_token": True},
    "a token that loses one assignment keeps its others": lambda expert_Tk, num_experts, factor: (
        keep(expert_Tk, num_experts, factor) & keep(expert_Tk, num_experts, factor).all(1, keepdim=True)
    ),
    "the capacity is rounded up": {"room": math.floor},
}
check_keep = Exercise(keep, choices, _WRONG_KEEP)


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
    for _ in range(3):
        ranks = rng.randrange(3, 7)
        rows = [[rng.randrange(1, 60) for _ in range(ranks)] for _ in range(ranks)]
        rank = rng.randrange(ranks)
        rows[rank][rank - 1] += 60 * ranks
        yield rows, rank, rng.randrange(16, 100), 1, rng.choice([2, 4])


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
