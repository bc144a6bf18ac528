"""Graders of chapter 11, exercises 1 and 2: tokens per second and days; the GPUs that a deadline needs."""

from __future__ import annotations

from numbers import Real

import torch

from course_lib.checks.core import expect_close, expect_equal, fail, grader

DAY_S = 86_400


def estimate(flops: float, tokens: float, num_gpus: int, reached_flops: float) -> tuple[float, float]:
    """Return (tokens/s, days) where each GPU reaches so many FLOP/s."""
    rate = num_gpus * reached_flops / flops
    return rate, tokens / rate / DAY_S


@grader
def check_estimate(answer, rng):
    """Of a model with fresh sizes, with attention's FLOPs."""
    for _ in range(3):
        layers, d_model, seq_len = rng.randrange(20, 100), 128 * rng.randrange(16, 100), 2048 * rng.randrange(1, 9)
        psi, tokens, num_gpus = 12 * layers * d_model**2, rng.randrange(1, 16) * 1e12, 8 * rng.randrange(1, 200)
        peak, mfu = rng.choice([312e12, 989e12]), rng.randrange(25, 50) / 100
        scores = 12 * layers * d_model * seq_len

        def right(flops, gpus=num_gpus, reached=peak * mfu, tokens=tokens):
            return estimate(flops, tokens, gpus, reached)

        want = right(6 * psi + scores)
        wrong = {
            "2 psi is the forward pass alone; training needs 6": right(2 * psi + scores),
            "attention's scores need FLOPs too: 12 L D S per token": right(6 * psi),
            "attention's scores count forward and backward: 12 L D S, not 4": right(6 * psi + scores // 3),
            "a GPU reaches its peak times the MFU, not its peak": right(6 * psi + scores, reached=peak),
            "all GPUs together, not one": right(6 * psi + scores, gpus=1),
            "days, not hours: a day has 86,400 seconds": (want[0], want[1] * 24),
            "days, not seconds: a day has 86,400 seconds": (want[0], want[1] * DAY_S),
        }
        got = answer(psi, layers, d_model, seq_len, tokens, num_gpus, peak, mfu)
        if not (isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(value, Real) for value in got)):
            fail(f"return two numbers, (tokens_per_s, days); got {got!r}")
        what = f"tokens/s and days of {psi / 1e9:.1f} B on {num_gpus} GPUs"
        shown = {message: torch.tensor(value, dtype=torch.float64) for message, value in wrong.items()}
        expect_close(
            torch.tensor([float(value) for value in got], dtype=torch.float64),
            torch.tensor(want, dtype=torch.float64),
            what,
            shown,
        )


@grader
def check_deadline(answer, rng):
    """Of MFUs by the GPUs the number with fewest GPU hours that is in time; None where none is. Once an MFU rises."""
    flops, peak = 5e11, 989e12
    for late, rises in ((False, False), (True, False), (False, True)):
        mfu_of = _mfu_by_gpus(rng, rises)
        days_of = {n: estimate(flops, 1e12, n, peak * share)[1] for n, share in mfu_of.items()}
        by_days = sorted(days_of, key=days_of.get)
        limit = days_of[by_days[0]] * 0.9 if late else days_of[by_days[2]] * 1.001
        in_time = [n for n in mfu_of if days_of[n] <= limit]
        hours = {n: n * days_of[n] for n in mfu_of}
        want = min(in_time, key=hours.get, default=None)
        wrong = {
            "the fastest is in time, but it is not the cheapest: more GPUs at a lower MFU": by_days[0],
            "the cheapest of all is too late": min(hours, key=hours.get),
            "the fewest GPUs that are in time; where MFU rises, more GPUs cost fewer GPU hours": min(
                in_time, default=None
            ),
            "nobody is in time, so return None": None if not late else by_days[0],
            "the largest number of GPUs is neither the fastest nor the cheapest": max(mfu_of),
        }
        got = answer(dict(mfu_of), flops, 1e12, peak, limit)
        what = f"GPUs for 1e12 tokens in {limit:.1f} days, MFU by GPUs {mfu_of}"
        if got is None and want is not None:
            fail(f"{what} is None, and {want} is right: it is in time")
        if late and got is not None:
            fail(f"{what} is {got}: nobody is in time, so return None")
        if want is not None:
            expect_equal(got, want, what, {message: value for message, value in wrong.items() if value != want})


def _mfu_by_gpus(rng, rises: bool) -> dict[int, float]:
    """MFU by GPUs; on the largest number it falls so far that the run takes longer than on half of them.

    rises   from 256 to 512 GPUs, as a measured row of the lesson once does
    """
    share, found = rng.randrange(40, 46) / 100, {}
    for n in (64, 128, 256, 512):
        found[n] = round(share, 4)
        share *= rng.randrange(75, 90) / 100
    if rises:
        found[512] = round(found[256] * rng.randrange(103, 108) / 100, 4)
    found[1024] = round(found[512] * 0.4, 4)
    names = list(found)
    rng.shuffle(names)
    return {n: found[n] for n in names}
