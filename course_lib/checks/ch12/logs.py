"""Graders of chapter 12 on logs: what share of a job's time was kept, and where two runs begin to differ."""

from __future__ import annotations

import json
import math

from course_lib.checks.core import expect_equal, expect_number, fail, fresh_seed, grader


# ------------------------------------------------------------------------------------ 1. goodput
@grader
def check_goodput(answer, rng):
    """Of a job without failures, one that went on after failures, and two that did not, of which one failed saving."""
    for name, lines in _jobs(rng).items():
        got = answer([dict(line) for line in lines])
        expect_number(got, goodput_of(lines), f"{name}: the goodput", _goodput_misconceptions(lines), form=".4f")


def goodput_of(lines: list[dict], complete: str = "saved", drop: bool = True) -> float:
    """Seconds of the steps that were kept, over the wall time of the job.

    complete   the event after which a checkpoint counts
    drop       whether steps behind the last checkpoint are lost when the job fails
    """
    wall_s = lines[-1]["at_s"] - lines[0]["at_s"]
    return sum(_kept(lines, complete, drop)) / wall_s


def _kept(lines: list[dict], complete: str, drop: bool) -> list[float]:
    steps, saved = [], 0  # (step, seconds)
    for line in lines:
        if line["event"] == "step":
            steps.append((line["step"], line["seconds"]))
        elif line["event"] == complete:
            saved = line["steps"]
        elif line["event"] == "failed" and drop:
            steps = [(step, seconds) for step, seconds in steps if step < saved]
    return [seconds for _, seconds in steps]


def _goodput_misconceptions(lines: list[dict]) -> dict[str, float]:
    wall_s = lines[-1]["at_s"] - lines[0]["at_s"]
    steps = [line for line in lines if line["event"] == "step"]
    last = {line["step"]: line["seconds"] for line in steps}
    useful_s, running_s, begun_s = goodput_of(lines) * wall_s, 0.0, lines[0]["at_s"]
    for line in lines:
        begun_s = line["at_s"] if line["event"] == "started" else begun_s
        running_s += line["at_s"] - begun_s if line["event"] in ("failed", "ended") else 0.0
    return {
        "a save that was begun and not finished keeps nothing; only `saved` counts": goodput_of(lines, "saving"),
        "steps behind the last complete checkpoint are lost when the job fails; do not count them": goodput_of(
            lines, drop=False
        ),
        "divide by the wall time, which also has the waiting between a failure and the next start": (
            useful_s / running_s
        ),
        "divide by the wall time; the seconds of all steps leave out saves and restarts": (
            useful_s / sum(line["seconds"] for line in steps)
        ),
        "after the last failure nobody computed the lost steps again, so nothing takes their place": (
            sum(last.values()) / wall_s
        ),
    }


class _Job:
    """Writes the log of a job; times go on by themselves."""

    def __init__(self, rng):
        self.rng, self.lines, self.at_s = rng, [], float(rng.randrange(100))

    def tell(self, event: str, after_s: float, **fields) -> None:
        self.at_s += after_s
        self.lines.append({"event": event, "at_s": self.at_s, **fields})

    def attempt(self, steps: range, every: int, end: str) -> None:
        """Computes steps from a checkpoint on; ends with `end`, which may be "failed in a save"."""
        self.tell("started", self.rng.uniform(10, 45))
        self.at_s += self.rng.uniform(3, 8)  # the checkpoint is loaded
        for step in steps:
            seconds = self.rng.uniform(1, 10)
            self.tell("step", seconds, step=step, seconds=seconds)
            if (step + 1) % every == 0:
                self.tell("saving", 0.0, steps=step + 1)
                if end == "failed in a save" and step == steps[-1]:
                    break
                self.tell("saved", self.rng.uniform(0.5, 3), steps=step + 1)
        self.tell("ended" if end == "ended" else "failed", 1.0)


def _jobs(rng) -> dict[str, list[dict]]:
    every = rng.randrange(3, 5)
    quiet, torn, broken, last = (_Job(rng) for _ in range(4))
    quiet.attempt(range(3 * every), every, "ended")
    torn.attempt(range(2 * every), every, "failed in a save")
    torn.attempt(range(every, 3 * every + 1), every, "failed")
    torn.attempt(range(3 * every, 4 * every), every, "ended")
    broken.attempt(range(2 * every - 1), every, "failed")
    broken.attempt(range(every, 3 * every + 2), every, "failed")
    last.attempt(range(2 * every), every, "failed in a save")
    return {
        "a job that did not fail": quiet.lines,
        "a job that failed while it saved, and later between two saves": torn.lines,
        "a job that failed twice and was not started again": broken.lines,
        "a job that ended in its second save": last.lines,
    }


