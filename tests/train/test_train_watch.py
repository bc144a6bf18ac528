"""What a run's logs say: each rank's numbers, and who is slow, has stopped, or failed; nobody who has not."""

import os
import signal
import subprocess
import sys
import time

import pytest
import run_logs

from course_lib.train import log as train_log
from course_lib.train.watch import look, read_run, run_table

FINE = "no rank is slow, none has stopped"
END, LATER_S = {"event": "end"}, 60.0


def test_rows_are_the_last_numbers_and_the_medians_of_the_last_steps(tmp_path):
    for rank in range(3):
        odd = run_logs.line(rank, 10, loss=1.25, tokens_per_s_per_rank=1.0, seconds=9.0)
        run_logs.write(tmp_path, rank, [*run_logs.steps(rank, 10), odd], age_s=3.0)
    run = look(tmp_path)
    assert [one.rank for one in run.ranks] == [0, 1, 2] and run.finding == FINE and not run.ended
    one = run.ranks[1]
    assert (one.step, one.loss, one.memory_bytes, one.state) == (10, 1.25, 200_000_001, "trains")
    assert (one.tokens_per_s, one.step_s, one.mfu) == (101.0, 0.5, None) and 3.0 <= one.age_s < 60
    assert one.own_s == pytest.approx(0.2) and one.wait_s == pytest.approx(0.2)
    header, row, *_ = run_table(run)
    assert header.split()[:4] == ["rank", "steps", "loss", "tokens/s"] and row.split()[:4] == [
        "0",
        "11",
        "1.2500",
        "100",
    ]
    assert all(len(line) <= 100 for line in run_table(run)) and run_table(run)[-1] == FINE


def test_the_slow_rank_is_named_by_what_it_computes_though_all_steps_are_as_long(tmp_path):
    for rank in range(4):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 6, own_s=0.35 if rank == 2 else 0.1))
    run = look(tmp_path)
    assert {one.step_s for one in run.ranks} == {0.5}
    assert run.finding == "rank 2 is slow: it computes 3.5 times as long as the median of the others"


def test_a_rank_that_computes_longer_and_waits_as_long_keeps_nobody_waiting(tmp_path):
    for rank in range(3):
        own_s = 0.2 if rank == 1 else 0.1
        run_logs.write(tmp_path, rank, [run_logs.line(rank, 0, own_s, communication_s=0.3 if rank == 1 else 0.2)])
    assert look(tmp_path).finding == FINE


def test_a_rank_that_is_behind_has_stopped_and_one_step_is_not_behind(tmp_path):
    for rank in range(3):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 8 - (rank == 0)))
    assert look(tmp_path).finding == FINE
    run_logs.write(tmp_path, 3, run_logs.steps(3, 5))
    assert look(tmp_path).finding == "rank 3 has stopped after 5 steps, and others have done 8"


def test_a_run_in_which_nobody_writes_hangs_unless_it_has_ended(tmp_path):
    for rank in range(2):
        run_logs.write(tmp_path, rank, run_logs.steps(rank, 8), age_s=LATER_S)
    run = look(tmp_path)
    assert run.finding == "no rank has written for 60 s, and a step took 0.50 s: the run hangs, or was killed"
    assert not run.ended
    for rank in range(2):
        run_logs.write(tmp_path, rank, [END], age_s=LATER_S)
    run = look(tmp_path)
    assert run.finding == FINE and run.ended and {one.state for one in run.ranks} == {"ended"}


def test_a_rank_that_failed_is_named_with_its_error(tmp_path):
    run_logs.write(tmp_path, 0, run_logs.steps(0, 4))
    run_logs.write(tmp_path, 1, [*run_logs.steps(1, 4), {"event": "error", "text": "FloatingPointError: nan"}])
    assert look(tmp_path).finding == "rank 1 has stopped after 4 steps: FloatingPointError: nan"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows has no SIGSTOP")
def test_a_process_that_is_suspended_or_gone_is_named_at_once(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        time.sleep(0.1)  # lines are younger than their process
        run_logs.write(tmp_path, 0, run_logs.steps(0, 4))
        run_logs.write(tmp_path, 1, run_logs.steps(1, 4), pid=process.pid)
        assert look(tmp_path).finding == FINE
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while look(tmp_path).finding == FINE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert look(tmp_path).finding == "rank 1 has stopped after 4 steps: the process is suspended"
    finally:
        process.kill()
        process.wait()
    run = look(tmp_path)
    assert run.finding == "rank 1 has stopped after 4 steps: the process is gone" and not run.ended


def test_of_a_repeated_step_the_last_counts_and_a_torn_line_does_not(tmp_path):
    again = [run_logs.line(0, 1, loss=7.0), run_logs.line(0, 2, loss=8.0)]
    run_logs.write(tmp_path, 0, [*run_logs.steps(0, 4), {"step": 3, "back_to_step": 1}, *again])
    with train_log.log_path(tmp_path).open("a") as file:
        file.write('{"step": 3, "loss": 9')
    run = look(tmp_path)
    assert (run.ranks[0].step, run.ranks[0].loss) == (2, 8.0)
    assert [one["step"] for one in read_run(tmp_path)[0] if "loss" in one] == [0, 1, 2, 3, 1, 2]


def test_logs_without_parts_as_a_gpus_name_nobody_slow(tmp_path):
    parts = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", "data_s", "communication_s"))
    for rank in range(2):
        run_logs.write(tmp_path, rank, [run_logs.line(rank, 0, **parts, mfu=0.4, loss=float("nan"))])
    run = look(tmp_path)
    assert run.finding == "no rank has stopped; the logs do not say how long each computes"
    assert (run.ranks[0].own_s, run.ranks[0].mfu) == (None, 0.4) and "40.0%" in run_table(run)[1]


def test_a_folder_without_logs_and_one_without_steps(tmp_path):
    with pytest.raises(ValueError, match=r"has no log/rank0.jsonl; give the folder of a run that was started with"):
        look(tmp_path)
    run_logs.write(tmp_path, 0, [{"event": "start"}])
    run = look(tmp_path)
    assert run.ranks[0].step is None and run.finding == "one rank, which nobody waits for"
