"""Graders of chapter 12 on logs: what share of a job's time was kept, and where two runs begin to differ."""

import json
import math

from course_lib.checks import Exercise, fresh_seed


# ------------------------------------------------------------------------------------ 4. goodput
def goodput(lines, complete="saved", drop=True, over=None, once=False):
    """Seconds of the steps that were kept, over the wall time of the job.

    complete   the event after which a checkpoint counts; drop: whether steps behind it are lost when the job fails
    over       what to divide by, of the lines; once: whether of a step that ran twice one time counts
    """
    steps, saved = [], 0  # (step, seconds)
    for line in lines:
        if line["event"] == "step":
            steps.append((line["step"], line["seconds"]))
        elif line["event"] == complete:
            saved = line["steps"]
        elif line["event"] == "failed" and drop:
            steps = [(step, seconds) for step, seconds in steps if step < saved]
    kept_s = sum(dict(steps).values()) if once else sum(seconds for _, seconds in steps)
    return kept_s / (over(lines) if over else lines[-1]["at_s"] - lines[0]["at_s"])


def _log(rng, every, *attempts):
    """The lines of a job; an attempt is (its steps, how it ended), which may be "failed in a save"."""
    lines, at_s = [], float(rng.randrange(100))

    def tell(event, after_s, **fields):
        nonlocal at_s
        at_s += after_s
        lines.append({"event": event, "at_s": at_s, **fields})

    for steps, end in attempts:
        tell("started", rng.uniform(10, 45))
        at_s += rng.uniform(3, 8)  # the checkpoint is loaded
        for step in steps:
            seconds = rng.uniform(1, 10)
            tell("step", seconds, step=step, seconds=seconds)
            if (step + 1) % every == 0:
                tell("saving", 0.0, steps=step + 1)
                if end == "failed in a save" and step == steps[-1]:
                    break
                tell("saved", rng.uniform(0.5, 3), steps=step + 1)
        tell(end.partition(" ")[0], 1.0)
    return lines


def jobs(rng):
    n = rng.randrange(3, 5)
    torn = (range(2 * n), "failed in a save"), (range(n, 3 * n + 1), "failed"), (range(3 * n, 4 * n), "ended")
    attempts = {
        "did not fail": [(range(3 * n), "ended")],
        "failed while it saved, and later between two saves": torn,
        "failed twice and was not started again": [(range(2 * n - 1), "failed"), (range(n, 3 * n + 2), "failed")],
        "ended in its second save": [(range(2 * n), "failed in a save")],
    }
    return [(name, _log(rng, n, *of_job)) for name, of_job in attempts.items()]


_ENDS = {"started": -1, "failed": 1, "ended": 1}
_WRONG_GOODPUT = {
    "a save that was begun and not finished keeps nothing; only `saved` counts": [
        {"complete": "saving"},
        {"complete": "saving", "once": True},
    ],
    "steps behind the last complete checkpoint are lost when the job fails; do not count them": {"drop": False},
    "divide by the wall time, which also has the waiting between a failure and the next start": {
        "over": lambda lines: sum(line["at_s"] * _ENDS.get(line["event"], 0) for line in lines)
    },
    "divide by the wall time; the seconds of all steps leave out saves and restarts": {
        "over": lambda lines: sum(line.get("seconds", 0.0) for line in lines)
    },
    "after the last failure nobody computed lost steps again: nothing takes their place": {"drop": False, "once": True},
}
check_goodput = Exercise(goodput, jobs, _WRONG_GOODPUT, lambda answer, job, lines: {"the goodput": answer(lines)})


# ------------------------------------------------------------------------------------ 5. two runs
KINDS = ("tokens", "loss", "grad_norm")


def _first_difference(first, second, tolerance=1e-6, by_rank=False, of_two_lines=-1):
    """(step, rank, kind) where two runs begin to differ. Mistakes: exactly, a rank before a kind, the first line."""
    runs = [[_by_step(text, of_two_lines) for text in run] for run in (first, second)]
    steps = sorted(set.intersection(*(set(of_rank) for run in runs for of_rank in run)))
    for step in steps:
        places = [(rank, kind) for kind in KINDS for rank in range(len(first))]
        for rank, kind in sorted(places, key=lambda place: place[0]) if by_rank else places:
            one, other = (run[rank][step][kind] for run in runs)
            if one != other and (isinstance(one, str) or not math.isclose(one, other, rel_tol=tolerance)):
                return step, rank, kind
    return None


def _by_step(text, of_two_lines=-1):
    lines = {}
    for line in map(json.loads, text.splitlines()):
        lines.setdefault(line["step"], []).append(line)
    return {step: of_step[of_two_lines] for step, of_step in lines.items()}


def runs(rng):
    ranks, steps = rng.choice([3, 4]), rng.randrange(9, 14)
    rank, at = rng.randrange(1, ranks), rng.randrange(4, steps - 1)
    norms, good = [1 + rng.random() for _ in range(steps)], []
    for _ in range(ranks):
        losses, tokens = [5 - 0.1 * step + rng.random() / 10 for step in range(steps)], f"{fresh_seed(rng):08x}"
        columns = enumerate(zip(losses, norms, strict=True))
        good.append([{"step": i, "tokens": f"{i}{tokens}", "loss": x, "grad_norm": norm} for i, (x, norm) in columns])
    noisy = [[{**line, "loss": line["loss"] * (1 + 1e-9)} for line in of_rank] for of_rank in good]
    other_tokens = _spoiled(good, at, rank, "tokens")
    again = [[*bad[: at + 1], *right[at - 2 :]] for right, bad in zip(good, other_tokens, strict=True)]
    pairs = {
        "the runs are equal up to rounding": (good, noisy),
        "one rank got other tokens": (good, other_tokens),
        "one rank computed another loss": (good, _spoiled(noisy, at, rank, "loss")),
        "the sum of the gradients differs": (_spoiled(good, at, rank, "grad_norm"), good),
        "the second was killed in a wrong step, and computed it again": (good, again),
        "the second ends earlier": (_spoiled(good, at, rank, "loss"), [of_rank[: at + 1] for of_rank in good]),
    }
    return [(name, *([_text(of_rank) for of_rank in run] for run in pair)) for name, pair in pairs.items()]


def _spoiled(run, at, rank, kind):
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


def _text(lines):
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _watch_difference(answer, runs, first, second):
    found = answer(first, second)
    return {"(step, rank, kind)": "None" if found is None else found}


_WRONG_RUNS = {
    "the gradient norm, a sum over ranks, differs on all; look for the kind before the rank": {"by_rank": True},
    "differences of a billionth are rounding; compare numbers to 1e-6 of their size": {"tolerance": 0.0},
    "of a step with two lines, the last one counts": {"of_two_lines": 0},
}
check_disagreement = Exercise(_first_difference, runs, _WRONG_RUNS, _watch_difference)
