"""The log is read whatever the moment at which its run was killed."""

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
    assert train_log.losses_of(log) == {0: [5.5], 1: [0.1 + 0.2, 0.1 + 0.2]}
    assert len(train_log.read(log)) == 4


def test_the_end_of_a_long_file_is_read_without_the_rest(tmp_path):
    log = tmp_path / "log.jsonl"
    for step in range(100):
        train_log.append(log, step=step, loss=1.0)
    with log.open("a") as file:
        file.write('7\n{"step": 100, "lo')
    assert [line["step"] for line in train_log.read(log, last_bytes=90)] == [98, 99]
    assert train_log.read(log, last_bytes=10**6) == train_log.read(log)
