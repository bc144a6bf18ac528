"""The graders of chapter 12 accept right answers that are arranged otherwise, such as three that find the slow rank."""

import json
from itertools import product
from statistics import median

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import ch12


def interval_by_power(mtbf_of_gpu_s, num_gpus, save_s):
    interval_s = (2 * save_s * mtbf_of_gpu_s / num_gpus) ** 0.5
    return [interval_s, 2 * save_s / interval_s]  # both parts of the share are equal there


def restart_by_counting(failed, every):
    saved = max(steps for steps in range(failed + 1) if steps % every == 0)
    return [saved, len(range(saved, failed + 1))]


def fewer_by_search(sequences, ranks, tp, pp, micro_batch):
    return next(
        (m for m in range(1, sequences + 1) if m * micro_batch * ranks == sequences * tp * pp and fits(ranks, tp, pp)),
        None,
    )


def fits(ranks, tp, pp):
    return ranks >= tp * pp and ranks % (tp * pp) == 0


# ------------------------------------------------------------------------------------ 2. logs
def goodput_forwards(lines):
    kept, saved = {}, 0
    for line in lines:
        match line["event"]:
            case "step":
                kept[line["step"]] = line["seconds"]
            case "saved":
                saved = line["steps"]
            case "failed":
                kept = {step: seconds for step, seconds in kept.items() if step < saved}
    return sum(kept.values()) / (lines[-1]["at_s"] - lines[0]["at_s"])


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


def disagreement_by_loops(first, second):
    first, second = list(map(_by_step, first)), list(map(_by_step, second))
    for step in sorted(first[0].keys() & second[0].keys()):
        for kind in KINDS:
            for rank, (one, other) in enumerate(zip(first, second, strict=True)):
                if _differ(one[step][kind], other[step][kind]):
                    return [step, rank, kind]
    return None


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


# ------------------------------------------------------------------------------------ 3. on ranks
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


RIGHT = [
    (ch12.check_interval, interval_by_power),
    (ch12.check_restart, restart_by_counting),
    (ch12.check_fewer_ranks, fewer_by_search),
    (ch12.check_goodput, goodput_forwards),
    (ch12.check_goodput, goodput_by_pending_steps),
    (ch12.check_goodput, goodput_backwards),
    (ch12.check_disagreement, disagreement_by_loops),
    (ch12.check_disagreement, disagreement_by_minimum),
    (ch12.check_disagreement, disagreement_by_arrays),
    (ch12.check_slow_rank, slow_by_tensors),
    (ch12.check_slow_rank, slow_by_sum),
    (ch12.check_slow_rank, slow_told_by_rank_0),
]


@pytest.mark.exhaustive
@pytest.mark.launches
@pytest.mark.parametrize(("check", "answer"), RIGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_right_answer_that_is_arranged_otherwise_passes(check, answer):
    check(answer)
