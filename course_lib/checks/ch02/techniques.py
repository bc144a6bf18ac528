"""Tables of chapter 02: gradients, what waits for backward, calls of small models, drawn afresh."""

import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checks.core import fresh_generator, fresh_seed, numbers
from course_lib.checks.table import Exercise
from course_lib.checks.watch import Kept

_NO_TARGET = -100


# ------------------------------------------------------------------------------------ 1. accumulation
class _Tiny(nn.Module):
    """A language model of one matrix, which notes the rows of each call and what was kept when it began."""

    def __init__(self, seed: int):
        super().__init__()
        self.table, self.kept, self.rows = nn.Parameter(numbers(seed, 11, 11)), Kept(), []

    def forward(self, x_BS: Tensor) -> Tensor:
        self.rows.append(len(x_BS))
        with self.kept.by_a_forward():
            return self.table[x_BS]


def _count(parts):
    return sum(int((y_BS != _NO_TARGET).sum()) for _, y_BS in parts)


def accumulate(model, parts, share=lambda part, parts, loss: loss / _count(parts), start=lambda model: None):
    """Gradients of the mean over all targets that count, one forward and backward a micro-batch."""
    for x_BS, y_BS in parts:
        start(model)
        loss = F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten(), reduction="sum")
        share((x_BS, y_BS), parts, loss).backward()


def _mean(part, loss):
    return loss / max(1, _count([part]))


def _one_backward(model, parts):
    losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") for x, y in parts]
    (sum(losses) / _count(parts)).backward()


def _all_at_once(model, parts):
    longest = max(x_BS.shape[1] for x_BS, _ in parts)
    x_BS = torch.cat([F.pad(x_BS, (0, longest - x_BS.shape[1])) for x_BS, _ in parts])
    y_BS = torch.cat([F.pad(y_BS, (0, longest - y_BS.shape[1]), value=_NO_TARGET) for _, y_BS in parts])
    F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten()).backward()


def _micro_batches(rng: random.Random) -> list[tuple]:
    """Of different shapes and numbers of targets that count; once one has none."""
    cases = []
    for counted in (rng.sample([2, 3, 5, 7], 4), [3, 0, 2, 5]):
        parts = []
        for rows, targets in zip(rng.sample([2, 3, 4, 5], 4), counted, strict=True):
            draw, shape = fresh_generator(rng), (rows, rng.randrange(5, 8))
            x_BS, y_BS = (torch.randint(11, shape, generator=draw) for _ in range(2))
            y_BS.view(-1)[torch.randperm(y_BS.numel(), generator=draw)[targets:]] = _NO_TARGET
            parts.append((x_BS, y_BS))
        cases.append((fresh_seed(rng), parts))
    return cases


def _watch_accumulation(answer, seed, parts):
    model = _Tiny(seed)
    answer(model, parts)
    return {
        "rows of each forward pass": sorted(model.rows),
        "micro-batches kept when a forward pass begins": model.kept.most(slack=1),
        "the gradient": model.table.grad,
    }


WRONG_SUM = {
    "the model has no gradient; call backward() on each micro-batch's loss": lambda model, parts: (
        [model(x_BS) for x_BS, _ in parts] and None
    ),
    "one forward pass for each micro-batch: together they would not fit": _all_at_once,
    "one backward for the sum of the losses keeps what every forward saved, as the whole batch would; call "
    "backward() after each micro-batch": _one_backward,
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
def _scaled_step(
    gradients, scale, good_steps, interval, update, finite=lambda g: g.isfinite().all(), divide=True, skipped=None
):
    if not all(finite(gradient) for gradient in gradients):
        return skipped(scale, good_steps) if skipped else (scale / 2, 0)
    for gradient in gradients if divide else []:
        gradient /= scale
    update()
    good_steps += 1
    return (scale * 2, 0) if good_steps == interval else (scale, good_steps)


def _scaled_gradients(rng: random.Random) -> list[tuple]:
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
    "update() ran 0 times although all gradients were finite; once is right": lambda *given: _scaled_step(
        *given[:-1], lambda: None
    ),
    "the update ran although a gradient of the last tensor is inf: that step must be left out": (
        lambda gradients, *given: _scaled_step(gradients, *given, finite=lambda gradient: gradients[0].isfinite().all())
    ),
    "the update ran although a gradient of the last tensor is nan: that step must be left out": (
        {"finite": lambda gradient: not gradient.isinf().any()}
    ),
    "still multiplied by the scale: divide in place, before the update": {"divide": False},
    "the good steps are counted in a row: start again at 0": {"skipped": lambda scale, good: (scale / 2, good)},
    "this step was not a good one": {"skipped": lambda scale, good: (scale / 2, good + 1)},
    "the scale was too large, so halve it": {"skipped": lambda scale, good: (scale, 0)},
    "the scale was too large, and it was doubled": {"skipped": lambda scale, good: (scale * 2, 0)},
    "the scale never grows": lambda gradients, scale, good_steps, interval, update: _scaled_step(
        gradients, scale, good_steps, 10**9, update
    ),
    "count the next row of good steps from 0": lambda gradients, scale, good_steps, interval, update: (
        _scaled_step(gradients, scale, good_steps, 10**9, update)[0] * (2 if good_steps + 1 == interval else 1),
        good_steps + 1,
    ),
}
_SAYS_STEP = {
    "times that update() ran": "a step with a gradient that is not finite must be left out",
    "(scale, good_steps)": "return the next scale and the next count of good steps, two numbers",
}
check_scaled_step = Exercise(_scaled_step, _scaled_gradients, WRONG_STEP, _watch_step, _SAYS_STEP)


# ------------------------------------------------------------------------------------ 3. two halves of a softmax
def merge(out_a, lse_a, out_b, lse_b):
    """Attention over two sets of keys, from the two outputs and log-sum-exps."""
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp() + out_b * (lse_b - lse).exp(), lse


def _halves(rng: random.Random) -> list[tuple]:
    """Small scores, a second half that saw no key, and scores whose exp overflows."""
    cases, shape = [], (2, rng.randrange(3, 6), rng.randrange(2, 5))
    for size in (1.0, 400.0):
        out_a, out_b = numbers(rng, *shape), numbers(rng, *shape)
        lse_a, lse_b = (size * (3 + numbers(rng, *shape[:2], 1).abs()) for _ in range(2))
        cases.append((out_a, lse_a, out_b, lse_b))
    out, lse = cases[0][:2]
    return [cases[0], (out, lse, torch.zeros_like(out), torch.full_like(lse, -math.inf)), cases[1]]


def _watch_merged(answer, *halves):
    result = answer(*halves)
    pair = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
    return {"the output": pair[0], "the log-sum-exp": pair[1]}


def _as_they_are(out_a, lse_a, out_b, lse_b):
    total = lse_a.exp() + lse_b.exp()
    return (out_a * lse_a.exp() + out_b * lse_b.exp()) / total, total.log()


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
    "the result overflows: take the larger log-sum-exp off before exp, as the chapter's maximum": _as_they_are,
    "the result is not a number where the second half saw no key at all (log-sum-exp of minus infinity)": _output(
        lambda a, la, b, lb: merge(a, la, b, lb)[0] + 0 * lb
    ),
}
_SAYS_MERGE = {"the log-sum-exp": "return two tensors: the output and the log-sum-exp of both halves together"}
check_merge = Exercise(merge, _halves, WRONG_MERGE, _watch_merged, _SAYS_MERGE)
