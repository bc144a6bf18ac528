"""One line each: is a pipeline right, what does each rank send, what does it keep, when did it compute.

`rank_class` is a class as in one_f_one_b.py: rank_class(model, micro_batches) with its `stage` of the model, and
run(words). `lists` is a schedule: for each rank a list of words such as ["F0", "B0"]. All functions run it on real
ranks on the CPU, on the same tiny Llama and the same text. (With NCCL the messages between two ranks run one after the
other, in both directions: one_f_one_b.py starts a send and a receive in one call, parallel/channels.py has a group for
each direction.)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.config import preset
from course_lib.launch import launch
from course_lib.measure import ByteMeter, MemoryTracker
from course_lib.minimal import compare
from course_lib.model import build
from course_lib.schedules import from_lists
from course_lib.span import Span
from course_lib.training.data import batch, tokens
from course_lib.validate import Size, checked

CONFIG = replace(preset("toy"), num_layers=8)
SEQUENCES, SEQ_LEN = 2, 64  # of a micro-batch
TIME_LIMIT_S = 60.0

Lists = Sequence[Sequence[str]]


@checked
def pipeline_difference(rank_class: Callable, lists: Lists) -> float:
    """Return the largest difference of any gradient from one process, in float64.

    Raises   ValueError if the lists are no schedule, or a stage has parameters without a gradient
    """
    found = {name: grad for of_rank in _launched(_gradients, rank_class, lists) for name, grad in of_rank.items()}
    expected = one_process(from_lists(lists).num_micro_batches)
    if missing := sorted(name for name in expected if found.get(name) is None):
        raise ValueError(f"{len(missing)} parameters have no gradient, first {missing[0]}; run B, or I and W, of each")
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


@checked
def pipeline_sent(rank_class: Callable, lists: Lists) -> list[int]:
    """Return the bytes that each rank sends in a step, with hidden states in bfloat16."""
    return list(_launched(_sent, rank_class, lists))


@checked
def pipeline_kept(rank_class: Callable, lists: Lists) -> list[int]:
    """Return the most activations that each rank holds at once, rounded to whole micro-batches."""
    return [round(peak / one) for peak, one in pipeline_peak_bytes(rank_class, lists)]


@checked
def pipeline_peak_bytes(rank_class: Callable, lists: Lists) -> list[tuple[int, int]]:
    """Return for each rank the most bytes of activations at once in a step, and those of one micro-batch alone."""
    return list(_launched(_peaks, rank_class, lists))


@checked
def pipeline_trace(rank_class: Callable, lists: Lists, runs: Size = 9) -> list[list[Span]]:
    """Return when each rank computed each instruction, waiting left out: the shortest of several runs.

    The shortest run is the least disturbed. On the CPU all ranks share the cores: seconds of ranks that compute at the
    same time say nothing about GPUs.
    """
    by_run = list(zip(*_launched(_trace, rank_class, lists, runs), strict=True))
    return [list(spans) for spans in min(by_run, key=_length_s)]


def _length_s(of_ranks: Sequence[Sequence[Span]]) -> float:
    spans = [span for of_rank in of_ranks for span in of_rank]
    return max(span.stop_s for span in spans) - min(span.start_s for span in spans)


@checked
def busy_share(traces: Sequence[Sequence[Span]]) -> float:
    """Return the share of the time in which ranks compute, all ranks together.

    Raises   ValueError if a rank has no span
    """
    if not traces or not all(traces):
        raise ValueError(f"traces has {len(traces)} ranks, of which one has no span; give those of pipeline_trace")
    busy_s = sum(span.seconds for of_rank in traces for span in of_rank)
    return busy_s / (len(traces) * _length_s(traces))


def _launched(function: Callable, rank_class: Callable, lists: Lists, *args):
    count = from_lists(lists).num_micro_batches
    words = [list(row) for row in lists]
    where = {"backend": "gloo", "timeout": TIME_LIMIT_S, "quiet": True}
    return launch(function, len(words), rank_class, words, count, *args, **where)


@checked
def micro_batches_of_step(count: Size) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a step, which all ranks have."""
    return [batch(tokens(100_000), index, SEQUENCES, SEQ_LEN) for index in range(count)]


@checked
def one_process(count: Size) -> dict[str, Tensor]:
    """Return the mean gradients of so many micro-batches, computed without ranks in float64."""
    return compare.one_process(CONFIG, micro_batches_of_step(count))


def _gradients(rank_class: Callable, lists: Lists, count: int) -> dict[str, Tensor | None]:
    worker = rank_class(build(CONFIG, dtype=torch.float64), micro_batches_of_step(count))
    worker.run(lists[dist.get_rank()])
    return {name: param.grad for name, param in worker.stage.named_parameters()}


def _sent(rank_class: Callable, lists: Lists, count: int) -> int:
    worker = rank_class(build(CONFIG, dtype=torch.bfloat16), micro_batches_of_step(count))
    with ByteMeter() as meter:
        worker.run(lists[dist.get_rank()])
    return meter.sent_bytes


def _peaks(rank_class: Callable, lists: Lists, count: int) -> tuple[int, int]:
    model, found, words = build(CONFIG), [], lists[dist.get_rank()]
    alone = [word for word in words if word[1:] == "0"]
    for words_of_run in (alone, alone, words):  # first so that the gradients exist
        worker = rank_class(model, micro_batches_of_step(count))
        with MemoryTracker(worker.stage) as tracker:
            worker.run(words_of_run)
        found.append(max(tracker.timeline.bytes_by_kind["activations"]))
    return found[2], found[1]


def _trace(rank_class: Callable, lists: Lists, count: int, runs: int) -> list[list[Span]]:
    model, words, rank = build(CONFIG), lists[dist.get_rank()], dist.get_rank()
    traces = []
    for _ in range(runs + 1):  # in the first, threads and buffers are made
        worker = rank_class(model, micro_batches_of_step(count))
        clocks = _timed(worker)
        dist.barrier()
        worker.run(words)
        named = zip(words, clocks, strict=True)
        traces.append([Span(rank, "compute", f"{word}@{rank}", *moments) for word, moments in named])
    return traces[1:]


def _timed(worker) -> list[tuple[float, float]]:
    """Make a worker note when each instruction computes: from its last receive to its first send, or its end."""
    clocks: list[tuple[float, float]] = []
    moments = {"begin": 0.0, "end": None}

    def of_instruction(function):
        def call(i):
            moments.update(begin=time.perf_counter(), end=None)
            function(i)
            clocks.append((moments["begin"], moments["end"] or time.perf_counter()))

        return call

    def of_receive(src, function=worker.receive):
        x_BSD = function(src)
        moments["begin"] = time.perf_counter()
        return x_BSD

    def of_send(x_BSD, dst, function=worker.send):
        moments["end"] = time.perf_counter()
        function(x_BSD, dst)

    for op in "FBIW":
        if hasattr(worker, op):
            setattr(worker, op, of_instruction(getattr(worker, op)))
    worker.receive, worker.send = of_receive, of_send
    return clocks
