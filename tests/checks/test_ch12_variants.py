"""The graders of chapter 12 accept right answers that are arranged otherwise, three of each."""

import json
import sys
from fractions import Fraction
from itertools import pairwise, product
from statistics import median

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import EXHAUSTIVE

from course_lib.checks import ch12

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have tests/ on their path


# ------------------------------------------------------------------------------------ an interval
def interval_by_power(mtbf_of_gpu_s, num_gpus, save_s):
    interval_s = (2 * save_s * mtbf_of_gpu_s / num_gpus) ** 0.5
    return [interval_s, 2 * save_s / interval_s]  # both parts of the share are equal there


def interval_by_share(mtbf_of_gpu_s, num_gpus, save_s):
    """The share first, from failures per second."""
    failures_per_s = num_gpus / mtbf_of_gpu_s
    share = np.sqrt(2 * save_s * failures_per_s)
    return share / failures_per_s, share


def interval_by_halving(mtbf_of_gpu_s, num_gpus, save_s):
    """Halves where the share still falls, down to its minimum."""
    mtbf_s = mtbf_of_gpu_s / num_gpus
    low, high = 0.0, 2 * (mtbf_s + save_s)
    for _ in range(100):
        middle = (low + high) / 2
        still_falls = save_s / middle**2 > 1 / (2 * mtbf_s)
        low, high = (middle, high) if still_falls else (low, middle)
    return high, save_s / high + high / (2 * mtbf_s)


# ------------------------------------------------------------------------------------ lost work
def restart_by_counting(failed, every):
    saved = max(steps for steps in range(failed + 1) if steps % every == 0)
    return [saved, len(range(saved, failed + 1))]


def restart_by_remainder(failed, every):
    behind = failed % every
    return failed - behind, behind + 1


def restart_step_by_step(failed, every):
    """The job itself, until a rank dies."""
    saved, unsaved = 0, []
    for step in range(failed + 1):
        unsaved.append(step)
        if step < failed and len(unsaved) == every:
            saved, unsaved = step + 1, []
    return saved, len(unsaved)


# ------------------------------------------------------------------------------------ fewer ranks
def fewer_by_search(sequences, ranks, tp, pp, micro_batch):
    return next(
        (m for m in range(1, sequences + 1) if m * micro_batch * ranks == sequences * tp * pp and fits(ranks, tp, pp)),
        None,
    )


def fits(ranks, tp, pp):
    return ranks >= tp * pp and ranks % (tp * pp) == 0


def fewer_by_fractions(sequences, ranks, tp, pp, micro_batch):
    dp = Fraction(ranks, tp * pp)
    micro_batches = sequences / dp / micro_batch
    return int(micro_batches) if dp.denominator == micro_batches.denominator == 1 else None


def fewer_by_dealing(sequences, ranks, tp, pp, micro_batch):
    """Takes full pipelines from the ranks, then deals a micro-batch to each, until no sequence is left."""
    dp = count = 0
    while ranks >= tp * pp:
        ranks, dp = ranks - tp * pp, dp + 1
    while dp and sequences >= dp * micro_batch:
        sequences, count = sequences - dp * micro_batch, count + 1
    return count if ranks == sequences == 0 else None


# ------------------------------------------------------------------------------------ logs
def goodput_by_attempts(lines):
    """Of each attempt what stands before its last complete checkpoint, or before its end."""
    kept_s, starts = 0.0, [index for index, line in enumerate(lines) if line["event"] == "started"]
    for begin, end in pairwise([*starts, len(lines)]):
        kept = [index for index in range(begin, end) if lines[index]["event"] in ("saved", "ended")]
        kept_s += sum(line.get("seconds", 0) for line in lines[begin : max(kept, default=begin)])
    return kept_s / (lines[-1]["at_s"] - lines[0]["at_s"])


def goodput_by_pending_steps(lines):
    safe_s = pending_s = 0.0
    for line in lines:
        if line["event"] == "step":
            pending_s += line["seconds"]
        elif line["event"] in ("saved", "ended"):
            safe_s, pending_s = safe_s + pending_s, 0.0
        elif line["event"] == "failed":
            pending_s = 0.0
    return safe_s / (lines[-1]["at_s"] - lines[0]["at_s"])


