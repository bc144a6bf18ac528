"""A signal to all, to one rank, or before there is a step: all ranks stop after the same one and leave a checkpoint."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import run_logs
import torch
import torch.distributed as dist
from harness import free_port
from test_train_torchrun import BATCH, LAYOUT, MODEL, children, look, options, start, uninterrupted, wait_until

from course_lib import checkpoint
from course_lib.launch import launch
from course_lib.train import Checkpoints, TrainPlan
from course_lib.train import log as train_log
from course_lib.train import trainer as train
from course_lib.train.options import layout_for, model_named
from course_lib.train.stop import HEARD, Stop, agreed, exit_code

STEPS = 24


class StopsItself(Stop):
    """A rank that gets a signal, or two, during its third step: `listen` is called before the first."""

    def __init__(self, *numbers: int):
        super().__init__()
        self.numbers = numbers

    def send(self, step: int) -> None:
        for number in self.numbers if step == 2 else ():
            os.kill(os.getpid(), number)


def stopped_and_gone_on(folder: Path, signals: dict[int, tuple[int, ...]]) -> list:
    """On each rank: two runs with one folder of checkpoints; during the first a rank gets the signals named for it."""
    stop, lines, seed_step = StopsItself(*signals.get(dist.get_rank(), ())), [], train.seed_step
    kept = Checkpoints(str(folder), every=4, in_background=True)
    run = (model_named(MODEL), layout_for(LAYOUT, BATCH), TrainPlan(6, 32, seed=7, warmup=4), kept, None, lines.append)
    train.seed_step = lambda plan, step, here: (stop.send(step), seed_step(plan, step, here))
    try:
        first = train.train(*run, stop)
    finally:
        train.seed_step = seed_step
        for number in HEARD:
            signal.signal(number, signal.SIG_DFL)
    return [first, train.train(*run), lines]


@pytest.mark.long
def test_a_signal_to_one_rank_alone_stops_all_after_the_same_step_and_the_first_of_two_counts(tmp_path):
    ranks = launch(stopped_and_gone_on, 4, tmp_path, {2: (signal.SIGUSR1, signal.SIGTERM)})
    expected = uninterrupted(6, LAYOUT)
    for first, second, _ in ranks:
        assert (len(first.losses), first.stopped_by) == (3, signal.SIGUSR1)
        assert (second.first_step, len(second.losses), second.stopped_by) == (3, 3, 0)
        assert [*first.losses, *second.losses] == expected
    text = f"stopped by SIGUSR1 after step 3 of 6, with a checkpoint in {tmp_path}; the same command goes on"
    assert text in str(ranks[0][2])


def test_ranks_that_heard_different_signals_agree_on_the_higher_number():
    def act():
        return agreed((0, signal.SIGUSR1, signal.SIGTERM, 0)[dist.get_rank()], torch.device("cpu"))

    assert list(launch(act, 4)) == [signal.SIGTERM] * 4
    assert (exit_code(0), exit_code(signal.SIGTERM), exit_code(signal.SIGUSR1)) == (0, 143, 138)


@pytest.mark.programs
def test_a_rank_that_waits_for_others_ends_at_once_and_two_that_train_end_with_143_though_one_was_asked(tmp_path):
    """Tasks of srun, which nobody restarts, and whose exit codes can be seen."""
    of_job = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }
    folder = tmp_path / "run"
    script = [sys.executable, "-m", "course_lib.train", *options(folder, steps=10**6, layout="tp=2")]

    def task(rank: int):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        return start(seen, script, tmp_path / f"{rank}.txt", **of_job, **place)

    with children() as seen:
        alone = task(0)
        wait_until(lambda: answers(of_job["MASTER_PORT"]) or alone.poll() is not None, seen)
        alone.terminate()
        asked_s = time.monotonic()
        wait_until(lambda: alone.poll() is not None or time.monotonic() > asked_s + 30, seen)
        assert alone.poll() == -signal.SIGTERM, (tmp_path / "0.txt").read_text()
        both = [task(0), task(1)]
        wait_until(lambda: len(run_logs.losses_of(train_log.log_path(folder))) > 5 or both[0].poll() is not None, seen)
        both[1].terminate()
        wait_until(lambda: all(one.poll() is not None for one in both), seen)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert [one.returncode for one in both] == [143, 143], said
    done = len(run_logs.losses_of(train_log.log_path(folder)))
    assert f"stopped by SIGTERM after step {done} of" in said[0] and said[1] == ""
    assert checkpoint.latest(folder).name == f"step-{done:08d}"


def answers(port: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


ENGINE = """
import os, subprocess, sys, time
for rank in "01":
    subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": rank, "LOCAL_RANK": rank})
time.sleep(1000)
"""


@pytest.mark.programs
def test_ranks_end_when_the_engine_that_started_them_was_killed(tmp_path):
    """An engine that gets SIGKILL can pass nothing on; its ranks would train on beside those that come next."""
    log = train_log.log_path(tmp_path / "run")
    script = [sys.executable, "-m", "course_lib.train", *options(tmp_path / "run", steps=10**6, layout="tp=2")]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with children() as seen:
        engine = start(seen, [sys.executable, "-c", ENGINE, *script], tmp_path / "out.txt", **place)
        wait_until(lambda: len(run_logs.losses_of(log)) > 1 or engine.poll() is not None, seen)
        look(seen)
        started = [process for process in seen.values() if process.pid != engine.pid]
        ranks = [process for process in started if process.is_running()]  # what reads the machine has ended
        assert len(ranks) == 2, (tmp_path / "out.txt").read_text()
        engine.kill()
        wait_until(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks), seen)
        steps = len(run_logs.losses_of(log))
    said = (tmp_path / "out.txt").read_text()
    assert "the process that started this rank has gone" in said and steps < 10**6, said
