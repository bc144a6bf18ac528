"""The log is read whatever the moment at which its run was killed."""

import pytest
import run_logs

from course_lib.train import Logs
from course_lib.train import log as train_log


def test_a_torn_line_is_left_out_and_the_next_run_begins_a_line_of_its_own(tmp_path):
    log = tmp_path / "runs" / "log.jsonl"
    assert train_log.read(log) == []
    train_log.append(log, step=0, loss=5.5)
    train_log.append(log, step=1, loss=0.1 + 0.2)
    with log.open("a") as file:
        file.write('{"step": 2, "lo')
    train_log.append(log, step=1, loss=0.1 + 0.2)
    train_log.append(log, event="end")
    assert run_logs.losses_of(log) == {0: [5.5], 1: [0.1 + 0.2, 0.1 + 0.2]}
    assert len(train_log.read(log)) == 4


def test_the_end_of_a_long_file_is_read_without_the_rest(tmp_path):
    log = tmp_path / "log.jsonl"
    for step in range(100):
        train_log.append(log, step=step, loss=1.0)
    with log.open("a") as file:
        file.write('7\n{"step": 100, "lo')
    assert [line["step"] for line in train_log.read(log, last_bytes=90)] == [98, 99]
    assert train_log.read(log, last_bytes=10**6) == train_log.read(log)


def test_a_full_disk_is_told_with_the_file_and_what_to_do_and_hides_no_other_error(tmp_path):
    with pytest.raises(
        train_log.CannotLog, match="/dev/full could not be written .No space left on device.; make room"
    ):
        train_log.append("/dev/full", step=0)
    log = train_log.log_path(tmp_path)
    with pytest.raises(ZeroDivisionError), train_log.open_log(Logs(str(tmp_path)), 0):
        log.unlink()
        log.symlink_to("/dev/full")
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": "x", "loss": 1.0}', "has step 'x' in a line"),
        ('{"step": 1, "loss": [1.0]}', "has loss a list in a line"),
        ('{"event": 3}', "has event 3 in a line"),
    ],
)
def test_a_line_of_another_kind_is_refused(line, said, tmp_path):
    (tmp_path / "log.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=said):
        train_log.read(tmp_path / "log.jsonl")


def test_what_is_nested_without_end_is_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_text("[" * 100_000 + '\n{"step": 1, "loss": 2.0}\n')
    assert run_logs.losses_of(tmp_path / "log.jsonl") == {1: [2.0]}
