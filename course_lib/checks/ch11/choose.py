"""Graders of chapter 11, exercises 1 to 5: days, a deadline, an advice, a margin, a choice under a limit."""

import math
from functools import partial
from statistics import mean

import numpy as np

from course_lib.checks import CheckFailed, Exercise, Stops, named, several
from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.plan import Job, work_out
from course_lib.plan.measured import MeasuredRun, measured_job, measured_runs

TRIES, GOOD_SHARE, DAY_S = 3, 0.85, 86_400


# ------------------------------------------------------------------------------------ 1. an estimate
def estimate(psi, num_layers, d_model, seq_len, tokens, num_gpus, peak, mfu, **mistake):
    """(tokens/s, days). A mistake replaces a number: FLOPs of a parameter or a score, GPUs, MFU, seconds of a day."""
    use = {"of_parameter": 6, "of_score": 12, "gpus": num_gpus, "reached": mfu, "day_s": DAY_S} | mistake
    flops = use["of_parameter"] * psi + use["of_score"] * num_layers * d_model * seq_len
    rate = use["gpus"] * peak * use["reached"] / flops
    return rate, tokens / rate / use["day_s"]


def models(rng):
    for _ in range(3):
        layers, d_model, seq_len = rng.randrange(20, 100), 128 * rng.randrange(16, 100), 2048 * rng.randrange(1, 9)
        tokens, num_gpus = rng.randrange(1, 16) * 1e12, 8 * rng.randrange(1, 200)
        run = (tokens, num_gpus, rng.choice([312e12, 989e12]), rng.randrange(25, 50) / 100)
        yield 12 * layers * d_model**2, layers, d_model, seq_len, *run


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
    """Of those in time the number with fewest GPU hours. Mistakes: least `by`; those too late count, or if none is."""
    needed = {n: tokens * flops_per_token / (n * peak * mfu) / DAY_S for n, mfu in mfu_of.items()}
    in_time = [n for n in needed if needed[n] <= days]
    if not late and in_time:
        in_time = needed
    return min(in_time or (needed if anyway else []), key=lambda n: by(n, needed[n]), default=None)


def deadlines(rng):
    """One in time, none, and one where an MFU rises."""
    cases, flops, peak = [], 5e11, 989e12
    for late, rises in ((False, False), (True, False), (False, True)):
        mfu_of = _mfu_by_gpus(rng, rises)
        days = sorted(1e12 * flops / (n * peak * mfu) / DAY_S for n, mfu in mfu_of.items())
        cases.append((mfu_of, flops, 1e12, peak, days[0] * 0.9 if late else days[2] * 1.001))
    return cases


def _mfu_by_gpus(rng, rises):
    """MFU by GPUs; on most it falls so far that fewer are faster. It may rise once, as a measured row of the lesson."""
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
check_deadline = Exercise(deadline, deadlines, _WRONG_DEADLINE, named("GPUs", none="None"))


# ------------------------------------------------------------------------------------ 3. yield
def _yield_of(predicted, measured, k, best=lambda told, real: max(real), of_first=max, highest=1):
    """The share of the best that the fastest of the k best predicted runs reached. A mistake: another best, or another
    of the first; highest = -1 begins with the lowest predictions."""
    first = sorted(range(len(predicted)), key=lambda index: -highest * predicted[index])[:k]
    return of_first([measured[index] for index in first]) / best(predicted, measured)


_of_the_last = partial(_yield_of, of_first=lambda tries: tries[-1])


def runs(rng):
    for k in (1, 2, 3):
        while True:
            measured = [float(rng.randrange(100, 7000)) for _ in range(9)]
            predicted = [speed * rng.randrange(40, 180) / 100 for speed in measured]
            reached = _yield_of(predicted, measured, k)
            worse = [_yield_of(predicted, measured, 1)] * (k > 1) + [_of_the_last(predicted, measured, k)] * (k > 2)
            if max([0.0, *worse]) < reached < 0.95:
                break
        yield predicted, measured, k


