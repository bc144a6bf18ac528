"""Seconds of waiting for other ranks are seen wherever a program waits, and nowhere else."""

import time

import pytest
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.launch import launch
from course_lib.measure.waits import own_seconds, record_waits
from course_lib.span import Span

LATE_S = 0.2


def in_flight(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    comm.all_reduce_(x.clone(), group, async_op=True).wait()


def one_way(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    comm.send(x, 0, group) if group.rank() == 1 else comm.recv(x, 1, group)


CALLS = [comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.pass_on, in_flight, one_way]


def waited_for_rank_1() -> list[tuple[float, float, float]]:
    """Of each call, with rank 1 late: the seconds that are recorded, when this rank came and when it went."""
    group, x, found, torchs_own = dist.group.WORLD, torch.ones(4), [], dist.Work.wait
    for call in CALLS:
        comm.barrier(group)
        if group.rank() == 1:
            time.sleep(LATE_S)
        came_s = time.perf_counter()
        with record_waits() as waits:
            call(x, x, group) if call is comm.pass_on else call(x, group)
        found.append((sum(wait.seconds for wait in waits), came_s, time.perf_counter()))
    assert dist.Work.wait is torchs_own
    return found


def test_a_rank_waits_from_its_own_arrival_until_the_late_ones():
    prompt, late = launch(waited_for_rank_1, 2)
    for call, (waited_s, came_s, went_s), (_, late_s, _) in zip(CALLS, prompt, late, strict=True):
        missing_s = went_s - came_s - waited_s  # starting the message, copying
        assert 0 <= missing_s < 0.5 * (went_s - came_s), call.__name__
        assert late_s > came_s and went_s >= late_s, call.__name__


def test_own_seconds_are_a_spans_without_the_waits_in_it():
    def span(start_s: float, stop_s: float) -> Span:
        return Span(0, "compute", "F0", start_s, stop_s)

    waits = [span(0.0, 1.0), span(2.5, 3.0), span(3.5, 4.5), span(9.0, 9.5)]
    assert own_seconds(span(2.0, 5.0), waits) == pytest.approx(1.5)
    assert own_seconds(span(5.0, 6.0), waits) == pytest.approx(1.0)
    assert own_seconds(span(0.0, 10.0), waits) == pytest.approx(7.0)
