"""Graders of chapter 09, exercises 1 to 3: a router, a balancing step, what a capacity drops."""

import math

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, fail, fresh_generator, grader, numbers
from course_lib.config import MoeConfig
from course_lib.model import moe


def _expect_integers(got, want: Tensor, what: str, believed: dict[str, Tensor]) -> None:
    """Exactly these integers; otherwise the misconception that fits, or the first place that differs."""
    if not isinstance(got, Tensor):
        fail(f"{what} must be a tensor, got {type(got).__name__}")
    if got.shape == want.shape and torch.equal(got, want):
        return
    for message, value in believed.items():
        if got.shape == value.shape and torch.equal(got, value):
            fail(f"{what}: {message}")
    if got.shape != want.shape:
        fail(f"{what} has shape {tuple(got.shape)}, and {tuple(want.shape)} is right")
    place = (got != want).nonzero()[0].tolist()
    fail(f"{what} is wrong at {place}: {got[tuple(place)].item()}, and {want[tuple(place)].item()} is right")


def _pair(got, count: int, names: str) -> tuple:
    if not isinstance(got, (tuple, list)) or len(got) != count:
        fail(f"return {names}, got {type(got).__name__}")
    return tuple(got)


def _random_choice(generator: torch.Generator, tokens: int, experts: int, k: int) -> Tensor:
    """k different experts a token, the first ones preferred."""
    lean_E = torch.linspace(1.5, 0, experts, dtype=torch.float64)
    return (numbers(generator, tokens, experts) + lean_E).topk(k).indices


# ------------------------------------------------------------------------------------ 1. the router
@grader
def check_route(answer, rng):
    """Choice and weights, softmax and sigmoid, with a bias that chooses and does not weigh."""
    for score in ("softmax", "sigmoid"):
        generator, experts, k = fresh_generator(rng), rng.randrange(5, 10), rng.choice([2, 3])
        config = MoeConfig(experts, k, 8, score=score, balancing="bias")
        logits_TE, bias_E = numbers(generator, 60, experts), 0.3 * numbers(generator, experts)
        expert_Tk, weight_Tk = _pair(answer(logits_TE.clone(), k, score, bias_E.clone()), 2, "expert_Tk, weight_Tk")
        _expect_routed(expert_Tk, weight_Tk, logits_TE, bias_E, config)


def _expect_routed(expert_Tk: Tensor, weight_Tk: Tensor, logits_TE: Tensor, bias_E: Tensor, config: MoeConfig) -> None:
    where, k, want = f"score {config.score!r}, k = {config.top_k}", config.top_k, moe.route(logits_TE, config, bias_E)
    score_TE, other = moe.scores(logits_TE, config.score), {"softmax": "sigmoid", "sigmoid": "softmax"}[config.score]
    kind = "one softmax over the experts" if config.score == "softmax" else "a sigmoid of each logit by itself"
    believed = {
        "the bias is missing: it is added to the scores for the choice": score_TE.topk(k).indices,
        "the bias is added to the scores, not to the logits": moe.scores(logits_TE + bias_E, config.score)
        .topk(k)
        .indices,
        f"scores are {kind} here": (moe.scores(logits_TE, other) + bias_E).topk(k).indices,
    }
    _expect_integers(expert_Tk, want.expert_Tk, f"{where}: expert_Tk, best first", believed)
    chosen_Tk, biased_Tk = score_TE.gather(1, expert_Tk), (score_TE + bias_E).gather(1, expert_Tk)
    wrong = {
        "the bias chooses, it does not weigh": biased_Tk / biased_Tk.sum(-1, keepdim=True),
        "these do not add up to 1: divide by the sum of the chosen scores": chosen_Tk,
        "a softmax of scores; the scores themselves are divided by their sum": chosen_Tk.softmax(-1),
    }
    if config.score == "sigmoid":
        of_logits_Tk = logits_TE.gather(1, expert_Tk).softmax(-1)
        wrong["a softmax of the chosen logits; with sigmoids that is not scores divided by their sum"] = of_logits_Tk
    expect_close(weight_Tk, want.weight_Tk, f"{where}: weight_Tk", wrong)


# ------------------------------------------------------------------------------------ 3. capacity
@grader
def check_keep(answer, rng):
    """Which assignments fit: capacity counts assignments, rounded up; first assignments go first."""
    for rounding in ("near below", "none", "any"):
        expert_Tk, experts, factor, want, believed = _drawn_capacity(rng, rounding)
        tokens, k = expert_Tk.shape
        got = answer(expert_Tk.clone(), experts, factor)
        _expect_integers(got, want, f"{tokens} tokens, k = {k}, {experts} experts, factor {factor}: kept_Tk", believed)


