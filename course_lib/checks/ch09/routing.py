"""Graders of chapter 09, exercises 1 to 4 and 6: router, dispatch, combine, capacity, a balancing step."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.checks.core import expect_close, expect_equal, fail, fresh_generator, grader
from course_lib.config import MoeConfig
from course_lib.model import moe


def _numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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
    return (_numbers(generator, tokens, experts) + lean_E).topk(k).indices


# ------------------------------------------------------------------------------------ 1. the router
@grader
def check_route(answer, rng):
    """Choice and weights, softmax and sigmoid, with a bias that chooses and does not weigh."""
    for score in ("softmax", "sigmoid"):
        generator, experts, k = fresh_generator(rng), rng.randrange(5, 10), rng.choice([2, 3])
        config = MoeConfig(experts, k, 8, score=score, balancing="bias")
        logits_TE, bias_E = _numbers(generator, 60, experts), 0.3 * _numbers(generator, experts)
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


# ------------------------------------------------------------------------------------ 2. dispatch
@grader
def check_dispatch(answer, rng):
    """Rows sorted by expert, where each comes from, and how many go to each rank."""
    for _ in range(3):
        generator, ranks, k = fresh_generator(rng), rng.choice([2, 4]), rng.choice([2, 3])
        experts, tokens = ranks * rng.choice([2, 3]), rng.randrange(9, 30)
        x_TD, expert_Tk = _numbers(generator, tokens, 3), _random_choice(generator, tokens, experts, k)
        x_RD, assignment_R, rows = _pair(answer(x_TD, expert_Tk, experts, ranks), 3, "x_RD, assignment_R, rows")
        _expect_dispatched(x_RD, assignment_R, rows, x_TD, expert_Tk, experts, ranks)


def _expect_dispatched(x_RD, assignment_R, rows, x_TD: Tensor, expert_Tk: Tensor, experts: int, ranks: int) -> None:
    tokens, k = expert_Tk.shape
    where = f"{tokens} tokens, k = {k}, {experts} experts on {ranks} ranks"
    want_R = expert_Tk.flatten().argsort(stable=True)
    by_slot_R = expert_Tk.t().flatten().argsort(stable=True)
    believed = {
        "these are the tokens; it must say token * k + slot": want_R // k,
        "this says in which row each assignment is; it must say which assignment is in each row": want_R.argsort(),
        "these are all assignments in order; sort them by expert": torch.arange(tokens * k),
        "the first assignments of all tokens stand before the second ones; flatten expert_Tk token by token": by_slot_R,
    }
    _expect_integers(assignment_R, want_R, f"{where}: assignment_R", believed)
    wrong = {
        "row r is of token assignment_R[r] // k, not % T": x_TD[want_R % tokens],
        "these are the rows before sorting": x_TD.repeat_interleave(k, 0),
    }
    expect_close(x_RD, x_TD[want_R // k], f"{where}: x_RD", wrong)
    rows_E = expert_Tk.flatten().bincount(minlength=experts)
    got = rows.tolist() if isinstance(rows, Tensor) else rows
    tokens_N = [len({t for t in range(tokens) if r in expert_Tk[t].div(experts // ranks, rounding_mode="floor")})
                for r in range(ranks)]  # fmt: skip
    wrong_rows = {
        "rows of each expert; each rank has several experts": rows_E.tolist(),
        "experts lie in neighbours: rank 0 has the first ones, not every N-th": rows_E.view(-1, ranks).sum(0).tolist(),
        "tokens; one with two experts on a rank sends it two rows": tokens_N,
    }
    want = rows_E.view(ranks, -1).sum(1).tolist()
    expect_equal(got, want, f"{where}: rows for each rank", {m: v for m, v in wrong_rows.items() if v != want})


# ------------------------------------------------------------------------------------ 3. combine
@grader
def check_combine(answer, rng):
    """Each token's weighted sum, zero where all its assignments are dropped; and the weights' gradient."""
    for _ in range(2):
        generator, k, tokens = fresh_generator(rng), rng.choice([2, 3]), rng.randrange(9, 30)
        expert_Tk = _random_choice(generator, tokens, 6, k)
        order_R = expert_Tk.flatten().argsort(stable=True)
        order_R = order_R[(order_R // k != 1) & (order_R != 4 * k)]  # token 1 lost all its assignments, token 4 one
        y_RD, weight_Tk = _numbers(generator, len(order_R), 3), _numbers(generator, tokens, k).softmax(-1)
        _expect_combined(answer, y_RD, order_R, weight_Tk.requires_grad_())


def _expect_combined(answer: Callable, y_RD: Tensor, assignment_R: Tensor, weight_Tk: Tensor) -> None:
    (tokens, k), token_R = weight_Tk.shape, assignment_R // weight_Tk.shape[1]
    where, weight_R1 = (
        f"{tokens} tokens, k = {k}, some assignments dropped",
        weight_Tk.flatten()[assignment_R].unsqueeze(1),
    )

    def added(rows_RD: Tensor) -> Tensor:
        return torch.zeros(tokens, 3, dtype=torch.float64).index_add(0, token_R, rows_RD)

    want, last = added(y_RD * weight_R1), torch.zeros(tokens, 3, dtype=torch.float64)
    for row, token in enumerate(token_R.tolist()):
        last[token] = (y_RD * weight_R1)[row].detach()
    got = answer(y_RD, assignment_R, weight_Tk)
    wrong = {
        "the weights are missing": added(y_RD),
        "row r has the weight of assignment_R[r]; these are the weights of the first rows": added(
            y_RD * weight_Tk.flatten()[: len(y_RD)].unsqueeze(1)
        ),
        "a token with several rows kept only the last: they must be added up": last,
        "a mean over assignments; the weights add up to 1 already": want / k,
        "what was dropped is missing; the weights of the rest are not made to add up to 1 again": want
        / added(weight_R1.expand(-1, 3)).clamp(min=1e-9),
        "row r is of token assignment_R[r] // k, not % T": torch.zeros(tokens, 3, dtype=torch.float64).index_add(
            0, assignment_R % tokens, y_RD * weight_R1
        ),
    }
    expect_close(got, want.detach(), f"{where}: y_TD", {message: value.detach() for message, value in wrong.items()})
    grad = None
    if got.requires_grad:
        (grad,) = torch.autograd.grad(got.square().sum(), weight_Tk, allow_unused=True)
    if grad is None:
        fail(f"{where}: the weights get no gradient; it is all that the router learns from")
    expect_close(grad, torch.autograd.grad(want.square().sum(), weight_Tk)[0], f"{where}: gradient of the weights")


# ------------------------------------------------------------------------------------ 4. capacity
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
        believed = {
            "the capacity counts assignments, k for each token: factor * k * T / E": moe.keep(
                expert_Tk, experts, math.ceil(share)
            ),
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


def _keep_by_token(expert_Tk: Tensor, room: int) -> Tensor:
    taken, kept = {}, []
    for expert in expert_Tk.flatten().tolist():
        taken[expert] = taken.get(expert, 0) + 1
        kept.append(taken[expert] <= room)
    return torch.tensor(kept).view_as(expert_Tk)


# ------------------------------------------------------------------------------------ 6. a balancing step
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
        bias_E, below_E = 0.1 * _numbers(generator, experts + 2), 50.0 - load_E.double()
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
