"""Grader of chapter 03, exercise 7: DDP from an empty cell, judged by what the lesson measures."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ch03.dp_hooks import WRITTEN, WatchedWork
from course_lib.checks.core import fail, grader, run_ranks
from course_lib.checks.trainers import expect_right, expect_sent, micro_batches
from course_lib.memory.states import count_parameters
from course_lib.minimal import compare
from course_lib.model import build

NUM_PARAMS = count_parameters(compare.CONFIG)
MOST_MESSAGES = 8  # buckets of 60,000 parameters are 4; a reduce-scatter and an all-gather count as two
BUCKET_SIZE = 60_000  # elements, as the task says
ITEMSIZE = 2  # bfloat16, in which sent_bytes computes
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter", "all_gather")


@dataclass
class Watched:
    """What one rank did in a step: collectives until backward was over, in all, blocking, in flight, never waited.

    written   tensors written while they were being summed
    sums      elements of each sum over the ranks, in the order of their start
    """

    during: int = 0
    total: int = 0
    blocking: int = 0
    most_in_flight: int = 0
    in_flight_after_backward: int = 0
    never_waited: int = 0
    written: int = 0
    sums: list[int] = field(default_factory=list)


@grader
def check_ddp(answer, rng):
    """DDP from an empty cell: equal weights, right, few messages, sent while backward runs, once per step."""
    world_size = rng.choice([2, 4])
    for rank, differs in enumerate(run_ranks(_weights_differ, world_size, answer)):
        if differs:
            fail(f"rank {rank} begins with other weights than rank 0; broadcast rank 0's in __init__")
    seen = {count: run_ranks(_watch, world_size, answer, count)[0] for count in (1, 3)}
    _expect_sent_once(seen[1].total, seen[3].total)
    for num_micro_batches in (1, 3):
        _expect_waited(seen[num_micro_batches], num_micro_batches)
    expect_right(answer, world_size)
    for num_micro_batches in (1, 3):
        _expect_overlap(seen[num_micro_batches], num_micro_batches)
        phase_bytes = ITEMSIZE * NUM_PARAMS * (world_size - 1) // world_size
        expect_sent(answer, world_size, num_micro_batches, 2, phase_bytes)


def _weights_differ(trainer: type) -> bool:
    made = trainer(build(compare.CONFIG, seed=dist.get_rank()), compare.sgd, dist.group.WORLD)
    expected = dict(build(compare.CONFIG, seed=0).named_parameters())
    return any(not torch.equal(param, expected[name]) for name, param in made.full_parameters().items())


def _watch(trainer: type, num_micro_batches: int) -> Watched:
    """The second step of a trainer: in the first, some make their buckets."""
    made = trainer(build(compare.CONFIG), compare.adamw, dist.group.WORLD)
    for step in (0, 1):
        parts = compare.micro_batches_of_rank(step, num_micro_batches)
        works, seen = [], Watched()
        originals = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, original in originals.items():
            setattr(dist, name, _watching(original, works, seen, sums="reduce" in name))
        try:
            made.backward(parts)
            seen.during, seen.in_flight_after_backward = len(works), _in_flight(works)
            made.update()
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        seen.total, seen.never_waited = len(works), _in_flight(works)
        seen.written = sum(work is not None and work.written for work in works)
        for work in filter(None, works):
            work.wait()
    return seen


def _watching(original, works: list, seen: Watched, sums: bool):
    def watched(*args, **kwargs):
        work = original(*args, **kwargs)
        seen.blocking += work is None
        tensors = [x if isinstance(x, list) else [x] for x in (*args, *kwargs.values()) if isinstance(x, Tensor | list)]
        works.append(WatchedWork(work, tensors[0][0]) if work is not None else None)
        if sums:  # the input of a reduce-scatter is longer than its output
            seen.sums.append(max(sum(x.numel() for x in of_one) for of_one in tensors))
        seen.most_in_flight = max(seen.most_in_flight, _in_flight(works))
        return works[-1]

    return watched


def _in_flight(works: list) -> int:
    return sum(work is not None and not work.waited for work in works)


def _expect_sent_once(of_one: int, of_three: int) -> None:
    """A trainer that sends in every micro-batch is told so before its numbers: they may be those of a race."""
    if of_three > of_one:
        fail(
            f"with 3 micro-batches a step took {of_three} messages, and with 1 it took {of_one}: send only in the last "
            "micro-batch; a later backward adds to a bucket, and must not while it is being sent"
        )


def _expect_waited(seen: Watched, num_micro_batches: int) -> None:
    """A trainer that does not wait is told so before its numbers: what it reads too early can also make ranks hang."""
    if seen.never_waited:
        fail(
            f"with {micro_batches(num_micro_batches)} {seen.never_waited} messages were never waited for; the update "
            "may read too early"
        )
    if seen.written:
        fail(f"with {micro_batches(num_micro_batches)} a bucket {WRITTEN}")


def _expect_overlap(seen: Watched, num_micro_batches: int) -> None:
    where = f"with {micro_batches(num_micro_batches)}"
    if seen.total == 0:
        fail(
            f"{where} no collective of torch.distributed was called; write the buckets yourself, without PyTorch's DDP"
        )
    if seen.during == 0:
        fail(f"{where} no message had started when backward was over; start a bucket in the hook that completes it")
    if seen.total > MOST_MESSAGES:
        enough = f"{MOST_MESSAGES} are enough: fill buckets of 60,000 parameters"
        fail(f"{where} a step took {seen.total} messages, and {enough}")
    if seen.total == 1:
        fail(f"{where} one message carried everything, so nothing overlapped; close a bucket at 60,000 parameters")
    if seen.blocking or (seen.most_in_flight <= 1 and not seen.in_flight_after_backward):
        fail(f"{where} backward waited for every message; start with async_op=True, and wait in update")
    early = [elements for elements in seen.sums[:-1] if elements < BUCKET_SIZE]
    if early:
        fail(
            f"{where} a message of {early[0]:,} elements was not the last one; fill buckets from the last parameter "
            f"to the first, so that the rest, below {BUCKET_SIZE:,} elements, is ready last"
        )
