"""Graders of chapter 11, exercises 1 and 2: tokens per second and days; the GPUs that a deadline needs."""

from course_lib.checks import Exercise, named, several

DAY_S = 86_400


# ------------------------------------------------------------------------------------ 1. an estimate
def estimate(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu, **mistake):
    """(tokens/s, days). A mistake replaces a number: FLOPs of a parameter or a score, GPUs, MFU, seconds of a day."""
    use = {"of_parameter": 6, "of_score": 12, "gpus": num_gpus, "reached": mfu, "day_s": DAY_S} | mistake
    flops = use["of_parameter"] * psi + use["of_score"] * num_layers * d_model * seq_len
    rate = use["gpus"] * peak * use["reached"] / flops
    return rate, tokens / rate / use["day_s"]


def models(rng):
    cases = []
    for _ in range(3):
        layers, d_model, seq_len = rng.randrange(20, 100), 128 * rng.randrange(16, 100), 2048 * rng.randrange(1, 9)
        tokens, num_gpus = rng.randrange(1, 16) * 1e12, 8 * rng.randrange(1, 200)
        run = (tokens, num_gpus, rng.choice([312e12, 989e12]), rng.randrange(25, 50) / 100)
        cases.append((12 * layers * d_model**2, layers, d_model, seq_len, *run))
    return cases


_WRONG_ESTIMATE = {
    "2 psi is the forward pass alone; training needs 6": {"of_parameter": 2},
    "attention's scores need FLOPs too: 12 L D S per token": {"of_score": 0},
    "attention's scores count forward and backward: 12 L D S, not 4": {"of_score": 4},
    "a GPU reaches its peak times the MFU, not its peak": {"reached": 1},
    "all GPUs together, not one": {"gpus": 1},
    "days, not hours: a day has 86,400 seconds": {"day_s": 3600},
    "days, not seconds: a day has 86,400 seconds": {"day_s": 1},
}
check_estimate = Exercise(
    estimate, models, _WRONG_ESTIMATE, several("return two numbers, (tokens_per_s, days)", "tokens/s", "days")
)


# ------------------------------------------------------------------------------------ 2. a deadline
def deadline(mfu_of, flops_per_token, tokens, peak, days, by=lambda n, days: n * days, late=True, anyway=False):
    """Of those in time the number with fewest GPU hours, or least `by`; None if there is none.

    late     whether those that are too late are left out; anyway: whether one of them is taken where none is in time
    """
    needed = {n: tokens * flops_per_token / (n * peak * mfu) / DAY_S for n, mfu in mfu_of.items()}
    in_time = [n for n in needed if needed[n] <= days]
    if not late and in_time:
        in_time = needed
    return min(in_time or (needed if anyway else []), key=lambda n: by(n, needed[n]), default=None)


def clusters(rng):
    """One in time, none, and one where an MFU rises."""
    cases, flops, peak = [], 5e11, 989e12
    for late, rises in ((False, False), (True, False), (False, True)):
        mfu_of = _mfu_by_gpus(rng, rises)
        days = sorted(1e12 * flops / (n * peak * mfu) / DAY_S for n, mfu in mfu_of.items())
        cases.append((mfu_of, flops, 1e12, peak, days[0] * 0.9 if late else days[2] * 1.001))
    return cases


def _mfu_by_gpus(rng, rises):
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
    return {n: found[n] for n in rng.sample(list(found), len(found))}


_WRONG_DEADLINE = {
    "the fastest is in time, but it is not the cheapest: more GPUs at a lower MFU": {"by": lambda n, days: days},
    "the cheapest of all is too late": {"late": False},
    "the fewest GPUs that are in time; where MFU rises, more GPUs cost fewer GPU hours": {"by": lambda n, days: n},
    "nobody is in time, so return None": {"anyway": True},
    "the largest number of GPUs is neither the fastest nor the cheapest": {"by": lambda n, days: -n, "late": False},
    "None is wrong where one is: it is in time": lambda mfu_of, flops_per_token, tokens, peak, days: None,
}
check_deadline = Exercise(deadline, clusters, _WRONG_DEADLINE, named("GPUs", none="None"))
