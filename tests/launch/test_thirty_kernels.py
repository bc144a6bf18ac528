"""Thirty students on one machine: thirty kernels run a cell with a launch at once, and each has its turn."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import warm_kernels
from jupyter_client.provisioning import local_provisioner
from jupyter_kernels import Kernel

pytestmark = [
    pytest.mark.launches,
    pytest.mark.programs,
    pytest.mark.skipif(not warm_kernels.is_possible(), reason="no pidfd, by which a forked kernel is watched"),
]

STUDENTS, RANKS, MOST = 30, 4, 8

CELL = f"""
import time
import torch, torch.distributed as dist
from course_lib.launch import _bar, _processes, launch
_bar.PATIENCE_S = 0.1  # the sentence is shown to whoever waits, however short

class World(_processes.World):
    def __init__(self, *args):
        print(time.monotonic())
        super().__init__(*args)
    def end(self):
        super().end()
        print(time.monotonic())
_processes.World = World

def work():
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.2)
    return total.item()

print(sum(launch(work, {RANKS})))
"""


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Kernels forked from one process that has imported torch, which share its memory; 8 ranks at once between them."""
    monkeypatch.setenv("COURSE_LAUNCHES", str(tmp_path / "launches"))
    monkeypatch.setenv("COURSE_MAX_RANKS", str(MOST))
    warm, one_at_a_time = warm_kernels.Warm(), threading.Lock()

    def launch_kernel(*args, **options):
        with one_at_a_time:
            return warm.launch_kernel(*args, **options)

    monkeypatch.setattr(local_provisioner, "launch_kernel", launch_kernel)
    with ThreadPoolExecutor(STUDENTS) as pool:
        starting = [pool.submit(Kernel) for _ in range(STUDENTS)]
    try:
        yield [kernel.result() for kernel in starting]
    finally:
        for kernel in starting:
            if not kernel.exception():
                kernel.result().stop()
        warm.close()


def most_at_once(spans):
    """How many of the spans (start, end) overlap at the worst moment."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    alive, most = 0, 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


def said_by(cell):
    """The texts beside a cell's bar."""
    contents = [message["content"] for message in cell.messages if message["msg_type"].startswith("comm")]
    states = [content["data"].get("state", {}) for content in contents]
    return [state["value"] for state in states if isinstance(state.get("value"), str) and state["value"]]


def test_thirty_kernels_that_launch_at_once_all_end_right_and_never_have_more_ranks_than_allowed(kernels):
    start = time.monotonic()
    cells = [(kernel, kernel.start(CELL)) for kernel in kernels]
    cells = [kernel.finish(message, timeout=170) for kernel, message in cells]
    print(f"{STUDENTS} launches of {RANKS} ranks, {MOST} at once: {time.monotonic() - start:.0f} s")
    assert [cell.error + cell.err for cell in cells] == [""] * STUDENTS
    start, end, total = zip(*(map(float, cell.out.split()) for cell in cells), strict=True)
    assert total == (RANKS * RANKS,) * STUDENTS
    assert most_at_once(zip(start, end, strict=True)) * RANKS == MOST
    sentence = rf"this launch of {RANKS} ranks waits behind .*'s of {RANKS} ranks \(process \d+, since [\d:]+\)"
    assert sum(any(re.search(sentence, text) for text in said_by(cell)) for cell in cells) > STUDENTS // 2
    assert all(kernel.manager.is_alive() for kernel in kernels)