_WRONG_YIELD = {
    "divide by the best measured run of all, not by the best prediction": {"best": lambda told, real: max(told)},
    "what counts is the measured speed of the choice, not its predicted one": lambda predicted, measured, k: (
        max(predicted) / max(measured)
    ),
    "you may measure k runs and keep the fastest": {"k": 1},
    "keep the fastest of the k tries; this is their mean": {"of_first": mean},
    "of the k tries the fastest counts, not the last": _of_the_last,
    "the k tries have the highest predictions, not the lowest": {"highest": -1},
    "choose by prediction: whoever knows the measurements needs no planner": lambda predicted, measured, k: 1.0,
}
check_yield = Exercise(_yield_of, runs, _WRONG_YIELD)


# ------------------------------------------------------------------------------------ 4. a margin
def _margin_of(predicted, measured, share, factor=lambda ratios, index: sorted(ratios)[index]):
    """The smallest factor on predictions that covers at least that share of the runs. A mistake takes another one."""
    ratios = [real / told for real, told in zip(measured, predicted, strict=True)]
    return factor(ratios, math.ceil(share * len(ratios) - 1e-9) - 1)


def _interpolated(predicted, measured, share):
    """The quantile as NumPy and PyTorch compute it: between the two runs beside it."""
    return float(np.quantile(np.array(measured) / np.array(predicted), share))


def shares(rng):
    for share, count in ((0.9, 20), (0.9, 30), (1.0, 11)):
        predicted = [rng.randrange(20, 80) + rng.random() for _ in range(count)]
        yield predicted, [told * (0.8 + 0.6 * rng.random()) for told in predicted], share


_WRONG_MARGIN = {
    "measured over predicted, not predicted over measured": lambda told, real, share: _margin_of(real, told, share),
    "this covers every run; a share of them is asked": {"factor": lambda ratios, index: max(ratios)},
    "this is the mean; half of the runs need more": {"factor": lambda ratios, index: mean(ratios)},
    "a quantile between two runs; the factor of a run is asked": _interpolated,
    "this covers one run too few": {"factor": lambda ratios, index: sorted(ratios)[index - 1]},
    "sort upwards: the smallest first": {"factor": lambda ratios, index: sorted(ratios, reverse=True)[index]},
}
check_margin = Exercise(_margin_of, shares, _WRONG_MARGIN)


# ------------------------------------------------------------------------------------ 5. a choice under a limit
class Cluster:
    """What a learner may ask of the measured runs: `measure(layout)` -> (tokens/s per GPU, GB), three times."""

    def __init__(self, runs: list[MeasuredRun]):
        self.runs = {run.layout: run for run in runs}
        self.asked: list[Layout] = []

    def measure(self, layout: Layout) -> tuple[float, float]:
        if layout not in self.runs:
            raise CheckFailed(f"measure() was asked for {layout}, which is none of the layouts that it was given")
        if layout not in self.asked:
            self.asked.append(layout)
        if len(self.asked) > TRIES:
            raise CheckFailed(
                f"measure() was called for {len(self.asked)} layouts; the cluster is free for {TRIES} short runs"
            )
        run = self.runs[layout]
        return run.tokens_per_s_per_gpu, run.memory_gb


def advice(job: Job, layouts: list[Layout], limit_gb: float) -> Layout:
    """Return what the planner would say if it knew the limit: the fastest predicted one that is predicted to fit."""
    options = [work_out(job, layout) for layout in layouts]
    fitting = [option for option in options if option.memory_bytes <= limit_gb * GB] or options
    return max(fitting, key=lambda option: option.tokens_per_s).layout


# Ranges of limits in GB. In each some fixed margins fail, and no factor on predictions is right in all of a model's.
_LIMITS = {
    ("8B", 64): ((52.3, 52.8), (41.3, 42.0), (45.0, 49.0)),  # above 0.94 out of memory; below 0.92 slow; no margin slow
    ("80B", 128): ((41.6, 42.4), (66.5, 67.4), (54.5, 58.0)),  # below 0.97 slow; below 0.95 slow; below 0.71 slow
}


