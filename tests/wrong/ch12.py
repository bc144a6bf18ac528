"""Wrong answers to the exercises of chapter 12, each with what its grader must say about it."""

import json
import math
from statistics import mean, median

import torch.distributed as dist

from course_lib.checks.ch12 import (
    check_disagreement,
    check_fewer_ranks,
    check_goodput,
    check_interval,
    check_restart,
    check_slow_rank,
)


# ------------------------------------------------------------------------------------ 1. an interval
def of_one_gpu(mtbf_of_gpu_s, num_gpus, save_s):
    interval_s = math.sqrt(2 * save_s * mtbf_of_gpu_s)
    return interval_s, save_s / interval_s + interval_s / (2 * mtbf_of_gpu_s)


def without_the_two(mtbf_of_gpu_s, num_gpus, save_s):
    mtbf_s = mtbf_of_gpu_s / num_gpus
    interval_s = math.sqrt(save_s * mtbf_s)
    return interval_s, save_s / interval_s + interval_s / (2 * mtbf_s)


def whole_interval_lost(mtbf_of_gpu_s, num_gpus, save_s):
    mtbf_s = mtbf_of_gpu_s / num_gpus
    interval_s = math.sqrt(2 * save_s * mtbf_s)
    return interval_s, save_s / interval_s + interval_s / mtbf_s


def saves_alone(mtbf_of_gpu_s, num_gpus, save_s):
    interval_s = math.sqrt(2 * save_s * mtbf_of_gpu_s / num_gpus)
    return interval_s, save_s / interval_s


# ------------------------------------------------------------------------------------ 2. lost work
def saved_before_it_died(failed, every):
    first = (failed + 1) // every * every
    return first, failed + 1 - first


def without_the_failed_step(failed, every):
    first = failed // every * every
    return first, failed - first


def last_saved_step_again(failed, every):
    first = failed // every * every - 1
    return first, failed + 1 - first


# ------------------------------------------------------------------------------------ 3. fewer ranks
def by_all_ranks(sequences, ranks, tp, pp, micro_batch):
    return sequences // (ranks * micro_batch)


def without_remainders(sequences, ranks, tp, pp, micro_batch):
    return sequences // (max(1, ranks // (tp * pp)) * micro_batch)


def micro_batches_of_one(sequences, ranks, tp, pp, micro_batch):
    return sequences * tp * pp // ranks


# ------------------------------------------------------------------------------------ 4. goodput
def wall_s(lines):
    return lines[-1]["at_s"] - lines[0]["at_s"]


def kept_s(lines, complete="saved"):
    kept, saved = {}, 0
    for line in lines:
        if line["event"] == "step":
            kept[line["step"]] = line["seconds"]
        elif line["event"] == complete:
            saved = line["steps"]
        elif line["event"] == "failed":
            kept = {step: seconds for step, seconds in kept.items() if step < saved}
    return sum(kept.values())


def with_lost_steps(lines):
    return sum(line.get("seconds", 0) for line in lines) / wall_s(lines)


def with_half_a_save(lines):
    return kept_s(lines, "saving") / wall_s(lines)


def over_steps_alone(lines):
    return kept_s(lines) / sum(line.get("seconds", 0) for line in lines)


def over_attempts(lines):
    starts = [line["at_s"] for line in lines if line["event"] == "started"]
    ends = [line["at_s"] for line in lines if line["event"] in ("failed", "ended")]
    return kept_s(lines) / (sum(ends) - sum(starts))


def last_line_of_each_step(lines):
    return sum({line["step"]: line["seconds"] for line in lines if "step" in line}.values()) / wall_s(lines)


# ------------------------------------------------------------------------------------ 5. two runs
def lines_by_step(text):
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def rank_by_rank(first, second):
    runs = [list(map(lines_by_step, run)) for run in (first, second)]
    for step in sorted(set(runs[0][0]) & set(runs[1][0])):
        for rank in range(len(first)):
            for kind in ("tokens", "loss", "grad_norm"):
                one, other = (run[rank][step][kind] for run in runs)
                if one != other and (kind == "tokens" or abs(one - other) > 1e-6 * abs(one)):
                    return step, rank, kind
    return None


def to_the_last_digit(first, second):
    runs = [list(map(lines_by_step, run)) for run in (first, second)]
    for step in sorted(set(runs[0][0]) & set(runs[1][0])):
        for kind in ("tokens", "loss", "grad_norm"):
            for rank in range(len(first)):
                if runs[0][rank][step][kind] != runs[1][rank][step][kind]:
                    return step, rank, kind
    return None


def first_line_of_each_step(first, second):
    runs = [[{} for _ in run] for run in (first, second)]
    for run, texts in zip(runs, (first, second), strict=True):
        for of_rank, text in zip(run, texts, strict=True):
            for line in map(json.loads, text.splitlines()):
                of_rank.setdefault(line["step"], line)
    for step in sorted(set(runs[0][0]) & set(runs[1][0])):
        for kind in ("tokens", "loss", "grad_norm"):
            for rank in range(len(first)):
                one, other = (run[rank][step][kind] for run in runs)
                if one != other and (kind == "tokens" or abs(one - other) > 1e-6 * abs(one)):
                    return step, rank, kind
    return None


# ------------------------------------------------------------------------------------ 6. the slow rank
def _gathered(value, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def by_mean(seconds, group):
    means = _gathered(mean(seconds), group)
    slowest = means.index(max(means))
    return slowest if means[slowest] > 1.5 * median(means[:slowest] + means[slowest + 1 :]) else None


def by_fixed_limit(seconds, group):
    medians = _gathered(median(seconds), group)
    return medians.index(max(medians)) if max(medians) > 0.15 else None


def on_its_own(seconds, group):
    return dist.get_rank(group) if median(seconds) > 0.15 else None


def with_its_own(seconds, group):
    medians = _gathered(median(seconds), group)
    return medians.index(max(medians)) if max(medians) > 1.5 * median(medians) else None


WRONG = {
    "my_interval": {
        "check": check_interval,
        "answers": [
            (of_one_gpu, "divide by the number of GPUs"),
            (without_the_two, "factor 2 under the root"),
            (whole_interval_lost, "not a whole one"),
            (saves_alone, "the share of the saves alone"),
        ],
    },
    "my_restart": {
        "check": check_restart,
        "answers": [
            (saved_before_it_died, "due then is not written"),
            (without_the_failed_step, "the failed step was computed too"),
            (last_saved_step_again, "go on with the next"),
        ],
    },
    "my_micro_batches": {
        "check": check_fewer_ranks,
        "answers": [
            (by_all_ranks, "divide by dp alone"),
            (without_remainders, "the ranks or the sequences do not divide"),
            (micro_batches_of_one, "a micro-batch has several sequences"),
        ],
    },
    "my_goodput": {
        "check": check_goodput,
        "answers": [
            (with_lost_steps, "are lost when the job fails"),
            (with_half_a_save, "begun and not finished"),
            (over_steps_alone, "the seconds of all steps leave out"),
            (over_attempts, "the waiting between a failure"),
            (last_line_of_each_step, "nothing takes their place"),
        ],
    },
    "my_disagreement": {
        "check": check_disagreement,
        "answers": [
            (rank_by_rank, "look for the kind before the rank"),
            (to_the_last_digit, "are rounding"),
            (first_line_of_each_step, "the last one counts"),
        ],
    },
    "my_slow_rank": {
        "check": check_slow_rank,
        "answers": [
            (by_mean, "compare medians"),
            (by_fixed_limit, "compare with the others"),
            (on_its_own, "all must name the same"),
            (with_its_own, "the median of the other ranks' medians"),
        ],
    },
}
