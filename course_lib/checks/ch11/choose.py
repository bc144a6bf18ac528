"""Graders of chapter 11, exercises 3 to 5: what an advice is worth, a margin, and a choice judged by measured runs."""

from __future__ import annotations

import math

from course_lib.checks.core import expect_number, fail, grader, observed
from course_lib.hardware import GB
from course_lib.layout import Layout
from course_lib.plan import Job, work_out
from course_lib.plan.measured import MeasuredRun, measured_job, measured_runs

TRIES, GOOD_SHARE = 3, 0.85


# ------------------------------------------------------------------------------------ 3. yield
def yield_of(predicted: list[float], measured: list[float], k: int) -> float:
    """Return the share of the best that the fastest of the k best predicted runs reached."""
    first = sorted(range(len(predicted)), key=lambda index: -predicted[index])[:k]
    return max(measured[index] for index in first) / max(measured)


@grader
def check_yield(answer, rng):
    """Of fresh runs, with 1 to 3 tries."""
    for k in (1, 2, 3):
        while True:
            measured = [float(rng.randrange(100, 7000)) for _ in range(9)]
            predicted = [speed * rng.randrange(40, 180) / 100 for speed in measured]
            want = yield_of(predicted, measured, k)
            if want < 0.95 and (k == 1 or yield_of(predicted, measured, 1) < want):
                break
        first = sorted(range(9), key=lambda index: -predicted[index])[:k]
        wrong = {
            "divide by the best measured run of all, not by the best prediction": want * max(measured) / max(predicted),
            "what counts is the measured speed of the choice, not its predicted one": predicted[first[0]]
            / max(measured),
            "you may measure k runs and keep the fastest of them": yield_of(predicted, measured, 1),
            "keep the fastest of the k tries; this is their mean": sum(measured[i] for i in first) / k / max(measured),
            "of the k tries the fastest counts, not the last": measured[first[-1]] / max(measured),
            "the k tries have the highest predictions, not the lowest": yield_of([-p for p in predicted], measured, k),
            "choose by prediction: whoever knows the measurements needs no planner": 1.0,
        }
        expect_number(answer(list(predicted), list(measured), k), want, f"the yield of {k} tries", wrong)


# ------------------------------------------------------------------------------------ 4. a margin
def margin_of(predicted: list[float], measured: list[float], share: float) -> float:
    """Return the smallest factor on predictions that covers at least that share of the runs."""
    ratios = sorted(real / told for real, told in zip(measured, predicted, strict=True))
    return ratios[math.ceil(share * len(ratios) - 1e-9) - 1]


def _interpolated(ratios: list[float], share: float) -> float:
    """Return the quantile as NumPy and PyTorch compute it: between the two runs beside it."""
    below, rest = divmod(share * (len(ratios) - 1), 1)
    return ratios[int(below)] + rest * (ratios[min(int(below) + 1, len(ratios) - 1)] - ratios[int(below)])


@grader
def check_margin(answer, rng):
    """The smallest factor that covers 9 in 10 of the runs, and all of them."""
    for share, count in ((0.9, 20), (0.9, 30), (1.0, 11)):
        predicted = [rng.randrange(20, 80) + rng.random() for _ in range(count)]
        measured = [told * (0.8 + 0.6 * rng.random()) for told in predicted]
        want = margin_of(predicted, measured, share)
        ratios = [real / told for real, told in zip(measured, predicted, strict=True)]
        wrong = {
            "measured over predicted, not predicted over measured": margin_of(measured, predicted, share),
            "this covers every run; a share of them is asked": max(ratios),
            "this is the mean; half of the runs need more": sum(ratios) / count,
            "a quantile between two runs; the factor of a run is asked": _interpolated(sorted(ratios), share),
            "this covers one run too few": sorted(ratios)[math.ceil(share * count - 1e-9) - 2],
            "the smallest factors come first: sort upwards": sorted(ratios, reverse=True)[
                math.ceil(share * count - 1e-9) - 1
            ],
        }
        got = answer(list(predicted), list(measured), share)
        expect_number(got, want, f"the margin for {share:.0%} of {count} runs", wrong)


