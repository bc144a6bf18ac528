"""Graders of chapter 02: gradients, kept bytes and calls of small models, drawn afresh. Arithmetic is in ladder.py."""

import math
import random
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_lib.checks.core import (
    expect_close,
    expect_equal,
    fail,
    fresh_generator,
    fresh_seed,
    grader,
    numbers,
    observed,
)

NO_TARGET = -100


# ------------------------------------------------------------------------------------ 1. accumulation
class _Tiny(nn.Module):
    """A language model of one matrix, which counts its rows and the forward passes that still wait for backward."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(numbers(generator, 11, 11))
        self.rows: list[int] = []
        self.saved, self.most_waiting = weakref.WeakSet(), 0

    def forward(self, x_BS: Tensor) -> Tensor:
        self.most_waiting = max(self.most_waiting, len({saved.of_forward for saved in self.saved}))
        self.rows.append(len(x_BS))
        with saved_tensors_hooks(self._save, lambda saved: saved.tensor):
            return self.table[x_BS]

    def _save(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(tensor, len(self.rows))
        self.saved.add(saved)
        return saved


class _Saved:
    """A tensor that a forward pass saved for backward; autograd drops it when backward has used it."""

    def __init__(self, tensor: Tensor, of_forward: int):
        self.tensor, self.of_forward = tensor, of_forward


def _parts(rng: random.Random, counted: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of different shapes, with that many targets that count."""
    parts = []
    for rows, count in zip(rng.sample([2, 3, 4, 5], len(counted)), counted, strict=True):
        shape = (rows, rng.randrange(5, 8))
        generator = fresh_generator(rng)
        x_BS, y_BS = (torch.randint(11, shape, generator=generator) for _ in range(2))
        hidden = torch.randperm(y_BS.numel(), generator=generator)[count:]
        y_BS.view(-1)[hidden] = NO_TARGET
        parts.append((x_BS, y_BS))
    return parts


def _gradient(seed: int, parts: list, shares: list[float]) -> Tensor:
    """The gradient of the sum of shares[i] times the mean loss of part i; a part without targets is left out."""
    model = _Tiny(seed)
    for (x_BS, y_BS), share in zip(parts, shares, strict=True):
        if (y_BS != NO_TARGET).any():
            (F.cross_entropy(model(x_BS).flatten(0, 1), y_BS.flatten()) * share).backward()
    return model.table.grad


@grader
def check_accumulate(answer, rng):
    """Gradients of the mean over all targets that count, one forward and backward a micro-batch."""
    some = rng.sample([2, 3, 5, 7], 3)
    for counted in (some, [some[0], 0, some[2]]):
        seed, parts = fresh_seed(rng), _parts(rng, counted)
        grad, rows, most_waiting = observed(_accumulated, answer, seed, parts)
        if grad is None:
            fail("the model has no gradient; call backward() on each micro-batch's loss")
        if rows != [len(x_BS) for x_BS, _ in parts]:
            fail(
                f"the model ran on {rows} rows, and {[len(x_BS) for x_BS, _ in parts]} is right: one forward "
                "pass for each micro-batch; together they would not fit"
            )
        if most_waiting > 1:  # a part without targets may wait until its name is given away
            fail(
                f"{most_waiting} micro-batches waited for backward when the last forward pass began: one "
                "backward for the sum of the losses keeps what every forward saved, as the whole batch would; call "
                "backward() after each micro-batch"
            )
        sizes = [y_BS.numel() for _, y_BS in parts]
        right = _gradient(seed, parts, [count / sum(counted) for count in counted])
        last = [0.0] * (len(parts) - 1)
        expect_close(
            grad,
            right,
            "the gradient",
            {
                "summed, not averaged: each micro-batch's mean counted whole": _gradient(seed, parts, [1.0] * 3),
                "the mean of the micro-batches' means: one with few targets counts too much": _gradient(
                    seed, parts, [1 / 3] * 3
                ),
                "weighted by all positions: those whose target is -100 do not count": _gradient(
                    seed, parts, [size / sum(sizes) for size in sizes]
                ),
                "the last micro-batch's alone: gradients must add up, so clear them only before the first": _gradient(
                    seed, parts, [*last, counted[-1] / sum(counted)]
                ),
                "summed over all targets, and never divided by their number": right * sum(counted),
            },
        )


def _accumulated(answer: Callable, seed: int, parts: list) -> tuple[Tensor | None, list[int], int]:
    model = _Tiny(seed)
    answer(model, parts)
    return model.table.grad, model.rows, model.most_waiting


