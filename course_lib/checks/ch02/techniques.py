"""Tables of chapter 02: gradients, what waits for backward, calls of small models, drawn afresh."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checks import Exercise, fresh_seed, numbers
from course_lib.checks.watch import Kept
from course_lib.minimal.ring_attention import merge

_NO_TARGET = -100


# ------------------------------------------------------------------------------------ 1. accumulation
def _count(parts):
    return sum(int((y_BS != _NO_TARGET).sum()) for _, y_BS in parts)


def _loss(model, x_BS, y_BS):
    return F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten(), reduction="sum")


def accumulate(model, parts, share=lambda part, parts, loss: loss / _count(parts), start=lambda model: None):
    """Gradients of the mean over all targets that count, one forward and backward a micro-batch."""
    for part in parts:
        start(model)
        share(part, parts, _loss(model, *part)).backward()


def _mean(part, loss):
    return loss / max(1, _count([part]))


def _micro_batches(rng):
    """Of different numbers of rows, and of targets that count; once one has none."""
    cases = []
    for counted in (rng.sample([2, 3, 5, 7], 4), [3, 0, 2, 5]):
        parts = []
        for rows, targets in zip(rng.sample([2, 3, 4, 5], 4), counted, strict=True):
            x_BS, y_BS = (torch.tensor(rng.choices(range(11), k=6 * rows)).view(rows, 6) for _ in range(2))
            y_BS.view(-1)[rng.sample(range(6 * rows), 6 * rows - targets)] = _NO_TARGET
            parts.append((x_BS, y_BS))
        cases.append((fresh_seed(rng), parts))
    return cases


def _watch_accumulation(answer, seed, parts):
    model = nn.Embedding.from_pretrained(numbers(seed, 11, 11), freeze=False)
    kept = Kept(model)
    answer(model, parts)
    return {
        "rows of each forward pass": sorted(kept.rows),
        "micro-batches kept when a forward pass begins": kept.most(slack=1),
        "the gradient": model.weight.grad,
    }


WRONG_SUM = {
    "the model has no gradient; call backward() on each micro-batch's loss": {
        "share": lambda part, parts, loss: loss.detach().requires_grad_()
    },
    "one forward pass for each micro-batch: together they would not fit": (
        lambda model, parts: accumulate(model, [[torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]])
    ),
    "one backward for the sum of the losses keeps what every forward saved, as the whole batch would; call "
    "backward() after each micro-batch": (
        lambda model, parts: (sum(_loss(model, *part) for part in parts) / _count(parts)).backward()
    ),
    "summed, not averaged: each part's mean counted whole": {"share": lambda part, parts, loss: _mean(part, loss)},
    "the mean of the micro-batches' means: one with few targets counts too much": {
        "share": lambda part, parts, loss: _mean(part, loss) / len(parts)
    },
    "weighted by all positions: those whose target is -100 do not count": {
        "share": lambda part, parts, loss: _mean(part, loss) * part[1].numel() / sum(y.numel() for _, y in parts)
    },
    "the last micro-batch's alone: gradients must add up, so clear them only before the first": {
        "start": lambda model: model.zero_grad()
    },
    "summed over all targets, and never divided by their number": {"share": lambda part, parts, loss: loss},
}
check_accumulate = Exercise(accumulate, _micro_batches, WRONG_SUM, _watch_accumulation)


# ------------------------------------------------------------------------------------ 2. loss scaling
def _all_finite(gradients):
    return torch.cat(gradients).isfinite().all()


def _scaled_step(gradients, scale, good_steps, interval, update, finite=_all_finite, divide=True, skipped=None):
    if not finite(gradients):
        return skipped(scale, good_steps) if skipped else (scale / 2, 0)
    for gradient in gradients if divide else []:
        gradient /= scale
    update()
    good_steps += 1
    return (scale * 2, 0) if good_steps == interval else (scale, good_steps)


def _scaled_gradients(rng):
    """After a good step, after one with a gradient that is not finite, and after the last good one of a row."""
    interval, scale, cases = rng.randrange(5, 9), 2.0 ** rng.randrange(8, 12), []
    for bad in (None, math.inf, -math.inf, math.nan, "last"):
        gradients = [numbers(rng, rng.randrange(2, 6)) * scale for _ in range(3)]
        if isinstance(bad, float):
            gradients[-1][rng.randrange(2)] = bad
        good_steps = interval - 1 if bad == "last" else rng.randrange(1, interval - 2)
        cases.append((gradients, scale, good_steps, interval))
    return cases


def _watch_step(answer, gradients, *args):
    seen: list[list[Tensor]] = []
    result = answer(gradients, *args, lambda: seen.append([gradient.clone() for gradient in gradients]))
    return {
        "times that update() ran": len(seen),
        "the gradients at the time of the update": seen,
        "(scale, good_steps)": result,
    }


WRONG_STEP = {
    "update() ran 0 times although all gradients were finite; once is right": {"update": lambda: None},
    "the update ran although a gradient of the last tensor is inf: that step must be left out": {
        "finite": lambda gradients: gradients[0].isfinite().all()
    },
    "the update ran although a gradient of the last tensor is nan: that step must be left out": {
        "finite": lambda gradients: not torch.cat(gradients).isinf().any()
    },
    "still multiplied by the scale: divide in place, before the update": {"divide": False},
    "the good steps are counted in a row: start again at 0": {"skipped": lambda scale, good: (scale / 2, good)},
    "this step was not a good one": {"skipped": lambda scale, good: (scale / 2, good + 1)},
    "the scale was too large, so halve it": {"skipped": lambda scale, good: (scale, 0)},
    "the scale was too large, and it was doubled": {"skipped": lambda scale, good: (scale * 2, 0)},
    "the scale never grows": {"interval": 10**9},
    "count the next row of good steps from 0": lambda *case: (_scaled_step(*case)[0], case[2] + 1),
}
_SAYS_STEP = {
    "times that update() ran": "a step with a gradient that is not finite must be left out",
    "(scale, good_steps)": "return the next scale and the next count of good steps, two numbers",
}
check_scaled_step = Exercise(_scaled_step, _scaled_gradients, WRONG_STEP, _watch_step, _SAYS_STEP)


# ------------------------------------------------------------------------------------ 3. two halves of a softmax
def _halves(rng):
    """Small scores, a second half that saw no key, and scores whose exp overflows."""
    shape = 2, rng.randrange(3, 6), rng.randrange(2, 5)
    out_a, out_b, lse_a, lse_b = (numbers(rng, *shape[:2], size) for size in (shape[2], shape[2], 1, 1))
    lse_a, lse_b, nothing = 3 + lse_a.abs(), 3 + lse_b.abs(), torch.full_like(lse_b, -math.inf)
    cases = ((lse_a, out_b, lse_b), (lse_a, torch.zeros_like(out_b), nothing), (400 * lse_a, out_b, 400 * lse_b))
    return [(out_a, *case) for case in cases]


def output_and_lse(answer, *halves):
    result = answer(*halves)
    pair = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
    return {"the output": pair[0], "the log-sum-exp": pair[1]}


def _output(of: Callable) -> Callable:
    return lambda a, la, b, lb: (of(a, la, b, lb), torch.logaddexp(la, lb))


def _lse(of: Callable) -> Callable:
    return lambda a, la, b, lb: (merge(a, la, b, lb)[0], of(la, lb))


WRONG_MERGE = {
    "averaged: a half with larger scores weighs more": _output(lambda a, la, b, lb: (a + b) / 2),
    "the outputs added: each is normalised, so they need weights that sum to 1": _output(lambda a, la, b, lb: a + b),
    "the weights are swapped": _output(lambda a, la, b, lb: merge(b, la, a, lb)[0]),
    "weighted by the log-sum-exps themselves, and not by their exponentials": _output(
        lambda a, la, b, lb: (la * a + lb * b) / (la + lb)
    ),
    "the log-sum-exps were added: add their exponentials": _lse(lambda la, lb: la + lb),
    "the larger of the two log-sum-exps: the other half's exponentials are missing": _lse(torch.maximum),
    "the result overflows: take the larger log-sum-exp off before exp, as the chapter's maximum": (
        lambda a, la, b, lb: merge(a, la.exp().log(), b, lb.exp().log())
    ),
    "the result is not a number where the second half saw no key at all (log-sum-exp of minus infinity)": _output(
        lambda a, la, b, lb: merge(a, la, b, lb)[0] + 0 * lb
    ),
}
_SAYS_MERGE = {"the log-sum-exp": "return two tensors: the output and the log-sum-exp of both halves together"}
check_merge = Exercise(merge, _halves, WRONG_MERGE, output_and_lse, _SAYS_MERGE)