# ------------------------------------------------------------------------------------ 5. a choice under a limit
class Cluster:
    """What a learner may ask of the measured runs: `measure(layout)` -> (tokens/s per GPU, GB), three times."""

    def __init__(self, runs: list[MeasuredRun]):
        self.runs = {run.layout: run for run in runs}
        self.asked: list[Layout] = []

    def measure(self, layout: Layout) -> tuple[float, float]:
        if layout not in self.runs:
            fail(f"measure() was asked for {layout}, which is none of the layouts that it was given")
        if layout not in self.asked:
            self.asked.append(layout)
        if len(self.asked) > TRIES:
            fail(f"measure() was called for {len(self.asked)} layouts; the cluster is free for {TRIES} short runs")
        run = self.runs[layout]
        return run.tokens_per_s_per_gpu, run.memory_gb


def _chosen(answer, job: Job, layouts: list[Layout], limit_gb: float, runs: list[MeasuredRun]) -> tuple[object, int]:
    """What the answer chose, and how many layouts it measured."""
    cluster = Cluster(runs)
    return answer(job, layouts, limit_gb, cluster.measure), len(cluster.asked)


def advice(job: Job, layouts: list[Layout], limit_gb: float) -> Layout:
    """Return what the planner would say if it knew the limit: the fastest predicted one that is predicted to fit."""
    options = [work_out(job, layout) for layout in layouts]
    fitting = [option for option in options if option.memory_bytes <= limit_gb * GB] or options
    return max(fitting, key=lambda option: option.tokens_per_s).layout


# Ranges of limits in GB. In each some fixed margins fail, and no factor on predictions is right in all of a model's.
LIMITS = {
    ("8B", 64): ((52.3, 52.8), (41.3, 42.0), (45.0, 49.0)),  # above 0.94 out of memory; below 0.92 slow; no margin slow
    ("80B", 128): ((41.6, 42.4), (66.5, 67.4), (54.5, 58.0)),  # below 0.97 slow; below 0.95 slow; below 0.71 slow
}


@grader
def check_choose(answer, rng):
    """On two measured jobs, limits drawn afresh: never more than the limit, nearly the best, better than the advice."""
    reached, advised, asked = [], [], 0
    for (model, num_gpus), ranges in LIMITS.items():
        job = measured_job(model, num_gpus)
        for limit_gb in [rng.uniform(*ends) for ends in ranges]:
            runs = measured_runs(model, num_gpus)
            best = max(run.tokens_per_s_per_gpu for run in runs if run.memory_gb <= limit_gb)
            by_layout = {run.layout: run for run in runs}
            layouts = list(by_layout)
            rng.shuffle(layouts)
            got, tries = observed(_chosen, answer, job, list(layouts), limit_gb, runs)
            where = f"{model} on {num_gpus} GPUs, limit {limit_gb:.1f} GB"
            if not isinstance(got, Layout) or got not in by_layout:
                fail(f"{where}: return one of the layouts that were given, got {got!r}")
            run, asked = by_layout[got], asked + tries
            if run.memory_gb > limit_gb:
                fail(
                    f"{where}: you chose {got}, which was measured at {run.memory_gb:.1f} GB: out of memory. A "
                    "predicted memory is not exact: measure, or leave a margin"
                )
            reached.append(run.tokens_per_s_per_gpu / best)
            known = by_layout[advice(job, layouts, limit_gb)]
            advised.append(known.tokens_per_s_per_gpu / best if known.memory_gb <= limit_gb else 0.0)
    worst, mean, before = min(reached), sum(reached) / len(reached), sum(advised) / len(advised)
    if mean < GOOD_SHARE or mean <= before:
        alone = "measure() was never called, and no fixed margin on predictions is right under every limit"
        advice_to_learner = "Rank by predicted speed, and spend the three runs on the first that may fit"
        fail(
            f"your choices reach {mean:.0%} of the best measured speed in the mean ({worst:.0%} in the worst case), "
            f"the planner's advice {before:.0%}, counting 0 where it is above the limit; required: {GOOD_SHARE:.0%}, "
            f"and more than the advice. {advice_to_learner if asked else alone}"
        )