ONE_MORE = (
    "each expert takes one too many",
    "the capacity is a whole number here, and stays what it is when rounded up",
)


def _drawn_capacity(rng, rounding: str) -> tuple:
    """Numbers for which each misconception gives something else.

    rounding   of the capacity, upwards: "near below" (from less than a half), "none" (it is whole) or "any" but none
    """
    while True:
        generator, k, experts = fresh_generator(rng), rng.choice([2, 3]), rng.choice([4, 6, 8])
        tokens, factor = rng.randrange(20, 50), rng.choice([0.75, 1.0, 1.25])
        expert_Tk = _random_choice(generator, tokens, experts, k)
        share = factor * tokens / experts
        part = k * share % 1
        if rounding == "none" and (part or experts == 6):  # sixths are not exact
            continue
        if rounding != "none" and not 0.01 < part < (0.49 if rounding == "near below" else 0.99):
            continue
        want = moe.keep(expert_Tk, experts, math.ceil(k * share))
        believed = _without_k(expert_Tk, experts, share) | {
            ONE_MORE[rounding == "none"]: moe.keep(expert_Tk, experts, math.ceil(k * share) + 1),
            "token by token; all first assignments come before any second one": _keep_by_token(
                expert_Tk, math.ceil(k * share)
            ),
            "a token that loses one assignment keeps its others": want & want.all(1, keepdim=True),
        }
        if rounding != "none":
            believed["the capacity is rounded up"] = moe.keep(expert_Tk, experts, math.floor(k * share))
        if all(not torch.equal(want, value) for value in believed.values()):
            return expert_Tk, experts, factor, want, believed


def _without_k(expert_Tk: Tensor, experts: int, share: float) -> dict[str, Tensor]:
    """Who leaves k out of the capacity: alone, rounded down, and token by token; message -> what they keep."""
    up, order = "its rounding goes up", "first choices go before second ones"
    formula = "assignments count, k for each token: factor * k * T / E"
    return {
        f"only k is missing in the capacity; {formula}": moe.keep(expert_Tk, experts, math.ceil(share)),
        f"k is missing in the capacity, and {up}; {formula}": moe.keep(expert_Tk, experts, math.floor(share)),
        f"k is missing in the capacity, and {order}; {formula}": _keep_by_token(expert_Tk, math.ceil(share)),
        f"k is missing in the capacity, {up}, and {order}; {formula}": _keep_by_token(expert_Tk, math.floor(share)),
    }


def _keep_by_token(expert_Tk: Tensor, room: int) -> Tensor:
    taken, kept = {}, []
    for expert in expert_Tk.flatten().tolist():
        taken[expert] = taken.get(expert, 0) + 1
        kept.append(taken[expert] <= room)
    return torch.tensor(kept).view_as(expert_Tk)


# ------------------------------------------------------------------------------------ 2. a balancing step
@grader
def check_bias_step(answer, rng):
    """One step down for overloaded experts, up for the others, none at the mean."""
    for _ in range(2):
        generator, experts, speed = fresh_generator(rng), rng.choice([6, 8]), rng.choice([0.001, 0.01, 0.05])
        off_E = torch.randint(2, 40, (experts - 2,), generator=generator)
        above = off_E.sum() // 2
        off_E = torch.cat([-off_E, torch.stack([above, off_E.sum() - above])])  # most are below, so that the median is
        load_E = 50 + off_E[torch.randperm(experts, generator=generator)]
        load_E = torch.cat([load_E, torch.tensor([50, 50])])  # the mean is 50: these two stay
        bias_E, below_E = 0.1 * numbers(generator, experts + 2), 50.0 - load_E.double()
        step_E = speed * below_E.sign()
        given = bias_E.clone()
        got = answer(given, load_E.clone(), speed)
        wrong = {
            "the wrong way: an overloaded expert must be chosen less": bias_E - step_E,
            "every step has the same size, however far the load is from the mean": bias_E + speed * below_E,
            "a step in proportion to the relative load; only its direction counts": bias_E + speed * below_E / 50,
            "an expert at the mean stays where it is": bias_E + speed * torch.where(below_E >= 0, 1.0, -1.0).double(),
            "an expert at the mean stays; it went down": bias_E + speed * torch.where(below_E > 0, 1.0, -1.0).double(),
            "the new bias starts from the old one": step_E,
            "away from the median; a fair share is the mean": bias_E + speed * (load_E.median() - load_E).sign(),
        }
        expect_close(got, bias_E + step_E, f"loads {load_E.tolist()}, speed {speed}: bias_E", wrong)