# ------------------------------------------------------------------------------------ 2. two runs
KINDS = ("tokens", "loss", "grad_norm")
ROUNDING = 1e-6  # relative


def first_difference(
    first: list[str], second: list[str], tolerance: float = ROUNDING, by_rank: bool = False
) -> tuple[int, int, str] | None:
    """(step, rank, kind) where two runs begin to differ, or None; of a step with two lines the last one counts.

    by_rank   looks for a rank before a kind
    """
    runs = [
        [{line["step"]: line for line in map(json.loads, text.splitlines())} for text in run] for run in (first, second)
    ]
    steps = sorted(set.intersection(*(set(of_rank) for run in runs for of_rank in run)))
    ranks = range(len(first))
    for step in steps:
        places = [(rank, kind) for kind in KINDS for rank in ranks]
        for rank, kind in sorted(places) if by_rank else places:
            if not _same(*(run[rank][step][kind] for run in runs), tolerance):
                return step, rank, kind
    return None


def _same(one, other, tolerance: float) -> bool:
    return one == other if isinstance(one, str) else math.isclose(one, other, rel_tol=tolerance)


@grader
def check_disagreement(answer, rng):
    """Of runs that are equal up to rounding, and of runs in which one rank's tokens, loss or sum went wrong."""
    ranks, steps = rng.choice([3, 4]), rng.randrange(9, 14)
    rank, at = rng.randrange(1, ranks), rng.randrange(4, steps - 1)
    good = _run(rng, ranks, steps)
    noisy = [[{**line, "loss": line["loss"] * (1 + 1e-9)} for line in of_rank] for of_rank in good]
    same = "the runs are equal up to rounding"
    cases = {
        same: (good, noisy),
        "one rank got other tokens": (good, _spoiled(good, at, rank, "tokens")),
        "one rank computed another loss": (good, _spoiled(noisy, at, rank, "loss")),
        "the sum of the gradients differs": (_spoiled(good, at, rank, "grad_norm"), good),
        "the second run was killed in a wrong step, and computed it again": (
            good,
            _with_again(good, _spoiled(good, at, rank, "tokens"), at),
        ),
        "the second run ends earlier": (_spoiled(good, at, rank, "loss"), [of_rank[: at + 1] for of_rank in good]),
    }
    for name, runs in cases.items():
        first, second = ([_text(of_rank) for of_rank in run] for run in runs)
        got = answer(list(first), list(second))
        got = tuple(got) if isinstance(got, list) else got
        want = first_difference(first, second)
        what = f"{name}: (step, rank, kind)"
        if want is None:
            told = (
                "differences of a billionth are rounding; compare numbers to 1e-6 of their size"
                if name == same
                else "of a step with two lines, the last one counts"
            )
            if got is not None:
                fail(f"{name}: you say {got!r}, and None is right: {told}")
            continue
        wrong = {
            "the gradient norm is summed over the ranks, so it differs on all; look for the kind before the rank": (
                first_difference(first, second, by_rank=True)
            ),
            "differences of a billionth are rounding; compare numbers to 1e-6 of their size": first_difference(
                first, second, tolerance=0.0
            ),
        }
        expect_equal(got, want, what, wrong)


def _run(rng, ranks: int, steps: int) -> list[list[dict]]:
    norms = [1 + rng.random() for _ in range(steps)]
    return [
        [
            {
                "step": step,
                "tokens": f"{fresh_seed(rng):08x}",
                "loss": 5 - 0.1 * step + rng.random() / 10,
                "grad_norm": norms[step],
            }
            for step in range(steps)
        ]
        for _ in range(ranks)
    ]


def _spoiled(run: list[list[dict]], at: int, rank: int, kind: str) -> list[list[dict]]:
    """The run in which a rank goes wrong in a step: what follows from that differs, too, then on all ranks."""
    changed = [[dict(line) for line in of_rank] for of_rank in run]
    for number, of_rank in enumerate(changed):
        for line in of_rank[at:]:
            line["grad_norm"] *= 1.01
            if line["step"] > at or (number == rank and kind != "grad_norm"):
                line["loss"] *= 1.02
    if kind == "tokens":
        changed[rank][at]["tokens"] = changed[rank][at]["tokens"][::-1] + "-"
    return changed


def _with_again(good: list[list[dict]], wrong: list[list[dict]], at: int) -> list[list[dict]]:
    """The lines of a run that went wrong, was killed after that step, and went on two steps before it."""
    return [[*bad[: at + 1], *right[at - 2 :]] for right, bad in zip(good, wrong, strict=True)]


def _text(lines: list[dict]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)