def _with_a_safe_try(job, layouts, limit_gb, measure):
    """Two tries are predicted to fit, the third far below the limit."""
    options = _fastest_first(job, layouts)
    tries = [one.layout for one in options if one.memory_bytes / GB <= limit_gb][:2]
    tries.append(next(one.layout for one in options if one.memory_bytes / GB <= 0.85 * limit_gb))
    found = [(*measure(layout), layout) for layout in tries]
    return max((run for run in found if run[1] <= limit_gb), key=lambda run: run[0])[2]


def _fastest_first(job, layouts):
    return sorted((work_out(job, layout) for layout in layouts), key=lambda option: -option.tokens_per_s)


def with_a_margin(margin):
    """Never measures; the fastest predicted below this share of the limit."""

    def choose(job, layouts, limit_gb, measure):
        options = _fastest_first(job, layouts)
        fitting = (option.layout for option in options if option.memory_bytes <= margin * limit_gb * GB)
        return next(fitting, options[-1].layout)

    return choose


def _leanest(job, layouts, limit_gb, measure):
    found = min(layouts, key=lambda layout: work_out(job, layout).memory_bytes)
    measure(found)
    return found


def clusters(rng):
    """Six choices in one case: two measured jobs, limits drawn afresh."""
    cases = []
    for of_job, ranges in _LIMITS.items():
        for limit_gb in [rng.uniform(*ends) for ends in ranges]:
            runs = measured_runs(*of_job)
            cases.append((measured_job(*of_job), rng.sample(runs, len(runs)), limit_gb))
    return [(cases,)]


def _watch_choices(answer, cases):
    """Never more than the limit, nearly the best, and better than the planner's advice."""
    reached, advised, asked = [], [], 0
    for job, runs, limit_gb in cases:
        by_layout = {run.layout: run for run in runs}
        cluster, layouts = Cluster(runs), list(by_layout)
        best = max(run.tokens_per_s_per_gpu for run in runs if run.memory_gb <= limit_gb)
        where = f"{job.config.name} on {job.num_gpus} GPUs, limit {limit_gb:.1f} GB"
        try:
            got = answer(job, list(layouts), limit_gb, cluster.measure)
        except CheckFailed as refused:
            return {"error": f"refused\n{where}: {refused}"}
        if not isinstance(got, Layout) or got not in by_layout:
            return {"error": f"no layout\n{where}: return one of the layouts that were given, got {got!r}"}
        run, asked = by_layout[got], asked + len(cluster.asked)
        if run.memory_gb > limit_gb:
            measured = f"you chose {got}, which was measured at {run.memory_gb:.1f} GB: out of memory"
            why = "A predicted memory is not exact: measure, or leave a margin"
            return {"error": f"too large\n{where}: {measured}. {why}"}
        reached.append(run.tokens_per_s_per_gpu / best)
        known = by_layout[advice(job, layouts, limit_gb)]
        advised.append(known.tokens_per_s_per_gpu / best if known.memory_gb <= limit_gb else 0.0)
    if mean(reached) >= GOOD_SHARE and mean(reached) > mean(advised):
        return {}
    why = "Rank by predicted speed, and spend the three runs on the first that may fit"
    if not asked:
        why = "measure() was never called, and no fixed margin on predictions is right under every limit"
    return {
        "error": f"too slow\nyour choices reach {mean(reached):.0%} of the best measured speed in the mean "
        f"({min(reached):.0%} in the worst case), the planner's advice {mean(advised):.0%}, counting 0 where it is "
        f"above the limit; required: {GOOD_SHARE:.0%}, and more than the advice. {why}"
    }


_WRONG_CHOOSE = {
    "out of memory": Stops(lambda job, layouts, limit_gb, measure: advice(job, layouts, limit_gb)),
    "spend the three runs on the first that may fit": Stops(_leanest),
    "no fixed margin on predictions": Stops(with_a_margin(0.9)),
    "the cluster is free for 3 short runs": Stops(lambda job, layouts, limit_gb, measure: max(layouts, key=measure)),
    "return one of the layouts": Stops(lambda job, layouts, limit_gb, measure: work_out(job, layouts[0])),
}
check_choose = Exercise(_with_a_safe_try, clusters, _WRONG_CHOOSE, _watch_choices)