def goodput_backwards(lines):
    kept_s, below = 0.0, float("inf")  # steps from here on were lost, or counted already
    saved_before = [max([0] + [line["steps"] for line in lines[:i] if line["event"] == "saved"]) for i in range(99)]
    for index in reversed(range(len(lines))):
        if lines[index]["event"] == "failed":
            below = min(below, saved_before[index])
        if lines[index]["event"] == "step" and lines[index]["step"] < below:
            kept_s += lines[index]["seconds"]
    return kept_s / (lines[-1]["at_s"] - lines[0]["at_s"])


KINDS = ("tokens", "loss", "grad_norm")


def _differ(one, other):
    return one != other if isinstance(one, str) else abs(one - other) > 1e-6 * max(abs(one), abs(other))


def _by_step(text):
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def disagreement_kind_by_kind(first, second):
    """Where each kind differs first; the earliest of these, and of equal ones the first kind."""
    first, second = list(map(_by_step, first)), list(map(_by_step, second))
    steps, best = first[0].keys() & second[0].keys(), None
    for kind in KINDS:
        places = product(steps, range(len(first)))
        wrong = [(step, rank) for step, rank in places if _differ(first[rank][step][kind], second[rank][step][kind])]
        if wrong and (best is None or min(wrong)[0] < best[0]):
            best = (*min(wrong), kind)
    return best


def disagreement_by_minimum(first, second):
    found = []
    for rank, texts in enumerate(zip(first, second, strict=True)):
        one, other = map(_by_step, texts)
        for step, (number, kind) in product(one.keys() & other.keys(), enumerate(KINDS)):
            if _differ(one[step][kind], other[step][kind]):
                found.append((step, number, rank))
    return (lambda step, number, rank: (step, rank, KINDS[number]))(*min(found)) if found else None


def disagreement_by_arrays(first, second):
    runs = [list(map(_by_step, run)) for run in (first, second)]
    steps = sorted(runs[0][0].keys() & runs[1][0].keys())
    for step in steps:
        columns = [[of_rank[step] for of_rank in run] for run in runs]
        if wrong := [r for r, (a, b) in enumerate(zip(*columns, strict=True)) if a["tokens"] != b["tokens"]]:
            return step, wrong[0], "tokens"
        for kind in KINDS[1:]:
            one, other = (np.array([line[kind] for line in lines]) for lines in columns)
            wrong = np.flatnonzero(~np.isclose(one, other, rtol=1e-6, atol=0))
            if len(wrong):
                return step, int(wrong[0]), kind
    return None


# ------------------------------------------------------------------------------------ the slow rank
def _named(medians):
    medians = list(map(float, medians))
    slowest = int(np.argmax(medians))
    return slowest if medians[slowest] > 1.5 * median(medians[:slowest] + medians[slowest + 1 :]) else None


def slow_by_tensors(seconds, group):
    own = torch.tensor([median(seconds)], dtype=torch.float64)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return _named(torch.cat(parts))


def slow_by_sum(seconds, group):
    row = torch.zeros(dist.get_world_size(group), dtype=torch.float64)
    row[dist.get_rank(group)] = median(seconds)
    dist.all_reduce(row, group=group)
    return _named(row)


def slow_told_by_rank_0(seconds, group):
    is_first = dist.get_rank(group) == 0
    rows = [None] * dist.get_world_size(group) if is_first else None
    dist.gather_object(seconds, rows, dst=0, group=group)
    told = [_named([median(row) for row in rows]) if is_first else None]
    dist.broadcast_object_list(told, src=0, group=group)
    return told[0]


RIGHT = {
    "check_interval": (interval_by_power, interval_by_share, interval_by_halving),
    "check_restart": (restart_by_counting, restart_by_remainder, restart_step_by_step),
    "check_fewer_ranks": (fewer_by_search, fewer_by_fractions, fewer_by_dealing),
    "check_goodput": (goodput_by_attempts, goodput_by_pending_steps, goodput_backwards),
    "check_disagreement": (disagreement_kind_by_kind, disagreement_by_minimum, disagreement_by_arrays),
    "check_slow_rank": (slow_by_tensors, slow_by_sum, slow_told_by_rank_0),
}
LAUNCHES = {"check_slow_rank": (pytest.mark.launches, EXHAUSTIVE)}


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        pytest.param(check, answer, marks=LAUNCHES.get(check, ()))
        for check, answers in RIGHT.items()
        for answer in answers
    ],
)
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer, capsys):
    getattr(ch12, check)(answer)
    assert capsys.readouterr().out == f"{check}: passed\n"