# ------------------------------------------------------------------------------------ 2. loss scaling
@grader
def check_scaled_step(answer, rng):
    """Unscale, step or skip, and the next scale."""
    interval, scale = rng.randrange(5, 9), 2.0 ** rng.randrange(8, 12)
    for bad in (None, math.inf, -math.inf, math.nan):
        true = [numbers(rng, rng.randrange(2, 6)) for _ in range(3)]
        gradients = [gradient * scale for gradient in true]
        if bad is not None:
            gradients[-1][rng.randrange(2)] = bad
        good_steps = rng.randrange(1, interval - 2)
        got, seen = observed(_scaled_step, answer, gradients, scale, good_steps, interval)
        _expect_pair(got)
        if bad is None:
            _expect_unscaled_update(seen, true, scale)
            expect_equal(tuple(got), (scale, good_steps + 1), "(scale, good_steps) after a good step")
            continue
        if seen:
            fail(f"the update ran although a gradient of the last tensor is {bad}: that step must be left out")
        expect_equal(
            tuple(got),
            (scale / 2, 0),
            "(scale, good_steps) after an overflow",
            {
                "the good steps are counted in a row: start again at 0": (scale / 2, good_steps),
                "this step was not a good one": (scale / 2, good_steps + 1),
                "the scale was too large, so halve it": (scale, 0),
                "the scale was too large, and it was doubled": (scale * 2, 0),
            },
        )
    got, _ = observed(_scaled_step, answer, [numbers(rng, 3)], scale, interval - 1, interval)
    expect_equal(
        tuple(got),
        (scale * 2, 0),
        f"(scale, good_steps) after {interval} good steps in a row",
        {
            "the scale never grows": (scale, interval),
            "count the next row of good steps from 0": (scale * 2, interval),
        },
    )


def _scaled_step(answer: Callable, gradients: list[Tensor], *args) -> tuple[object, list[list[Tensor]]]:
    """What the answer returned, and the gradients at each of its updates."""
    seen: list[list[Tensor]] = []
    return answer(gradients, *args, lambda: seen.append([g.clone() for g in gradients])), seen


def _expect_pair(got) -> None:
    if not isinstance(got, tuple | list) or len(got) != 2:
        fail(f"return the next scale and the next count of good steps, two numbers; got {got!r}")


def _expect_unscaled_update(seen: list, true: list[Tensor], scale: float) -> None:
    if len(seen) != 1:
        fail(f"update() ran {len(seen)} times although all gradients were finite; once is right")
    for got, want in zip(seen[0], true, strict=True):
        expect_close(
            got,
            want,
            "a gradient at the time of the update",
            {"still multiplied by the scale: divide in place, before the update": want * scale},
        )


# ------------------------------------------------------------------------------------ 3. two halves of a softmax
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-2, -1)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1, keepdim=True)


@grader
def check_merge(answer, rng):
    """Attention over two sets of keys, from the two outputs and log-sum-exps."""
    rows, H = rng.randrange(3, 6), rng.randrange(2, 5)
    for size in (1.0, 400.0):  # exp overflows above 709
        q, k, v = size * numbers(rng, 2, rows, H).abs(), 2 + numbers(rng, 2, 9, H).abs(), numbers(rng, 2, 9, H)
        cut = rng.randrange(3, 6)
        first, second = _attention(q, k[:, :cut], v[:, :cut]), _attention(q, k[:, cut:], v[:, cut:])
        _expect_merged(answer(*first, *second), first, second, _attention(q, k, v))
    masked = (torch.zeros_like(first[0]), torch.full_like(first[1], -math.inf))
    got = answer(*first, *masked)
    if got[0].isnan().any() or got[1].isnan().any():
        fail("the result is not a number where the second half saw no key at all (log-sum-exp of minus infinity)")
    expect_close(got[0], first[0], "the output, where the second half saw no key,")


def _expect_merged(got, first: tuple, second: tuple, want: tuple) -> None:
    if not isinstance(got, tuple | list) or len(got) != 2:
        fail("return two tensors: the output and the log-sum-exp of both halves together")
    (out_a, lse_a), (out_b, lse_b) = first, second
    if got[0].isnan().any() or not got[1].isfinite().all():
        fail("the result overflows: take the larger of the two log-sum-exps off before exp, as the chapter's maximum")
    share = torch.sigmoid(lse_a - lse_b)
    expect_close(
        got[0],
        want[0],
        "the output",
        {
            "averaged: a half with larger scores weighs more": (out_a + out_b) / 2,
            "the two outputs added: each is normalised already, so they need weights that sum to 1": out_a + out_b,
            "the weights are swapped": out_a * (1 - share) + out_b * share,
            "weighted by the log-sum-exps themselves, and not by their exponentials": (lse_a * out_a + lse_b * out_b)
            / (lse_a + lse_b),
        },
        rtol=1e-8,
    )
    expect_close(
        got[1],
        want[1],
        "the log-sum-exp",
        {
            "the two were added: add their exponentials": lse_a + lse_b,
            "the larger of the two: the other half's exponentials are missing": torch.maximum(lse_a, lse_b),
        },
        rtol=1e-10,
        atol=1e-6,
    )
